"""The rows of tensors that a kernel call reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..pattern.tile import shift_range
from ..plan.work import Work
from .memory import empty
from .pad import crop_to
from .softmax import add_

#: The most query rows times heads times batch of one call, which bounds what a kernel allocates.
BATCH_ROWS = 1 << 18


class RowViews:
    """Tensors [B, H, n, ...], with a cache of the views that kernel calls read or write."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        _, self._heads, self._rows, *_ = tensors[0].shape
        self._views: dict[tuple[range, range], tuple[Tensor, ...]] = {}

    def of(self, batch: slice | None) -> tuple[Tensor, ...]:
        """The tensors for some elements of the batch (None: all)."""
        return self.tensors if batch is None else tuple([x[batch] for x in self.tensors])

    def select(
        self, heads: range, rows: range, batch: slice | None = None, repeat: int = 1, shift: int = 0
    ) -> tuple[Tensor, ...]:
        """The views at these heads and rows for some elements of the batch (None: all).

        With `repeat` > 1, dimension 0 of a view stands for the repetitions, which are `shift` rows apart.
        """
        if batch is not None or repeat != 1:
            return tuple([_select(x if batch is None else x[batch], heads, rows, repeat, shift) for x in self.tensors])
        if len(rows) == self._rows and len(heads) == self._heads:
            return self.tensors
        views = self._views.get((heads, rows))
        if views is None:
            views = self._views[heads, rows] = tuple([_select(x, heads, rows, 1, 0) for x in self.tensors])
        return views


def batches(work: Work, count: int) -> Sequence[slice | None]:
    """The slices of a batch of `count` elements that `work` computes one after another; None is the whole batch.

    A call has at most BATCH_ROWS rows. A work with repetitions takes one element of the batch per call. In a packed
    work each sequence counts as at least 5 rows, so that a call (BATCH_ROWS = 262,144) has at most 52,428 sequences; a
    CUDA grid has at most 65,535.
    """
    if count <= 1:
        return (None,)
    rows = max(len(work.q) * len(work.heads), 5 * len(work.sequences), work.copied_rows)
    size = max(1, BATCH_ROWS // rows) if work.repeat == 1 else 1
    if size >= count:
        return (None,)
    return [slice(first, first + size) for first in range(0, count, size)]


def select_inputs(
    work: Work, batch: slice | None, by_query: RowViews, by_key: RowViews
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(query tensors, key tensors) that a kernel call reads: views, or copies if its rows do not lie together.

    `batch` None is the whole batch.
    """
    if work.gathered:
        gather = packing().gather
        rows = tuple([gather(x, work) for x in by_query.of(batch)])
        return rows, tuple([gather(x, work, by_key=True) for x in by_key.of(batch)])
    rows = by_query.select(work.heads, work.q, batch, work.repeat, work.q_shift)
    if len(work.k) == 1:
        return rows, by_key.select(work.kv, work.k[0], batch, work.repeat, work.k_shift)
    runs = [by_key.select(work.kv, run, batch, work.repeat, work.k_shift) for run in work.k]
    return rows, tuple([_concatenate(of_tensor, work.keys) for of_tensor in zip(*runs, strict=True)])


def _concatenate(runs: tuple[Tensor, ...], keys: int) -> Tensor:
    """Join runs of key rows into one tensor."""
    like = runs[0]
    return torch.cat(runs, 2, out=empty((*like.shape[:2], keys, like.shape[3]), like.dtype, like.device))


def _select(x: Tensor, heads: range, rows: range, repeat: int, shift: int) -> Tensor:
    """The view of x [B, H, n, ...] at these heads and rows; see `RowViews.select`."""
    count, all_heads, all_rows, *width = x.shape
    if repeat == 1 and (len(heads), len(rows)) == (all_heads, all_rows):
        return x
    batch_stride, head_stride, row_stride, *last = x.stride()
    if repeat != 1:
        count, batch_stride = repeat, shift * row_stride
    return x.as_strided(  # one call of torch
        (count, len(heads), len(rows), *width),
        (batch_stride, heads.step * head_stride, rows.step * row_stride, *last),
        x.storage_offset() + heads.start * head_stride + rows.start * row_stride,
    )


def accumulate(
    sums: RowViews, work: Work, batch: slice | None, *parts: Tensor, by_key: bool = False, is_new: bool = False
) -> None:
    """Add a call's results to its query rows (with `by_key`: key rows) in `sums`.

    Shapes: parts [B or repeat, heads, rows, D or more], sums [B, H, n, D]. `is_new`: the sums are uninitialized, and
    the parts, which cover all rows, overwrite them.
    """
    if is_new:
        for total, part in zip(sums.tensors, parts, strict=True):
            total.copy_(crop_to(part, total.shape[-1]))
        return
    if work.gathered:
        for total, part in zip(sums.of(batch), parts, strict=True):
            packing().scatter_add(total, work, crop_to(part, total.shape[-1]), by_key=by_key)
        return
    heads, runs, shift = (work.kv, work.k, work.k_shift) if by_key else (work.heads, (work.q,), work.q_shift)
    repeat = work.repeat
    first = 0
    for run in runs:
        # Add overlapping repetitions in turns, so that no single call writes an element twice.
        turns = min(repeat, -(-(run[-1] + 1 - run[0]) // shift)) if shift else repeat
        for turn in range(turns):
            count = len(range(turn, repeat, turns))
            targets = sums.select(heads, shift_range(run, turn * shift) if turn else run, batch, count, turns * shift)
            for target, part in zip(targets, parts, strict=True):
                rows = part if part.shape[-1] == target.shape[-1] else crop_to(part, target.shape[-1])
                rows = rows if len(runs) == 1 else rows[:, :, first : first + len(run)]
                add_(target, rows if turns == 1 else rows[turn::turns])
        first += len(run)


def packing() -> ModuleType:
    return import_module(".packing", __package__)  # only gathered calls load it
