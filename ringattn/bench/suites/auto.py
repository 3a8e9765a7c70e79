"""Suite "auto": how often the schedule that `auto` picks by the timing model is the fastest, in 40 settings;
and in 100 modelled settings how near the pick is to the fastest simulated schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from ...functional import ring_attention
from ...machine.machine import Machine
from ...machine.presets import MACHINES
from ...pattern import parse_pattern
from ...planner import make_plan
from ...simulator.timing.auto import list_schedules
from ..case import (
    BenchCase,
    BenchColumn,
    BenchSuite,
    CaseRecord,
    Context,
    Ratio,
    Run,
    make_inputs,
    make_settings,
    make_shards,
    relative_error,
)
from ..choices import RANKS, SEED, SETTINGS, draw_settings
from ..links import Links

HEADS, HEAD_DIM = 2, 64
#: Most relative difference between the results of two schedules, which sum in different orders.
TOLERANCE = 1e-5
#: A pick counts as right where the fastest schedule takes at least this part of the pick's time.
NEAR = 0.9
#: The promised share of settings with a right pick.
TARGET = 0.9
#: (name, pattern, layout, tokens) of settings on the processes of one machine, each with 2 ranks and with 4 ranks. The
#: tokens make calls of 10 ms and more.
LOCAL: tuple[tuple[str, str, str, int], ...] = (
    ("full", "Full()", "contiguous", 4096),
    ("causal", "Causal()", "zigzag", 4096),
    ("window", "Causal() & Window(511)", "contiguous", 16384),
    ("window", "Causal() & Window(511)", "zigzag", 16384),
    ("documents", "Causal() & Documents({documents})", "zigzag", 16384),
    ("longnet", "Dilated((512, 1024, 2048), (1, 2, 4))", "contiguous", 16384),
    ("blocks", "strided_blocks(128, stride=8)", "contiguous", 16384),
    ("far", "dilated_blocks(128, offsets=(1, 8, 16))", "contiguous", 16384),
)
#: (name, pattern, layout, tokens) of settings on two nodes of two ranks, each behind each of LINKS.
LINKED: tuple[tuple[str, str, str, int], ...] = (
    ("full", "Full()", "contiguous", 2048),
    ("causal", "Causal()", "zigzag", 2048),
    ("window", "Causal() & Window(511)", "contiguous", 8192),
    ("window", "Causal() & Window(511)", "zigzag", 8192),
    ("documents", "Causal() & Documents({documents})", "zigzag", 8192),
    ("longnet", "Dilated((512, 1024, 4096), (1, 2, 4))", "contiguous", 8192),
    ("blocks", "strided_blocks(128, stride=8)", "contiguous", 4096),
    ("far", "dilated_blocks(128, offsets=(1, 32))", "contiguous", 8192),
)
LINKS = (Links(2, 2, 10e6, 100e6), Links(2, 2, 40e6, 400e6), Links(2, 2, 100e6, 100e6))
NOTE = (
    "auto: forward, 1 thread per rank, the layout as given; best / auto is the time of the fastest schedule over the "
    "time of the schedule that auto picks, both medians of the rounds, and 1 where auto picks the fastest. The model "
    "gets the rates of the links, and half the speed of a core where four ranks share two cores"
)
MODELLED_NOTE = (
    "modelled: forward on a preset, in bfloat16 with a head_dim of 128; auto / best is the simulated time of the pick "
    "over that of the fastest of all schedules that fit; nothing is measured"
)


def list_cases() -> list[BenchCase]:
    """The 40 measured settings, and 100 modelled ones."""
    cpu = MACHINES["cpu"]
    cases = [
        _case(f"{name}_{layout}_{tokens}_{ranks}", pattern, layout, tokens, ranks, cpu)
        for name, pattern, layout, tokens in LOCAL
        for ranks in (2, 4)
    ]
    for links in LINKS:
        machine = Machine(
            flops=cpu.flops / 2,  # four ranks share two cores
            latency=cpu.latency,
            bandwidth=links.bandwidth,
            ranks_per_node=links.ranks_per_node,
            node_bandwidth=links.node_bandwidth,
            shared_nic=True,
        )
        rates = f"{links.bandwidth / 1e6:.0f}_{links.node_bandwidth / 1e6:.0f}"
        cases += [
            _case(f"{name}_{layout}_{rates}", pattern, layout, tokens, links.ranks, machine, links)
            for name, pattern, layout, tokens in LINKED
        ]
    return cases + [_modelled_case(ranks) for ranks in RANKS]


def _modelled_case(ranks: int) -> BenchCase:
    """Random settings on presets: the schedule that `auto` picks against every schedule, simulated."""
    settings = make_settings(0, 0, 0, ranks=ranks, settings=SETTINGS, seed=SEED)

    def measure(context: Context, repeat: int) -> dict[str, Any]:
        rows = [{**asdict(setting), **setting.judge()} for setting in draw_settings(ranks)]
        return {"times": {}, "errors": {}, "details": {"settings": rows}}

    def summarise(record: CaseRecord) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = record["details"]["settings"]
        return [row | {"near": row["auto / best"] <= 1 / NEAR} for row in rows]

    return BenchCase(
        f"modelled_{ranks}", 1, settings, (), measure=measure, summarise=summarise, weight=ranks, notes=(MODELLED_NOTE,)
    )


def _case(
    name: str, pattern: str, layout: str, tokens: int, ranks: int, machine: Machine, links: Links | None = None
) -> BenchCase:
    written = pattern.format(documents=[tokens // 16] * 16)
    plan = make_plan(
        parse_pattern(written),
        tokens=tokens,
        ranks=ranks,
        layout=layout,
        heads=HEADS,
        head_dim=HEAD_DIM,
        machine=machine,
    )
    assert plan.choice is not None
    predicted = {c.schedule: c.prediction.seconds for c in plan.choice.candidates if c.prediction is not None}
    settings = make_settings(
        HEADS, HEAD_DIM, tokens, pattern=written, layout=layout, picked=plan.schedule, predicted_seconds=predicted
    )
    names = list_schedules(plan, machine)
    columns = tuple(BenchColumn(schedule, 1, _make_attention(schedule)) for schedule in names)
    ratios = tuple(Ratio(other, plan.schedule) for other in names if other != plan.schedule)
    return BenchCase(name, ranks, settings, columns, ratios, _check, links=links, summarise=_judge, notes=(NOTE,))


def _make_attention(schedule: str) -> Callable[[Context], Run]:
    def make(context: Context) -> Run:
        settings, pattern = context.settings, parse_pattern(context.settings["pattern"])
        q, k, v = make_shards(context, make_inputs(settings, 3))
        return lambda: ring_attention(
            q, k, v, pattern, layout=settings["layout"], schedule=schedule, transport=context.transport
        )

    return make


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference of each other schedule's result from the result of the first schedule."""
    first, *others = results
    errors = {name: relative_error(results[name], results[first]) for name in others}
    worst = max(errors.values())
    assert worst < TOLERANCE, f"{context.settings['pattern']}: schedules differ by {worst:.1e}"
    return errors


