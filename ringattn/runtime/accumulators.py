"""Rows of tensors that a kernel call reads and writes, and the output rows of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..kernels.base import as_dtype, wide
from ..kernels.pad import crop_to
from ..pattern.tile import shift_range
from ..plan.work import Work
from .memory import MergeSpace, empty
from .merge_plan import KernelCall, Section
from .rank_run import begin_sums
from .softmax import add_, merge_, merge_sinks_

#: Bytes of a cache line and of the widest registers of CPUs.
LINE = 64

Tensors = tuple[Tensor, ...]
#: (out [B, H, n, Dv], lse [B, H, n]).
Pair = tuple[Tensor, Tensor]


def align_rows(x: Tensor) -> Tensor:
    """x if its rows are whole cache lines, or if it is contiguous and starts a cache line; else a copy that does.

    Matrix products add in another order at other addresses. With aligned rows a shard gives the same bits whether the
    shard is a tensor of its own, as on a real rank, or a view of the whole sequence, as on a virtual rank.
    """
    if x.shape[-1] * x.element_size() % LINE == 0 or (x.is_contiguous() and x.data_ptr() % LINE == 0):
        return x
    return empty(x.shape, x.dtype, x.device).copy_(x)


class RowViews:
    """Tensors [B, H, n, ...] and the views of them that kernel calls read or write. Equal views are made once."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        _, self._heads, self._rows, *_ = tensors[0].shape
        self._views: dict[tuple[range, range], tuple[Tensor, ...]] = {}

    def of(self, batch: slice | None) -> tuple[Tensor, ...]:
        """The tensors, of some elements of the batch; None is all of them."""
        return self.tensors if batch is None else tuple([x[batch] for x in self.tensors])

    def select(
        self, heads: range, rows: range, batch: slice | None = None, repeat: int = 1, shift: int = 0
    ) -> tuple[Tensor, ...]:
        """The views at these heads and rows of some elements of the batch; None is all of them.

        With repetitions the batch dimension of a view counts them; repetitions are `shift` rows apart.
        """
        if batch is not None or repeat != 1:
            return tuple([_select(x if batch is None else x[batch], heads, rows, repeat, shift) for x in self.tensors])
        if len(rows) == self._rows and len(heads) == self._heads:
            return self.tensors
        views = self._views.get((heads, rows))
        if views is None:
            views = self._views[heads, rows] = tuple([_select(x, heads, rows, 1, 0) for x in self.tensors])
        return views


