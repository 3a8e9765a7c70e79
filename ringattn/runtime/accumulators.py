"""The rows that a kernel call reads and writes, and how a rank merges its output rows: the plan and its execution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ..kernels.base import Kernel, as_dtype, wide
from ..kernels.pad import crop_to
from ..pattern.tile import shift_range
from ..plan.plan import Plan
from ..plan.work import Work, join_keys, join_repetitions
from .memory import MergeSpace, empty
from .softmax import add_, merge_, merge_sinks_
from .tensors import begin_sums

#: Neighbouring runs are joined until a section has this many query rows times heads, enough to batch kernel calls.
SECTION_ROWS = 1 << 17
#: Bytes of a cache line and of the widest registers of CPUs.
LINE = 64

Tensors = tuple[Tensor, ...]
#: (out [B, H, n, Dv], lse [B, H, n]).
Pair = tuple[Tensor, Tensor]


def align_rows(x: Tensor) -> Tensor:
    """x with its rows aligned to cache lines: x itself if they already are, else a contiguous copy.

    x itself is returned if a row is a whole number of cache lines, or if x is contiguous and begins a cache line. The
    order of summation in a matrix product depends on addresses. With aligned rows, a shard gives the same bits as a
    separate tensor (on a real rank) and as a view of the whole sequence (on a virtual rank).
    """
    if x.shape[-1] * x.element_size() % LINE == 0 or (x.is_contiguous() and x.data_ptr() % LINE == 0):
        return x
    return empty(x.shape, x.dtype, x.device).copy_(x)


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


def select_inputs(
    work: Work, batch: slice | None, by_query: RowViews, by_key: RowViews
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(query tensors, key tensors) that a kernel call reads: views, or copies if its rows do not lie together.

    `batch` None is the whole batch.
    """
    if work.gathered:
        gather = _packing().gather
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
            _packing().scatter_add(total, work, crop_to(part, total.shape[-1]), by_key=by_key)
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
                rows = crop_to(part, target.shape[-1])
                rows = rows if len(runs) == 1 else rows[:, :, first : first + len(run)]
                add_(target, rows if turns == 1 else rows[turn::turns])
        first += len(run)