def _judge(record: CaseRecord) -> dict[str, Any]:
    """The fastest schedule, the pick of auto, and ratios of medians."""
    picked = record["settings"]["picked"]
    medians = {name: median(column["seconds"]) for name, column in record["columns"].items()}
    best = min(medians, key=lambda name: medians[name])
    ratio = medians[best] / medians[picked]
    worst_ratio = max(medians.values()) / medians[best]
    return {"best": best, "auto": picked, "best / auto": ratio, "worst / best": worst_ratio, "near": ratio >= NEAR}


def _conclude(records: list[CaseRecord]) -> dict[str, Any]:
    """The share of settings in which auto picked the fastest schedule, or a schedule that is nearly as fast."""
    modelled = [row for record in records if isinstance(record["summary"], list) for row in record["summary"]]
    judged = [record["summary"] for record in records if not isinstance(record["summary"], list)] or modelled
    kind = "modelled" if judged is modelled else "measured"
    share = sum(summary["near"] for summary in judged) / len(judged)
    ring_share = sum(summary["best"] == "ring" for summary in judged) / len(judged)  # of a fixed choice without a model
    return {
        "summary": f"auto picks the best schedule, or one within 10 % of it, in {share:.3f} of {len(judged)} settings "
        f"({kind}); the ring is best in {ring_share:.3f}" + _count_near(modelled),
        "value": share,
        "target": TARGET,
        "met": share >= TARGET,
    }


def _count_near(modelled: list[dict[str, Any]]) -> str:
    """Of the settings that are simulated, in how many the pick is near."""
    near = sum(row["near"] for row in modelled)
    return f"; on presets in {near} of {len(modelled)} settings (modelled)" if modelled else ""


SUITE = BenchSuite(list_cases, _conclude)
