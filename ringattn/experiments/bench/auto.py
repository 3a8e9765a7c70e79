"""Suite "auto": whether the schedule that `auto` picks by its model is the measured best, over 40 settings."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ...functional import ring_attention
from ...machine.machine import Machine
from ...machine.presets import MACHINES
from ...pattern import parse_pattern
from ...planner import make_plan
from .case import BenchCase, BenchColumn, Context, Ratio, Run, relative_error
from .links import Links

HEADS, DIM = 2, 64
#: Results of two schedules may differ by the order of their sums.
WRONG = 1e-5
#: The pick counts where it takes at most 1 / NEAR of the best one's time; the share of settings that is promised.
NEAR, SHARE = 0.9, 0.9
#: The processes of one machine on 2 ranks and on 4, with tokens that make calls of 10 ms and more: name, pattern,
#: layout, tokens.
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
#: Behind a slow link between two nodes of two ranks.
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
    "auto: forward, 1 thread per rank, the layout given; best / auto is the time of the fastest schedule over the time "
    "of the one that auto picks, both medians of the rounds; 1 where it picks the best. The model is told the rates of "
    "the links, and of a core that two of four ranks share half"
)


def cases() -> list[BenchCase]:
    """40 settings."""
    cpu = MACHINES["cpu"]
    found = [
        _case(f"{name}_{layout}_{tokens}_{ranks}", pattern, layout, tokens, ranks, cpu)
        for name, pattern, layout, tokens in LOCAL
        for ranks in (2, 4)
    ]
    for links in LINKS:
        # Four ranks on two cores.
        machine = Machine(
            flops=cpu.flops / 2,
            latency=cpu.latency,
            bandwidth=links.outer,
            ranks_per_node=links.inner,
            node_bandwidth=links.fast,
            shared_nic=True,
        )
        found += [
            _case(
                f"{name}_{layout}_{links.outer / 1e6:.0f}_{links.fast / 1e6:.0f}",
                pattern,
                layout,
                tokens,
                4,
                machine,
                links,
            )
            for name, pattern, layout, tokens in LINKED
        ]
    return found


def _case(
    name: str, pattern: str, layout: str, tokens: int, ranks: int, machine: Machine, links: Links | None = None
) -> BenchCase:
    written = pattern.format(documents=[tokens // 16] * 16)
    plan = make_plan(
        parse_pattern(written), tokens=tokens, ranks=ranks, layout=layout, heads=HEADS, head_dim=DIM, machine=machine
    )
    assert plan.choice is not None
    predicted = {c.schedule: c.prediction.seconds for c in plan.choice.candidates if c.prediction is not None}
    settings = {
        "batch": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", "tokens": tokens,
        "pattern": written, "layout": layout, "picked": plan.schedule, "predicted_seconds": predicted,
    }  # fmt: skip
    columns = tuple(BenchColumn(schedule, 1, _attends(schedule)) for schedule in predicted)
    ratios = tuple(Ratio(other, plan.schedule) for other in predicted if other != plan.schedule)
    return BenchCase(name, ranks, settings, columns, ratios, _check, links=links, summary=_judge, notes=(NOTE,))


def _attends(schedule: str) -> Callable[[Context], Run]:
    def make(context: Context) -> Run:
        settings, pattern = context.settings, parse_pattern(context.settings["pattern"])
        plan = make_plan(
            pattern, tokens=settings["tokens"], ranks=context.ranks, layout=settings["layout"], heads=HEADS
        )
        source = torch.Generator().manual_seed(1)
        whole = [torch.randn(1, HEADS, settings["tokens"], DIM, generator=source, device="cpu") for _ in range(3)]
        q, k, v = (plan.layout.shard_tensor(x, context.rank).clone() for x in whole)
        options: dict[str, Any] = {"layout": plan.layout, "schedule": schedule, "transport": context.transport}
        return lambda: ring_attention(q, k, v, pattern, **options)

    return make


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest difference of the other schedules from the first."""
    first, *others = results
    errors = {name: relative_error(results[name], results[first]) for name in others}
    worst = max(errors.values())
    assert worst < WRONG, f"{context.settings['pattern']}: schedules differ by {worst:.1e}"
    return errors


def _judge(found: dict[str, Any]) -> dict[str, Any]:
    """What was best, what auto picked, and the ratio of their medians."""
    picked = found["settings"]["picked"]
    medians = {name: median(column["seconds"]) for name, column in found["columns"].items()}
    best = min(medians, key=lambda name: medians[name])
    ratio = medians[best] / medians[picked]
    others = max(medians.values()) / medians[best]
    return {"best": best, "auto": picked, "best / auto": ratio, "worst / best": others, "near": ratio >= NEAR}


def share(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of the settings in which auto was best or near it."""
    judged = [case["summary"] for case in results]
    part = sum(case["near"] for case in judged) / len(judged)
    # What a choice without a model would reach.
    fixed = sum(case["summary"]["best"] == "ring" for case in results) / len(judged)
    return {
        "summary": f"auto picks the best, or one within 10 % of it, in {part:.3f} of {len(judged)} settings (measured); "
        f"the ring is best in {fixed:.3f}",
        "value": part, "target": SHARE, "met": part >= SHARE,
    }  # fmt: skip
