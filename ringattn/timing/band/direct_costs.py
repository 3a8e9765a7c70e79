"""What goes straight between ranks that are no neighbours, on a machine: chords, with all that is sent beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..rates import Faults, Rates
from ..solvers.recurrence import DirectMessages
from .last_receivers import PART, LastReceivers
from .neighbor_messages import NeighborMessages

#: A rank between its neighbours.
AROUND = np.arange(-1, 2)


@dataclass(frozen=True)
class DirectCosts:
    """The chords of some steps, at steps of the pass, and what they are to the ranks at their ends.

    `keys` are step * ranks + rank of these ends, ascending; `beside` the seconds that the messages take that they send
    and receive, float64 [2, 2, keys] as in `Lanes`; `longest` when the last of them has ended, [keys].
    """

    ranks: int
    chords: DirectMessages
    keys: np.ndarray
    beside: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(
        cls,
        rates: Rates,
        faults: Faults,
        found: LastReceivers,
        lanes: Callable[[np.ndarray, np.ndarray], NeighborMessages],
    ) -> DirectCosts:
        """Those of messages that go straight; `lanes` tells those to neighbours, of ranks in the middle of others [n, 3]
        at steps [n, 1]. As in `Lanes`, a message ends with all of its rank, step and kind of link."""
        ranks, inner = found.ranks, rates.machine.ranks_per_node
        near = found.source // inner == found.target // inner
        kind = near.astype(np.int64)
        alone = rates.message(found.bytes.astype(np.float64), near)[0]
        if faults.slow_links is not None:
            alone = alone * faults.slow_links[found.source]
        sides = [found.step * ranks + rank for rank in (found.source, found.target)]
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
        chords = DirectMessages(found.step, found.source, found.target, found.bytes, seconds)
        return cls(ranks, chords, keys, beside, longest)

    def at(self, ranks: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(beside, longest) of any ranks at steps, 0 where they have no chord: [2, 2, ...] and [...]."""
        keys = steps * self.ranks + ranks
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        known = self.keys[place] == keys
        return self.beside[:, :, place] * known, self.longest[place] * known


def _totals(
    step: np.ndarray, rank: np.ndarray, ranks: int, lanes: Callable[[np.ndarray, np.ndarray], NeighborMessages]
) -> np.ndarray:
    """Seconds of what ranks send to their neighbours at steps, and receive from them, [2, 2, ranks] as in `Lanes`."""
    around = (rank[:, None] + AROUND) % ranks
    moving = lanes(around, step[:, None])
    assert moving.sent is not None and moving.got is not None
    return np.stack([[np.broadcast_to(row, around.shape)[:, 1] for row in rows] for rows in (moving.sent, moving.got)])