def select_inputs(
    work: Work, batch: slice | None, by_query: RowViews, by_key: RowViews
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The rows that a call reads in tensors of query rows and of key rows: views, or a copy where the keys are several
    runs.

    `batch` None is the whole batch.
    """
    if work.gathered:
        gather = _packing().gather
        rows = tuple([gather(x, work) for x in by_query.of(batch)])
        return rows, tuple([gather(x, work, by_key=True) for x in by_key.of(batch)])
    rows = by_query.select(work.heads, work.q, batch, work.repeat, work.q_shift)
    runs = [by_key.select(work.kv, run, batch, work.repeat, work.k_shift) for run in work.k]
    if len(runs) == 1:
        return rows, runs[0]
    return rows, tuple([_concatenate(of_tensor, work.keys) for of_tensor in zip(*runs, strict=True)])


def _concatenate(runs: tuple[Tensor, ...], keys: int) -> Tensor:
    """Runs of key rows as one tensor."""
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
    """Add `parts` [B or repeat, heads, rows, D or more] to those rows of `sums` [B, H, n, D] that a call has read.

    `is_new`: the sums are arbitrary, and the parts, which are all of their rows, are written to them.
    """
    if is_new:
        for total, part in zip(sums.tensors, parts, strict=True):
            total.copy_(crop_to(part, total.shape[-1]))
        return
    if work.gathered:
        for total, part in zip(sums.of(batch), parts, strict=True):
            _packing().scatter_add(total, work, crop_to(part, total.shape[-1]), by_key=by_key)
        return
    heads, runs, shift = (work.kv, work.k, work.k_shift) if by_key else (work.heads, (work.q,), work.q_shift)
    repeat = work.repeat
    first = 0
    for run in runs:
        # Overlapping repetitions are added in turns, so that no call writes an element twice.
        turns = min(repeat, -(-(run[-1] + 1 - run[0]) // shift)) if shift else repeat
        for turn in range(turns):
            count = len(range(turn, repeat, turns))
            targets = sums.select(heads, shift_range(run, turn * shift) if turn else run, batch, count, turns * shift)
            for target, part in zip(targets, parts, strict=True):
                rows = crop_to(part, target.shape[-1])
                rows = rows if len(runs) == 1 else rows[:, :, first : first + len(run)]
                add_(target, rows if turns == 1 else rows[turn::turns])
        first += len(run)


def _packing() -> ModuleType:
    return import_module("..kernels.packing", __package__)  # only gathered calls load it


def _merge_gathered(call: KernelCall, first: int, total: tuple[Tensor, ...], part: Pair) -> None:
    """Merge the partial of a gathered call into tensors of the rows from number `first` on."""
    packing = _packing()
    if not call.first:
        out, lse = (packing.gather(x, call.work, first=first) for x in total)
        merge_(out, lse, *part)
        part = out, lse
    for x, y in zip(total, part, strict=True):
        packing.scatter(x, call.work, y, first=first)


class OutputAccumulator:
    """The output rows of one rank. A row's only partial is written once; other partials are merged in fp32 or fp64.

    An output of that dtype is its own accumulator; a narrower output has one accumulator per section, for as long as
    the section is open. lse is summed in fp64: each rounding of lse would be an error of the backward's probabilities.
    Without a given output, a first partial that covers all rows becomes the output without a copy.
    """

    def __init__(self, q: Tensor, value_dim: int, out: Tensor | None) -> None:
        self.q, self.shape, self.out = q, (*q.shape[:3], value_dim), out
        self.lse: Tensor | None = None
        #: The dtype of partials that can be the output; None where the output is narrower than partials are merged in.
        self._whole_dtype = q.dtype if q.dtype == wide(q.dtype) else None
        self._space = MergeSpace()
        #: out and lse of every open section.
        self._open: dict[Section, RowViews] = {}

    def add(self, section: Section, call: KernelCall, part: Tensor, part_lse: Tensor, batch: slice | None) -> None:
        """Take in the partial of a kernel call for some elements of the batch; None is all of them."""
        work = call.work
        if self.out is None and not work.gathered and part.shape == self.shape and part.dtype == self._whole_dtype:
            self.out = part
            self._open_section(section).tensors[1].copy_(part_lse)
            return
        views = self._open.get(section) or self._open_section(section)
        if work.gathered:
            _merge_gathered(call, section.rows.start, views.of(batch), (part, part_lse))
            return
        out, lse = views.select(work.heads, call.rows, batch, work.repeat, work.q_shift)
        if call.first:
            out.copy_(part)
            lse.copy_(part_lse)
        else:
            merge_(out, lse, part, part_lse, space=self._space)

    def close(self, section: Section) -> None:
        """Write the accumulator of a section, which has all its partials, to the output."""
        accumulator, _ = self._open.pop(section).tensors
        assert self.out is not None
        if accumulator.dtype != self.out.dtype:
            self._rows(self.out, section.rows).copy_(accumulator)

    def finish(self, empty: Sequence[range], sinks: Tensor | None) -> Pair:
        """(out, lse) of all rows. Rows in `empty` see no key and get 0 and -inf. `sinks` [H] are merged last."""
        self._allocate()
        assert self.out is not None and self.lse is not None
        for rows in empty:
            self._rows(self.out, rows).zero_()
            self._rows(self.lse, rows).fill_(-torch.inf)
        if sinks is not None:
            merge_sinks_(self.out, self.lse, sinks)
        return self.out, as_dtype(self.lse, wide(self.q.dtype))

    def _open_section(self, section: Section) -> RowViews:
        """The accumulators (out, lse) of a section, allocated and filled when it is first met."""
        self._allocate()
        out, lse = self._rows(self.out, section.rows), self._rows(self.lse, section.rows)
        dtype = wide(self.q.dtype)
        if not section.single and out.dtype != dtype:
            batch, heads, rows, width = out.shape
            out = empty((batch, rows, heads, width), dtype, self.q.device).transpose(1, 2)
        if section.filled:
            out.zero_()
            lse.fill_(-torch.inf)
        views = self._open[section] = RowViews(out, lse)
        return views

    def _rows(self, x: Tensor | None, rows: range) -> Tensor:
        assert x is not None
        return x[:, :, rows.start : rows.stop]

    def _allocate(self) -> None:
        """Allocate the output and lse, unless they exist."""
        if self.lse is not None:
            return
        batch, heads, rows, width = self.shape
        # Rows before heads in memory, as in the results of the kernels, so that a merge walks memory in order.
        if self.out is None:
            self.out = empty((batch, rows, heads, width), self.q.dtype, self.q.device).transpose(1, 2)
        self.lse = empty((batch, rows, heads), torch.float64, self.q.device).transpose(1, 2)


def make_output_sums(q: Tensor, value_dim: int) -> Pair:
    """(out, lse) of queries that have met no key: out in fp32 (fp64 for fp64 queries), lse in fp64."""
    batch, heads, rows, _ = q.shape
    out = empty((batch, rows, heads, value_dim), wide(q.dtype), q.device).transpose(1, 2)
    lse = empty((batch, rows, heads), torch.float64, q.device).transpose(1, 2)
    begin_sums(out, lse)
    return out, lse


def merge_partial(totals: RowViews, work: Work, part: Pair, batch: slice | None, *, is_new: bool) -> None:
    """Merge the partial of a call into the (out, lse) of its rows, for some elements of the batch; None is all of them.

    `is_new`: these are arbitrary, and the partial, which is all of their rows, is written to them.
    """
    if is_new:
        for total, x in zip(totals.tensors, part, strict=True):
            total.copy_(x)
    elif work.gathered:
        _merge_gathered(KernelCall(work, work.q, False), 0, totals.of(batch), part)
    else:
        out, lse = totals.select(work.heads, work.q, batch, work.repeat, work.q_shift)
        merge_(out, lse, *part)


def finish_sums(out: Tensor, lse: Tensor, q: Tensor, sinks: Tensor | None, target: Tensor | None) -> Pair:
    """(out, lse) of queries that have met all keys and, last, the `sinks` [H]; out is written to `target` if given."""
    if sinks is not None:
        merge_sinks_(out, lse, sinks)
    out = as_dtype(out, q.dtype) if target is None else target.copy_(out)
    return out, as_dtype(lse, wide(q.dtype))


def make_sums(*like: Tensor) -> Tensors:
    """Sums for tensors of these shapes and strides, in fp32 (fp64 for fp64 tensors)."""
    return tuple(torch.zeros_like(x, dtype=wide(x.dtype)) for x in like)
