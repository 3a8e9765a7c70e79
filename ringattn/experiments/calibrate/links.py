"""Times of messages: between two ranks, and from every rank to its neighbour while all other ranks send too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from .measuring_ranks import MeasuringRanks

#: (bytes, seconds of all ranks and repetitions) of each size of message.
MessageTimes = list[tuple[int, list[float]]]


def time_ping_pong(ranks: MeasuringRanks, sizes: Sequence[int], repeat: int) -> MessageTimes:
    """Seconds one way between ranks 0 and 1 while all other ranks wait: half of the time there and back."""
    times = []
    for size in sizes:
        call = partial(_ping_pong, ranks, ranks.make_buffer(size), ranks.make_buffer(size))
        seconds = ranks.gather(ranks.time_repeated(call, repeat))
        times.append((size, [t / 2 for of_rank in seconds[:2] for t in of_rank]))
    return times


def _ping_pong(ranks: MeasuringRanks, sent: torch.Tensor, received: torch.Tensor) -> None:
    if ranks.rank == 0:
        ranks.exchange({1: sent}, {})
        ranks.exchange({}, {1: received})
    elif ranks.rank == 1:
        ranks.exchange({}, {0: received})
        ranks.exchange({0: sent}, {})


def time_shift(ranks: MeasuringRanks, sizes: Sequence[int], repeat: int, *, within_node: bool) -> MessageTimes:
    """Seconds of messages from every rank to the next rank of its node, or to the same place on the next node."""
    node, place = divmod(ranks.rank, ranks.ranks_per_node)

    def peer(step: int) -> int:
        if within_node:
            return node * ranks.ranks_per_node + (place + step) % ranks.ranks_per_node
        return (node + step) % ranks.nodes * ranks.ranks_per_node + place

    times = []
    for size in sizes:
        call = partial(ranks.exchange, {peer(1): ranks.make_buffer(size)}, {peer(-1): ranks.make_buffer(size)})
        times.append((size, ranks.time_on_all(call, repeat)))
    return times
