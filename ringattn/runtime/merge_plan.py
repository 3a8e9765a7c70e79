"""What a rank's forward does to its output rows, worked out before it runs: which call copies, which merges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..kernels.base import Kernel
from ..plan.plan import Plan
from ..plan.work import Work, join_keys, join_repetitions

#: Query rows times heads that a section holds at least, where it can be chosen: enough for calls to be batched.
SECTION_ROWS = 1 << 17


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel. `first`: its rows have no partial yet, so that the result is copied, not merged."""

    work: Work
    first: bool


@dataclass(frozen=True)
class Section:
    """A run of local rows that no work crosses the ends of, so that it can be finished by itself.

    `single`: no row has two partials; `filled`: rows without a partial must read 0 and -inf when others are merged.
    """

    rows: range
    single: bool
    filled: bool


@dataclass(frozen=True)
class VisitPart:
    """The part of a visit in one section; `last`: no later visit touches it."""

    section: Section
    pieces: tuple[KernelCall, ...]
    last: bool


@dataclass(frozen=True)
class MergePlan:
    """The portions of every visit, in the order of the visits, and the rows that see no key at all."""

    visits: tuple[tuple[VisitPart, ...], ...]
    empty: tuple[range, ...]


def hides(visit: tuple[VisitPart, ...]) -> bool:
    """Whether some call of a visit has a band, so that a key hidden from some rows is seen by others."""
    return any(not piece.work.dense for portion in visit for piece in portion.pieces)


def make_script(plan: Plan, rank: int, kernel: Kernel) -> MergePlan:
    """The (cached) script of one rank."""
    return plan.cache.answer((make_script, rank, kernel.name), lambda: _write(plan, rank, kernel))


def _write(plan: Plan, rank: int, kernel: Kernel) -> MergePlan:
    demand = plan.demand
    visits = [
        demand.works(rank, part.owner, part.row_set) for step in plan.for_rank(rank).forward for part in step.visits
    ]
    spans = list(_spans([work for works in visits for work in works], SECTION_ROWS // plan.heads))
    starts = np.array([span.start for span in spans])
    parts: list[list[list[Work]]] = [[[] for _ in spans] for _ in visits]
    for visit, works in enumerate(visits):
        for work in works:
            parts[visit][int(np.searchsorted(starts, work.q.start, "right")) - 1].append(work)
    drafts: list[list[tuple[int, list[KernelCall]]]] = [[] for _ in visits]
    sections, last = [], {}
    for index, span in enumerate(spans):
        seen = np.zeros((plan.heads, len(span)), dtype=np.uint16)
        mixed = False
        for visit in range(len(visits)):
            pieces = []
            for work in join_repetitions(join_keys(parts[visit][index])):
                for call in kernel.split(work):
                    marks = _marks(seen, call, span.start)
                    first = not marks.any()
                    mixed |= not first and not marks.all()
                    marks += 1
                    pieces.append(KernelCall(call, first))
            if pieces:
                drafts[visit].append((index, pieces))
                last[index] = visit
        sections.append(Section(span, bool(seen.max() <= 1), mixed or not seen.all()))
    return MergePlan(
        tuple(
            tuple(VisitPart(sections[i], tuple(pieces), last[i] == visit) for i, pieces in draft)
            for visit, draft in enumerate(drafts)
        ),
        tuple(_gaps(spans, plan.layout.rows(rank))),
    )


def _spans(works: list[Work], least: int) -> Iterator[range]:
    """Runs of rows that no work crosses the ends of; neighbours are joined up to `least` rows."""
    start = stop = None
    for rows in sorted((work.rows for work in works), key=lambda r: r.start):
        if (
            start is not None
            and stop is not None
            and rows.start >= stop
            and (rows.start != stop or stop - start >= least)
        ):
            yield range(start, stop)
            start = stop = None
        start = rows.start if start is None else start
        stop = rows.stop if stop is None else max(stop, rows.stop)
    if start is not None and stop is not None:
        yield range(start, stop)


def _gaps(spans: list[range], rows: int) -> Iterator[range]:
    first = 0
    for span in spans:
        if span.start > first:
            yield range(first, span.start)
        first = span.stop
    if first < rows:
        yield range(first, rows)


def _marks(seen: np.ndarray, work: Work, origin: int) -> np.ndarray:
    """The view of `seen` [H, rows] at the rows of a work: [repeat, heads, rows]."""
    heads, q = work.heads, work.q
    one = seen[heads.start : heads.stop : heads.step, q.start - origin : q.stop - origin : q.step]
    return np.lib.stride_tricks.as_strided(
        one, (work.repeat, *one.shape), (work.q_shift * seen.strides[1], *one.strides)
    )
