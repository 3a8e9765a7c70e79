"""Times of the attention kernel by shape and size of tile, and of merging, with the calls that the executor makes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, groupby, product

import torch

from ...kernels.base import Kernel, wide
from ...kernels.softmax import merge_
from ...kernels.views import RowViews, accumulate, batches, select_inputs
from ...machine.kernel_times import BACKWARD, WHOLE_KEYS
from ...plan.work import Work
from ...simulator.timing.kernel_seconds import lower_to_tiles
from .fits import Sample
from .measuring_ranks import MeasuringRanks, Settings, TimedBytes, count_turns

#: Most bytes that the tensors of works taking turns may have together.
TOGETHER = 1 << 30
#: A ragged dense tile has this many fewer keys than rows.
RAGGED_BY = 7
#: Query rows and keys of the reference tile.
REFERENCE_ROWS = 256


def list_works(rows: Sequence[int], widths: Sequence[int], heads: int) -> Iterator[Work]:
    """The works to time: dense tiles of rows x keys, causal triangles, and bands of `widths` keys per row.

    Also one dense tile for each size whose keys are not a multiple of a tile (ragged), unless the sizes themselves are
    ragged. Within each kind, large works come first: right after a work of 1 s, a call of 0.1 ms would take up to 4
    times as long.
    """
    all_heads = range(heads)
    ragged = [(n, n - RAGGED_BY) for n in rows if not any(m % WHOLE_KEYS for m in rows)]
    for n, m in sorted((*product(rows, rows), *ragged), key=math.prod, reverse=True):
        yield Work(all_heads, all_heads, range(n), (range(m),))
    for n in sorted(rows, reverse=True):
        yield Work(all_heads, all_heads, range(n), (range(n),), lo=0)
    for n, width in sorted(product(rows, widths), key=math.prod, reverse=True):
        # A parallelogram: row i sees the keys i .. i + width - 1.
        yield Work(all_heads, all_heads, range(n), (range(n + width - 1),), lo=1 - width, hi=0)


def time_works(ranks: MeasuringRanks, kernel: Kernel, works: Sequence[Work], settings: Settings) -> list[Sample]:
    """Time each work, first forward and then backward; returns a sample of each.

    Works of one shape take turns. A small call that is repeated alone would take up to half less time than in a pass,
    where other calls and their data come between.
    """
    samples = []
    for backward, group in product((False, True), _group(works, settings)):
        calls = [make_call(kernel, work, settings, ranks.device, backward=backward) for work in group]
        for work, seconds in zip(group, ranks.time_alternating(calls), strict=True):
            ((shape, rows, keys, pairs),) = lower_to_tiles(work)
            flops = pairs * 4 * settings.head_dim * (BACKWARD if backward else 1.0)
            samples.append(Sample(shape, backward, rows, keys, flops, ranks.gather_times(seconds)))
    return samples


def _group(works: Sequence[Work], settings: Settings) -> Iterator[list[Work]]:
    """The works of each shape, in groups whose tensors fit into TOGETHER bytes; a larger work is its own group."""
    item = 4 * settings.head_dim * max(settings.torch_dtype.itemsize, 4)
    for _, of_shape in groupby(works, lambda work: next(lower_to_tiles(work))[0]):
        group: list[Work] = []
        size = 0
        for work in of_shape:
            nbytes = item * len(work.heads) * (len(work.q) + work.keys)
            if group and size + nbytes > TOGETHER:
                yield group
                group, size = [], 0
            group.append(work)
            size += nbytes
        yield group


def make_call(
    kernel: Kernel, work: Work, settings: Settings, device: torch.device, *, backward: bool
) -> Callable[[], None]:
    """A function that computes a work on random inputs: like the executor, it drops outputs and sums gradients."""
    heads, head_dim, dtype = len(work.heads), settings.head_dim, settings.torch_dtype
    q, grad, out = (torch.randn(1, heads, len(work.q), head_dim, device=device).to(dtype) for _ in range(3))
    k, v = (torch.randn(1, heads, work.keys, head_dim, device=device).to(dtype) for _ in range(2))
    lse = torch.full((1, heads, len(work.q)), math.log(work.keys), device=device, dtype=wide(dtype))
    scale = head_dim**-0.5
    kernel_calls = list((kernel.for_backward() if backward else kernel).split(work))
    rows = RowViews(q, grad, out, lse) if backward else RowViews(q)
    dq, dk, dv = (torch.zeros(x.shape, device=device, dtype=wide(dtype)) for x in (q, k, v))
    of_rows, of_keys = RowViews(dq), RowViews(dk, dv)

    def run() -> None:
        keys = RowViews(k, v)
        for call in kernel_calls:
            for batch in batches(call, len(q)):
                (x, *others), (y, z) = select_inputs(call, batch, rows, keys)
                if backward:
                    dout, o, total = others
                    dq_part, *key_parts = kernel.backward(dout, x, y, z, o, total, call, scale)
                    accumulate(of_rows, call, batch, dq_part)
                    accumulate(of_keys, call, batch, *key_parts, by_key=True)
                else:
                    kernel.forward(x, y, z, call, scale)

    return run


def make_reference(kernel: Kernel, settings: Settings, device: torch.device) -> Callable[[], None]:
    """A function that computes a small dense forward, whose time shows how fast the machine currently is.

    It also takes turns with short calls: a call that is repeated alone finds its data in the caches and its threads
    awake, unlike in a pass.
    """
    return make_call(kernel, square(REFERENCE_ROWS, settings.heads), settings, device, backward=False)


def square(rows: int, heads: int) -> Work:
    """A dense work of `rows` queries and equally many keys, for all heads."""
    return Work(range(heads), range(heads), range(rows), (range(rows),))


def time_overheads(ranks: MeasuringRanks, kernel: Kernel, settings: Settings) -> list[tuple[float, ...]]:
    """The overhead of a kernel call: seconds of forward and of backward calls on 1 row and 1 key of 1 head.

    These calls take turns with larger ones, so that their data is not in the caches.
    """
    works, found = (square(1, 1), square(REFERENCE_ROWS, settings.heads)), []
    for backward in (False, True):
        calls = [make_call(kernel, work, settings, ranks.device, backward=backward) for work in works]
        found.append(ranks.gather_times(ranks.time_alternating(calls)[0]))
    return found


def time_merges(ranks: MeasuringRanks, rows: Sequence[int], settings: Settings) -> list[TimedBytes]:
    """For each number of rows, the bytes of a partial result and the seconds to merge another one into it."""
    times, heads, dtype = [], settings.heads, wide(settings.torch_dtype)
    for n in rows:
        size = n * heads * (settings.head_dim + 1) * dtype.itemsize
        shapes = [(1, heads, n, settings.head_dim), (1, heads, n)] * 2  # (out, lse) of two partials
        turns = range(count_turns(2 * size))
        first = [torch.randn(shape, device=ranks.device, dtype=dtype) for shape in shapes]
        partials = cycle([[x.clone() for x in first] for _ in turns])

        def merge(partials: Iterator[list[torch.Tensor]] = partials) -> None:
            merge_(*next(partials))

        (seconds,) = ranks.time_alternating([merge])
        times.append(TimedBytes(size, ranks.gather_times(seconds)))
    return times
