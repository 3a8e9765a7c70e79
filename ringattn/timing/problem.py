"""From a plan on a machine to a ring problem, where the plan is a ring whose numbers are known of all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import plural
from ..schedules.relay import Way
from ..schedules.ring import Ring as RingSchedule
from ..steps import Kind, Part
from .banded import Banded, banded, unequal
from .counted import Counted
from .lanes import lane, scaled
from .rates import Faults, Rates
from .ring import Lane, Phase, Ring, Value

if TYPE_CHECKING:
    from ..plan import Plan


#: Up to this many ranks x clocks all are counted, even where a busiest rank alone would tell the makespan.
SMALL = 1 << 20
#: The most ranks whose visits are counted, which takes memory for each.
MOST = 1 << 20


@dataclass(frozen=True)
class Problem:
    """A ring problem, its clocks, and what of the plan was compared to see it.

    Where `copies` > 1, the plan's ranks are so many copies of those of `ring` one after another. `bound`: only the
    makespan is that of the plan. `counted`: what counts the numbers that differ from rank to rank and clock to clock.
    """

    ring: Ring
    clocks: int
    compared: str
    copies: int = 1
    bound: bool = False
    counted: Counted | None = None

    def whole(self) -> Ring:
        """The ring of all ranks."""
        return self.ring if self.copies == 1 else repeated(self.ring, self.copies)


def problem(rates: Rates, faults: Faults) -> Problem | str:
    """The ring problem of a plan, or why it is none that is known of all ranks at once."""
    plan = rates.plan
    if plan.schedule != "ring":
        return f"the schedule {plan.schedule} is no ring"
    band = banded(plan)
    if band is None:
        return unequal(plan) or "the mask is not one band over contiguous or zigzag ranks"
    ways = tuple(RingSchedule(plan.demand).ways)
    if rates.machine.shared and rates.machine.inner > 1 and len(ways) > 1:
        return "both directions share the way out of a node"
    if rates.machine.shared and 1 < rates.machine.inner < plan.ranks and rates.backward and not band.dense:
        return "messages of the backward share the way out of a node"
    if band.dense and len(ways) <= 1:
        return _dense(rates, faults, band, ways)
    if rates.backward:
        return "the backward of a mask that is not dense sends blocks beyond neighbours"
    if plan.ranks > MOST:
        return f"visits that differ are counted for at most {MOST:,} ranks"
    counted = Counted(rates, faults, band, ways)
    if "reach" not in plan.memory:
        plan.memory["reach"] = counted.reach()
    clocks = plan.memory["reach"] + 1
    alike = not faults and not rates.gamma and rates.buffers == 1
    if alike and plan.ranks * clocks > SMALL:
        hidden = counted.hidden()
        if hidden is not None:
            ring, clocks, words = hidden
            return Problem(ring, clocks, f"{band_words(band)}; {words}", bound=True)
    words = f"{band_words(band)}; {clocks:,} clocks x {plan.ranks:,} ranks were counted"
    return Problem(counted.ring(clocks), clocks, words, counted=counted)


def band_words(band: Banded) -> str:
    """What was compared of a band, for people."""
    low, high = (("-inf", "inf")[i] if x is None else f"{x:,}" for i, x in enumerate((band.lo, band.hi)))
    mask = "all pairs" if band.dense else f"{low} <= q - k <= {high}"
    return (
        f"the mask's tiles: one, {mask}, over all heads ({band.heads:,}); {plural(band.rows, 'token')} on each of {band.ranks:,} "
        "ranks (integers of the whole plan, no sample)"
    )


def repeated(ring: Ring, copies: int) -> Ring:
    """The ring whose ranks are those of `ring`, so many times over."""
    assert isinstance(ring.phases, tuple) and not ring.stalls

    def wide(value: Value) -> Value:
        return np.tile(value, copies) if isinstance(value, np.ndarray) else value

    phases = tuple(
        replace(
            phase,
            compute=wide(phase.compute),
            merge=wide(phase.merge),
            lanes=tuple(Lane(x.sign, wide(x.seconds), wide(x.gap), wide(x.bytes)) for x in phase.lanes),
        )
        for phase in ring.phases
    )
    return replace(ring, ranks=ring.ranks * copies, phases=phases)


def _dense(rates: Rates, faults: Faults, band: Banded, ways: tuple[Way, ...]) -> Problem:
    """Everybody sees everything: all visits and all blocks are alike."""
    plan, ranks = rates.plan, rates.plan.ranks
    inner = min(rates.machine.inner, ranks)
    distinct = inner if not faults and ranks % inner == 0 else ranks
    pairs = band.rows**2 * band.heads
    compute = scaled(pairs * rates.pair, faults)
    merge = scaled(rates.merge(band.rows), faults)
    sign, runs = (ways[0].sign if ways else 1), [(ranks, 0.0)]
    if not rates.backward:
        runs = [(ranks - 1, float(_bytes(plan, "kv"))), (1, 0.0)]
    elif ranks > 1 and plan.rotates == "keys":
        sign = -sign
        # Clocks ranks - 1 .. 0: the block goes back until its owner's neighbour has it, dK and dV until the owner.
        block, sums = float(_bytes(plan, "kv")), float(_bytes(plan, "grad"))
        runs = [(1, block if ranks > 2 else 0.0), (ranks - 3, block + sums), (min(2, ranks - 1), sums)]
    elif ranks > 1:
        sign = RingSchedule(plan.transposed).ways[0].sign
        # Clocks 0 .. ranks: dQ begins a clock after the queries, and goes home after the last visit.
        block, sums = float(_bytes(plan, "q") + _bytes(plan, "row")), float(_bytes(plan, "dq"))
        last = sums if ranks > 2 else 0.0
        runs = [(min(2, ranks - 1), block), (ranks - 3, block + sums), (1, last), (1, sums)]
    phases = []
    clock = 0
    for length, size in runs:
        if length < 1:
            continue
        lanes = (lane(rates, faults, sign, size, [(sign, size)], np.arange(distinct)),) if size else ()
        visiting = max(0, min(length, ranks - clock))
        if visiting:
            phases.append(Phase(visiting, compute, merge, lanes))
        if length > visiting:
            phases.append(Phase(length - visiting, 0.0, 0.0, lanes))
        clock += length
    ring = Ring(distinct, tuple(phases), rates.buffers, rates.gamma, stalls=faults.stalls)
    words = f"{band_words(band)}, so that all visits and all blocks are equal"
    return Problem(ring, sum(phase.clocks for phase in phases), words, ranks // distinct)


def _bytes(plan: Plan, kind: Kind) -> int:
    return plan.part_bytes(Part(kind, 0))
