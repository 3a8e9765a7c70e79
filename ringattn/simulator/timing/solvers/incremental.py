"""Solver stencil for bands: every rank at every step, where only ranks whose numbers change are counted anew.

From one step to the next few ranks change: those where ranks wrap around the ring, and those at the limits of the band.
Sums over all steps follow from the changes, too: a number that grows by d at step k of K adds (K - k) d to its sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...progress import track
from ..band.breakpoints import find_rank_breakpoints
from ..band.counts import BandCounts
from ..band.direct_costs import DirectCosts
from ..resources import Loads, Traffic
from .base import Solved
from .changes import CoefficientChanges
from .delay import DEPTH, DelayState
from .recurrence import Ring, Value

#: All ranks are counted at a step at which more ranks change.
MANY = 4096
#: Ranks on either side whose numbers a rank's coefficients depend on: a message of a neighbor ends with the other
#: messages of the neighbor, which go to the neighbor's neighbors.
NEAR = np.arange(-2, 3)


def solve_incremental(counts: BandCounts, compared: str = "") -> Solved:
    """The solved timing problem of a band with one receive slot; `compared` as in Solved."""
    steps = IncrementalSteps(counts)
    state, instant = (DelayState(steps.ring, counts.rates.machine.ranks_per_node) for _ in range(2))
    for changes in steps:
        state.advance_changes(changes.timed())
    finish = state.finish()
    seconds = float(finish.max())
    loads, traffic = _sum_resources(counts, steps)
    peers = loads.busiest
    if loads.waits(seconds):
        for changes in IncrementalSteps(counts):  # counted again: the changes of a long pass do not fit into memory
            instant.advance_changes(changes.instant())
        peers = float(instant.finish().max())
    return Solved("stencil", seconds, finish, "every rank at every step", loads, traffic, compared, peers)


@dataclass(frozen=True)
class ChangedRuns:
    """Runs of ranks [start, stop) whose numbers differ from the step before; `row` is the index of the step."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def find_changed_runs(counts: BandCounts, steps: np.ndarray) -> ChangedRuns:
    """The runs of ranks that change at some consecutive steps, the first step left out.

    Ranks are counted at the breakpoints alone, where a run of equal ranks may begin.
    """
    ranks = counts.band.ranks
    row_keys = ranks * np.arange(len(steps))[:, None]
    breakpoints = find_rank_breakpoints(counts.band, counts.ways, counts.traffic, counts.distance(steps)) + row_keys
    direct_breakpoints = counts.direct_breakpoints(int(steps[0]), int(steps[-1]) + 1)
    keys = np.unique(np.concatenate([breakpoints.ravel(), direct_breakpoints]))
    keys = keys[keys < ranks * len(steps)]
    row, rank = np.divmod(keys, ranks)
    values = counts.count(rank, steps[row])
    begins = np.append(True, (values[:, 1:] != values[:, :-1]).any(axis=0)) | (rank == 0)
    starts, values = keys[begins], values[:, begins]
    # Between two of these keys neither the step nor the step before it has a breakpoint.
    both = np.unique(np.concatenate([starts, starts + ranks]))
    both = both[(both >= ranks) & (both < ranks * len(steps))]
    now, before = (np.searchsorted(starts, key, side="right") - 1 for key in (both, both - ranks))
    differ = (values[:, now] != values[:, before]).any(axis=0)
    stops = np.append(both[1:], ranks * len(steps))
    row_start = both - both % ranks
    return ChangedRuns((both // ranks)[differ], (both - row_start)[differ], (stops - row_start)[differ])


class IncrementalSteps:
    """Yields the changed coefficients of a band's steps once, in parts of DEPTH steps, and sums what ranks do and send.

    `totals` and `interference_totals` are complete after the last part. `totals`, int64 [2 + 2 signs, ranks], holds
    pairs of one head, query rows that are merged, bytes sent by direction, and messages by direction.
    """

    def __init__(self, counts: BandCounts) -> None:
        self.counts, self.steps, self.ranks = counts, counts.steps, counts.band.ranks
        #: Gives the coefficients of a phase; the phases are made here, step by step.
        self.ring = Ring(self.ranks, (), counts.rates.buffers, counts.rates.gamma)
        width = 2 + 2 * len(counts.signs)
        #: The numbers of the last step, and their sums over all steps.
        self.now, self.totals = np.zeros((2, width, self.ranks), dtype=np.int64)
        self.interference_now, self.interference_totals = np.zeros((2, self.ranks))

    def __iter__(self) -> Iterator[CoefficientChanges]:
        for first in track(range(0, self.steps, DEPTH), -(-self.steps // DEPTH), f"steps by {DEPTH}"):
            steps = np.arange(max(first - 1, 0), min(first + DEPTH, self.steps))
            runs = find_changed_runs(self.counts, steps)
            direct_costs = self.counts.direct_costs(int(steps[0]), int(steps[-1]) + 1)
            direct_ends = self._find_direct_ends(direct_costs, steps)
            changed = np.bincount(runs.row, weights=runs.stop - runs.start, minlength=len(steps))
            changed += np.bincount(direct_ends[0], minlength=len(steps))
            begin = first - int(steps[0])
            recounted = [row for row in range(begin, len(steps)) if steps[row] == 0 or changed[row] > MANY]
            starts = sorted({begin, *recounted})
            for low, high in zip(starts, [*starts[1:], len(steps)], strict=True):
                initial = self._count_all(int(steps[low]), direct_costs) if low in recounted else None
                row, rank, values = self._count_changed(
                    runs, direct_ends, steps, low + (low in recounted), high, direct_costs
                )
                direct = None
                if direct_costs is not None:
                    direct = direct_costs.messages.between(int(steps[low]), int(steps[0]) + high)
                yield CoefficientChanges(high - low, initial, row - low, rank, values, direct)

    def _find_direct_ends(self, direct_costs: DirectCosts | None, steps: np.ndarray) -> np.ndarray:
        """(index of the step, rank) where a rank has a direct message, or had one a step before: int64 [2, ...]."""
        if direct_costs is None:
            return np.zeros((2, 0), dtype=np.int64)
        step, rank = np.divmod(direct_costs.end_keys, self.ranks)
        row = np.concatenate([step, step + 1]) - steps[0]
        return np.stack([row, np.tile(rank, 2)])[:, row < len(steps)]

    def _count_all(self, step: int, direct_costs: DirectCosts | None) -> tuple[np.ndarray, ...]:
        """The coefficients of all ranks at a step."""
        numbers, coefficients, interference = self._count(np.arange(self.ranks), np.asarray(step), direct_costs)
        self.totals += (self.steps - step) * (numbers - self.now)
        self.interference_totals += (self.steps - step) * (interference - self.interference_now)
        self.now, self.interference_now = numbers, interference.copy()
        return coefficients

    def _count_changed(
        self,
        runs: ChangedRuns,
        direct_ends: np.ndarray,
        steps: np.ndarray,
        low: int,
        high: int,
        direct_costs: DirectCosts | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(index of the step, rank, coefficients) of all ranks that change at steps[low:high], ascending."""
        in_range = (runs.row >= low) & (runs.row < high)
        row, start, size = runs.row[in_range], runs.start[in_range], (runs.stop - runs.start)[in_range]
        offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        row, rank = np.repeat(row, size), np.repeat(start, size) + offset
        direct_ends = direct_ends[:, (direct_ends[0] >= low) & (direct_ends[0] < high)]
        row, rank = np.concatenate([row, direct_ends[0]]), np.concatenate([rank, direct_ends[1]])
        keys = [(row * self.ranks)[:, None] + (rank[:, None] + NEAR) % self.ranks]
        for stall in self.counts.faults.stalls:  # a stall begins at a step, and is over at the next step
            rows = stall.step - int(steps[0]) + np.arange(2)
            keys.append(rows[(rows >= low) & (rows < high), None] * self.ranks + stall.rank)
        row, rank = np.divmod(np.unique(np.concatenate([key.ravel() for key in keys])), self.ranks)
        near_ranks = (rank[:, None] + NEAR) % self.ranks
        numbers, coefficients, interference = self._count(near_ranks, steps[row][:, None], direct_costs)
        middle = len(NEAR) // 2
        self._add_changes(rank, steps[row], numbers[..., middle], interference[:, middle])
        return row, rank, np.stack([value[:, middle] for value in coefficients])

    def _count(
        self, ranks: np.ndarray, steps: np.ndarray, direct_costs: DirectCosts | None
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
        """Numbers as in `totals`, stencil coefficients, and seconds of interference, of ranks at steps."""
        counted = self.counts.count_in_parts(ranks, steps)
        phase = self.counts.make_phase(counted, ranks, direct_costs, steps)
        interference = self.ring.busy(phase) - phase.compute - phase.merge
        seconds_late = np.zeros(counted.shape[1:])
        for stall in self.counts.faults.stalls:
            seconds_late += stall.seconds * ((ranks == stall.rank) & (steps == stall.step))
        stalled = replace(phase, merge=phase.merge + seconds_late)

        def widen(value: Value) -> np.ndarray:
            return np.broadcast_to(np.asarray(value, dtype=np.float64), counted.shape[1:])

        coefficients = tuple(widen(value) for value in (*self.ring.coefficients(stalled), self.ring.busy(stalled)))
        return np.concatenate([counted, counted[2:] > 0]), coefficients, widen(interference)

    def _add_changes(self, ranks: np.ndarray, steps: np.ndarray, numbers: np.ndarray, interference: np.ndarray) -> None:
        """Add the changes of ranks at steps to the totals."""
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
    """What ranks did and sent, after the last step."""
    faults, signs = counts.faults, len(counts.signs)
    slow = np.ones(steps.ranks) if faults.slow is None else faults.slow
    pairs, merged_rows = steps.totals[:2]
    stalls = np.zeros(steps.ranks)
    for stall in faults.stalls:
        stalls[stall.rank] += stall.seconds
    loads = Loads(
        compute=slow * pairs * counts.pair_seconds,
        merge=slow * merged_rows * counts.rates.merge(counts.band.heads),
        interference=steps.interference_totals,
        stalls=stalls,
    )
    sent_bytes, messages = steps.totals[2 : 2 + signs], int(steps.totals[2 + signs :].sum())
    return loads, Traffic.of(sent_bytes.ravel(), messages, counts.direct_bytes.bytes)
