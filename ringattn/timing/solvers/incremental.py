"""All ranks of a band at all steps, of which only those are counted anew whose numbers change from step to step.

From one step to the next few ranks change: those at the turn of the ring, and at the edges of the band. What all of them
do in sum follows from the changes, too: a number that grows by d at step k of K adds (K - k) d.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...progress import track
from ..band.breakpoints import places
from ..band.counted import Counted
from ..band.direct_costs import DirectCosts
from ..resources import Loads, Traffic
from .changes import Changes
from .recurrence import Ring, Solved, Value
from .stencil import DEPTH, Delay

#: Where more ranks change at a step, all are counted.
MANY = 4096
#: Ranks on either side whose numbers a rank's step depends on: its neighbours send what ends with their other messages.
NEAR = np.arange(-2, 3)


@dataclass(frozen=True)
class Changed:
    """Runs of ranks [start, stop) that do not do at a step what they did at the one before; `row`: of which step."""

    row: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def changed(counted: Counted, steps: np.ndarray) -> Changed:
    """The runs of ranks that change at each of some consecutive steps but the first; by counts at the places alone."""
    ranks = counted.band.ranks
    rows = ranks * np.arange(len(steps))[:, None]
    found = places(counted.band, counted.ways, counted.course, counted.away(steps)) + rows
    keys = np.unique(np.concatenate([found.ravel(), counted.turns(int(steps[0]), int(steps[-1]) + 1)]))
    keys = keys[keys < ranks * len(steps)]
    row, rank = np.divmod(keys, ranks)
    values = counted.at(rank, steps[row])
    begins = np.append(True, (values[:, 1:] != values[:, :-1]).any(axis=0)) | (rank == 0)
    starts, values = keys[begins], values[:, begins]
    every = np.unique(np.concatenate([starts, starts + ranks]))
    every = every[(every >= ranks) & (every < ranks * len(steps))]
    now, then = (np.searchsorted(starts, place, side="right") - 1 for place in (every, every - ranks))
    differ = (values[:, now] != values[:, then]).any(axis=0)
    stops = np.append(every[1:], ranks * len(steps))
    first = every - every % ranks
    return Changed((every // ranks)[differ], (every - first)[differ], (stops - first)[differ])


class Sweep:
    """One pass over all steps of a counted plan. `totals` and `interference` are whole once it has ended."""

    def __init__(self, counted: Counted) -> None:
        self.counted, self.steps, self.ranks = counted, counted.steps, counted.band.ranks
        rates = counted.rates
        #: Only what it says of a step is asked for: its phases are made here.
        self.ring = Ring(self.ranks, (), rates.buffers, rates.gamma)
        width = 2 + 2 * len(counted.signs)
        #: Pairs, rows that are merged, bytes sent by direction, messages by direction: of the step that was last, and over
        #: all steps.
        self.now, self.totals = np.zeros((2, width, self.ranks), dtype=np.int64)
        self.taken, self.interference = np.zeros((2, self.ranks))

    def __iter__(self) -> Iterator[Changes]:
        for first in track(range(0, self.steps, DEPTH), -(-self.steps // DEPTH), f"steps by {DEPTH}"):
            steps = np.arange(max(first - 1, 0), min(first + DEPTH, self.steps))
            runs = changed(self.counted, steps)
            crossing = self.counted.crossing(int(steps[0]), int(steps[-1]) + 1)
            touched = self._touched(crossing, steps)
            length = np.bincount(runs.row, weights=runs.stop - runs.start, minlength=len(steps))
            length += np.bincount(touched[0], minlength=len(steps))
            begin = first - int(steps[0])
            fresh = [row for row in range(begin, len(steps)) if steps[row] == 0 or length[row] > MANY]
            starts = sorted({begin, *fresh})
            for low, high in zip(starts, [*starts[1:], len(steps)], strict=True):
                whole = self._whole(int(steps[low]), crossing) if low in fresh else None
                points = self._points(runs, touched, steps, low + (low in fresh), high, crossing)
                chords = None if crossing is None else crossing.chords.inside(int(steps[low]), int(steps[0]) + high)
                yield Changes(high - low, whole, points[0] - low, *points[1:], chords)

    def _touched(self, crossing: DirectCosts | None, steps: np.ndarray) -> np.ndarray:
        """(rows of `steps`, ranks) at which a rank has a chord, or had one at the step before: int64 [2, ...]."""
        if crossing is None:
            return np.zeros((2, 0), dtype=np.int64)
        step, rank = np.divmod(crossing.keys, self.ranks)
        row = np.concatenate([step, step + 1]) - steps[0]
        return np.stack([row, np.tile(rank, 2)])[:, row < len(steps)]

    def _whole(self, step: int, crossing: DirectCosts | None) -> tuple[np.ndarray, ...]:
        """The coefficients of all ranks at a step."""
        counts, coefficients, taken = self._at(np.arange(self.ranks), np.asarray(step), crossing)
        self.totals += (self.steps - step) * (counts - self.now)
        self.interference += (self.steps - step) * (taken - self.taken)
        self.now, self.taken = counts, taken.copy()
        return coefficients

    def _points(
        self, runs: Changed, touched: np.ndarray, steps: np.ndarray, low: int, high: int, crossing: DirectCosts | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows of `steps`, ranks, coefficients) of what changes at the rows low .. high - 1, by row."""
        mine = (runs.row >= low) & (runs.row < high)
        row, start, size = runs.row[mine], runs.start[mine], (runs.stop - runs.start)[mine]
        inside = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        row, rank = np.repeat(row, size), np.repeat(start, size) + inside
        touched = touched[:, (touched[0] >= low) & (touched[0] < high)]
        row, rank = np.concatenate([row, touched[0]]), np.concatenate([rank, touched[1]])
        keys = [(row * self.ranks)[:, None] + (rank[:, None] + NEAR) % self.ranks]
        for stall in self.counted.faults.stalls:  # it begins at a step, and is over at the next
            at = stall.step - int(steps[0]) + np.arange(2)
            keys.append(at[(at >= low) & (at < high), None] * self.ranks + stall.rank)
        row, rank = np.divmod(np.unique(np.concatenate([key.ravel() for key in keys])), self.ranks)
        counts, coefficients, taken = self._at((rank[:, None] + NEAR) % self.ranks, steps[row][:, None], crossing)
        middle = len(NEAR) // 2
        counts, taken = counts[..., middle], taken[:, middle]
        self._sum(rank, steps[row], counts, taken)
        return row, rank, np.stack([value[:, middle] for value in coefficients])

    def _at(
        self, ranks: np.ndarray, steps: np.ndarray, crossing: DirectCosts | None
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray]:
        """Numbers as in `totals`, coefficients of the stencil, and seconds of interference, of ranks at steps."""
        counts = self.counted.many(ranks, steps)
        phase = self.counted.phase(counts, ranks, crossing, steps)
        taken = self.ring.busy(phase) - phase.compute - phase.merge
        late = np.zeros(counts.shape[1:])
        for stall in self.counted.faults.stalls:
            late += stall.seconds * ((ranks == stall.rank) & (steps == stall.step))
        stalled = replace(phase, merge=phase.merge + late)

        def wide(value: Value) -> np.ndarray:
            return np.broadcast_to(np.asarray(value, dtype=np.float64), counts.shape[1:])

        coefficients = tuple(wide(value) for value in self.ring.stencil(stalled))
        return np.concatenate([counts, counts[2:] > 0]), coefficients, wide(taken)

    def _sum(self, ranks: np.ndarray, steps: np.ndarray, counts: np.ndarray, taken: np.ndarray) -> None:
        """Add what changes at points, the earlier first at each rank."""
        order = np.lexsort((steps, ranks))
        ranks, steps, counts, taken = ranks[order], steps[order], counts[:, order], taken[order]
        same = np.zeros(len(ranks), dtype=bool)
        same[1:] = ranks[1:] == ranks[:-1]
        before = np.where(same, np.roll(counts, 1, axis=-1), self.now[:, ranks])
        taken_before = np.where(same, np.roll(taken, 1), self.taken[ranks])
        last = np.ones(len(ranks), dtype=bool)
        last[:-1] = ~same[1:]
        weight = self.steps - steps
        np.add.at(self.totals.T, ranks, (weight * (counts - before)).T)
        np.add.at(self.interference, ranks, weight * (taken - taken_before))
        self.now[:, ranks[last]], self.taken[ranks[last]] = counts[:, last], taken[last]


def swept(counted: Counted) -> tuple[Solved, Loads, Traffic]:
    """solver stencil of a counted plan with one receive slot: every rank at every step, and what they do and send."""
    sweep = Sweep(counted)
    state = Delay(sweep.ring, counted.rates.machine.ranks_per_node)
    for changes in sweep:
        state.change(changes)
    finish = state.finish()
    return Solved("stencil", float(finish.max()), finish, "every rank at every step"), *_loads(counted, sweep)


def _loads(counted: Counted, sweep: Sweep) -> tuple[Loads, Traffic]:
    rates, faults, signs = counted.rates, counted.faults, len(counted.signs)
    slow = np.ones(sweep.ranks) if faults.slow is None else faults.slow
    pairs, merged = sweep.totals[:2]
    stalls = np.zeros(sweep.ranks)
    for stall in faults.stalls:
        stalls[stall.rank] += stall.seconds
    loads = Loads(
        slow * pairs * counted.pair, slow * merged * rates.merge(counted.band.heads), sweep.interference, stalls
    )
    sent, messages = sweep.totals[2 : 2 + signs], int(sweep.totals[2 + signs :].sum())
    return loads, Traffic.of(sent.ravel(), messages, counted.across.bytes)
