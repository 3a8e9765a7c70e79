"""Seconds of the messages of one step between neighbors, on a machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..rates import Faults, Rates
from ..solvers.recurrence import NEVER, NeighborMessages, Value, shift_ranks

#: Bytes of a message: of each rank, or the same for all ranks.
Bytes = np.ndarray | float


class NeighborCosts:
    """The messages of a step to neighbors, of all ranks or of `ranks`, which are neighbors along the last axis.

    `sizes` are (direction, bytes), at most one entry per direction. Messages of one rank, step and kind of link follow
    each other, so that each ends with the last of them at its sender or its receiver. `direct_seconds` are the seconds
    of the direct messages that ranks send (0) and receive (1), between nodes (0) and within a node (1): float64 [2, 2,
    ranks].
    """

    def __init__(
        self,
        rates: Rates,
        faults: Faults,
        sizes: Sequence[tuple[int, Bytes]],
        ranks: np.ndarray | None = None,
        direct_seconds: np.ndarray | None = None,
    ) -> None:
        self.sizes = dict(sizes)
        #: By direction: whether the receiver is in the sender's node; seconds of the message alone, and its gap.
        self.near = {sign: rates.near(sign, ranks) for sign, _ in sizes}
        self.alone: dict[int, np.ndarray] = {}
        self.gaps: dict[int, np.ndarray] = {}
        factor = 1.0 if faults.slow_links is None else faults.slow_links
        for sign, size in sizes:
            seconds, gap = rates.message(size, self.near[sign])
            empty = np.equal(size, 0)
            self.alone[sign] = np.where(empty, 0.0, seconds * factor)
            self.gaps[sign] = np.where(empty, 0.0, gap * factor)
        #: Seconds of all messages that a rank sends, and receives, between nodes (0) and within its node (1); None
        #: where every rank has one message.
        self.sent: list[Value] | None = None
        self.received: list[Value] | None = None
        if len(self.alone) > 1 or direct_seconds is not None:
            by_kind = [
                {sign: np.where(self.near[sign] == near, self.alone[sign], 0.0) for sign in self.alone}
                for near in (False, True)
            ]
            self.sent = [
                sum(seconds.values(), 0.0 if direct_seconds is None else direct_seconds[0, kind])
                for kind, seconds in enumerate(by_kind)
            ]
            self.received = [
                sum(
                    (shift_ranks(row, sign) for sign, row in seconds.items()),
                    0.0 if direct_seconds is None else direct_seconds[1, kind],
                )
                for kind, seconds in enumerate(by_kind)
            ]

    def messages(self, sign: int) -> NeighborMessages:
        """The messages of one direction."""
        sent = received = self.alone[sign]
        if self.sent is not None and self.received is not None:
            near = self.near[sign]
            sent = np.where(near, self.sent[1], self.sent[0])
            received = np.where(near, *(shift_ranks(np.asarray(row), -sign) for row in self.received[::-1]))
        seconds = np.where(np.equal(self.sizes[sign], 0), NEVER, np.maximum(sent, received))
        return NeighborMessages(sign, _simplify(seconds), _simplify(self.gaps[sign]), self.sizes[sign])


def scale_by_slow_ranks(seconds: Value, faults: Faults) -> Value:
    """Seconds of visits or merges, times the factors of slow ranks."""
    return seconds if faults.slow is None else seconds * faults.slow


def _simplify(value: np.ndarray) -> Value:
    """One number where all entries are equal, else the array."""
    value = np.atleast_1d(value)
    first = value.flat[0]
    return float(first) if bool((value == first).all()) else value
