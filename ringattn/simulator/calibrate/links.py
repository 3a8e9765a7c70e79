"""Times of messages: between two ranks, among all ranks at once, and under the visits that hide them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from ...kernels.base import Kernel
from ...plan.work import Work
from .kernels import make_call, make_reference
from .measuring_ranks import MeasuringRanks, Settings, TimedBytes, count_turns


def time_ping_pong(ranks: MeasuringRanks, sizes: Sequence[int]) -> list[TimedBytes]:
    """Seconds one way between ranks 0 and 1 while all other ranks wait: half of the time there and back."""
    times = []
    for size in sizes:
        call = partial(_ping_pong, ranks, ranks.make_buffer(size), ranks.make_buffer(size))
        (seconds,) = ranks.time_alternating([call])
        times.append(TimedBytes(size, tuple(t / 2 for of_rank in ranks.gather(seconds)[:2] for t in of_rank)))
    return times


def _ping_pong(ranks: MeasuringRanks, sent: torch.Tensor, received: torch.Tensor) -> None:
    if ranks.rank == 0:
        ranks.exchange({1: sent}, {})
        ranks.exchange({}, {1: received})
    elif ranks.rank == 1:
        ranks.exchange({}, {0: received})
        ranks.exchange({0: sent}, {})


def time_shift(
    ranks: MeasuringRanks, kernel: Kernel, sizes: Sequence[int], settings: Settings, *, within_node: bool
) -> list[TimedBytes]:
    """Seconds of messages from every rank to the next rank of its node, or to the same place on the next node.

    Each message follows a visit, and has other buffers than the one before: as in a pass, the threads that copy it have
    slept, and its bytes are not in the caches. Messages of some MiB that are repeated by themselves take half as long.
    """
    visit = make_reference(kernel, settings, ranks.device)
    node, place = divmod(ranks.rank, ranks.ranks_per_node)

    def peer(step: int) -> int:
        if within_node:
            return node * ranks.ranks_per_node + (place + step) % ranks.ranks_per_node
        return (node + step) % ranks.nodes * ranks.ranks_per_node + place

    times = []
    for size in sizes:
        pairs = cycle([(ranks.make_buffer(size), ranks.make_buffer(size)) for _ in range(count_turns(2 * size))])

        def shift(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            sent, received = next(pairs)
            ranks.exchange({peer(1): sent}, {peer(-1): received})

        _, seconds = ranks.time_alternating((visit, shift))
        times.append(TimedBytes(size, _of_last(ranks, seconds)))
    return times


def _of_last(ranks: MeasuringRanks, seconds: Sequence[float]) -> tuple[float, ...]:
    """The seconds of repeated messages on the rank that came last to each: the others also waited for that rank."""
    return tuple(min(of_ranks) for of_ranks in zip(*ranks.gather(seconds), strict=True))


@dataclass(frozen=True)
class Overlap:
    """Seconds of `rows` queries visiting `rows` keys, and of the block of `bytes` bytes that travels meanwhile.

    By repetition: `message` alone. By rank and repetition: `visit` alone; `both`, from posting the message until the
    visit has ended and the message has arrived.
    """

    rows: int
    bytes: int
    visit: tuple[float, ...]
    message: tuple[float, ...]
    both: tuple[float, ...]


def measure_overlap(ranks: MeasuringRanks, kernel: Kernel, rows: int, settings: Settings) -> Overlap:
    """A dense visit of `rows` queries to `rows` keys while a K/V block of `rows` rows goes to the next rank."""
    heads = range(settings.heads)
    work = Work(heads, heads, range(rows), (range(rows),))
    visit = make_call(kernel, work, settings, ranks.device, backward=False)
    size = 2 * rows * settings.heads * settings.head_dim * settings.torch_dtype.itemsize
    sends = {(ranks.rank + 1) % ranks.size: ranks.make_buffer(size)}
    recvs = {(ranks.rank - 1) % ranks.size: ranks.make_buffer(size)}

    def overlap() -> None:
        ticket = ranks.start_messages(sends, recvs)
        visit()
        ranks.finish_messages(ticket)

    visits, messages, both = ranks.time_alternating((visit, partial(ranks.exchange, sends, recvs), overlap))
    return Overlap(rows, size, ranks.gather_times(visits), _of_last(ranks, messages), ranks.gather_times(both))
