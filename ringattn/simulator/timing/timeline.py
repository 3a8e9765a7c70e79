"""The result of a simulation of time."""

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

#: Keys of `Timeline.exposed` that are modelled only with a number of the machine, and the name of that number.
CAUSES = {number.cause: name for name, number in MACHINE_NUMBERS.items() if number.cause}
#: Cores of the host on which the preset cpu was measured.
MEASURED_CORES = 2
#: Effects that are not modelled on any machine.
NEVER_MODELLED = ("contention inside the network, beyond the shared NIC of a node", "start-up of the program")


@dataclass(frozen=True)
class Timeline:
    """The modelled time of one pass of a plan on a machine, in seconds; sizes are in bytes."""

    #: "forward" or "backward".
    direction: str
    ranks: int
    seconds: float
    #: The name of the solver, and why it could be used.
    solver: str
    why: str
    #: What of the plan was compared to show that a simpler problem takes as long; "" where every step was simulated.
    compared: str
    #: When each rank finishes, without jitter, float64 [ranks].
    finish: np.ndarray
    #: Mean seconds of visits per rank.
    compute: float
    #: Seconds by which the pass is longer than `compute`, by cause: imbalance (of the busiest rank), merge,
    #: interference, stalls, wait for peers (what the pass takes longer where messages take no time), wait for messages
    #: (the rest), jitter, host (starting steps) and call. With `compute` they sum to `seconds`.
    exposed: dict[str, float]
    #: The 95 % interval of the mean time with jitter, and whether it is extrapolated from smaller rings; None without
    #: jitter.
    interval: tuple[float, float] | None
    extrapolated: bool
    #: Counted bytes on links.
    traffic: Traffic
    #: Bytes of one rank by category.
    memory: dict[str, int]
    #: How often the job makes the pass. None: no job is stated; energy and price are of one pass, without failures.
    passes: int | None
    #: Failures and checkpoints of the job; None: not modelled, or no job is stated.
    failures: Failures | None
    #: Energy [J] and price of the job, or of one pass; None: not modelled.
    joules: float | None
    price: float | None
    machine: Machine
    #: What is assumed where the machine's speed belongs to another dtype, head dim or number of heads.
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the job, with failures and checkpoints where they are modelled; without a job, of one pass."""
        return (self.passes or 1) * self.seconds if self.failures is None else self.failures.expected

    @property
    def kind(self) -> str:
        """The kind of number that `seconds` is: "modelled" or "extrapolated"."""
        return "extrapolated" if self.extrapolated else "modelled"

    @property
    def fits(self) -> bool | None:
        """Whether the memory of a rank is enough; None: not modelled."""
        return None if self.machine.memory is None else sum(self.memory.values()) <= self.machine.memory

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """The effects that are not modelled, each with the number of the machine that would model it."""
        left_out = [
            f"{number.effect} (machine.{name})"
            for name, number in MACHINE_NUMBERS.items()
            if number.effect and getattr(self.machine, name) is None
        ]
        if self.machine.mtbf is not None and self.passes is None:
            left_out.append("failures and checkpoints: a job has them; state a job with passes=...")
        return (*left_out, *NEVER_MODELLED)


def note_assumptions(plan: Plan, machine: Machine) -> tuple[str, ...]:
    """One sentence for each assumption about a plan's kernel, for the error band of a preset, and for shared cores.

    All published passes behind the bands have 16-bit inputs.
    """
    rows = plan.batch * -(-plan.tokens // plan.ranks)
    band = describe_band(machine.preset, rows) if ITEM_BYTES[plan.dtype] == 2 else ""
    cores = ""
    if machine.preset == "cpu" and plan.ranks > MEASURED_CORES and machine.cores is None:
        cores = (
            f"each of {plan.ranks:,} ranks is taken to have a core of its own [assumed]; of one host give "
            f"machine.ranks_per_node={plan.ranks} machine.cores=..."
        )
    return (*_note_kernel(plan, machine), *(note for note in (band, cores) if note))


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
