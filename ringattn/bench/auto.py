"""Suite "auto": whether the schedule that `auto` picks by its model is the measured best, over 40 settings."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from ..functional import ring_attention
from ..pattern import parse_pattern
from ..plan import make_plan
from .case import Case, Column, Context, Ratio, Run, relative_error

HEADS, DIM = 2, 64
SCHEDULES = ("ring", "direct", "allgather")
#: Results of two schedules may differ by the order of their sums.
WRONG = 1e-5
#: The pick counts where it takes at most 1 / NEAR of the best one's time; the share of settings that is promised.
NEAR, SHARE = 0.9, 0.9
#: Pattern, layouts it is run on, tokens on 2 ranks and on 4.
GRID: tuple[tuple[str, str, tuple[str, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    ("full", "Full()", ("contiguous",), (2048, 4096), (2048, 4096)),
    ("causal", "Causal()", ("contiguous", "zigzag"), (2048, 4096), (2048, 4096)),
    ("window", "Causal() & Window(511)", ("contiguous", "zigzag"), (4096, 16384), (4096, 16384)),
    ("documents", "Causal() & Documents({documents})", ("contiguous", "zigzag"), (16384,), (8192,)),
    ("longnet", "Dilated((512, 1024, 2048), (1, 2, 4))", ("contiguous", "zigzag"), (4096, 16384), (4096, 16384)),
    ("blocks", "strided_blocks(128, stride=8)", ("contiguous",), (8192, 16384), (8192, 16384)),
    ("far", "dilated_blocks(128, offsets=(1, 8, 16))", ("contiguous",), (8192, 16384), (8192, 16384)),
)
NOTE = (
    "auto: forward, 1 thread per rank, the layout given; best / auto is the time of the fastest schedule over the time "
    "of the one that auto picks with the preset machine, both medians of the rounds; 1 where it picks the best"
)


def cases() -> list[Case]:
    """40 settings."""
    return [
        _case(f"{name}_{layout}_{tokens}_{ranks}", pattern, layout, tokens, ranks)
        for name, pattern, layouts, *sizes in GRID
        for layout in layouts
        for ranks, lengths in zip((2, 4), sizes, strict=True)
        for tokens in lengths
    ]


def _case(name: str, pattern: str, layout: str, tokens: int, ranks: int) -> Case:
    written = pattern.format(documents=[tokens // 16] * 16)
    plan = make_plan(parse_pattern(written), tokens=tokens, ranks=ranks, layout=layout, heads=HEADS, head_dim=DIM)
    settings = {
        "batch": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", "tokens": tokens,
        "pattern": written, "layout": layout, "picked": plan.schedule,
    }  # fmt: skip
    columns = tuple(Column(schedule, 1, _attends(schedule)) for schedule in SCHEDULES)
    ratios = tuple(Ratio(other, plan.schedule) for other in SCHEDULES if other != plan.schedule)
    return Case(name, ranks, settings, columns, ratios, _check, summary=_judge, notes=(NOTE,))


def _attends(schedule: str) -> Callable[[Context], Run]:
    def make(context: Context) -> Run:
        settings, pattern = context.settings, parse_pattern(context.settings["pattern"])
        plan = make_plan(
            pattern, tokens=settings["tokens"], ranks=context.ranks, layout=settings["layout"], heads=HEADS
        )
        source = torch.Generator().manual_seed(1)
        whole = [torch.randn(1, HEADS, settings["tokens"], DIM, generator=source) for _ in range(3)]
        q, k, v = (plan.layout.shard_tensor(x, context.rank).clone() for x in whole)
        return lambda: ring_attention(q, k, v, pattern, layout=plan.layout, schedule=schedule)

    return make


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest difference of the other schedules from the ring."""
    errors = {name: relative_error(results[name], results["ring"]) for name in SCHEDULES[1:]}
    worst = max(errors.values())
    assert worst < WRONG, f"{context.settings['pattern']}: schedules differ by {worst:.1e}"
    return errors


def _judge(found: dict[str, Any]) -> dict[str, Any]:
    """What was best, what auto picked, and the ratio of their medians."""
    picked = found["settings"]["picked"]
    medians = {name: median(column["seconds"]) for name, column in found["columns"].items()}
    best = min(medians, key=lambda name: medians[name])
    ratio = medians[best] / medians[picked]
    return {"best": best, "auto": picked, "best / auto": ratio, "near": ratio >= NEAR}


def share(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of the settings in which auto was best or near it."""
    judged = [case["summary"] for case in results]
    part = sum(case["near"] for case in judged) / len(judged)
    return {
        "summary": f"auto picks the best, or one within 10 % of it, in {part:.3f} of {len(judged)} settings (measured)",
        "value": part, "target": SHARE, "met": part >= SHARE,
    }  # fmt: skip
