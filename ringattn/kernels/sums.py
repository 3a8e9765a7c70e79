"""How a rank merges its output rows from partial results: the plan, and its execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..pattern.tile import shift_range
from ..plan.work import Work, join_keys, join_repetitions
from .contract import Pair
from .memory import MergeSpace, as_dtype, empty_rows, wide
from .softmax import begin_sums, merge_, merge_sinks_
from .views import RowViews, packing

#: Neighbouring runs are joined until a section has this many query rows times heads, enough to batch kernel calls.
SECTION_ROWS = 1 << 17


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


#: Splits works that are computed together into the calls of a kernel.
CallsOf = Callable[[Iterable[Work]], list[Work]]


def plan_merges(
    visits: Sequence[Sequence[Work]], heads: int, rows: int, calls_of: CallsOf
) -> tuple[list[tuple[VisitPart, ...]], tuple[range, ...]]:
    """(the parts of each visit, the rows that see no key) of a rank with `rows` query rows.

    `visits` are the works of each visit of the pass, in order.
    """
    spans = list(_spans([work for works in visits for work in works], SECTION_ROWS // heads))
    by_visit = [_by_span(works, spans) for works in visits]
    planned: list[list[tuple[int, tuple[KernelCall, ...]]]] = [[] for _ in visits]
    sections: list[Section] = []
    last_visit: dict[int, int] = {}
    for index, span in enumerate(spans):
        #: The number of partials of each query row of the span so far, by head.
        partials = np.zeros((heads, len(span)), dtype=np.uint16)
        mixed = False  # some call covers both rows with and rows without a partial
        for visit in range(len(visits)):
            calls, call_mixes = _mark_calls(by_visit[visit][index], calls_of, partials, span.start)
            mixed |= call_mixes
            if calls:
                planned[visit].append((index, calls))
                last_visit[index] = visit
        sections.append(Section(span, bool(partials.max() <= 1), mixed or not partials.all()))
    gaps = zip([0, *(span.stop for span in spans)], [*(span.start for span in spans), rows], strict=True)
    by_section = [
        tuple(VisitPart(sections[i], calls, last_visit[i] == visit) for i, calls in parts)
        for visit, parts in enumerate(planned)
    ]
    return by_section, tuple(range(first, stop) for first, stop in gaps if first < stop)


def _by_span(works: Sequence[Work], spans: list[range]) -> list[list[Work]]:
    """The works of one visit, grouped by the span that they lie in."""
    starts = np.array([span.start for span in spans])
    by_span: list[list[Work]] = [[] for _ in spans]
    for work in works:
        by_span[int(np.searchsorted(starts, work.q.start, "right")) - 1].append(work)
    return by_span


def _mark_calls(
    works: list[Work], calls_of: CallsOf, partials: np.ndarray, origin: int
) -> tuple[tuple[KernelCall, ...], bool]:
    """The kernel calls of `works`, and whether a call has both rows with and without a partial. Updates `partials`."""
    calls, mixed = [], False
    for call in calls_of(join_repetitions(join_keys(works))):
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
        self._dtype = wide(q.dtype)
        self._whole_dtype = q.dtype if q.dtype == self._dtype else None
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
        return self.out, as_dtype(self.lse, self._dtype)

    def _open_section(self, section: Section) -> RowViews:
        """The accumulators (out, lse) of a section, allocated and filled at the first use."""
        self._allocate()
        out, lse = self._rows(self.out, section.rows), self._rows(self.lse, section.rows)
        if not section.single and out.dtype != self._dtype:
            out = empty_rows(out.shape, self._dtype, self.q.device)
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
            self.out = empty_rows(self.shape, self.q.dtype, self.q.device)
        self.lse = empty_rows(self.shape[:3], torch.float64, self.q.device)


def make_output_sums(q: Tensor, value_dim: int) -> Pair:
    """(out, lse) for queries that have not met a key yet: out is 0, and lse is -inf.

    out is fp32 (fp64 for fp64 queries), lse is fp64.
    """
    out = empty_rows((*q.shape[:3], value_dim), wide(q.dtype), q.device)
    lse = empty_rows(q.shape[:3], torch.float64, q.device)
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
        packed, whole = packing(), totals.of(batch)
        if not call.first:
            out, lse = (packed.gather(x, work, first=first) for x in whole)
            merge_(out, lse, *part)
            part = out, lse
        for x, y in zip(whole, part, strict=True):
            packed.scatter(x, work, y, first=first)
        return
    out, lse = totals.select(work.heads, call.rows, batch, work.repeat, work.q_shift)
    if call.first:
        out.copy_(part[0])
        lse.copy_(part[1])
    else:
        merge_(out, lse, *part, space=space)


def finish_sums(out: Tensor, lse: Tensor, q: Tensor, sinks: Tensor | None, target: Tensor | None) -> Pair:
    """Complete (out, lse): merge the `sinks` [H] if given, and cast; out is written to `target` if given."""
    if sinks is not None:
        merge_sinks_(out, lse, sinks)
    out = as_dtype(out, q.dtype) if target is None else target.copy_(out)
    return out, as_dtype(lse, wide(q.dtype))
