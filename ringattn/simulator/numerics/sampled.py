"""Executes sampled query rows over the whole sequence: every message of their ranks, but no rows of other ranks.

One walk over the block owners serves all rows: K/V of an owner are generated when a message delivers them, and shared
by the sampled ranks that wait for the same block. Messages come from the schedule's route one by one, so memory does
not grow with the number of steps; a route lists them in arcs that can be followed simultaneously (`Route.arcs`).
Ranks merge in the order of the walk, not of time. In fp64 this only changes rounding; `whole` keeps the order of a
real run.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, count, groupby
from operator import itemgetter

import numpy as np
import torch

from ...errors import InvalidInput, Unsupported
from ...kernels import get_kernel
from ...kernels.sums import merge_partial
from ...kernels.views import RowViews, select_inputs
from ...plan.plan import Plan
from ...plan.row_sets import WHOLE_BLOCK, AllRows, RowSet, RowSets
from ...plan.schedules import make_schedule
from ...plan.schedules.base import Edge, Route
from ...plan.steps import Part
from ...plan.work import Work
from ..progress import track
from .checkpoint import NOT_KEPT, Checkpoint
from .ledger import AuditingKernel, PairLedger, expect
from .oracle import exact_rows
from .result import NumericsReport
from .source import RowSource, check_seed

#: The largest accepted fp64 error; 262,144 merges drift by less than 1e-12.
TOLERANCE = 1e-11
#: Messages after which the demand's cache is cleared: for a billion tokens it would grow too large.
REMEMBERED = 4096

#: The rows that share a work without a band, by (work, turn); rows are numbered in the order of `_homes`.
Calls = dict[tuple[Work, int], list[int]]


def chosen_rows(plan: Plan, number: int, ranks: int | None = None, seed: int = 0) -> list[int]:
    """Choose `number` different query positions on at most `ranks` ranks (default: `number`); `seed` varies the choice.

    The first and the last position of the sequence are included if `ranks` allows it.
    """
    check_seed(seed)
    random = np.random.default_rng(seed)
    layout, firsts = plan.layout_of("q"), [*accumulate(map(len, plan.layout_of("q").domain), initial=0)]
    number = min(number, layout.tokens)
    ends = {run[end] for run, end in ((layout.domain[0], 0), (layout.domain[-1], -1))} if layout.tokens else set()
    most = min(number if ranks is None else max(ranks, 1), min(plan.ranks, layout.tokens))
    rows = ends if number > 1 and most >= len({*map(layout.owner, ends)}) else {*sorted(ends)[: min(number, 1)]}
    homes = {layout.owner(row) for row in rows}
    while len(rows) < number:
        index = int(random.integers(layout.tokens))
        run = bisect_right(firsts, index) - 1
        row = layout.domain[run][index - firsts[run]]
        if layout.owner(row) not in homes and len(homes) >= most:
            shard = layout.positions(sorted(homes)[int(random.integers(len(homes)))])
            row = int(shard[int(random.integers(len(shard)))])
            if all(layout.rows(h) <= sum(layout.owner(r) == h for r in rows) for h in homes):
                break  # these ranks have no rows left
        rows.add(row)
        homes.add(layout.owner(row))
    return sorted(rows)


def sample(plan: Plan, source: RowSource, *, rows: list[int], checkpoint: Checkpoint = NOT_KEPT) -> NumericsReport:
    """Execute all messages of the ranks that hold the query positions `rows`, check these rows, and return a report.

    The rows are compared with an exact computation, and the computed pairs with those of the pattern. Memory grows by
    24 bytes per rank of the plan. Raises InvalidInput if the plan is not fp64, Unsupported if it uses Ulysses.
    """
    check_plan(plan)
    get_route(plan)
    if plan.dtype != "float64":
        raise InvalidInput(f"dtype {plan.dtype}: sampled rows need fp64; make the plan with dtype='float64'")
    domain = plan.layout_of("q").domain
    if not rows or any(not any(row in run for run in domain) for row in rows) or len(set(rows)) != len(rows):
        positions = ", ".join(f"{run[0]} .. {run[-1]}" for run in domain[:8])
        raise InvalidInput(f"rows must be one or more distinct query positions in {positions}; got {rows[:8]}")
    begun = time.perf_counter()
    order, homes = _homes(plan, rows)
    report = NumericsReport(plan, "sample", ranks=len(homes), tolerance=TOLERANCE, rows=len(order))
    ledger, wanted = (PairLedger(np.array(order), plan.heads) for _ in range(2))
    for rank, local in homes:
        mine = [range(p, p + 1) for p in plan.layout_of("q").positions(rank)[list(local)].tolist()]
        report.visits_expected += len(expect(plan.pattern, plan.layout, mine, plan.heads, wanted))
    places = [range(row, row + 1) for row in order]
    q = torch.cat([source.rows("q", place) for place in places], 2)
    kernel = AuditingKernel(get_kernel("auto", q, q, q).single(), source, plan.layout, ledger)
    scale, factor = plan.head_dim**-0.5, plan.pattern.output_scale
    out = torch.zeros(1, plan.heads, len(order), plan.value_dim, dtype=q.dtype, device="cpu")
    lse = torch.full(out.shape[:3], -torch.inf, dtype=q.dtype, device="cpu")
    walk, finished, before = Walk(plan, source, homes), 0, 0.0
    if checkpoint.state:
        kept = checkpoint.state
        finished, before = kept["deliveries"], kept["seconds"]
        out, lse = (torch.tensor(kept[name], dtype=q.dtype, device="cpu") for name in ("out", "lse"))
        ledger.restore(kept["ledger"])
    for number, (block, calls) in enumerate(walk.visits(finished), finished):
        if checkpoint.due:
            seconds = before + time.perf_counter() - begun
            checkpoint.write({"deliveries": number, "seconds": seconds, "out": out.tolist(), "lse": lse.tolist(),
                              "ledger": ledger.counts()})  # fmt: skip
        for (work, _), numbers in calls.items():
            index = _index_rows(tuple(numbers))
            queries, totals = RowViews(q[:, :, index]), RowViews(out[:, :, index], lse[:, :, index])
            for call in kernel.split(replace(work, q=range(len(numbers)))):
                (x,), (y, z) = select_inputs(call, None, queries, block)
                merge_partial(totals, call, kernel.forward(x, y, z, call, scale), None, is_new=False)
            if isinstance(index, torch.Tensor):  # else these are views
                out[:, :, index], lse[:, :, index] = totals.tensors
    report.visits, report.unsent = sum(one.visits for one in walk.streams), walk.unsent
    truth = exact_rows(plan.pattern, source, places, scale)
    for i in range(len(order)):
        report.compare(out[0, :, i] * factor, lse[0, :, i], truth.out[:, i], truth.lse[:, i])
    report.add_ledger(ledger, wanted)
    report.seconds = before + time.perf_counter() - begun
    return report


def check_plan(plan: Plan) -> None:
    """Raise Unsupported if ranks exchange tokens for heads (Ulysses), or round what they send (`comm_dtype`)."""
    if plan.comm_dtype is not None:
        raise Unsupported(
            f"comm_dtype={plan.comm_dtype} would round the tags that encode positions; make the plan without it"
        )
    if plan.ulysses_size > 1:
        raise Unsupported(
            f"schedule {plan.schedule}: the numerics simulator does not execute the all-to-all of Ulysses; try the "
            f"schedule between its groups, {plan.ring_plan(0)[0].schedule}, or virtual_attention"
        )


def _homes(plan: Plan, rows: list[int]) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
    """(rows ordered by rank, [(rank, local indices of its rows), ...])."""
    layout = plan.layout_of("q")
    owned = ((layout.owner(row), row) for row in rows)
    placed = sorted((rank, int(np.flatnonzero(layout.positions(rank) == row)[0]), row) for rank, row in owned)
    homes = [(rank, tuple(local for _, local, _ in found)) for rank, found in groupby(placed, itemgetter(0))]
    return [row for _, _, row in placed], homes


@dataclass(eq=False)
class SampledArc:
    """How far a sampled rank has got along one sequence of the blocks that it receives.

    `local` are the local indices of its sampled rows, `first` the number of the first of them among all sampled rows,
    and `blocks` the (owner, row sets) still to come.
    """

    rank: int
    local: tuple[int, ...]
    first: int
    blocks: Iterator[tuple[int, RowSets]]
    visits: int = 0


class Walk:
    """Goes through all blocks that the sampled rows attend, and checks that each block was really sent.

    `homes` are (rank, local indices of its sampled rows), ascending.
    """

    def __init__(self, plan: Plan, source: RowSource, homes: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        self.plan, self.source, self.route = plan, source, get_route(plan)
        self.streams: list[SampledArc] = []
        #: Blocks that a sampled rank expects but no rank sends.
        self.unsent = 0
        arcs = [self._arcs(rank) for rank, _ in homes]
        # If arcs are the owners after and before a rank, the walk meets an owner first on the last arcs of the ranks
        # above it, then on the first arcs of those below.
        for arc in reversed(range(max(map(len, arcs)))):
            first = 0
            for (rank, local), mine in zip(homes, arcs, strict=True):
                if arc < len(mine):
                    self.streams.append(SampledArc(rank, local, first, mine[arc]))
                first += len(local)

    def visits(self, finished: int = 0) -> Iterator[tuple[RowViews, Calls]]:
        """Yield (keys and values, works) for each block that sampled rows attend, one owner after another.

        The next owner is always the nearest one from which a sampled rank still expects a block. The first `finished`
        items are skipped.
        """
        size, at, hops = self.plan.ranks, 0, 0
        coming = {one: next(one.blocks, None) for one in reversed(self.streams)}
        owners = iter(track(count(), size, "blocks"))
        while waiting := [(one, *block) for one in self.streams if (block := coming[one]) is not None]:
            here = [(one, row_sets) for one, owner, row_sets in waiting if owner == at]
            if not here:
                at = min((x for _, x, _ in waiting), key=lambda owner: min((at - owner) % size, (owner - at) % size))
                continue
            next(owners)
            groups: dict[RowSets, list[SampledArc]] = {}
            for one, row_sets in here:
                groups.setdefault(row_sets, []).append(one)
            for row_sets, group in groups.items():
                seen: set[int] = set()
                for row_set in row_sets:
                    calls = self._find_calls(at, row_set, group, seen)
                    if calls and finished:
                        finished -= 1
                    elif calls:
                        yield RowViews(*self.source.block(self.plan, Part("kv", at, row_set))), calls
                for one in group:
                    one.visits += one.rank in seen
            for one, _ in reversed(here):  # farthest first: its cached answers help the nearer ones
                coming[one] = next(one.blocks, None)
            hops += len(here)
            if hops > REMEMBERED:
                hops = 0
                self.plan.demand.cache.clear()

    def _arcs(self, rank: int) -> list[Iterator[tuple[int, RowSets]]]:
        """For each arc, the (owner, row sets) of the blocks that a rank has or receives; its own block comes first."""
        arcs = [map(self._arrive, arc) for arc in self.route.arcs(rank)]
        own: Iterator[tuple[int, RowSets]] = iter([(rank, WHOLE_BLOCK)])
        return [chain(own, *arcs[:1]), *arcs[1:]]

    def _arrive(self, edge: Edge) -> tuple[int, RowSets]:
        """(owner, row sets) of what arrives on an edge; counts it in `unsent` if its source does not send it."""
        self.unsent += not self.route.sends(edge)
        return edge.owner, self.route.carried(edge)

    def _find_calls(self, owner: int, row_set: RowSet | AllRows, group: list[SampledArc], seen: set[int]) -> Calls:
        """The works of a delivered block; adds to `seen` the ranks with a row that sees a key of the block."""
        calls: Calls = {}
        for one in group:
            works = self.plan.demand.works(one.rank, owner, row_set)
            for work, turn, places in _lowered(works, one.local):
                seen.add(one.rank)
                rows = [one.first + place for place in places]
                while not set(rows).isdisjoint(calls.get((work, turn), ())):
                    turn += 1  # another arc of the rank delivered the same keys
                calls.setdefault((work, turn), []).extend(rows)
        return calls


def get_route(plan: Plan) -> Route:
    """The `Route` on which a plan's keys and values travel.

    Raises Unsupported for a schedule without routes, and if queries travel (pass-Q).
    """
    if plan.forward_rotates == "q":
        raise Unsupported("sampled rows need pass-KV, but this plan is pass-Q; try rotate='kv', or whole ranks")
    route = make_schedule(plan.schedule, plan.demand)
    if not isinstance(route, Route):
        raise Unsupported(
            f"schedule {plan.schedule} delivers all blocks at once, so there are no hops to follow; try ring, "
            "direct or double_ring, or whole ranks, by mode='all' or ringattn verify whole=true"
        )
    return route


@lru_cache(maxsize=4096)
def _index_rows(rows: tuple[int, ...]) -> slice | torch.Tensor:
    """Rows as an index: a slice if they are consecutive, else a tensor."""
    if rows[-1] - rows[0] == len(rows) - 1 and list(rows) == sorted(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device="cpu")


@lru_cache(maxsize=1024)
def _lowered(works: tuple[Work, ...], local: tuple[int, ...]) -> tuple[tuple[Work, int, tuple[int, ...]], ...]:
    """(work without a band, turn, indices of the rows in `local` that share it) for the rows `local`.

    A row that sees the same keys in several branches has the same work several times, with different turns.
    """
    found: dict[tuple[Work, int], list[int]] = {}
    for work in works:
        for place, row in enumerate(local):
            if row not in work.q:
                continue
            i = work.q.index(row)
            low = 0 if work.hi is None else max(0, i - work.hi)
            high = work.keys if work.lo is None else min(work.keys, i - work.lo + 1)
            if low < high:
                part = work.narrow((i, i + 1), (low, high))
                assert part.dense
                one = Work(part.heads, part.kv, range(1), part.k)
                turn = next(n for n in count() if place not in found.get((one, n), ()))
                found.setdefault((one, turn), []).append(place)
    return tuple((work, turn, tuple(places)) for (work, turn), places in found.items())