def _packing() -> ModuleType:
    return import_module("..kernels.packing", __package__)  # only gathered calls load it


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel; `rows` are its query rows, counted from the start of their section.

    `first` means that these rows have no partial result yet, so the call's result is copied instead of merged.
    """

    work: Work
    rows: range
    first: bool


@dataclass(frozen=True, eq=False)
class Section:
    """A run of local query rows that is finished on its own: every work lies entirely inside or outside of it.

    `single`: no row gets more than one partial result. `filled`: a merge may touch rows without a partial result, so
    the section must start with out 0 and lse -inf.
    """

    rows: range
    single: bool
    filled: bool


@dataclass(frozen=True)
class VisitPart:
    """The kernel calls in one section that compute with one block; `last` means that no later block has calls there."""

    section: Section
    calls: tuple[KernelCall, ...]
    last: bool


#: The parts of every visit, in the order of the visits, and the local rows that see no key.
MergePlan = tuple[tuple[tuple[VisitPart, ...], ...], tuple[range, ...]]


def make_merge_plan(plan: Plan, rank: int, kernel: Kernel) -> MergePlan:
    """The kernel calls of a rank's forward by visited block and section, and the rows that see no key.

    The calls are those that `kernel` makes. The plan caches the result.
    """
    return plan.cache.answer((make_merge_plan, rank, kernel.key), lambda: _plan_merges(plan, rank, kernel))


def _plan_merges(plan: Plan, rank: int, kernel: Kernel) -> MergePlan:
    demand = plan.demand
    visits = [
        demand.works(rank, part.owner, part.row_set) for step in plan.for_rank(rank).forward for part in step.visits
    ]
    spans = list(_spans([work for works in visits for work in works], SECTION_ROWS // plan.heads))
    by_visit = [_by_span(works, spans) for works in visits]
    planned: list[list[tuple[int, tuple[KernelCall, ...]]]] = [[] for _ in visits]
    sections: list[Section] = []
    last_visit: dict[int, int] = {}
    for index, span in enumerate(spans):
        #: The number of partials of each query row of the span so far, by head.
        partials = np.zeros((plan.heads, len(span)), dtype=np.uint16)
        mixed = False  # some call covers both rows with and rows without a partial
        for visit in range(len(visits)):
            calls, call_mixes = _mark_calls(by_visit[visit][index], kernel, partials, span.start)
            mixed |= call_mixes
            if calls:
                planned[visit].append((index, calls))
                last_visit[index] = visit
        sections.append(Section(span, bool(partials.max() <= 1), mixed or not partials.all()))
    rows = plan.layout_of("q").rows(rank)
    gaps = zip([0, *(span.stop for span in spans)], [*(span.start for span in spans), rows], strict=True)
    visits_parts = (
        tuple(VisitPart(sections[i], calls, last_visit[i] == visit) for i, calls in parts)
        for visit, parts in enumerate(planned)
    )
    return tuple(visits_parts), tuple(range(first, stop) for first, stop in gaps if first < stop)


def _by_span(works: tuple[Work, ...], spans: list[range]) -> list[list[Work]]:
    """The works of one visit, grouped by the span that they lie in."""
    starts = np.array([span.start for span in spans])
    by_span: list[list[Work]] = [[] for _ in spans]
    for work in works:
        by_span[int(np.searchsorted(starts, work.q.start, "right")) - 1].append(work)
    return by_span


def _mark_calls(
    works: list[Work], kernel: Kernel, partials: np.ndarray, origin: int
) -> tuple[tuple[KernelCall, ...], bool]:
    """The kernel calls of `works`, and whether a call has both rows with and without a partial. Updates `partials`."""
    calls, mixed = [], False
    for call in kernel.calls_of(join_repetitions(join_keys(works))):
        counts = [_counts(partials, part, origin) for part in (call.sequences if call.gathered else (call,))]
        first = not any(x.any() for x in counts)
        mixed |= not first and not all(x.all() for x in counts)
        for x in counts:
            x += 1
        calls.append(KernelCall(call, shift_range(call.q, -origin), first))
    return tuple(calls), mixed


def _spans(works: list[Work], least: int) -> Iterator[range]:
    """Runs of rows that no work straddles. Adjacent runs are joined until they have `least` rows."""
    span = None
    for rows in sorted((work.rows for work in works), key=lambda rows: rows.start):
        if span is None:
            span = rows
        elif rows.start > span.stop or (rows.start == span.stop and len(span) >= least):
            yield span
            span = rows
        else:
            span = range(span.start, max(span.stop, rows.stop))
    if span is not None:
        yield span


def _counts(partials: np.ndarray, work: Work, origin: int) -> np.ndarray:
    """The view [repeat, heads, rows] of `partials` [H, rows] at a work's query rows. Row 0 is local row `origin`."""
    heads, q = work.heads, work.q
    first = partials[heads.start : heads.stop : heads.step, q.start - origin : q.stop - origin : q.step]
    return np.lib.stride_tricks.as_strided(
        first, (work.repeat, *first.shape), (work.q_shift * partials.strides[1], *first.strides)
    )


