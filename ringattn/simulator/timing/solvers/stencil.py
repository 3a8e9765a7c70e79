"""Solver stencil: evaluates the recurrence for every rank at every step.

For a band, only ranks whose numbers change from one step to the next are recounted: those where ranks wrap around the
ring, and those at the limits of the band. Sums over all steps also follow from the changes: a number that grows by d at
step k of K adds (K - k) d to its sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ....errors import Unsupported
from ...progress import track
from ..band.band import distinct, find_rank_breakpoints
from ..band.counts import BandCounts
from ..band.messages import DirectCosts
from ..problem import TimingProblem
from .base import Loads, RingTimes, Solved, Traffic, solve_ring
from .delay import DEPTH, CoefficientChanges, DelayState
from .recurrence import NO_DIRECT, Ring

#: The most ranks x steps.
MOST = 1 << 38
#: Why the times are exact, for the report.
WHY = "every rank at every step"
#: If more ranks than this change at a step, all ranks are recounted.
MANY = 4096
#: Offsets of the ranks whose numbers affect a rank's coefficients: a neighbor's message ends together with its other
#: messages, which go to the neighbor's neighbors.
NEAR = np.arange(-2, 3)


def solve_by_stencil(problem: TimingProblem) -> Solved | None:
    """Solve the ring of a plan in O(ranks x steps) time; None if the plan has no ring.

    For a band mask, each step only updates ranks whose numbers differ from the step before. Raises Unsupported for
    rings that are too large.
    """
    ring = problem.ring
    if isinstance(ring, str):
        return None
    if ring.ring.ranks * ring.steps > MOST:
        raise Unsupported(
            f"{ring.ring.ranks:,} ranks x {ring.steps:,} steps are more than {MOST:,}, the limit of solver stencil; "
            "try fewer ranks"
        )
    if ring.counts is None:
        return solve_ring("stencil", problem, solve_stencil)
    steps = IncrementalSteps(ring.counts)
    state, instant = DelayState(ring.ring), DelayState(ring.ring, instant=True)
    for changes in steps:
        state.advance_changes(changes)
        instant.advance_changes(changes)
    finish = state.finish()
    loads, traffic = _sum_resources(ring.counts, steps)
    peers = float(instant.finish().max()) if loads.waits(float(finish.max())) else loads.busiest
    return Solved("stencil", finish, WHY, loads, traffic, peers)


def solve_stencil(ring: Ring, instant: bool = False) -> RingTimes:
    """When the ranks of any ring finish, computed in O(ranks x steps) time and O(ranks) memory.

    `instant`: as if messages took no time.
    """
    state = DelayState(ring, instant=instant)
    for phase in ring.split(ring.phases):
        state.advance(phase, phase.steps)
    return RingTimes(state.finish(), WHY, ring)


def find_changed_runs(counts: BandCounts, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index of the step, start, stop) of each run of ranks start .. stop - 1 whose numbers change at that step.

    `steps` are consecutive; the first has no previous step and is left out. Ranks are counted only at breakpoints,
    where a run of equal ranks may begin.
    """
    ranks = counts.band.ranks
    row_keys = ranks * np.arange(len(steps), dtype=np.int64)[:, None]
    breakpoints = (
        find_rank_breakpoints(counts.band, counts.directions, counts.traffic, counts.distance(steps)) + row_keys
    )
    direct_breakpoints = counts.direct_breakpoints(int(steps[0]), int(steps[-1]) + 1)
    keys = distinct(np.concatenate([breakpoints.ravel(), direct_breakpoints]))
    keys = keys[keys < ranks * len(steps)]
    row, rank = np.divmod(keys, ranks)
    values = counts.count(rank, steps[row])
    begins = np.append(True, (values[:, 1:] != values[:, :-1]).any(axis=0)) | (rank == 0)
    starts, values = keys[begins], values[:, begins]
    # Between two of these keys, neither the step nor the previous step has a breakpoint.
    both = distinct(np.concatenate([starts, starts + ranks]))
    both = both[(both >= ranks) & (both < ranks * len(steps))]
    now, before = (np.searchsorted(starts, key, side="right") - 1 for key in (both, both - ranks))
    differ = (values[:, now] != values[:, before]).any(axis=0)
    stops = np.append(both[1:], ranks * len(steps))
    row_start = both - both % ranks
    return (both // ranks)[differ], (both - row_start)[differ], (stops - row_start)[differ]


class IncrementalSteps:
    """Yields how a band's coefficients change, DEPTH steps at a time, and sums up each rank's work and traffic.

    Iterate only once; then `totals` and `interference_totals` are complete. `totals`, int64 [2 + 2 * directions,
    ranks], holds pairs of one head, merged query rows, bytes sent by direction, and messages by direction.
    """

    def __init__(self, counts: BandCounts) -> None:
        self.counts, self.steps, self.ranks = counts, counts.steps, counts.band.ranks
        width = 2 + 2 * len(counts.signs)
        #: The numbers of the last step counted, and their sums over all steps.
        self.now, self.totals = np.zeros((2, width, self.ranks), dtype=np.int64)
        self.interference_now, self.interference_totals = np.zeros((2, self.ranks))
        #: The direct messages of the current steps.
        self.direct_costs: DirectCosts | None = None

    def __iter__(self) -> Iterator[CoefficientChanges]:
        for first in track(range(0, self.steps, DEPTH), -(-self.steps // DEPTH), f"steps by {DEPTH}"):
            steps = np.arange(max(first - 1, 0), min(first + DEPTH, self.steps), dtype=np.int64)
            self.direct_costs = self.counts.direct_costs(int(steps[0]), int(steps[-1]) + 1)
            row, rank, many = self._find_changed(steps)
            begin = first - int(steps[0])
            recounted = [at for at in range(begin, len(steps)) if steps[at] == 0 or many[at]]
            starts = sorted({begin, *recounted})
            for low, high in zip(starts, [*starts[1:], len(steps)], strict=True):
                initial = self._count_all(int(steps[low])) if low in recounted else None
                part = (row >= low + (low in recounted)) & (row < high)
                points, ranks, values = self._count_changed(
                    row[part], rank[part], steps, low + (low in recounted), high
                )
                direct = NO_DIRECT if self.direct_costs is None else self.direct_costs.messages
                direct = direct.between(int(steps[low]), int(steps[0]) + high)
                yield CoefficientChanges(high - low, initial, points - low, ranks, values, direct)

    def _find_changed(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(indices of steps, ranks, many): the points where numbers change, or a direct message begins or has ended.

        `many`, bool [steps]: more than MANY ranks change at the step, and its points may be missing.
        """
        # `bincount` and `repeat` take indices only, of 32 bits on some platforms.
        run, start, stop = (index.astype(np.intp) for index in find_changed_runs(self.counts, steps))
        size = stop - start
        changed = np.bincount(run, weights=size, minlength=len(steps))
        end_rows, ends = np.zeros((2, 0), dtype=np.int64)
        if self.direct_costs is not None:
            step, rank = np.divmod(self.direct_costs.end_keys, self.ranks)
            end_rows, ends = np.concatenate([step, step + 1]) - steps[0], np.tile(rank, 2)
            end_rows, ends = end_rows[end_rows < len(steps)], ends[end_rows < len(steps)]
        changed += np.bincount(end_rows.astype(np.intp), minlength=len(steps))
        size *= changed[run] <= MANY
        offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        row, rank = np.repeat(run, size), np.repeat(start, size) + offset
        return np.concatenate([row, end_rows]), np.concatenate([rank, ends]), changed > MANY

    def _count_all(self, step: int) -> np.ndarray:
        """The coefficients and busy seconds of all ranks at a step."""
        numbers, values, interference = self._count(np.arange(self.ranks), np.asarray(step))
        self.totals += (self.steps - step) * (numbers - self.now)
        self.interference_totals += (self.steps - step) * (interference - self.interference_now)
        self.now, self.interference_now = numbers, interference
        return values

    def _count_changed(
        self, row: np.ndarray, rank: np.ndarray, steps: np.ndarray, low: int, high: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(indices of steps, ranks, coefficients and busy seconds) of all ranks that change at steps[low:high].

        `row` and `rank` are the points at which numbers change.
        """
        keys = [(row * self.ranks)[:, None] + (rank[:, None] + NEAR) % self.ranks]
        for stall in self.counts.faults.stalls:  # a stall lasts one step
            rows = stall.step - int(steps[0]) + np.arange(2)
            keys.append(rows[(rows >= low) & (rows < high), None] * self.ranks + stall.rank)
        row, rank = np.divmod(distinct(np.concatenate([key.ravel() for key in keys])), self.ranks)
        near_ranks = (rank[:, None] + NEAR) % self.ranks
        numbers, values, interference = self._count(near_ranks, steps[row][:, None])
        middle = len(NEAR) // 2
        self._add_changes(rank, steps[row], numbers[..., middle], interference[:, middle])
        return row, rank, values[..., middle]

    def _count(self, ranks: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(numbers as in `totals`, coefficients and busy seconds, seconds of interference) of ranks at steps."""
        # Ranks near each other have neighbors in common: count each (step, rank) once.
        every = steps * self.ranks + ranks
        step, rank = np.divmod(keys := distinct(every), self.ranks)
        counted = self.counts.count(rank, step)[:, np.searchsorted(keys, every)]
        phase = self.counts.make_phase(counted, ranks, steps, self.direct_costs)
        ring = self.counts.ring
        interference = ring.busy(phase) - phase.compute - phase.merge
        seconds_late = np.zeros(counted.shape[1:])
        for stall in self.counts.faults.stalls:
            seconds_late += stall.seconds * ((ranks == stall.rank) & (steps == stall.step))
        stalled = replace(phase, merge=phase.merge + seconds_late)
        values = np.empty((4, *counted.shape[1:]))
        for row, value in zip(values, ring.coefficients(stalled), strict=True):
            row[...] = value
        return np.concatenate([counted, counted[2:] > 0]), values, interference + 0 * seconds_late

    def _add_changes(self, ranks: np.ndarray, steps: np.ndarray, numbers: np.ndarray, interference: np.ndarray) -> None:
        """Add the changes of `ranks` at `steps` to the totals."""
        order = np.lexsort((steps, ranks))
        ranks, steps, numbers, interference = ranks[order], steps[order], numbers[:, order], interference[order]
        same_rank = np.zeros(len(ranks), dtype=bool)
        same_rank[1:] = ranks[1:] == ranks[:-1]
        before = np.where(same_rank, np.roll(numbers, 1, axis=-1), self.now[:, ranks])
        interference_before = np.where(same_rank, np.roll(interference, 1), self.interference_now[ranks])
        last = np.ones(len(ranks), dtype=bool)
        last[:-1] = ~same_rank[1:]
        remaining = self.steps - steps
        np.add.at(self.totals.T, ranks, (remaining * (numbers - before)).T)
        np.add.at(self.interference_totals, ranks, remaining * (interference - interference_before))
        self.now[:, ranks[last]], self.interference_now[ranks[last]] = numbers[:, last], interference[last]


def _sum_resources(counts: BandCounts, steps: IncrementalSteps) -> tuple[Loads, Traffic]:
    """(loads, traffic) of the pass, from the totals after the last step."""
    faults, signs = counts.faults, len(counts.signs)
    slow = np.ones(steps.ranks) if faults.slow is None else faults.slow
    pairs, merged_rows = steps.totals[:2]
    loads = replace(
        Loads.of_stalls(steps.ranks, faults.stalls),
        compute=slow * pairs * counts.pair_seconds,
        merge=slow * merged_rows * counts.rates.merge(counts.band.heads),
        interference=steps.interference_totals,
    )
    sent_bytes, messages = steps.totals[2 : 2 + signs], int(steps.totals[2 + signs :].sum())
    direct_bytes = counts.by_sign[0].bytes  # each on its own link
    return loads, Traffic.of(np.append(sent_bytes, direct_bytes), messages + len(direct_bytes))
