"""How much messages slow down the visits that hide them: a block travels while another block is visited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels.base import Kernel
from ...plan.work import Work
from .kernels import make_call
from .measuring_ranks import ENOUGH, MeasuringRanks


@dataclass(frozen=True)
class Overlap:
    """Seconds of `rows` queries visiting `rows` keys, and of the block of `bytes` bytes that travels meanwhile.

    By repetition and rank: `visit` alone; `message` alone; `together`, from posting the message to the end of the
    visit; `both`, from posting the message until the visit has ended and the message has arrived.
    """

    rows: int
    bytes: int
    visit: tuple[float, ...]
    message: tuple[float, ...]
    together: tuple[float, ...]
    both: tuple[float, ...]


def measure_overlaps(
    ranks: MeasuringRanks,
    kernel: Kernel,
    rows: Sequence[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    repeat: int,
) -> list[Overlap]:
    """For each n of `rows`: a dense visit of n queries to n keys while a K/V block of n rows goes to the next rank."""
    return [_measure_overlap(ranks, kernel, n, heads, head_dim, dtype, repeat) for n in rows]


def _measure_overlap(
    ranks: MeasuringRanks, kernel: Kernel, rows: int, heads: int, head_dim: int, dtype: torch.dtype, repeat: int
) -> Overlap:
    work = Work(range(heads), range(heads), range(rows), (range(rows),))
    visit = make_call(kernel, work, head_dim, dtype, ranks.device, backward=False)
    size = 2 * rows * heads * head_dim * dtype.itemsize
    sends = {(ranks.rank + 1) % ranks.size: ranks.make_buffer(size)}
    recvs = {(ranks.rank - 1) % ranks.size: ranks.make_buffer(size)}
    together, both = [], []

    def send() -> None:
        ranks.finish_messages(ranks.start_messages(sends, recvs))

    def overlap() -> None:
        start = time.perf_counter()
        ticket = ranks.start_messages(sends, recvs)  # inside the timing: some transports copy before they return
        visit()
        ranks.synchronize()
        together.append(time.perf_counter() - start)
        ranks.finish_messages(ticket)
        both.append(time.perf_counter() - start)

    visit_seconds, message_seconds, _ = ranks.time_alternating((visit, send, overlap), repeat, 3 * ENOUGH)
    # The first overlap was the warm-up.
    of_ranks = ranks.gather((visit_seconds, message_seconds, together[1:], both[1:]))
    return Overlap(rows, size, *(tuple(t for of_rank in of_ranks for t in of_rank[i]) for i in range(4)))
