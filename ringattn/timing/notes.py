"""Where a machine's speed was found with something else than the plan has that it is used for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dtypes import ITEM_BYTES
from ..machine.machine import Machine

if TYPE_CHECKING:
    from ..plan.plan import Plan


def notes(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """Sentences on what is assumed of the speed of a plan's kernel; dtypes of one size are taken to be one."""
    known = machine.kernel
    if known is None:
        if machine.flops_dtype is None or ITEM_BYTES[machine.flops_dtype] == ITEM_BYTES[plan.dtype]:
            return ()
        return (
            f"flops={machine.flops:g} of this machine are those of {machine.flops_dtype}, and {plan.dtype} is taken to be as fast "
            f"[assumed]; try dtype={machine.flops_dtype}, or machine.flops=... of {plan.dtype}",
        )
    pairs = (
        ("dtype", known.dtype, plan.dtype),
        ("head_dim", known.head_dim, plan.head_dim),
        ("heads", known.heads, plan.heads),
    )
    return tuple(
        f"kernel times were measured with {name}={mine}, and {name}={asked} is taken to take as long per flop [assumed]; "
        f"ringattn calibrate {name}={asked} measures it"
        for name, mine, asked in pairs
        if mine not in (None, asked)
    )
