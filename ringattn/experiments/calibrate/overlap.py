"""How much messages slow down the visits that hide them: a block travels while another block is visited."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from ...kernels.base import Kernel
from ...plan.work import Work
from .kernels import make_call
from .measuring_ranks import ENOUGH, MeasuringRanks, Settings


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


def measure_overlap(ranks: MeasuringRanks, kernel: Kernel, rows: int, settings: Settings) -> Overlap:
    """A dense visit of `rows` queries to `rows` keys while a K/V block of `rows` rows goes to the next rank."""
    heads = range(settings.heads)
    work = Work(heads, heads, range(rows), (range(rows),))
    visit = make_call(kernel, work, settings, ranks.device, backward=False)
    size = 2 * rows * settings.heads * settings.head_dim * settings.torch_dtype.itemsize
    sends = {(ranks.rank + 1) % ranks.size: ranks.make_buffer(size)}
    recvs = {(ranks.rank - 1) % ranks.size: ranks.make_buffer(size)}
    together, both = [], []

    def overlap() -> None:
        start = time.perf_counter()
        ticket = ranks.start_messages(sends, recvs)  # inside the timing: some transports copy before they return
        visit()
        ranks.synchronize()
        together.append(time.perf_counter() - start)
        ranks.finish_messages(ticket)
        both.append(time.perf_counter() - start)

    visit_seconds, message_seconds, _ = ranks.time_alternating(
        (visit, partial(ranks.exchange, sends, recvs), overlap), settings.repeat, 3 * ENOUGH
    )
    # The first overlap was the warm-up.
    of_ranks = ranks.gather((visit_seconds, message_seconds, together[1:], both[1:]))
    return Overlap(rows, size, *(tuple(t for of_rank in of_ranks for t in of_rank[i]) for i in range(4)))