class OutputAccumulator:
    """Collects the output rows of one rank from the partial results of kernel calls.

    A row with a single partial result is written once; several are merged in fp32 or fp64. If the output has this
    dtype, it is merged in place. Otherwise each section has an accumulator until its rows are complete. lse is
    accumulated in fp64, because every rounding of lse changes the backward's probabilities. If the caller gives no
    output, a first partial result that covers all rows becomes the output without a copy.
    """

    def __init__(self, q: Tensor, value_dim: int, out: Tensor | None) -> None:
        self.q, self.shape, self.out = q, (*q.shape[:3], value_dim), out
        self.lse: Tensor | None = None
        #: The dtype of partials that can become the output; None if the output is narrower than the merge dtype.
        self._whole_dtype = q.dtype if q.dtype == wide(q.dtype) else None
        self._space = MergeSpace()
        #: out and lse of every open section.
        self._open: dict[Section, RowViews] = {}

    def add(self, section: Section, call: KernelCall, part: Tensor, part_lse: Tensor, batch: slice | None) -> None:
        """Merge the partial result of a kernel call into its rows, for the given elements of the batch (None: all)."""
        work = call.work
        if self.out is None and not work.gathered and part.shape == self.shape and part.dtype == self._whole_dtype:
            self.out = part
            self._open_section(section).tensors[1].copy_(part_lse)
            return
        views = self._open.get(section) or self._open_section(section)
        _merge_call(views, call, section.rows.start, (part, part_lse), batch, self._space)

    def close(self, section: Section) -> None:
        """Write the accumulator of a section to the output once all its partials are merged."""
        accumulator, _ = self._open.pop(section).tensors
        assert self.out is not None
        if accumulator.dtype != self.out.dtype:
            self._rows(self.out, section.rows).copy_(accumulator)

    def finish(self, empty: Sequence[range], sinks: Tensor | None) -> Pair:
        """(out, lse) of all rows, with `sinks` [H] merged. The rows in `empty` see no key: out is 0, lse -inf.

        Sinks are merged after that, so with sinks these rows have another lse.
        """
        self._allocate()
        assert self.out is not None and self.lse is not None
        for rows in empty:
            begin_sums(self._rows(self.out, rows), self._rows(self.lse, rows))
        if sinks is not None:
            merge_sinks_(self.out, self.lse, sinks)
        return self.out, as_dtype(self.lse, wide(self.q.dtype))

    def _open_section(self, section: Section) -> RowViews:
        """The accumulators (out, lse) of a section, allocated and filled at the first use."""
        self._allocate()
        out, lse = self._rows(self.out, section.rows), self._rows(self.lse, section.rows)
        dtype = wide(self.q.dtype)
        if not section.single and out.dtype != dtype:
            out = _empty_rows(out.shape, dtype, self.q.device)
        if section.filled:
            begin_sums(out, lse)
        views = self._open[section] = RowViews(out, lse)
        return views

    def _rows(self, x: Tensor | None, rows: range) -> Tensor:
        assert x is not None
        return x if len(rows) == x.shape[2] else x[:, :, rows.start : rows.stop]

    def _allocate(self) -> None:
        """Allocate the output and lse if they do not exist yet."""
        if self.lse is not None:
            return
        if self.out is None:
            self.out = _empty_rows(self.shape, self.q.dtype, self.q.device)
        self.lse = _empty_rows(self.shape[:3], torch.float64, self.q.device)


def make_output_sums(q: Tensor, value_dim: int) -> Pair:
    """(out, lse) for queries that have not met a key yet: out is 0, and lse is -inf.

    out is fp32 (fp64 for fp64 queries), lse is fp64.
    """
    out = _empty_rows((*q.shape[:3], value_dim), wide(q.dtype), q.device)
    lse = _empty_rows(q.shape[:3], torch.float64, q.device)
    begin_sums(out, lse)
    return out, lse


def merge_partial(totals: RowViews, work: Work, part: Pair, batch: slice | None, *, is_new: bool) -> None:
    """Merge a call's partial result (out, lse) into the totals of its query rows.

    `batch` selects elements of the batch (None: all). `is_new`: the totals are uninitialized, and the partial result,
    which covers all rows, overwrites them.
    """
    if is_new:
        for total, x in zip(totals.tensors, part, strict=True):
            total.copy_(x)
    else:
        _merge_call(totals, KernelCall(work, work.q, False), 0, part, batch)


def _merge_call(
    totals: RowViews, call: KernelCall, first: int, part: Pair, batch: slice | None, space: MergeSpace | None = None
) -> None:
    """Merge a call's partial into (out, lse), or copy it, see `KernelCall`; row 0 of these is local row `first`."""
    work = call.work
    if work.gathered:
        packing, whole = _packing(), totals.of(batch)
        if not call.first:
            out, lse = (packing.gather(x, work, first=first) for x in whole)
            merge_(out, lse, *part)
            part = out, lse
        for x, y in zip(whole, part, strict=True):
            packing.scatter(x, work, y, first=first)
        return
    out, lse = totals.select(work.heads, call.rows, batch, work.repeat, work.q_shift)
    if call.first:
        out.copy_(part[0])
        lse.copy_(part[1])
    else:
        merge_(out, lse, *part, space=space)


def _empty_rows(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor [B, H, n, ...] with rows before heads in memory, like the results of the kernels.

    Merges then access memory in order.
    """
    batch, heads, rows, *width = shape
    return empty((batch, rows, heads, *width), dtype, device).transpose(1, 2)


def finish_sums(out: Tensor, lse: Tensor, q: Tensor, sinks: Tensor | None, target: Tensor | None) -> Pair:
    """Complete (out, lse): merge the `sinks` [H] if given, and cast; out is written to `target` if given."""
    if sinks is not None:
        merge_sinks_(out, lse, sinks)
    out = as_dtype(out, q.dtype) if target is None else target.copy_(out)
    return out, as_dtype(lse, wide(q.dtype))
