"""From a plan on a machine to a ring problem, where the plan is a ring whose numbers are known of all ranks at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..errors import plural
from ..plan.schedules.relay import Way
from ..plan.schedules.ring import RingSchedule
from .band.banded import Banded, banded, unequal
from .band.counted import Counted
from .band.neighbor_messages import NeighborMessages, scaled
from .band.traffic import BandTraffic
from .rates import Faults, Rates
from .solvers.recurrence import Lane, Phase, Ring, Value

#: Up to this many ranks x steps all are counted, even where a busiest rank alone would tell the makespan.
SMALL = 1 << 20
#: The most ranks whose visits are counted, which takes memory for each.
MOST = 1 << 20


@dataclass(frozen=True)
class Problem:
    """A ring problem, its steps, and what of the plan was compared to see it.

    Where `copies` > 1, the plan's ranks are so many copies of those of `ring` one after another. `bound`: only the
    makespan is that of the plan. `counted`: what counts the numbers that differ from rank to rank and step to step.
    """

    ring: Ring
    steps: int
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
    # Blocks of queries go where keys are that they see.
    ways = tuple(RingSchedule(plan.query_demand if rates.turned else plan.demand).ways)
    if rates.machine.shared_nic and rates.machine.ranks_per_node > 1 and len(ways) > 1:
        return "both directions share the way out of a node"
    if rates.machine.shared_nic and 1 < rates.machine.ranks_per_node < plan.ranks and rates.backward and not band.dense:
        return "messages of the backward share the way out of a node"
    if band.dense and len(ways) <= 1:
        return _dense(rates, faults, band, ways)
    if plan.ranks > MOST:
        return f"visits that differ are counted for at most {MOST:,} ranks"
    counted = Counted(rates, faults, band.transposed if rates.turned else band, ways)
    if rates.buffers > 1 and len(counted.across.step):
        return "what goes straight between ranks that are no neighbours has one receive slot"
    steps = counted.steps
    alike = not faults and not rates.gamma and rates.buffers == 1
    if alike and not rates.backward and plan.ranks * steps > SMALL:
        hidden = counted.hidden()
        if hidden is not None:
            ring, steps, words = hidden
            return Problem(ring, steps, f"{band_words(band)}; {words}", bound=True)
    words = f"{band_words(band)}; {steps:,} steps x {plan.ranks:,} ranks were counted"
    return Problem(counted.ring(), steps, words, counted=counted)


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
    """Everybody sees everything: all visits and all blocks are alike, and every block goes on to the last rank."""
    plan, ranks = rates.plan, rates.plan.ranks
    inner = min(rates.machine.ranks_per_node, ranks)
    distinct = inner if not faults and ranks % inner == 0 else ranks
    pairs = band.rows**2 * band.heads
    compute = scaled(pairs * rates.pair, faults)
    merge = scaled(rates.merge(band.rows * band.heads), faults)
    course, hops = BandTraffic.of(plan, rates.backward), ranks - 1
    # Where rows stop, the next rank is their owner: sums that go straight are a hop more, after the last visit.
    homeward = 0 if course.back or not hops else course.straight
    sign = (-1 if course.back else 1) * (ways[0].sign if ways else 1)
    edges = {edge for cargo in course.cargo for edge in (2 * cargo.lag, hops + cargo.lag)}
    last = ranks + (homeward > 0)
    bounds = sorted({0, *(() if rates.backward else (1,)), ranks, last, *(edge for edge in edges if edge < last)})
    phases = []
    for first, stop in pairwise(bounds):
        moving = (cargo.row_bytes for cargo in course.cargo if 2 * cargo.lag <= first < hops + cargo.lag)
        size = float(band.rows * (sum(moving) + (homeward if first == ranks else 0)))
        lanes = (NeighborMessages(rates, faults, [(sign, size)], np.arange(distinct)).lane(sign),) if size else ()
        visits = (compute, merge if rates.merges(first == 0) else 0.0) if first < ranks else (0.0, 0.0)
        phases.append(Phase(stop - first, *visits, lanes))
    phases = phases[::-1] if course.back else phases
    ring = Ring(distinct, tuple(phases), rates.buffers, rates.gamma, stalls=faults.stalls)
    words = f"{band_words(band)}, so that all visits and all blocks are equal"
    return Problem(ring, last, words, ranks // distinct)
