"""Suite "patterns": sparse patterns against dense attention by the same library call, on one thread."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from ....call.functional import attention
from ....call.planner import make_plan
from ....dtypes import ITEM_BYTES
from ....pattern import parse_pattern
from ....simulator.numerics.oracle import oracle_rows_alone, sampled_rows
from ..calls import BACKWARD_WORK, check_error, make_alone, make_backward, make_inputs, make_ours
from ..case import HEAD_DIM, HEADS, BenchCase, BenchColumn, BenchSuite, Context, Ratio, Run, make_settings

TOKENS = 8192
#: Tokens in the cases that measure how time and memory scale.
MOST_TOKENS = 1 << 18
DILATED = "(2048, 4096, 8192), (1, 2, 4)"
#: Name, pattern, and the promised ratio of its rate of useful work to the rate of dense attention. Below 0.8, PyTorch's
#: flash op for CPUs sets the limit: it computes up to 512 keys for a row that sees fewer (docs/measured.md).
RATES: tuple[tuple[str, str, float | None], ...] = (
    ("dilated_group", f"Dilated({DILATED}, mix='group')", 0.85),
    ("longnet", f"Dilated({DILATED})", 0.80),
    ("local_window_1_8", "local_window(128, density=0.125)", 0.70),
    ("strided_blocks_1_8", "strided_blocks(128, stride=8)", 0.55),
    ("dilated_blocks_1_8", "dilated_blocks(128, density=0.125)", 0.60),
    ("causal_blocks_1_4", "dilated_blocks(128, density=0.25) & Causal()", None),
    ("window_256", "Window(255)", 0.40),
    ("window_1024", "Window(1023)", None),
    ("documents_16", f"Documents({[512] * 16})", None),
)
#: Name and pattern of the cases with MOST_TOKENS tokens.
LONG: tuple[tuple[str, str], ...] = (
    ("local_window", "local_window(128, blocks=2)"),
    ("dilated", f"Dilated({DILATED}, mix='group')"),
)
RATE_NOTE = (
    "useful rate: counted pairs of the pattern over the pairs of dense attention, times the ratio of times; for a "
    "backward: 2.5 times the time of its forward over its own (five matrix products against two); column backward: "
    "the backward alone, on a retained graph"
)
MEMORY_NOTE = (
    "memory: rise of VmHWM, reset by clear_refs, over VmRSS before the inputs exist, the worst of all rounds; "
    "formula: q, k, v and the output"
)
SCALING_NOTE = "linear: time for 8,192 tokens times the ratio of lengths, over the time for the long sequence"


def list_cases() -> list[BenchCase]:
    """The cases of rates, scaling and memory; their targets are the project's promises."""
    return [
        *(_rate_case(*row) for row in RATES),
        *(_scaling_case(name, pattern) for name, pattern in LONG),
        *(_memory_case(name, pattern) for name, pattern in LONG),
    ]


def _make_short(context: Context) -> Run | None:
    return make_ours(replace(context, settings={**context.settings, "tokens": TOKENS}))


def _make_backward(context: Context) -> Run:
    *inputs, grad = make_inputs(context.settings, 4)
    return make_backward(partial(attention, pattern=parse_pattern(context.settings["pattern"])), inputs, grad)


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest relative error of 16 rows against fp64 softmaxes over the rows of the pattern's dense mask."""
    rows, pattern = sampled_rows(context.settings["tokens"], 16), context.settings["pattern"]
    exact = oracle_rows_alone(parse_pattern(pattern), rows, *make_inputs(context.settings, 3))
    return {"forward": check_error(pattern, [results["forward"][0][:, :, rows]], [exact])}


def _rate_case(name: str, pattern: str, target: float | None) -> BenchCase:
    plan = make_plan(pattern, tokens=TOKENS, ranks=1, heads=HEADS)
    return BenchCase(
        name,
        1,
        make_settings(TOKENS, pattern=pattern, density=plan.density),
        (
            BenchColumn("dense", 1, partial(make_alone, attend=scaled_dot_product_attention)),
            BenchColumn("forward", 1, make_ours),
            BenchColumn("backward", 1, _make_backward),
        ),
        (
            Ratio("dense", "forward", target, work=plan.density),
            Ratio("forward", "backward", 0.8 if target else None, work=BACKWARD_WORK),
        ),
        _check,
        notes=(RATE_NOTE,),
    )


def _scaling_case(name: str, pattern: str) -> BenchCase:
    return BenchCase(
        f"scaling_{name}",
        1,
        make_settings(MOST_TOKENS, "bfloat16", pattern=pattern),
        (BenchColumn("short", 1, _make_short), BenchColumn("long", 1, make_ours)),
        (Ratio("short", "long", 0.9, work=MOST_TOKENS / TOKENS),),
        rounds=3,
        notes=(SCALING_NOTE,),
    )


def _memory_case(name: str, pattern: str) -> BenchCase:
    def formula(context: Context) -> int:
        settings = context.settings
        return 4 * settings["tokens"] * HEADS * HEAD_DIM * ITEM_BYTES[settings["dtype"]]

    return BenchCase(
        f"memory_{name}",
        1,
        make_settings(MOST_TOKENS, "bfloat16", pattern=pattern),
        (BenchColumn("forward", 1, make_ours),),
        formula_bytes=formula,
        limit=1.25,
        rounds=2,
        notes=(MEMORY_NOTE,),
    )


SUITE = BenchSuite(
    list_cases,
    title="Sparse masks against dense attention",
    about=(
        "dense / forward: the time of dense attention times the share of visible pairs, over ours; 1 means that the "
        "mask saves all it can. forward / backward: 2.5 forwards, which a backward should cost, over the backward.",
    ),
)
