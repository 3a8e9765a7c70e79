"""The search against loops over every candidate, bounds that nothing falls below, and errors by name."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import product
from math import prod
from types import FrameType
from typing import Any

import pytest
from launches import TITAN, read_torchtitan

import ringattn as ra
from ringattn import InvalidInput
from ringattn.lab.advise import torchtitan
from ringattn.lab.advise.advice import LENGTHS, advise, nearest_miss, record, span
from ringattn.lab.advise.search import Offer, Question, least_attention_of_layers, list_spreads, search
from ringattn.lab.models.config import ModelConfig, load_model
from ringattn.lab.models.packing import Lognormal
from ringattn.lab.models.parallel import Parallel, Software
from ringattn.lab.models.training import ATTENTION_PARTS, StepEstimate, training_step
from ringattn.machine.bands import step_band
from ringattn.text import duration

MODEL = ModelConfig("tiny", 2, 64, 4, 2, 16, 128, 512, experts=2, windows=(64, None))
MACHINE = replace(ra.get_machine("h100_nvlink_ib"), ranks_per_node=2, memory=1.1e7)


def ask(**more: Any) -> Question:
    machine = more.pop("machine", MACHINE)
    return Question(**{"model": MODEL, "offers": (Offer("small", machine, 2.0),), "tokens": 4096, "gpus": 4, **more})


def try_all(question: Question) -> list[tuple[Parallel, StepEstimate]]:
    """Every candidate on all GPUs, by loops of its own: a stage of two has one layer, and a sequence for each."""
    tried, machine = [], question.offers[0].machine
    for tp, pp in product((1, 2), (1, 2)):  # divides the 2 key/value heads and the node of 2; the 2 layers
        for cp in (1, 2, 4):
            if 4 % (cp * tp * pp):
                continue
            dp = 4 // cp // tp // pp
            if cp > 1 and cp * 128 > question.tokens:
                continue
            plans = [(layout, name) for layout in ("zigzag", "contiguous") for name in ("ring", "allgather", "direct")]
            if tp == 1:  # groups within a node, and key/value heads for each rank of them
                plans += [(layout, "ulysses(2, ring)") for layout in ("zigzag", "contiguous")]
            if tp == 1 and cp == 4:
                plans += [(layout, "double_ring(2)") for layout in ("zigzag", "contiguous")]
            for ep, (layout, schedule) in product(
                (1, 2) if cp * dp % 2 == 0 else (1,), plans if cp > 1 else [("contiguous", "ring")]
            ):
                # The two key/value heads of a rank, or one after another; a group of two needs one for each rank.
                alone = ("heads",) if tp == 1 and not schedule.startswith("ulysses") else ()
                for checkpointing in ("none", "selective", "attention", "full", "offload", "host", *alone):
                    for shard in ("none", "gradients", "weights") if cp * dp > 1 else ("none",):
                        parallel = Parallel(cp, dp, tp, ep, layout, schedule, checkpointing, shard, rows=pp, pp=pp)
                        tried.append((parallel, training_step(MODEL, machine, question.tokens, parallel)))
    return tried


def test_the_search_finds_what_loops_over_all_candidates_find() -> None:
    question = ask()
    tried, offer = try_all(question), question.offers[0]
    fitting = [(parallel, step) for parallel, step in tried if step.fits]
    assert 0 < len(fitting) < len(tried)  # the memory decides for some of them
    best: dict[tuple[int, ...], tuple[bool, float]] = {}
    for parallel, step in fitting:
        shape = (parallel.cp, parallel.dp, parallel.tp, parallel.pp, parallel.ep)
        key = step.reserved > (offer.machine.memory or 0), step.seconds / step.tokens
        best[shape] = min(key, best.get(shape, key))
    assert any(step.reserved > (offer.machine.memory or 0) for _, step in fitting)
    for shown in (1, 3):
        found = search(question, offer, 4, shown)
        assert sum(found.counts.values()) == len(tried) and not found.refused
        ours = [one.step.seconds / one.step.tokens for one in found.best[:shown]]
        assert ours == pytest.approx([x for _, x in sorted(best.values())[:shown]], rel=2e-3)  # equal ones by bytes
    form = r"the nearest miss is (.+?), (checkpoint.+?)(?:, schedule=[^:]+)?: (.+) more than the"
    missed = re.match(form, nearest_miss(found))
    assert missed and missed[3] != "0 B" and missed.groups()[:2] not in {(one.name, one.choices) for one in found.best}
    everything = search(question, offer, 4, 99).counts
    assert everything == {"too large": len(tried) - len(fitting), "simulated": len(fitting)}


@pytest.mark.parametrize(("tokens", "flops"), [(512, None), (1 << 16, None), (512, 1e12)])
def test_nothing_is_faster_or_smaller_than_the_least_step(tokens: int, flops: float | None) -> None:
    machine = MACHINE if flops is None else MACHINE.changed(flops=flops)
    question = ask(tokens=tokens, machine=machine)
    for parallel, step in try_all(question):
        least = question.step(machine, parallel, least_attention_of_layers)
        assert least.seconds <= step.seconds * (1 + 1e-9)
        assert all(least.parts[name] <= step.parts[name] * (1 + 1e-9) for name in ATTENTION_PARTS)
        assert all(count <= step.memory[name] for name, count in least.memory.items())


def test_pipelines_answer_where_weights_are_too_many_for_a_node() -> None:
    """Few sequences, slow links and no stages: the gathers of weights take most of the time."""
    machine = ra.get_machine("a100_nvlink_ib").changed(memory=4e10, bandwidth=1e9)
    question = Question(load_model("llama3_405b"), (Offer("a100_40gb", machine, 1.0),), 8192, 512, 64)
    best = search(question, question.offers[0], 512, 1).best[0]
    alone = [
        training_step(question.model, machine, 8192, parallel)
        for parallel in list_spreads(question, machine, 512)
        if parallel.pp == 1 and parallel.cp == 1
    ]
    assert best.parallel.pp > 1 and best.step.fits
    assert best.seconds < min(1e9 / one.tokens * one.seconds for one in alone if one.fits)


def test_bands_decide_how_sure_the_order_is() -> None:
    """Candidates within the band of published steps of the first are named as equal, by time or by cost."""
    offer = Offer("h100_nvlink_ib", ra.get_machine("h100_nvlink_ib"), 2.5)
    for by in ("time", "cost"):
        advice = advise(ask(offers=(offer,), tokens=1 << 16, gpus=2), by)
        low, high = span(advice.best[0])
        assert low < advice.best[0].seconds < high
        most = step_band(advice.best[0].step.outside)[1]
        close = [one for one in advice.best[1:] if advice.value(one) <= most * advice.value(advice.best[0])]
        assert any("published steps" in line for line in advice.doubts)
        assert bool(close) == any("not distinguishable" in line for line in advice.doubts)
        words, first = " ".join([advice.verdict, *advice.changes]), advice.best[0]
        for factor, one in zip(LENGTHS, advice.lengths, strict=True):
            stays = one is not None and (one.name, one.choices) == (first.name, first.choices)
            end = f"at {int(65536 * factor):,} this candidate stays the {'fastest' if by == 'time' else 'cheapest'}."
            assert (end in words) == stays
        assert ("fastest" in words.lower() or "faster" in words) == (by == "time")
    assert [one.cost for one in advice.pareto] == sorted((one.cost for one in advice.pareto), reverse=True)
    assert not any(
        other.seconds < one.seconds and other.cost < one.cost * 0.998 for one in advice.pareto for other in advice.all
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 0}, "gpus=0: must be at least 1"),
        ({"tokens": 0}, "tokens=0"),
        ({"batch": 0}, "batch=0"),
        ({"offers": ()}, "no machine to compare"),
        ({"machine": MACHINE.changed(memory=1e5)}, "does not fit on up to 4 GPUs: "),
        ({"offers": (Offer("a", MACHINE, 1.0), Offer("b", MACHINE, None))}, "prices: comparing several machines"),
    ],
)
def test_questions_without_an_answer_say_why(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        advise(ask(**change))
    with pytest.raises(InvalidInput, match="by=money: expected one of time, cost"):
        advise(ask(), "money")


def test_an_answer_says_what_helps_and_how_to_launch_it() -> None:
    """What is nearly full or misses; the decision of the Llama 3 report is within the band of the first."""
    offer = Offer("h100_nvlink_ib", ra.get_machine("h100_nvlink_ib"), None)
    small = load_model("llama3_8b")
    full = advise(Question(small, (offer,), 3 << 20, 8))
    assert full.best[0].parallel.trains_on_host and full.launched is not None
    assert full.launched.fits is False and full.launch == "" and record(full)["launch"] == ""
    assert "which does not fit: train with ringattn.train" in full.launched_words
    assert f"Kernel: with fa3, a step takes {duration(full.best[0].step.seconds)}; " in " ".join(full.changes)
    tight = advise(Question(small, (offer,), 10_700_000, 8))
    assert tight.best[0].is_tight and any("an allocator could take" in line for line in tight.doubts)
    assert not full.best[0].is_tight and not any("allocator" in line for line in full.doubts)
    with pytest.raises(
        InvalidInput, match=r"nearest miss is .* more than the 79.1 GiB there are.*; \d+ GPUs would be enough"
    ):
        advise(Question(small, (offer,), 1 << 24, 8))
    experts = advise(Question(load_model("gpt_oss_20b"), (offer,), 4096, 8))
    assert experts.best[0].parallel.ep == 8 and any("No published step has experts" in line for line in experts.doubts)
    assert "--parallelism.expert_parallel_degree 8 " in experts.launch or experts.best[0].parallel.cp > 1
    assert advise(Question(MODEL, (offer,), 4096, 8)).launched_words == (
        "torchtitan 0.3.0 has no configuration of tiny: train with ringattn.train."
    )
    best = search(Question(load_model("llama3_405b"), (offer,), 8192, 16384, 2048), offer, 16384, 5).best
    (meta,) = (one for one in best if one.name == "dp=128 tp=8 pp=16")
    assert meta.seconds <= step_band(())[1] * best[0].seconds


def test_refused_candidates_are_counted_and_named_and_do_not_end_the_search() -> None:
    """A recurrence of 33 heads cannot be split by tp=2: those are left out, and the rest of the search goes on."""
    model = load_model("qwen3_next_80b")
    assert model.recurrence is not None
    odd = replace(model, recurrence=replace(model.recurrence, heads=33))
    offer = Offer("h100_nvlink_ib", ra.get_machine("h100_nvlink_ib"), None)
    question = Question(odd, (offer,), 4096, 4)
    found = search(question, offer, 4, 1)
    refused = [one for one in list_spreads(question, offer.machine, 4) if one.tp == 2]
    assert found.best and all(one.parallel.tp == 1 for one in found.best)
    assert found.counts["refused"] == sum(found.refused.values()) >= len(refused) > 0
    assert all("tp=2 does not divide" in reason and "33 recurrent heads" in reason for reason in found.refused)


@pytest.mark.parametrize("name", [*torchtitan.CONFIGS])
@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(cp=4, dp=2, shard="weights", checkpointing="attention"),
        Parallel(dp=4, tp=2, shard="none", checkpointing="none"),
        Parallel(dp=2, tp=2, ep=2, pp=4, interleaved=2, rows=8, shard="gradients", checkpointing="selective"),
    ],
)
def test_the_command_has_names_that_torchtitan_knows(name: str, parallel: Parallel) -> None:
    model, machine = load_model(name), ra.get_machine("h100_nvlink_ib")
    module, why = torchtitan.configuration(model, machine, parallel)
    if not module:
        refused = parallel.cp > 1 and name.startswith("gpt_oss") and "refuses context parallelism" in why
        assert refused or (name == "llama3_405b" and "in this precision" in why)
        return
    given, flags, launcher = read_torchtitan(torchtitan.command(model, machine, 8192, parallel))
    assert TITAN["release"] == torchtitan.RELEASE and launcher["--nproc_per_node"] == "8"
    degrees = [int(given[f"parallelism.{kind}_parallel_degree"]) for kind in ("context", "tensor", "pipeline")]
    data = [int(given[f"parallelism.data_parallel_{kind}_degree"]) for kind in ("replicate", "shard")]
    assert prod([*degrees, *data]) == parallel.gpus
    assert (parallel.pp > 1) <= ("training.disable_cuda_graphs" in flags)


def test_configurations_are_those_of_the_precision_and_of_no_adapters() -> None:
    b200, h100 = ra.get_machine("b200_nvlink_ib"), ra.get_machine("h100_nvlink_ib")

    def found(name: str, machine: ra.Machine, **software: Any) -> tuple[str, str]:
        return torchtitan.configuration(load_model(name), machine, Parallel(software=Software(**software)))

    assert found("llama3_8b", b200, fp8=True) == ("llama3", "llama3_8b_mxfp8")
    assert found("llama3_405b", h100, fp8=True) == ("llama3", "llama3_405b")
    assert found("deepseek_v3", h100, fp8=True)[1] in TITAN["configs"]["deepseek_v3"]
    wrongs: list[tuple[dict[str, Any], str]]
    wrongs = [({"fp8": True}, "in this precision"), ({"lora": 8}, "adapters only in configurations")]
    for wrong, words in wrongs:
        module, why = found("llama3_8b", h100, **wrong)
        assert module == "" and words in why


def test_packed_documents_are_searched_with_layouts_that_balance_them() -> None:
    """43 lengths in 32k tokens: every candidate computes their pairs, and the advice scales their lengths."""
    lengths = (8000, 6000, 4000, 3000, 2000, 1500, *(228,) * 36, 60)
    offer = Offer("h100_nvlink_ib", ra.get_machine("h100_nvlink_ib"), None)
    question = ask(offers=(offer,), tokens=sum(lengths), documents=lengths, gpus=4, batch=1)
    found, whole = (search(one, offer, 4, 1).best[0] for one in (question, replace(question, documents=())))
    assert len(lengths) == 43 and found.step.seconds < whole.step.seconds
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    assert whole.step.flops - found.step.flops < 6 * 32 * 4 * 2 * (question.tokens * (question.tokens + 1) / 2 - pairs)
    assert question.resized(4).documents[0] == 32000 and question.resized(0.25).tokens == sum(x // 4 for x in lengths)
    with pytest.raises(InvalidInput, match="do not fill a sequence of 4,096"):
        advise(ask(offers=(offer,), tokens=4096, documents=(4000,)))


def test_the_bound_of_a_candidate_is_cheap() -> None:
    """61 layers on 256 GPUs have 20,508 candidates, and most end with their bound: it takes few calls of Python."""
    offer = Offer("h100_nvlink_ib", ra.get_machine("h100_nvlink_ib"), None)
    question, calls = Question(load_model("deepseek_v3"), (offer,), 1 << 17, 256), 0
    spreads = [*list_spreads(question, offer.machine, 256)]
    assert len(spreads) == 20508

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for parallel in (one := spreads[::200]):  # the stages are kept
        question.step(offer.machine, parallel, least_attention_of_layers)
    sys.setprofile(count)
    try:
        for parallel in one:
            question.step(offer.machine, parallel, least_attention_of_layers)
    finally:
        sys.setprofile(None)
    assert calls < 800 * len(one), f"{calls / len(one):.0f} calls a candidate; 7,800 where each layer is counted again"


def test_an_advice_says_what_layouts_and_more_sequences_change() -> None:
    """One document of half of the tokens: contiguous shards load the first of two ranks."""
    offer = Offer("h100_nvlink_ib", ra.get_machine("h100_nvlink_ib"), None)
    lengths, model = (1 << 17, *(1 << 11,) * 64), load_model("llama3_8b")
    advice = advise(Question(model, (offer,), sum(lengths), 2, 1, documents=lengths))
    first = advice.best[0]
    assert first.parallel.cp == 2 and {first.parallel.layout, *advice.layouts} == {"zigzag", "contiguous", "balanced"}
    for name, step in advice.layouts.items():
        assert (
            step.seconds
            == training_step(model, offer.machine, sum(lengths), replace(first.parallel, layout=name)).seconds
        )
        said = f"Layout: with {name} a step takes {duration(step.seconds)}, as {step.unequal}." in advice.changes
        assert said == (step.seconds > 1.001 * first.step.seconds)
    assert advice.layouts["contiguous"].imbalance[0] > 1.5 > first.step.imbalance[0]
    assert advice.batched is None and not any(line.startswith("Batch") for line in advice.changes)
    drawn = advise(Question(model, (offer,), 1 << 15, 2, documents=Lognormal(2000, 1.2)))
    assert drawn.batched is not None and drawn.batched.tokens == 4 * drawn.best[0].step.tokens
    assert drawn.question.resized(4).documents == Lognormal(2000, 1.2) and record(drawn)["question"]["documents"] == (
        "lognormal(2000, 1.2, 0)"
    )
