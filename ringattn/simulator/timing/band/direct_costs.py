"""Seconds of direct messages on a machine, and what they add to the messages that their ends send to neighbors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..rates import Faults, Rates
from ..solvers.recurrence import DirectMessages
from .neighbor_costs import NeighborCosts
from .owner_messages import RANKS_AT_A_TIME, OwnerMessages

#: A rank between its neighbors.
AROUND = np.arange(-1, 2)
#: Gives the costs of messages to neighbors, of ranks in the middle of their neighbors [n, 3] at steps [n, 1].
FindNeighborCosts = Callable[[np.ndarray, np.ndarray], NeighborCosts]


@dataclass(frozen=True)
class DirectCosts:
    """The direct messages of some steps of the pass, and the seconds that they cost the ranks at their ends.

    `end_keys` are step * ranks + rank of these ends, ascending. `end_seconds` are the seconds of the direct messages
    that an end sends and receives, float64 [2, 2, keys] as in NeighborCosts. `longest` are the seconds of the longest
    that it sends (0) and receives (1), [2, keys].
    """

    ranks: int
    messages: DirectMessages
    end_keys: np.ndarray
    end_seconds: np.ndarray
    longest: np.ndarray

    @classmethod
    def of(
        cls, rates: Rates, faults: Faults, sent: OwnerMessages, find_neighbor_costs: FindNeighborCosts
    ) -> DirectCosts:
        """The costs of messages. As in NeighborCosts, a message ends with all of its rank, step and kind of link."""
        ranks, per_node = sent.ranks, rates.machine.ranks_per_node
        near = sent.source // per_node == sent.target // per_node
        kind = near.astype(np.int64)
        alone = rates.message(sent.bytes.astype(np.float64), near)[0]
        if faults.slow_links is not None:
            alone = alone * faults.slow_links[sent.source]
        keys_of_ends = [sent.step * ranks + rank for rank in (sent.source, sent.target)]
        end_keys = np.unique(np.concatenate(keys_of_ends))
        places = [np.searchsorted(end_keys, keys) for keys in keys_of_ends]
        end_seconds, longest = np.zeros((2, 2, len(end_keys))), np.zeros((2, len(end_keys)))
        for sums, place in zip(end_seconds, places, strict=True):
            np.add.at(sums, (kind, place), alone)
        parts = (end_keys[i : i + RANKS_AT_A_TIME] for i in range(0, len(end_keys), RANKS_AT_A_TIME))
        together = end_seconds + np.concatenate(
            [_sum_neighbor_seconds(*np.divmod(keys, ranks), ranks, find_neighbor_costs) for keys in parts], axis=-1
        )
        seconds = np.maximum(*(sums[kind, place] for sums, place in zip(together, places, strict=True)))
        for of_ends, place in zip(longest, places, strict=True):
            np.maximum.at(of_ends, place, seconds)
        messages = DirectMessages(sent.step, sent.source, sent.target, sent.bytes, seconds)
        return cls(ranks, messages, end_keys, end_seconds, longest)

    def at(self, ranks: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(end_seconds, longest) of any ranks at steps, [2, 2, ...] and [2, ...]; 0 without a direct message."""
        keys = steps * self.ranks + ranks
        place = np.minimum(np.searchsorted(self.end_keys, keys), len(self.end_keys) - 1)
        is_end = self.end_keys[place] == keys
        return self.end_seconds[:, :, place] * is_end, self.longest[:, place] * is_end


def _sum_neighbor_seconds(
    step: np.ndarray, rank: np.ndarray, ranks: int, find_neighbor_costs: FindNeighborCosts
) -> np.ndarray:
    """Seconds of the messages that ranks exchange with their neighbors at steps, [2, 2, ranks] as in NeighborCosts."""
    around = (rank[:, None] + AROUND) % ranks
    costs = find_neighbor_costs(around, step[:, None])
    assert costs.sent is not None and costs.received is not None
    return np.stack(
        [[np.broadcast_to(row, around.shape)[:, 1] for row in rows] for rows in (costs.sent, costs.received)]
    )
