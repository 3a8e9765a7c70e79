"""ringattn advise: the best ways to train a model on a cluster, from models alone: without torch, nothing is run."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

from ...cli.config.groups import refuse_stdout
from ...errors import InvalidInput
from ...files import STDOUT, check_json, check_writable, write_json, write_text
from ...machine.presets import CURRENCY
from ...simulator.progress import listening
from ...simulator.reporting.console import print_grid, print_paragraph, print_plain, show_progress
from ...text import command_lines
from ..advise.advice import Advice, advise, explain, record, tabulate
from ..advise.question import make_question
from ..advise.serving import Serving, serve
from ..models.inference import ERRORS
from ..pages.figures import check_matplotlib
from .settings import AdviseConfig


def main(config: AdviseConfig) -> None:
    """Print the advice; also write it as JSON to `output.path` and as an HTML page to `output.page`, if set."""
    check_json(config.output.path)
    config.check()
    if config.phase != "training":
        return _serve(config)
    if config.output.page is not None:
        refuse_stdout(
            "output.page", config.output.page, "a page is written to a file only; try output.page=advice.html"
        )
        check_matplotlib("leave output.page out")
        check_writable(Path(config.output.page))
    question = make_question(config)
    with show_progress(Console(stderr=True)) as tell:
        advice = advise(question, config.by, tell)
    if config.output.path is not None:
        write_json(config.output.path, record(advice))
    if config.output.page is not None:
        page = import_module("..advise.page", __package__)  # needs matplotlib
        write_text(Path(config.output.page), page.render(advice))
    if config.output.path != STDOUT:
        _print(advice)


def _serve(config: AdviseConfig) -> None:
    """Print how many GPUs a prefill or a decode needs; also write it as JSON to `output.path`, if set.

    With `prices`, for each machine, and which of them is cheapest.
    """
    question = make_question(config)
    with show_progress(Console(stderr=True)) as tell, listening(tell):
        servings, refused = list[Serving](), list[str]()
        for offer in question.offers:
            try:
                servings.append(serve(question, offer, tell))
            except InvalidInput as error:  # another machine may serve
                refused.append(f"{offer.name}: {error}")
    if not servings:
        raise InvalidInput("; ".join(refused))
    able = [(one.costs(one.chosen).get(CURRENCY, 0.0), one) for one in servings if one.chosen is not None]
    first = min(able, key=lambda one: one[0], default=(0.0, servings[0]))[1]
    if config.output.path is not None:
        others = [one.record for one in servings if one is not first]
        write_json(config.output.path, first.record | ({"others": others} if others else {}))
    if config.output.path != STDOUT:
        for serving in servings:
            _print_serving(serving)
        for line in refused:
            print_paragraph(f"refused: {line}")
        if len(servings) > 1 and able:
            print_paragraph(f"cheapest of these: {first.verdict}")
        for words, line in first.launches:
            print_paragraph(f"note: {words}")
            if line:
                print_plain(f"launch: {command_lines(line)}")
    if first.chosen is None:
        sys.exit(2)


def _print_serving(serving: Serving) -> None:
    """Print the verdict, the best candidate for each number of GPUs, what does not fit, and what was not measured."""
    question, machine = serving.question, serving.offer.machine
    print_paragraph(serving.verdict)
    for line in serving.changes:
        print_paragraph(f"- {line}")
    waits = "first token" if question.phase == "prefill" else "next token"
    header = ["GPUs", "candidate", f"{waits} [modelled]", "rate", "longest part", "memory of a GPU", "1e6 tokens"]
    print_grid("", header, serving.rows)
    if serving.misses:
        print_paragraph(f"does not fit: {serving.describe_miss(max(serving.misses))}")
    library = "flops" if machine.kernel_rates is None else machine.kernel_rates.library
    print_paragraph(f"note: {ERRORS[question.phase]}; attention at the rate of {library}")


def _print(advice: Advice) -> None:
    """Print the verdict, the best candidates with reasons, what does not fit, and how certain the order is."""
    print_paragraph(advice.verdict)
    for line in advice.changes:
        print_paragraph(f"- {line}")
    print_grid("", *tabulate(advice.best))
    for place, candidate in enumerate(advice.best, 1):
        print_paragraph(f"{place}. {candidate.step.plan}; {candidate.choices}; {explain(candidate)}")
    print_grid("neither faster nor cheaper than these is possible [modelled]", *tabulate(advice.pareto))
    remarks = {"does not fit": advice.not_fitting, "refused": advice.refused, "how sure": advice.doubts}
    for title, lines in remarks.items():
        for line in lines:
            print_paragraph(f"{title}: {line}")
    print_paragraph(advice.counts)
    print_paragraph(f"note: {advice.launched_words}")
    if advice.launch:
        print_plain(f"launch: {advice.launch_lines}")
