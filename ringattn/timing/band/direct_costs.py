"""What goes straight between ranks that are no neighbours, on a machine: chords, with all that is sent beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..rates import Faults, Rates
from ..solvers.recurrence import Chords
from .last_receivers import PART, Straight
from .neighbor_messages import Lanes

#: A rank between its neighbours.
AROUND = np.arange(-1, 2)


@dataclass(frozen=True)
class Crossing:
    """The chords of some clocks, at clocks of the pass, and what they are to the ranks at their ends.

    `keys` are clock * ranks + rank of these ends, ascending; `beside` the seconds that the messages take that they send
    and receive, float64 [2, 2, keys] as in `Lanes`; `longest` when the last of them has ended, [keys].
    """

    ranks: int
    chords: Chords
    keys: np.ndarray
    beside: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(
        cls, rates: Rates, faults: Faults, found: Straight, lanes: Callable[[np.ndarray, np.ndarray], Lanes]
    ) -> Crossing:
        """Those of messages that go straight; `lanes` tells those to neighbours, of ranks in the middle of others [n, 3]
        at clocks [n, 1]. As in `Lanes`, a message ends with all of its rank, clock and kind of link."""
        ranks, inner = found.ranks, rates.machine.inner
        near = found.source // inner == found.target // inner
        kind = near.astype(np.int64)
        alone = rates.message(found.bytes.astype(np.float64), near)[0]
        if faults.slow_links is not None:
            alone = alone * faults.slow_links[found.source]
        sides = [found.clock * ranks + rank for rank in (found.source, found.target)]
        keys = np.unique(np.concatenate(sides))
        places = [np.searchsorted(keys, side) for side in sides]
        beside, longest = np.zeros((2, 2, len(keys))), np.zeros(len(keys))
        for sums, place in zip(beside, places, strict=True):
            np.add.at(sums, (kind, place), alone)
        whole = beside + np.concatenate(
            [_totals(*np.divmod(keys[i : i + PART], ranks), ranks, lanes) for i in range(0, len(keys), PART)], axis=-1
        )
        seconds = np.maximum(*(sums[kind, place] for sums, place in zip(whole, places, strict=True)))
        for place in places:
            np.maximum.at(longest, place, seconds)
        chords = Chords(found.clock, found.source, found.target, found.bytes, seconds)
        return cls(ranks, chords, keys, beside, longest)

    def at(self, ranks: np.ndarray, clocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(beside, longest) of any ranks at clocks, 0 where they have no chord: [2, 2, ...] and [...]."""
        keys = clocks * self.ranks + ranks
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        known = self.keys[place] == keys
        return self.beside[:, :, place] * known, self.longest[place] * known


def _totals(
    clock: np.ndarray, rank: np.ndarray, ranks: int, lanes: Callable[[np.ndarray, np.ndarray], Lanes]
) -> np.ndarray:
    """Seconds of what ranks send to their neighbours at clocks, and receive from them, [2, 2, ranks] as in `Lanes`."""
    around = (rank[:, None] + AROUND) % ranks
    moving = lanes(around, clock[:, None])
    assert moving.sent is not None and moving.got is not None
    return np.stack([[np.broadcast_to(row, around.shape)[:, 1] for row in rows] for rows in (moving.sent, moving.got)])
