"""The messages of a band's steps for all ranks at once, with bytes and seconds on a machine: between neighbors, and
directly between owners of blocks and the last receivers of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....plan.schedules.ring import Direction
from ..rates import Faults, Rates
from ..solvers.recurrence import NEVER, DirectMessages, NeighborMessages, Value, shift_ranks
from .band import Band, BandTraffic, distinct

#: Bytes of a message: an array by rank, or one number for all ranks.
Bytes = np.ndarray | float
#: Ranks counted at a time, to bound memory.
RANKS_AT_A_TIME = 16384


class NeighborCosts:
    """How long the messages of a step to neighboring ranks take; `ranks` are consecutive along the last axis.

    `sizes` are (direction, bytes), at most one entry per direction. Messages of one rank, step and link type follow
    each other, and all count as ending with the last of them, at the sender or the receiver, whichever is later.
    `direct_seconds` are the seconds of the direct messages that ranks send (0) and receive (1), between nodes (0) and
    within a node (1): float64 [2, 2, ranks].
    """

    def __init__(
        self,
        rates: Rates,
        faults: Faults,
        sizes: Sequence[tuple[int, Bytes]],
        ranks: np.ndarray,
        direct_seconds: np.ndarray | None = None,
    ) -> None:
        self.sizes = dict(sizes)
        #: By direction: True if the receiver is in the sender's node.
        self.near = {sign: rates.near(sign, ranks) for sign, _ in sizes}
        #: Total seconds of the messages that a rank sends, or receives, between nodes (0) and within its node (1).
        self.sent: list[Value]
        self.received: list[Value]
        self.sent, self.received = (
            [*kinds] for kinds in (np.zeros((2, 2)) if direct_seconds is None else direct_seconds)
        )
        factor = 1.0 if faults.slow_links is None else faults.slow_links
        for sign, size in sizes:
            seconds = rates.message(size, self.near[sign])
            empty = np.equal(size, 0)
            for kind in (0, 1):
                alone = np.where(empty | (self.near[sign] != kind), 0.0, seconds * factor)
                self.sent[kind] = self.sent[kind] + alone
                self.received[kind] = self.received[kind] + shift_ranks(alone, sign)

    def messages(self, sign: int) -> NeighborMessages:
        """The messages in direction `sign`, with their times."""
        near = self.near[sign]
        sent = np.where(near, self.sent[1], self.sent[0])
        received = np.where(near, *(shift_ranks(np.asarray(row), -sign) for row in self.received[::-1]))
        seconds = np.where(np.equal(self.sizes[sign], 0), NEVER, np.maximum(sent, received))
        return NeighborMessages(sign, _simplify(seconds), self.sizes[sign])


def scale_by_slow_ranks(seconds: Value, faults: Faults) -> Value:
    """Seconds of computation or merges, multiplied by the slowdown factors of slow ranks."""
    return seconds if faults.slow is None else seconds * faults.slow


def _simplify(value: np.ndarray) -> Value:
    """A single number if all entries are equal, else the array."""
    value = np.atleast_1d(value)
    first = value.flat[0]
    return float(first) if bool((value == first).all()) else value


def find_last_receivers(band: Band, direction: Direction) -> np.ndarray:
    """How many rows of each owner travel exactly how far in a direction: (owner, distance, rows), int64 [3, n].

    `rows` rows of `owner` are last received by the rank at `distance`. Fewer rows are needed the farther a block gets,
    so the search skips all distances between two with equally many rows.
    """
    entries = [np.zeros((3, 0), dtype=np.int64)]
    for first in range(0, band.ranks, RANKS_AT_A_TIME):
        owners = np.arange(first, min(first + RANKS_AT_A_TIME, band.ranks), dtype=np.int64)
        rows_near, rows_far = (
            band.rows_beyond(owners, direction.sign, distance, direction.limit) for distance in (1, direction.limit)
        )
        near, far = np.full_like(owners, 1), np.full_like(owners, direction.limit)
        # Intervals (owner, near distance, far distance, rows needed from near on, rows needed from far on); most blocks
        # go all the way.
        intervals = [
            np.stack([owners, near, far, rows_near, rows_far]),
            np.stack([owners, far, far + 1, rows_far, 0 * rows_far]),
        ]
        while intervals:
            unequal = np.concatenate(intervals, axis=1)
            unequal = unequal[:, unequal[3] != unequal[4]]
            adjacent = unequal[2] - unequal[1] == 1
            owner, low, high, rows_low, rows_high = unequal[:, adjacent]
            entries.append(np.stack([owner, low, rows_low - rows_high]))
            owner, low, high, rows_low, rows_high = unequal[:, ~adjacent]
            middle = (low + high) // 2
            rows_middle = band.rows_beyond(owner, direction.sign, middle, direction.limit)
            halves = (
                np.stack([owner, low, middle, rows_low, rows_middle]),
                np.stack([owner, middle, high, rows_middle, rows_high]),
            )
            intervals = [*halves] if len(owner) else []
    return np.concatenate(entries, axis=1)


def find_owner_messages(
    band: Band, directions: Sequence[Direction], traffic: BandTraffic, reach: int
) -> DirectMessages:
    """The messages sent directly between owners and the last receivers of their rows, with `seconds` 0.

    `reach` is the most hops of any block.
    """
    entries = [np.zeros((4, 0), dtype=np.int64)]
    for direction in directions if traffic.direct_row_bytes else ():
        owner, distance, rows = find_last_receivers(band, direction)
        receiver = (owner + direction.sign * distance) % band.ranks
        step, size = distance + 1, rows * traffic.direct_row_bytes
        if traffic.to_owner:
            sent_again = ~_find_saved(receiver, distance, rows, band.rows)
            entries.append(np.stack([reach - step, owner, receiver, size])[:, sent_again])
        else:
            entries.append(np.stack([step, receiver, owner, size]))
    messages = np.concatenate(entries, axis=1)
    messages = messages[:, messages[3] > 0]
    step, source, target, size = messages[:, np.lexsort((messages[1], messages[0]))]
    return DirectMessages(step, source, target, size, np.zeros(len(step)))


def _find_saved(receiver: np.ndarray, distance: np.ndarray, rows: np.ndarray, block: int) -> np.ndarray:
    """Which rows their last receivers save for the backward, as in `Route.saved`: bool [entries].

    A receiver saves its latest rows, at most a block of them, but the very latest ones in any case.
    """
    order = np.lexsort((-distance, receiver))
    rows_before = np.cumsum(rows[order]) - rows[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = receiver[order][1:] != receiver[order][:-1]
    rows_before -= rows_before[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    saved = np.zeros(len(order), dtype=bool)
    saved[order] = (rows_before == 0) | (rows_before + rows[order] <= block)
    return saved


@dataclass(frozen=True)
class DirectCosts:
    """The direct messages of some steps, with their times for each sender and receiver.

    `end_keys` holds step * ranks + rank for each sender or receiver, ascending. `end_seconds` are the seconds of the
    direct messages that it sends and receives, float64 [2, 2, keys] as in NeighborCosts. `longest` are the seconds of
    the longest one that it sends (0) and receives (1), [2, keys].
    """

    ranks: int
    messages: DirectMessages
    end_keys: np.ndarray
    end_seconds: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(
        cls,
        rates: Rates,
        faults: Faults,
        sent: DirectMessages,
        neighbor_seconds: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> DirectCosts:
        """Compute the times of the direct messages `sent`.

        As in NeighborCosts, messages of one rank, step and link type end together. `neighbor_seconds(steps, ranks)`
        returns the seconds of the messages that ranks exchange with their neighbors, [2, 2, ranks].
        """
        ranks, per_node = rates.plan.ranks, rates.machine.ranks_per_node
        near = sent.source // per_node == sent.target // per_node
        kind = near.astype(np.int64)
        crowd = rates.crowd(sent.source, sent.target)
        alone = rates.message(sent.bytes.astype(np.float64), near, crowd)
        if faults.slow_links is not None:
            alone = alone * faults.slow_links[sent.source]
        keys_of_ends = [sent.step * ranks + rank for rank in (sent.source, sent.target)]
        end_keys = distinct(np.concatenate(keys_of_ends))
        places = [np.searchsorted(end_keys, keys) for keys in keys_of_ends]
        end_seconds, longest = np.zeros((2, 2, len(end_keys))), np.zeros((2, len(end_keys)))
        for sums, place in zip(end_seconds, places, strict=True):
            np.add.at(sums, (kind, place), alone)
        parts = (end_keys[i : i + RANKS_AT_A_TIME] for i in range(0, len(end_keys), RANKS_AT_A_TIME))
        together = end_seconds + np.concatenate([neighbor_seconds(*np.divmod(keys, ranks)) for keys in parts], axis=-1)
        seconds = np.maximum(*(sums[kind, place] for sums, place in zip(together, places, strict=True)))
        for of_ends, place in zip(longest, places, strict=True):
            np.maximum.at(of_ends, place, seconds)
        return cls(ranks, replace(sent, seconds=seconds), end_keys, end_seconds, longest)

    def at(self, ranks: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(end_seconds [2, 2, ...], longest [2, ...]) of `ranks` at `steps`; 0 where there is no direct message."""
        keys = steps * self.ranks + ranks
        place = np.minimum(np.searchsorted(self.end_keys, keys), len(self.end_keys) - 1)
        is_end = self.end_keys[place] == keys
        return self.end_seconds[:, :, place] * is_end, self.longest[:, place] * is_end
