"""`Timeline`, the result of `simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...dtypes import ITEM_BYTES
from ...machine.bands import describe_band
from ...machine.machine import MACHINE_NUMBERS, Machine
from .costs import Failures
from .solvers.base import Traffic

if TYPE_CHECKING:
    from ...plan.plan import Plan

#: Keys of `Timeline.exposed` that are modelled only if the machine has a certain number, and that number's name.
CAUSES = {number.cause: name for name, number in MACHINE_NUMBERS.items() if number.cause}
#: Cores of the host on which the preset cpu was measured.
MEASURED_CORES = 2
#: Effects that are never modelled.
NEVER_MODELLED = ("contention inside the network, beyond the shared NIC of a node", "start-up of the program")


@dataclass(frozen=True)
class Timeline:
    """The modelled time of one pass of a plan, and what it consists of, in seconds: the result of `simulate`.

    Sizes are in bytes.
    """

    #: "forward" or "backward".
    direction: str
    ranks: int
    seconds: float
    #: The name of the solver, and why it could be used.
    solver: str
    why: str
    #: When each rank finishes, its call and its host included, float64 [ranks].
    finish: np.ndarray
    #: Mean seconds of visits per rank.
    compute: float
    #: Seconds by which the pass is longer than `compute`, by cause: imbalance (of the busiest rank), merge,
    #: interference, stalls, wait for peers (the waiting that would remain if messages took no time), wait for messages
    #: (all other waiting), host (starting steps) and call. Together with `compute` they sum to `seconds`.
    exposed: dict[str, float]
    #: Counted bytes on links.
    traffic: Traffic
    #: Bytes of one rank by category.
    memory: dict[str, int]
    #: Passes of the job. None: no job; energy and price are those of one pass, without failures.
    passes: int | None
    #: Failures and checkpoints of the job; None: not modelled, or no job.
    failures: Failures | None
    #: Energy [J] and price of the job, or of one pass; None: not modelled.
    joules: float | None
    price: float | None
    machine: Machine
    #: Assumptions, such as for a machine whose speed was measured with another dtype, head dim or number of heads.
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds that the whole job takes, with failures and checkpoints if modelled; without a job, one pass."""
        return (self.passes or 1) * self.seconds if self.failures is None else self.failures.expected

    @property
    def fits(self) -> bool | None:
        """True if the plan fits into the memory of a rank; None: not modelled."""
        return None if self.machine.memory is None else sum(self.memory.values()) <= self.machine.memory

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """The effects that are not modelled, each with the machine parameter that would model it."""
        left_out = [
            f"{number.effect} (machine.{name})"
            for name, number in MACHINE_NUMBERS.items()
            if number.effect and getattr(self.machine, name) is None
        ]
        if self.machine.mtbf is not None and self.passes is None:
            left_out.append("failures and checkpoints (define a job with passes=...)")
        return (*left_out, *NEVER_MODELLED)


def note_assumptions(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """The assumptions behind a simulation, one sentence each: the kernel's speed, a preset's error band, shared cores.

    Error bands come from published passes, all with 16-bit inputs.
    """
    rows = plan.batch * -(-plan.tokens // plan.ranks)
    library = machine.kernel_rates.library if machine.kernel_rates else ""
    band = describe_band(machine.preset, library, rows) if ITEM_BYTES[plan.dtype] == 2 else ""
    cores = ""
    if machine.preset == "cpu" and plan.ranks > MEASURED_CORES and machine.cores is None:
        cores = (
            f"each of {plan.ranks:,} ranks has its own core [assumed]; on a single host, give "
            f"machine.ranks_per_node={plan.ranks} machine.cores=..."
        )
    return (*_note_kernel(plan, machine), *(note for note in (band, cores) if note))


def _note_kernel(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """One sentence for each assumption about the speed of the kernel; dtypes of one size count as equally fast."""
    times = machine.kernel
    rates = machine.kernel_rates
    if rates is not None and times is None:
        if ITEM_BYTES[plan.dtype] == 2:
            return ()
        return (
            f"kernel rates of {rates.library} are for 16-bit inputs, and pairs of {plan.dtype} take "
            f"{rates.wide:g} times as long [assumed], unchecked by published passes; try dtype=bfloat16",
        )
    if times is None:
        if machine.flops_dtype is None or ITEM_BYTES[machine.flops_dtype] == ITEM_BYTES[plan.dtype]:
            return ()
        return (
            f"flops={machine.flops:g} of this machine are for {machine.flops_dtype}, and {plan.dtype} is "
            f"as fast [assumed]; try dtype={machine.flops_dtype}, or give machine.flops=... for {plan.dtype}",
        )
    compared = (
        ("dtype", times.dtype, plan.dtype),
        ("head_dim", times.head_dim, plan.head_dim),
        ("heads", times.heads, plan.heads),
    )
    return tuple(
        f"kernel times were measured with {name}={measured}, and {name}={planned} takes as long per flop "
        f"[assumed]; ringattn calibrate {name}={planned} measures it"
        for name, measured, planned in compared
        if measured not in (None, planned)
    )
