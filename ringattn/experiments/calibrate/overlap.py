"""How much messages slow down the visits under which they hide: a block travels while a block is visited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...kernels.base import Kernel
from ...plan.work import Work
from .kernels import calls
from .team import ENOUGH, Team


@dataclass(frozen=True)
class Overlap:
    """Seconds by repetition, in turn, of all ranks: a visit alone, a message alone, the posting of
    the message and the visit while it travels, and both until the message is there."""

    rows: int
    bytes: int
    visit: tuple[float, ...]
    message: tuple[float, ...]
    together: tuple[float, ...]
    both: tuple[float, ...]


def measure(
    team: Team, kernel: Kernel, rows: Sequence[int], heads: int, head_dim: int, dtype: torch.dtype, repeat: int
) -> list[Overlap]:
    """A dense visit of n queries to n keys while the K/V block of n rows goes to the next rank, for each n of `rows`."""
    return [_one(team, kernel, n, heads, head_dim, dtype, repeat) for n in rows]


def _one(team: Team, kernel: Kernel, rows: int, heads: int, head_dim: int, dtype: torch.dtype, repeat: int) -> Overlap:
    visit = calls(
        kernel,
        Work(range(heads), range(heads), range(rows), (range(rows),)),
        head_dim,
        dtype,
        team.device,
        backward=False,
    )
    size = 2 * rows * heads * head_dim * dtype.itemsize
    mine, theirs = team.buffer(size), team.buffer(size)
    following, before = (team.rank + 1) % team.size, (team.rank - 1) % team.size
    together, both = [], []

    def send() -> None:
        team.finish(team.exchange({following: mine}, {before: theirs}))

    def overlapped() -> None:
        start = time.perf_counter()
        ticket = team.exchange({following: mine}, {before: theirs})  # some transports begin to copy at once
        visit()
        team.synchronize()
        together.append(time.perf_counter() - start)
        team.finish(ticket)
        both.append(time.perf_counter() - start)

    alone, message, _ = team.alternating((visit, send, overlapped), repeat, 3 * ENOUGH)
    everyone = team.everyone((alone, message, together[1:], both[1:]))  # the first one is the warm-up
    return Overlap(rows, size, *(tuple(t for rank in everyone for t in rank[i]) for i in range(4)))
