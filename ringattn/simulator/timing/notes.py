"""Notes on a plan that differs from what a machine's speed was measured with, or stated for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...dtypes import ITEM_BYTES
from ...machine.bands import describe_band
from ...machine.machine import Machine

if TYPE_CHECKING:
    from ...plan.plan import Plan


def note_assumptions(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """One sentence for each assumption about the speed of a plan's kernel, and one for the error band of a preset.

    All published passes behind the bands have 16-bit inputs.
    """
    rows = plan.batch * -(-plan.tokens // plan.ranks)
    band = describe_band(machine.preset, rows) if ITEM_BYTES[plan.dtype] == 2 else None
    return (*_note_kernel(plan, machine), *([band] if band else []))


def _note_kernel(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """One sentence for each assumption about the speed of the kernel; dtypes of one size are taken to be alike."""
    times = machine.kernel
    rates = machine.kernel_rates
    if rates is not None and times is None:
        if ITEM_BYTES[plan.dtype] == 2:
            return ()
        return (
            f"kernel rates of {rates.library} are those of 16-bit inputs, and a pair of {plan.dtype} is taken to take "
            f"{rates.wide:g} times as long [assumed]; no published pass says how near that is; try dtype=bfloat16",
        )
    if times is None:
        if machine.flops_dtype is None or ITEM_BYTES[machine.flops_dtype] == ITEM_BYTES[plan.dtype]:
            return ()
        return (
            f"flops={machine.flops:g} of this machine are those of {machine.flops_dtype}, and {plan.dtype} is taken to "
            f"be as fast [assumed]; try dtype={machine.flops_dtype}, or give machine.flops=... for {plan.dtype}",
        )
    compared = (
        ("dtype", times.dtype, plan.dtype),
        ("head_dim", times.head_dim, plan.head_dim),
        ("heads", times.heads, plan.heads),
    )
    return tuple(
        f"kernel times were measured with {name}={measured}, and {name}={planned} is taken to take as long per flop "
        f"[assumed]; ringattn calibrate {name}={planned} measures it"
        for name, measured, planned in compared
        if measured not in (None, planned)
    )
