"""The hops of sampled ranks, in one walk over the owners of blocks: who waits for a block shares it.

Hops come from the schedule's route one by one, so that a rank with hundreds of thousands of steps never has them all.
A route lists them in arcs that can be followed at the same time (`Route.arcs`); each arc gathers what it computes in
slots of its own, in the order of its hops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, count

import torch

from ..errors import Unsupported
from ..plan.plan import Plan
from ..plan.row_sets import WHOLE, RowSet, RowSets
from ..plan.schedules import planner
from ..plan.schedules.route import Route
from ..plan.work import Work
from ..progress import track
from .mutate import Mutation
from .source import RowSource, placed

#: Answers that a plan's demand remembers are dropped after so many hops: a billion tokens have too many.
REMEMBERED = 4096

Slots = slice | torch.Tensor
#: A work without a band, and the slots of the rows that share it.
Calls = dict[tuple[Work, int], list[int]]


@dataclass
class SampledArc:
    """An arc of a sampled rank: the local indices of the rank's rows, their first slot, and its next visit."""

    rank: int
    local: tuple[int, ...]
    slot: int
    blocks: Iterator[tuple[int, RowSets]]
    next: tuple[int, RowSets] | None = None
    visits: int = 0


@dataclass(frozen=True)
class Block:
    """What a visit is to: a cut of the block of `owner`, as it came."""

    owner: int
    cut: RowSet | None
    k: torch.Tensor
    v: torch.Tensor


Compute = Callable[[Block, Calls], None]


@dataclass
class Walk:
    """All visits of the rows of some ranks."""

    plan: Plan
    source: RowSource
    #: Ranks, ascending, with the local indices of their rows.
    homes: Sequence[tuple[int, tuple[int, ...]]]
    mutation: Mutation | None = None
    streams: list[SampledArc] = field(default_factory=list)
    #: Slots of each row, by the order of `homes`; those of the first arc first.
    slots: list[list[int]] = field(default_factory=list)
    route: Route = field(init=False)

    def __post_init__(self) -> None:
        self.route = get_route(self.plan)
        arcs = [self._arcs(rank) for rank, _ in self.homes]
        self.slots = [[] for _, local in self.homes for _ in local]
        slot = 0
        # Where arcs are the owners after and before a rank, those that meet at an owner have slots side by side: the
        # last arcs of the ranks above it, then the first ones of those below.
        for arc in reversed(range(max(map(len, arcs)))):
            place = 0
            for (rank, local), mine in zip(self.homes, arcs, strict=True):
                if arc < len(mine):
                    self.streams.append(SampledArc(rank, local, slot, mine[arc]))
                for i in range(len(local)):
                    if arc < len(mine):
                        self.slots[place + i].insert(0, slot + i)
                slot += len(local) if arc < len(mine) else 0
                place += len(local)

    @property
    def size(self) -> int:
        """Number of slots."""
        return sum(map(len, self.slots))

    def run(self, compute: Compute) -> None:
        """Visit owner after owner, the nearest one that a stream waits for first, until none waits."""
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
                came = (at, at) if self.mutation is None else self.mutation.delivered(one.rank, at, size)
                groups.setdefault((came, one.next[1]), []).append(one)
            for (came, cuts), group in groups.items():
                seen = {rank for cut in cuts for rank in self._visit(at, came, cut, group, compute)}
                for one in group:
                    one.visits += one.rank in seen
            for one in reversed(here):  # the farthest first: what is known of it holds for those that are nearer
                one.next = next(one.blocks, None)
            hops += len(here)
            if hops > REMEMBERED:
                hops = 0
                self.plan.demand.memory.clear()

    def _arcs(self, rank: int) -> list[Iterator[tuple[int, RowSets]]]:
        """(owner, cuts) of the blocks that a rank has or gets, arc by arc; its own is the first."""
        arcs = [((edge.owner, self.route.cuts(edge)) for edge in arc) for arc in self.route.arcs(rank)]
        own: Iterator[tuple[int, RowSets]] = iter([(rank, WHOLE)])
        found = [chain(own, *arcs[:1]), *arcs[1:]]
        m = self.mutation
        return [m.visits(blocks) for blocks in found] if m is not None and m.rank == rank else list(found)

    def _visit(
        self, owner: int, came: tuple[int, int], cut: RowSet | None, group: list[SampledArc], compute: Compute
    ) -> set[int]:
        """One delivered block; returns the ranks of whose rows some saw a key of it."""
        calls: Calls = {}
        seen: set[int] = set()
        for one in group:
            works = self.plan.demand.works(one.rank, owner, cut)
            for work, turn, places in _lowered(works, one.local):
                seen.add(one.rank)
                calls.setdefault((work, turn), []).extend(one.slot + place for place in places)
        if not calls:
            return seen
        layout, source = self.plan.layout, self.source
        if cut is not None and (len(cut.heads) < self.plan.kv_heads or len(cut.rows) > 1):
            keys, values = (source.block(layout, home, cut) for home in came)
            compute(Block(owner, cut, keys[0], values[1]), calls)
            return seen
        runs = [layout.shard(home) if cut is None else placed(layout, home, cut.rows[0]) for home in came]
        with source.shard(runs[0]) as (k, v):
            if runs[0] == runs[1]:
                compute(Block(owner, cut, k, v), calls)
                return seen
            with source.shard(runs[1]) as (_, other):
                compute(Block(owner, cut, k, other), calls)
        return seen


def get_route(plan: Plan) -> Route:
    """The route of a plan's keys and values. Raises Unsupported where there is none."""
    route = planner(plan.schedule, plan.demand)
    if not isinstance(route, Route):
        raise Unsupported(
            f"schedule {plan.schedule} brings all blocks at once: there are no hops to follow one by one; try ring, direct or "
            "double_ring, or mode='all'"
        )
    return route


def _apart(a: int, ranks: int, b: int) -> int:
    """Hops between two of `ranks` ranks around the ring."""
    return min((a - b) % ranks, (b - a) % ranks)


@lru_cache(maxsize=4096)
def placed_slots(slots: tuple[int, ...]) -> Slots:
    """Slots as an index of a dimension: a slice where they are a run."""
    if slots[-1] - slots[0] == len(slots) - 1 and list(slots) == sorted(slots):
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots, device="cpu")


@lru_cache(maxsize=1024)
def _lowered(works: tuple[Work, ...], local: tuple[int, ...]) -> tuple[tuple[Work, int, tuple[int, ...]], ...]:
    """Works without a band of the rows `local`, each with the numbers of those rows that share it.

    A row that sees the same keys in several branches has the work several times, told apart by a number.
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
