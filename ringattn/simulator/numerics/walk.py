"""The messages of sampled ranks, in one walk over the owners of blocks: all rows that wait for a block share it.

Messages come from the schedule's route one by one, so that memory does not grow with the number of steps. A route
lists them in arcs that can be followed at the same time (`Route.arcs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count

import torch

from ...errors import Unsupported
from ...kernels.base import Kernel
from ...plan.plan import Plan
from ...plan.row_sets import WHOLE_BLOCK, AllRows, RowSet, RowSets
from ...plan.schedules import make_schedule
from ...plan.schedules.route import Edge, Route
from ...plan.work import Work
from ..progress import track
from .faults import Fault
from .source import RowSource

#: Messages after which cached answers of the demand are dropped: a billion tokens have too many answers.
REMEMBERED = 4096

#: The rows that share a work without a band, by (work, turn); rows count in the order of `Walk.homes`.
Calls = dict[tuple[Work, int], list[int]]


@dataclass
class SampledArc:
    """An arc of a sampled rank: the local indices of its rows, the number of the first row, and the next visit."""

    rank: int
    local: tuple[int, ...]
    first: int
    blocks: Iterator[tuple[int, RowSets]]
    next: tuple[int, RowSets] | None = None
    visits: int = 0


@dataclass(frozen=True)
class Block:
    """The rows of the block of `owner` that a visit computes with, as they arrived."""

    owner: int
    row_set: RowSet | AllRows
    k: torch.Tensor
    v: torch.Tensor


Compute = Callable[[Block, Calls], None]


@dataclass
class Walk:
    """All visits of some rows of some ranks."""

    plan: Plan
    source: RowSource
    #: Ranks, ascending, with the local indices of their rows.
    homes: Sequence[tuple[int, tuple[int, ...]]]
    fault: Fault | None = None
    streams: list[SampledArc] = field(default_factory=list)
    route: Route = field(init=False)
    #: Blocks that the plan of a sampled rank receives and that no plan of a rank sends.
    unsent: int = 0

    def __post_init__(self) -> None:
        self.route = get_route(self.plan)
        arcs = [self._arcs(rank) for rank, _ in self.homes]
        # Where arcs are the owners after and before a rank, an owner is met by the last arcs of the ranks above it,
        # then by the first arcs of those below.
        for arc in reversed(range(max(map(len, arcs)))):
            first = 0
            for (rank, local), mine in zip(self.homes, arcs, strict=True):
                if arc < len(mine):
                    self.streams.append(SampledArc(rank, local, first, mine[arc]))
                first += len(local)

    def run(self, compute: Compute) -> None:
        """Visit owner after owner, always the nearest owner that an arc waits for, until no arc waits."""
        size, at, hops = self.plan.ranks, 0, 0
        for one in reversed(self.streams):
            one.next = next(one.blocks, None)
        owners = iter(track(count(), size, "blocks"))
        while waiting := [one for one in self.streams if one.next is not None]:
            here = [one for one in waiting if one.next is not None and one.next[0] == at]
            if not here:
                at = min((one.next[0] for one in waiting if one.next is not None), key=partial(_apart, at, size))
                continue
            next(owners)
            groups: dict[tuple[tuple[int, int], RowSets], list[SampledArc]] = {}
            for one in here:
                assert one.next is not None
                came = (at, at) if self.fault is None else self.fault.delivered(one.rank, at, size)
                groups.setdefault((came, one.next[1]), []).append(one)
            for (came, row_sets), group in groups.items():
                seen = {rank for row_set in row_sets for rank in self._visit(at, came, row_set, group, compute)}
                for one in group:
                    one.visits += one.rank in seen
            for one in reversed(here):  # the farthest first: what is known of it holds for those that are nearer
                one.next = next(one.blocks, None)
            hops += len(here)
            if hops > REMEMBERED:
                hops = 0
                self.plan.demand.cache.clear()

    def _arcs(self, rank: int) -> list[Iterator[tuple[int, RowSets]]]:
        """For each arc the (owner, row sets) of the blocks that a rank has or receives; its own block comes first."""
        arcs = [map(self._arrive, arc) for arc in self.route.arcs(rank)]
        own: Iterator[tuple[int, RowSets]] = iter([(rank, WHOLE_BLOCK)])
        return [chain(own, *arcs[:1]), *arcs[1:]]

    def _arrive(self, edge: Edge) -> tuple[int, RowSets]:
        """(owner, row sets) of what arrives on an edge, which the plan of its source must send."""
        self.unsent += edge not in self.route.departures(edge.source, (edge.owner, edge.target))
        return edge.owner, self.route.carried(edge)

    def _visit(
        self, owner: int, came: tuple[int, int], row_set: RowSet | AllRows, group: list[SampledArc], compute: Compute
    ) -> set[int]:
        """Compute with one delivered block; returns the ranks with a row that saw a key of the block."""
        calls: Calls = {}
        seen: set[int] = set()
        for one in group:
            works = self.plan.demand.works(one.rank, owner, row_set)
            for work, turn, places in _lowered(works, one.local):
                seen.add(one.rank)
                rows = [one.first + place for place in places]
                while not set(rows).isdisjoint(calls.get((work, turn), ())):
                    turn += 1  # another arc of the rank brought the same keys
                calls.setdefault((work, turn), []).extend(rows)
        if not calls:
            return seen
        layout, source = self.plan.layout, self.source
        with source.shard(layout, came[0], row_set) as (k, v):
            if came[0] == came[1]:
                compute(Block(owner, row_set, k, v), calls)
                return seen
            with source.shard(layout, came[1], row_set) as (_, other):
                compute(Block(owner, row_set, k, other), calls)
        return seen


def get_route(plan: Plan) -> Route:
    """The route of a plan's keys and values. Raises Unsupported where the schedule has no route."""
    route = make_schedule(plan.schedule, plan.demand)
    if not isinstance(route, Route):
        raise Unsupported(
            f"schedule {plan.schedule} brings all blocks at once: there are no hops to follow one by one; try ring, "
            "direct or double_ring, or mode='all'"
        )
    return route


def _apart(a: int, ranks: int, b: int) -> int:
    """The distance between two ranks around a ring of `ranks`."""
    return min((a - b) % ranks, (b - a) % ranks)


def split_calls(kernel: Kernel, calls: Calls) -> Iterator[tuple[Work, slice | torch.Tensor]]:
    """Yield (call of the kernel, index of its rows) of all works; the rows of a call count from 0."""
    for (work, _), rows in calls.items():
        for call in kernel.split(Work(work.heads, work.kv, range(len(rows)), work.k)) if rows else ():
            index = _index_rows(tuple(rows[call.q.start : call.q.stop : call.q.step]))
            yield Work(call.heads, call.kv, range(len(call.q)), call.k), index


@lru_cache(maxsize=4096)
def _index_rows(rows: tuple[int, ...]) -> slice | torch.Tensor:
    """Rows as an index of a dimension: a slice where the rows are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1 and list(rows) == sorted(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device="cpu")


@lru_cache(maxsize=1024)
def _lowered(works: tuple[Work, ...], local: tuple[int, ...]) -> tuple[tuple[Work, int, tuple[int, ...]], ...]:
    """Works without a band for the rows `local`, each with the indices of the rows that share it.

    A row that sees the same keys in several branches has the work several times; a number tells these apart.
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
