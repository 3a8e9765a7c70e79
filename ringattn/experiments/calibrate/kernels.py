"""Times of the attention kernel, tile shape by tile shape, through the calls that the executor makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...kernels.base import Kernel, finite, wide
from ...kernels.base import backward as kernel_backward
from ...kernels.base import forward as kernel_forward
from ...plan.work import Work
from ...runtime.accumulators import KernelInputs, accumulate, batches
from ...runtime.memory_pool import memory_pool
from ...timing.forecast import BACKWARD
from ...timing.kernel_seconds import lowered
from .fits import Sample
from .team import ENOUGH, ROUNDS, Team


def tiles(rows: Sequence[int], widths: Sequence[int], heads: int) -> Iterator[Work]:
    """One work for each point of the grids: dense rows x keys, causal triangles, bands of `widths` keys per row."""
    every = range(heads)
    for n in rows:
        for m in rows:
            yield Work(every, every, range(n), (range(m),))
    for n in rows:
        yield Work(every, every, range(n), (range(n),), lo=0)
    for n in rows:
        for width in widths:
            # A parallelogram: row i sees the keys i .. i + width - 1.
            yield Work(every, every, range(n), (range(n + width - 1),), lo=1 - width, hi=0)


def samples(
    team: Team, kernel: Kernel, works: Sequence[Work], head_dim: int, dtype: torch.dtype, repeat: int
) -> list[Sample]:
    """Samples of works, forward and then backward, measured in rounds over all of them."""
    kinds = [(work, backward) for backward in (False, True) for work in works]
    rounds = [
        [
            sample(team, kernel, work, head_dim, dtype, backward=backward, repeat=-(-repeat // ROUNDS))
            for work, backward in kinds
        ]
        for _ in range(ROUNDS)
    ]
    return [
        replace(same[0], seconds=tuple(seconds for one in same for seconds in one.seconds))
        for same in zip(*rounds, strict=True)
    ]


def sample(
    team: Team, kernel: Kernel, work: Work, head_dim: int, dtype: torch.dtype, *, backward: bool, repeat: int
) -> Sample:
    """Seconds of all ranks for one work, which all of them compute at the same time."""
    call = calls(kernel, work, head_dim, dtype, team.device, backward=backward)
    seconds = team.repeated(call, repeat, ENOUGH / ROUNDS)
    (tile,) = lowered(work)
    shape, rows, keys, pairs = tile
    flops = pairs * 4 * head_dim * (BACKWARD if backward else 1.0)
    return Sample(shape, backward, rows, keys, flops, tuple(t for rank in team.everyone(seconds) for t in rank))


def calls(
    kernel: Kernel, work: Work, head_dim: int, dtype: torch.dtype, device: torch.device, *, backward: bool
) -> Callable[[], None]:
    """A function that computes a work on random inputs as the executor does: the output is dropped, gradients are added."""
    heads = len(work.heads)
    q, grad, out = (torch.randn(1, heads, len(work.q), head_dim, device=device).to(dtype) for _ in range(3))
    k, v = (torch.randn(1, heads, work.keys, head_dim, device=device).to(dtype) for _ in range(2))
    lse = torch.full((1, heads, len(work.q)), float(work.keys), device=device, dtype=wide(dtype))
    scale = head_dim**-0.5
    split = list(kernel.split(work))
    inputs = KernelInputs(memory_pool(device))

    banded = not work.dense

    def forward_() -> None:
        clean = banded and finite(k, v)
        for call in split:
            for batch in batches(call, q):
                x, y, z = inputs.select(call, batch, (q,), (k, v))
                kernel_forward(kernel, x, y, z, call, scale, clean=clean)

    dq, dk, dv = (torch.zeros(x.shape, device=device, dtype=wide(dtype)) for x in (q, k, v))

    def backward_() -> None:
        clean = banded and finite(k, v)
        for call in split:
            for batch in batches(call, q):
                g, x, o, total, y, z = inputs.select(call, batch, (grad, q, out, lse), (k, v))
                parts = kernel_backward(kernel, g, x, y, z, o, total, call, scale, clean=clean)
                accumulate(dq[batch], call.heads, (call.q,), call, call.q_shift, parts[0])
                accumulate(dk[batch], call.kv, call.k, call, call.k_shift, parts[1])
                accumulate(dv[batch], call.kv, call.k, call, call.k_shift, parts[2])

    return backward_ if backward else forward_


def overheads(
    team: Team, kernel: Kernel, head_dim: int, dtype: torch.dtype, repeat: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of calls on one row and one key of one head, forward and backward: what a call takes beside its work."""
    work = Work(range(1), range(1), range(1), (range(1),))
    forward, backward = (
        sample(team, kernel, work, head_dim, dtype, backward=backward, repeat=repeat).seconds
        for backward in (False, True)
    )
    return forward, backward
