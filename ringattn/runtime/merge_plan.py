"""How a rank's forward writes its output rows, planned before it runs: which kernel call is copied, which is merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..kernels.base import Kernel
from ..pattern.tile import shift_range
from ..plan.plan import Plan
from ..plan.work import Work, join_keys, join_repetitions

#: Query rows times heads of a section at least, where neighbours can be joined: enough to batch kernel calls.
SECTION_ROWS = 1 << 17


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel. `rows` are its query rows, counted from the start of their section.

    `first`: the rows have no partial yet, so that the result is copied and not merged.
    """

    work: Work
    rows: range
    first: bool


@dataclass(frozen=True, eq=False)
class Section:
    """A run of local query rows. Every work lies wholly inside or wholly outside, so that the run can be finished
    alone.

    `single`: no row has two partials. `filled`: some rows may be merged before they have a first partial, so that the
    section must start with out 0 and lse -inf.
    """

    rows: range
    single: bool
    filled: bool


@dataclass(frozen=True)
class VisitPart:
    """The kernel calls of one visit in one section. `last`: no later visit has calls in this section."""

    section: Section
    calls: tuple[KernelCall, ...]
    last: bool


@dataclass(frozen=True)
class MergePlan:
    """The parts of every visit, in the order of the visits, and the local rows that see no key."""

    visits: tuple[tuple[VisitPart, ...], ...]
    empty: tuple[range, ...]


def make_merge_plan(plan: Plan, rank: int, kernel: Kernel) -> MergePlan:
    """The merge plan of one rank with the calls that `kernel` makes. Cached by the plan."""
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
        #: How many partials each query row of the span has so far, by head.
        partials = np.zeros((plan.heads, len(span)), dtype=np.uint16)
        mixed = False  # some call covers rows with a partial and rows without
        for visit in range(len(visits)):
            calls, call_mixes = _mark_calls(by_visit[visit][index], kernel, partials, span.start)
            mixed |= call_mixes
            if calls:
                planned[visit].append((index, calls))
                last_visit[index] = visit
        sections.append(Section(span, bool(partials.max() <= 1), mixed or not partials.all()))
    rows = plan.layout_of("q").rows(rank)
    gaps = zip([0, *(span.stop for span in spans)], [*(span.start for span in spans), rows], strict=True)
    return MergePlan(
        tuple(
            tuple(VisitPart(sections[i], calls, last_visit[i] == visit) for i, calls in parts)
            for visit, parts in enumerate(planned)
        ),
        tuple(range(first, stop) for first, stop in gaps if first < stop),
    )


def _by_span(works: tuple[Work, ...], spans: list[range]) -> list[list[Work]]:
    """The works of one visit by the span that they lie in."""
    starts = np.array([span.start for span in spans])
    by_span: list[list[Work]] = [[] for _ in spans]
    for work in works:
        by_span[int(np.searchsorted(starts, work.q.start, "right")) - 1].append(work)
    return by_span


def _mark_calls(
    works: list[Work], kernel: Kernel, partials: np.ndarray, origin: int
) -> tuple[tuple[KernelCall, ...], bool]:
    """The kernel calls of works, counted in `partials`, and whether a call has rows with and rows without a partial."""
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
    """Runs of rows whose ends no work crosses. Adjacent runs are joined until they have `least` rows."""
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
