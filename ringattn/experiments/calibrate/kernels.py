"""Times of the attention kernel by shape and size of tile, through the calls that the executor makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...kernels.base import Kernel, finite, wide
from ...kernels.base import backward as kernel_backward
from ...kernels.base import forward as kernel_forward
from ...plan.work import Work
from ...runtime.accumulators import KernelInputs, accumulate, in_batch
from ...runtime.rank_program import batches
from ...timing.forecast import BACKWARD
from ...timing.kernel_seconds import lower_to_tiles
from .fits import Sample
from .measuring_ranks import ENOUGH, ROUNDS, MeasuringRanks


def list_works(rows: Sequence[int], widths: Sequence[int], heads: int) -> Iterator[Work]:
    """One work for each point of the grids: dense rows x keys, causal triangles, and bands of `widths` keys per row."""
    all_heads = range(heads)
    for n in rows:
        for m in rows:
            yield Work(all_heads, all_heads, range(n), (range(m),))
    for n in rows:
        yield Work(all_heads, all_heads, range(n), (range(n),), lo=0)
    for n in rows:
        for width in widths:
            # A parallelogram: row i sees the keys i .. i + width - 1.
            yield Work(all_heads, all_heads, range(n), (range(n + width - 1),), lo=1 - width, hi=0)


def time_works(
    ranks: MeasuringRanks, kernel: Kernel, works: Sequence[Work], head_dim: int, dtype: torch.dtype, repeat: int
) -> list[Sample]:
    """A sample of each work, forward and then backward, measured in rounds over all works."""
    kinds = [(work, backward) for backward in (False, True) for work in works]
    rounds = [
        [
            time_work(ranks, kernel, work, head_dim, dtype, backward=backward, repeat=-(-repeat // ROUNDS))
            for work, backward in kinds
        ]
        for _ in range(ROUNDS)
    ]
    return [
        replace(samples[0], seconds=tuple(seconds for sample in samples for seconds in sample.seconds))
        for samples in zip(*rounds, strict=True)
    ]


def time_work(
    ranks: MeasuringRanks,
    kernel: Kernel,
    work: Work,
    head_dim: int,
    dtype: torch.dtype,
    *,
    backward: bool,
    repeat: int,
) -> Sample:
    """Seconds of all ranks for one work, which all ranks compute at the same time."""
    call = make_call(kernel, work, head_dim, dtype, ranks.device, backward=backward)
    seconds = ranks.gather(ranks.time_repeated(call, repeat, ENOUGH / ROUNDS))
    ((shape, rows, keys, pairs),) = lower_to_tiles(work)
    flops = pairs * 4 * head_dim * (BACKWARD if backward else 1.0)
    return Sample(shape, backward, rows, keys, flops, tuple(t for of_rank in seconds for t in of_rank))


def make_call(
    kernel: Kernel, work: Work, head_dim: int, dtype: torch.dtype, device: torch.device, *, backward: bool
) -> Callable[[], None]:
    """A function that computes a work on random inputs as the executor does: it drops the output, or adds gradients."""
    heads = len(work.heads)
    q, grad, out = (torch.randn(1, heads, len(work.q), head_dim, device=device).to(dtype) for _ in range(3))
    k, v = (torch.randn(1, heads, work.keys, head_dim, device=device).to(dtype) for _ in range(2))
    lse = torch.full((1, heads, len(work.q)), float(work.keys), device=device, dtype=wide(dtype))
    scale = head_dim**-0.5
    kernel_calls = list(kernel.split(work))
    inputs = KernelInputs()
    check_finite = not work.dense  # as in the executor, the check is part of a call with a band

    def run_forward() -> None:
        clean = check_finite and finite(k, v)
        for call in kernel_calls:
            for batch in batches(call, len(q)):
                q_rows, k_rows, v_rows = inputs.select(call, batch, (q,), (k, v))
                kernel_forward(kernel, q_rows, k_rows, v_rows, call, scale, clean=clean)

    dq, dk, dv = (torch.zeros(x.shape, device=device, dtype=wide(dtype)) for x in (q, k, v))

    def run_backward() -> None:
        clean = check_finite and finite(k, v)
        for call in kernel_calls:
            for batch in batches(call, len(q)):
                grad_rows, q_rows, out_rows, lse_rows, k_rows, v_rows = inputs.select(
                    call, batch, (grad, q, out, lse), (k, v)
                )
                grads = kernel_backward(
                    kernel, grad_rows, q_rows, k_rows, v_rows, out_rows, lse_rows, call, scale, clean=clean
                )
                accumulate(in_batch(dq, batch), call.heads, (call.q,), call, call.q_shift, grads[0])
                accumulate(in_batch(dk, batch), call.kv, call.k, call, call.k_shift, grads[1])
                accumulate(in_batch(dv, batch), call.kv, call.k, call, call.k_shift, grads[2])

    return run_backward if backward else run_forward


def time_overheads(
    ranks: MeasuringRanks, kernel: Kernel, head_dim: int, dtype: torch.dtype, repeat: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of forward and of backward calls on 1 row and 1 key of 1 head: the time of a call beside its work."""
    work = Work(range(1), range(1), range(1), (range(1),))
    forward, backward = (
        time_work(ranks, kernel, work, head_dim, dtype, backward=backward, repeat=repeat).seconds
        for backward in (False, True)
    )
    return forward, backward
