"""Timing problems: a plan on a machine and, if the numbers of all ranks are known at once, its ring."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...errors import InvalidInput
from ...plan.schedules.ring import Direction, RingSchedule
from .band.band import Band, BandTraffic, explain_unequal, find_band
from .band.counts import BandCounts
from .band.messages import NeighborCosts, scale_by_slow_ranks
from .rates import Faults, Rates
from .solvers.recurrence import NeighborMessages, Phase, Ring

#: The most ranks whose visits are counted; counting takes memory for each rank.
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class RingProblem:
    """A ring whose costs are known for all ranks at once, the input of fast solvers.

    `counts` gives the costs if they differ between ranks and steps; None if all blocks take equally long. Raises
    InvalidInput for stalls after the last step.
    """

    ring: Ring
    steps: int
    counts: BandCounts | None = None

    def __post_init__(self) -> None:
        for stall in self.ring.stalls:
            if stall.step >= self.steps:
                raise InvalidInput(f"{stall}: the pass has steps 0 .. {self.steps - 1}; try one of these")

    @property
    def calls(self) -> int:
        """The largest number of calls that a rank's host starts: one per block computed, one per step without any."""
        return self.steps if self.counts is None else self.counts.calls


@dataclass(frozen=True)
class TimingProblem:
    """The input of all solvers: a plan on a machine, and its `RingProblem` or the reason why there is none."""

    rates: Rates
    faults: Faults
    ring: RingProblem | str


def make_ring_problem(rates: Rates, faults: Faults) -> RingProblem | str:
    """A plan's `RingProblem`, or the reason why the costs of all its ranks cannot be computed at once."""
    plan = rates.plan
    if not plan.is_plain:
        return "queries have other positions than the keys, or the forward is pass-Q"
    if plan.reproducible is not None:
        return "nodes of gradients go straight to the owners of blocks"
    if plan.schedule != "ring":
        return f"the schedule {plan.schedule} is not a ring"
    band = find_band(plan)
    if band is None:
        return explain_unequal(plan) or "the mask is not one band over contiguous or zigzag ranks"
    # With pass-Q, a block of queries visits the keys that it sees.
    directions = tuple(RingSchedule(plan.query_demand if rates.passes_q else plan.demand).directions)
    if rates.machine.shared_nic and rates.machine.ranks_per_node > 1 and len(directions) > 1:
        return "both directions share a node's NIC"
    if rates.machine.shared_nic and 1 < rates.machine.ranks_per_node < plan.ranks and rates.backward and not band.dense:
        return "messages of the backward share a node's NIC"
    if rates.cores is not None:
        return "the ranks of a node share its cores"
    if band.dense and len(directions) <= 1:
        return _make_dense_problem(rates, faults, band, directions)
    if rates.one_by_one:
        return "each visit has the measured seconds of its own tiles"
    if plan.ranks > MOST_RANKS:
        return f"visits that differ are counted for at most {MOST_RANKS:,} ranks"
    counts = BandCounts(rates, faults, band.transposed if rates.passes_q else band, directions)
    return RingProblem(counts.ring, counts.steps, counts)


def _make_dense_problem(rates: Rates, faults: Faults, band: Band, directions: tuple[Direction, ...]) -> RingProblem:
    """The problem of a dense mask: all visits and blocks are equal, and every block travels to the last rank."""
    plan, ranks = rates.plan, rates.plan.ranks
    pairs = band.rows**2 * band.heads
    compute = scale_by_slow_ranks(pairs * rates.pair, faults)
    merge = scale_by_slow_ranks(rates.merge(band.rows * band.heads), faults)
    traffic, hops = BandTraffic.of(plan, rates.backward), ranks - 1
    # The rank after the last receiver is the owner: sums sent there directly make one more hop, after the last visit.
    last_row_bytes = 0 if traffic.to_owner or not hops else traffic.direct_row_bytes
    sign = (-1 if traffic.to_owner else 1) * (directions[0].sign if directions else 1)
    last = ranks + (last_row_bytes > 0)
    # Steps at which rows start or stop moving, or at which the first visit, which needs no merge, ends.
    changes = {step for moving in traffic.moving for step in (2 * moving.lag, hops + moving.lag)}
    bounds = sorted({0, *(() if rates.backward else (1,)), ranks, last, *(step for step in changes if step < last)})
    phases = []
    for first, stop in pairwise(bounds):
        moving_bytes = sum(moving.row_bytes for moving in traffic.moving if 2 * moving.lag <= first < hops + moving.lag)
        size = float(band.rows * (moving_bytes + (last_row_bytes if first == ranks else 0)))
        messages: tuple[NeighborMessages, ...] = ()
        if size:
            messages = (NeighborCosts(rates, faults, [(sign, size)], np.arange(ranks, dtype=np.int64)).messages(sign),)
        visit = (compute, merge if rates.merges(first == 0) else 0.0) if first < ranks else (0.0, 0.0)
        phases.append(Phase(stop - first, *visit, messages))
    phases = phases[::-1] if traffic.to_owner else phases
    return RingProblem(Ring(ranks, tuple(phases), rates.gamma, stalls=faults.stalls), last)
