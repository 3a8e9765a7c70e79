"""Messages of one step on a machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..rates import Faults, Rates
from ..solvers.recurrence import NEVER, Lane, Value, shifted

#: Bytes that one message of a step carries: those of each rank, or of all.
Bytes = np.ndarray | float


class NeighborMessages:
    """The messages of a step to neighbours, of all ranks or of `ranks`, neighbours along the last axis.

    `sizes` are (direction, bytes), one of each direction at most. Those of one rank and kind of link in a step follow
    each other, so that each ends with the last of them at its sender or its receiver. `beside` are the seconds of other
    messages that ranks send (0) and receive (1) between nodes (0) and within (1): float64 [2, 2, ranks].
    """

    def __init__(
        self,
        rates: Rates,
        faults: Faults,
        sizes: Sequence[tuple[int, Bytes]],
        ranks: np.ndarray | None = None,
        beside: np.ndarray | None = None,
    ) -> None:
        self.sizes = dict(sizes)
        self.near, self.gaps = {sign: rates.near(sign, ranks) for sign, _ in sizes}, {}
        moved = {}
        factor = 1.0 if faults.slow_links is None else faults.slow_links
        for sign, size in sizes:
            seconds, gap = rates.message(size, self.near[sign])
            empty = np.equal(size, 0)
            moved[sign] = np.where(empty, 0.0, seconds * factor)
            self.gaps[sign] = np.where(empty, 0.0, gap * factor)
        #: Seconds that all messages of a rank and kind of link take, at their senders and at their receivers; None where
        #: each is alone.
        self.sent: list[Value] | None = None
        self.got: list[Value] | None = None
        self.alone = moved
        if len(moved) > 1 or beside is not None:
            kinds = [{s: np.where(self.near[s] == within, moved[s], 0.0) for s in moved} for within in (False, True)]
            self.sent = [sum(kind.values(), 0.0 if beside is None else beside[0, i]) for i, kind in enumerate(kinds)]
            self.got = [
                sum((shifted(row, s) for s, row in kind.items()), 0.0 if beside is None else beside[1, i])
                for i, kind in enumerate(kinds)
            ]

    def lane(self, sign: int) -> Lane:
        """The messages of a direction."""
        out = into = self.alone[sign]
        if self.sent is not None and self.got is not None:
            near = self.near[sign]
            out = np.where(near, self.sent[1], self.sent[0])
            into = np.where(near, *(shifted(np.asarray(row), -sign) for row in self.got[::-1]))
        seconds = np.where(np.equal(self.sizes[sign], 0), NEVER, np.maximum(out, into))
        return Lane(sign, _few(seconds), _few(self.gaps[sign]), self.sizes[sign])


def _few(value: np.ndarray) -> Value:
    """One number where all are equal."""
    value = np.atleast_1d(value)
    first = value.flat[0]
    return float(first) if bool((value == first).all()) else value


def scaled(seconds: Value, faults: Faults) -> Value:
    """Seconds of visits, on slow ranks more."""
    return seconds if faults.slow is None else seconds * faults.slow
