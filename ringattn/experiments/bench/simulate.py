"""Suite "simulate": what virtual ranks cost beside one device, and how long the timing model takes, on one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...functional import attention
from ...kernels import get_kernel
from ...machine.machine import Machine
from ...numerics import Outcome, TensorSource, execute, make_groups, make_source
from ...pattern import Full, parse_pattern
from ...plan.plan import Plan
from ...planner import make_plan
from ...timing.simulation import simulate
from ...timing.timeline import Timeline
from .case import BenchCase, BenchColumn, Context, Ratio, Run, relative_error

HEADS, DIM, TOKENS, RANKS = 8, 64, 65536, 1024
#: Virtual ranks may take 1.3 times as long as one device.
TARGET = 1 / 1.3
#: A result that differs from the one of a single device by more than this is wrong, and is not timed.
WRONG = 1e-5
#: Ranks, and steps, of the largest timeline.
MOST = 1 << 18
MACHINE = Machine(flops=5e14, latency=1e-5, bandwidth=5e10)
VIRTUAL_NOTE = (
    "virtual ranks: all of them executed in cohorts (`numerics.way=all`) on tensors that exist, without oracles and "
    "ledger, of a plan that is known; attention: one call on the same tensors"
)
TIMING_NOTE = (
    "timing: ra.simulate of a plan of 262,144 ranks; slow: every rank has a factor of its own (solver stencil)"
)


def cases() -> list[BenchCase]:
    """Targets are the project's promises."""
    found = [_virtual(f"window_{width}", f"Window({width})") for width in (63, 255, 1023)]
    found.append(_virtual("dilated_backward", "Dilated((256,), (2,), causal=True)", backward=True))
    return [*found, _timing("what_if", slow=False), _timing("every_clock", slow=True)]


def _virtual(name: str, pattern: str, *, backward: bool = False) -> BenchCase:
    columns = BenchColumn("attention", 1, _single(backward)), BenchColumn("virtual ranks", 1, _ranks(backward))
    settings = {
        "heads": HEADS, "head_dim": DIM, "dtype": "float32", "tokens": TOKENS, "virtual_ranks": RANKS, "pattern": pattern
    }  # fmt: skip
    return BenchCase(
        name, 1, settings, columns,
        (Ratio("attention", "virtual ranks", TARGET),), None if backward else _check, notes=(VIRTUAL_NOTE,),
    )  # fmt: skip


def _plan(context: Context) -> Plan:
    s = context.settings
    return make_plan(
        parse_pattern(s["pattern"]), tokens=s["tokens"], ranks=s["virtual_ranks"], schedule="ring", heads=s["heads"],
        head_dim=s["head_dim"], dtype=s["dtype"], rotate="keys",
    )  # fmt: skip


def _single(backward: bool) -> Callable[[Context], Run]:
    def make(context: Context) -> Run:
        plan = _plan(context)
        source = make_source(plan)
        q, k, v, grad = (source.rows(name, range(plan.tokens)) for name in ("q", "k", "v", "grad"))
        if not backward:
            return lambda: attention(q, k, v, plan.pattern)
        inputs = [x.requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(attention(q, k, v, plan.pattern), inputs, grad)

    return make


def _ranks(backward: bool) -> Callable[[Context], Run]:
    def make(context: Context) -> Run:
        plan = _plan(context)
        source = TensorSource.of(make_source(plan))
        one = source.rows("q", range(1))
        kernel = get_kernel("auto", one, one, one)
        groups = make_groups(plan, range(plan.ranks), backward=backward)

        def run() -> list[Outcome]:
            done = [execute(group, source, lambda: kernel, plan.head_dim**-0.5, grads=backward)[0] for group in groups]
            return [outcome for outcomes in done for outcome in outcomes]

        return run

    return make


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest difference of the ranks' outputs from the one of a single device."""
    layout = _plan(context).layout
    outs = {rank: o.out[i : i + 1] for o in results["virtual ranks"] for i, rank in enumerate(o.ranks)}
    error = relative_error(layout.unshard_tensor([outs[rank] for rank in range(layout.ranks)]), results["attention"])
    assert error < WRONG, f"the virtual ranks are wrong by {error:.1e}"
    return {"virtual ranks": error}


def _timing(name: str, *, slow: bool) -> BenchCase:
    def make(context: Context) -> Run:
        s = context.settings
        plan = make_plan(
            Full(),
            tokens=4096 * s["ranks"],
            ranks=s["ranks"],
            heads=HEADS,
            head_dim=128,
            dtype="bfloat16",
            schedule="ring",
        )
        factors = 1 + np.random.default_rng(0).random(s["ranks"]) / 10

        def run() -> Timeline:
            return simulate(plan, MACHINE, slow=factors) if slow else simulate(plan, MACHINE)

        return run

    settings = {
        "ranks": MOST,
        "steps": MOST,
        "flops": MACHINE.flops,
        "latency": MACHINE.latency,
        "bandwidth": MACHINE.bandwidth,
    }
    return BenchCase(
        name, 1, settings, (BenchColumn("timeline", 1, make),), rounds=1 if slow else None, notes=(TIMING_NOTE,)
    )
