"""Suite "simulate": virtual ranks against one device, and the run time of the timing model, on one thread."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ....call.functional import attention
from ....call.planner import make_plan
from ....kernels import get_kernel
from ....machine.machine import Machine
from ....pattern import Full
from ....plan.plan import Plan
from ....simulator.numerics.source import TensorSource, make_source
from ....simulator.numerics.whole import Outcome, execute, make_groups
from ....simulator.timing.simulation import simulate
from ....simulator.timing.timeline import Timeline
from ..calls import check_error, make_pass
from ..case import HEADS, BenchCase, BenchColumn, BenchSuite, Context, Ratio, Run, make_settings

TOKENS, RANKS = 65536, 1024
#: For a window of 255, kernel calls on blocks of 64 rows take 1.5 times as long as one call on all rows, and the copies
#: of messages 0.8 times (measured): no more than 1 / 2.3 can be reached.
TARGET = 0.35
#: Ranks and steps of the timelines.
TIMELINE_RANKS = 1 << 18
MACHINE = Machine(flops=5e14, latency=1e-5, bandwidth=5e10)
VIRTUAL_NOTE = (
    "virtual ranks: all ranks executed in batches (`whole=true`) on existing tensors, after planning, without "
    "oracles and ledger; attention: one call on the same tensors"
)
TIMING_NOTE = "timing: ra.simulate of a plan of 262,144 ranks; slow: each rank has its own factor (solver stencil)"


def list_cases() -> list[BenchCase]:
    """The cases of this suite: three windows, a dilated backward, and two timelines.

    Their targets are what the project promises.
    """
    return [
        *(_virtual_case(f"window_{width}", f"Window({width})") for width in (63, 255, 1023)),
        _virtual_case("dilated_backward", "Dilated((256,), (2,), causal=True)", backward=True),
        _timing_case("what_if", slow=False),
        _timing_case("every_step", slow=True),
    ]


def _virtual_case(name: str, pattern: str, *, backward: bool = False) -> BenchCase:
    return BenchCase(
        name,
        1,
        make_settings(TOKENS, virtual_ranks=RANKS, pattern=pattern, backward=backward),
        (BenchColumn("attention", 1, _make_attention), BenchColumn("virtual ranks", 1, _make_virtual_ranks)),
        (Ratio("attention", "virtual ranks", TARGET),),
        _check,
        notes=(VIRTUAL_NOTE,),
    )


def _plan(context: Context) -> Plan:
    settings = context.settings
    sizes = {name: settings[name] for name in ("pattern", "tokens", "heads", "head_dim", "dtype")}
    return make_plan(**sizes, ranks=settings["virtual_ranks"], schedule="ring", rotate="kv")


def _make_attention(context: Context) -> Run:
    plan = _plan(context)
    source = make_source(plan)
    *inputs, grad = (source.rows(name, range(plan.tokens)) for name in ("q", "k", "v", "grad"))
    return make_pass(partial(attention, pattern=plan.pattern), inputs, grad if context.settings["backward"] else None)


def _make_virtual_ranks(context: Context) -> Run:
    plan, backward = _plan(context), context.settings["backward"]
    source = TensorSource.of(make_source(plan))
    row = source.rows("q", range(1))
    kernel = get_kernel("auto", row, row, row).single()
    groups = [*make_groups(plan, range(plan.ranks), backward=backward)]

    def run() -> list[Outcome]:
        executed = (execute(group, source, lambda: kernel, plan.head_dim**-0.5, grads=backward) for group in groups)
        return [outcome for outcomes, *_ in executed for outcome in outcomes]

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference between the virtual ranks' output and that of one device."""
    layout = _plan(context).layout
    shards = {
        rank: outcome.out[i : i + 1] for outcome in results["virtual ranks"] for i, rank in enumerate(outcome.ranks)
    }
    out = layout.unshard_tensor([shards[rank] for rank in range(layout.ranks)])
    return {"virtual ranks": check_error("the result of virtual ranks", [out], results["attention"][:1])}


def _timing_case(name: str, *, slow: bool) -> BenchCase:
    def make(context: Context) -> Run:
        ranks = context.settings["ranks"]
        plan = make_plan(
            Full(), tokens=4096 * ranks, ranks=ranks, heads=HEADS, head_dim=128, dtype="bfloat16", schedule="ring"
        )
        factors = 1 + np.random.default_rng(0).random(ranks) / 10

        def run() -> Timeline:
            return simulate(plan, MACHINE, slow=factors) if slow else simulate(plan, MACHINE)

        return run

    numbers = {number: getattr(MACHINE, number) for number in ("flops", "latency", "bandwidth")}
    settings = {"ranks": TIMELINE_RANKS, "steps": TIMELINE_RANKS, **numbers}
    columns = (BenchColumn("timeline", 1, make),)
    return BenchCase(name, 1, settings, columns, rounds=1 if slow else None, notes=(TIMING_NOTE,))


SUITE = BenchSuite(
    list_cases,
    title="Virtual ranks against one call, and the run time of a simulation",
    about=("attention / virtual ranks: the same rows on one device, over a ring of virtual ranks in one process.",),
)
