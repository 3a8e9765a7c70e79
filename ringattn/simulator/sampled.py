"""Some query rows, exactly, over the whole sequence: every hop of their ranks is executed, other ranks' rows are not.

The hops come from the schedule's route one by one, so that a rank with hundreds of thousands of steps never has them
all. K/V of an owner are made when a hop brings them and shared by the sampled ranks that wait for the same block: ranks
merge in the order in which their route lists arrivals, the latest first, not in that of time. In fp64 that changes
rounding only; `whole` keeps the order of a real run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count

import numpy as np
import torch

from ..cut import WHOLE, Cut, Cuts
from ..errors import InvalidInput, Unsupported
from ..kernels import get_kernel
from ..kernels.base import Kernel, forward
from ..plan import Plan
from ..pool import memory_pool
from ..rows import Inputs
from ..schedules import planner
from ..schedules.allgather import AllGather
from ..schedules.route import Route
from ..softmax import merge_
from ..work import Work
from .ledger import Book, Witness, expect
from .mutate import Mutation, tampered
from .oracle import exact_row
from .result import NumericsReport
from .source import Source, placed

#: fp64 errors above this are faults: 262,144 merges drift by less than 1e-12.
TOLERANCE = 1e-11
#: Answers that a plan's demand remembers are dropped after so many hops: a billion tokens have too many.
REMEMBERED = 4096

Slots = slice | torch.Tensor


def chosen_rows(plan: Plan, number: int, ranks: int | None = None, seed: int = 0) -> list[int]:
    """`number` distinct query positions, the first and the last of the sequence among them, on at most `ranks` ranks
    (default: as many as there are rows)."""
    random = np.random.default_rng(seed)
    number = min(number, plan.tokens)
    homes = {plan.layout.owner(0), plan.layout.owner(plan.tokens - 1)} if plan.tokens else set()
    most = min(number if ranks is None else max(ranks, 1), min(plan.ranks, plan.tokens))
    rows = {0, plan.tokens - 1} if number > 1 and most >= len(homes) else {0} if number else set()
    homes = {plan.layout.owner(row) for row in rows}
    while len(rows) < number:
        row = int(random.integers(plan.tokens))
        home = plan.layout.owner(row)
        if home not in homes and len(homes) >= most:
            shard = plan.layout.positions(sorted(homes)[int(random.integers(len(homes)))])
            row = int(shard[int(random.integers(len(shard)))])
            if all(plan.layout.rows(h) <= sum(plan.layout.owner(r) == h for r in rows) for h in homes):
                break  # these ranks have no row left
        rows.add(row)
        homes.add(plan.layout.owner(row))
    return sorted(rows)


@dataclass
class _Rank:
    """A sampled rank: its rows' local indices, their first slot, and its next visit."""

    rank: int
    local: tuple[int, ...]
    slot: int
    stream: Iterator[tuple[int, Cuts]]
    next: tuple[int, Cuts] | None = None
    visits: int = 0


@dataclass
class _Sweep:
    """The sampled rows and what they have seen so far."""

    plan: Plan
    source: Source
    kernel: Kernel
    scale: float
    mutation: Mutation | None
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    inputs: Inputs = field(default_factory=lambda: Inputs(memory_pool("cpu")))

    def run(self, ranks: list[_Rank]) -> None:
        """Visit owner after owner, the nearest one that a rank waits for first, until no rank waits."""
        size, at, hops = self.plan.ranks, ranks[0].rank, 0
        for one in ranks:
            one.next = next(one.stream, None)
        while waiting := [one for one in ranks if one.next is not None]:
            wanted = sorted({one.next[0] for one in waiting if one.next is not None})
            if at not in wanted:
                at = min(wanted, key=partial(_apart, at, size))
            here = [one for one in waiting if one.next is not None and one.next[0] == at]
            groups: dict[tuple[tuple[int, int], Cuts], list[_Rank]] = {}
            for one in here:
                assert one.next is not None
                came = (at, at) if self.mutation is None else self.mutation.delivered(one.rank, at, size)
                groups.setdefault((came, one.next[1]), []).append(one)
            for (came, cuts), group in groups.items():
                seen = {rank for cut in cuts for rank in self._visit(at, came, cut, group)}
                for one in group:
                    one.visits += one.rank in seen
            for one in here:
                one.next = next(one.stream, None)
            hops += len(here)
            if hops > REMEMBERED:
                hops = 0
                self.plan.demand.memory.clear()
        self.inputs.close()

    def _visit(self, owner: int, came: tuple[int, int], cut: Cut | None, group: list[_Rank]) -> set[int]:
        """One delivered block; returns the ranks of whose rows some saw a key of it."""
        calls: dict[tuple[Work, int], list[int]] = {}
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
            self._compute(calls, keys[0], values[1])
            return seen
        runs = [layout.shard(home) if cut is None else placed(layout, home, cut.rows[0]) for home in came]
        with source.shard(runs[0]) as (k, v):
            if runs[0] == runs[1]:
                self._compute(calls, k, v)
                return seen
            with source.shard(runs[1]) as (_, v):
                self._compute(calls, k, v)
        return seen

    def _compute(self, calls: dict[tuple[Work, int], list[int]], k: torch.Tensor, v: torch.Tensor) -> None:
        for (work, _), slots in calls.items():
            place = _slots(tuple(slots))
            some = Work(work.heads, work.kv, range(len(slots)), work.k)
            heads = slice(work.heads.start, work.heads.stop, work.heads.step)
            for call in self.kernel.split(some):
                rows = slice(call.q.start, call.q.stop, call.q.step)
                index = place[rows] if isinstance(place, torch.Tensor) else _slots(tuple(slots[rows]))
                x, y, z = self.inputs.of(call, slice(0, 1), (self.q[:, :, place],), (k, v))
                part, part_lse = forward(self.kernel, x, y, z, call, self.scale, clean=False)
                total, lse = self.out[:, heads, index], self.lse[:, heads, index]
                merge_(total, lse, part, part_lse)
                if isinstance(index, torch.Tensor):  # else these are views
                    self.out[:, heads, index], self.lse[:, heads, index] = total, lse


def _apart(a: int, ranks: int, b: int) -> int:
    """Hops between two of `ranks` ranks around the ring."""
    return min((a - b) % ranks, (b - a) % ranks)


@lru_cache(maxsize=4096)
def _slots(slots: tuple[int, ...]) -> Slots:
    if slots[-1] - slots[0] == len(slots) - 1 and list(slots) == sorted(slots):
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots)


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


def sample(
    plan: Plan,
    source: Source,
    *,
    rows: list[int],
    kernel: str = "auto",
    scale: float | None = None,
    mutation: Mutation | None = None,
) -> NumericsReport:
    """Execute every hop of the ranks of query positions `rows` for these rows, and compare them with `exact_row`.

    Memory does not depend on the number of ranks, but for 24 bytes of each that the ledger's expectation takes. The
    plan is one of fp64 without teams, forward only. Raises InvalidInput or Unsupported.
    """
    check_plan(plan)
    _route(plan)
    if plan.dtype != "float64":
        raise InvalidInput(
            f"dtype {plan.dtype}: sampled rows are exact in fp64 only; make the plan with dtype='float64'"
        )
    if not rows or any(not 0 <= row < plan.tokens for row in rows) or len(set(rows)) != len(rows):
        raise InvalidInput(
            f"rows must be distinct query positions 0 .. {plan.tokens - 1}, at least one; got {rows[:8]}"
        )
    if mutation is not None:
        mutation.check(plan, backward=False)
    begun = time.perf_counter()
    source.live = source.peak = 0
    true, plan = plan, plan if mutation is None else tampered(plan, mutation)
    factor = plan.head_dim**-0.5 if scale is None else scale
    order, homes = _homes(plan, rows)
    book = Book(np.array(order), plan.heads)
    q = torch.cat([source.rows("q", range(row, row + 1)) for row in order], 2)
    inner = get_kernel(kernel, q, q, q)
    witness = Witness(inner, source, plan.layout, book)
    out = torch.zeros(1, plan.heads, len(order), plan.value_dim, dtype=q.dtype)
    sweep = _Sweep(
        plan, source, witness, factor, mutation, q, out, torch.full(out.shape[:3], -torch.inf, dtype=q.dtype)
    )
    ranks, slot = [], 0
    for rank, local in homes:
        stream = _visits(plan, rank)
        if mutation is not None and mutation.rank == rank:
            stream = mutation.visits(stream)
        ranks.append(_Rank(rank, local, slot, stream))
        slot += len(local)
    sweep.run(ranks)
    wanted = Book(np.array(order), plan.heads)
    expected = 0
    for rank, local in homes:
        met = [expect(true.pattern, true.layout, range(p, p + 1), true.heads, wanted)
               for p in true.layout.positions(rank)[list(local)].tolist()]  # fmt: skip
        expected += len(np.unique(np.concatenate(met)))
    error, lse_error = _errors(true, source, order, factor, out * plan.pattern.output_scale, sweep.lse)
    return NumericsReport(
        plan=true, mode="sample", ranks=len(homes), rows=len(order), visits=sum(one.visits for one in ranks),
        visits_expected=expected, pairs=int(book.pairs.sum()), pairs_expected=int(wanted.pairs.sum()),
        wrong=book.wrong(wanted), wrong_gradients=None, error=error, lse_error=lse_error, gradient_error=None,
        tolerance=TOLERANCE, seconds=time.perf_counter() - begun, calls=book.calls, live=source.peak,
    )  # fmt: skip


def check_plan(plan: Plan) -> None:
    """Raise Unsupported where a plan's ranks exchange heads, or round what they send."""
    if plan.wire is not None:
        raise Unsupported(f"wire_dtype={plan.wire} would round the tags that tell positions; make the plan without it")
    if plan.team > 1:
        raise Unsupported(
            f"schedule {plan.schedule}: teams exchange tokens for heads, which the numerics simulator does not execute; "
            f"try the schedule between the teams, {plan.member(0)[0].schedule}, or virtual_attention"
        )


def _homes(plan: Plan, rows: list[int]) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
    """The rows in the order of their ranks, and for each rank the local indices of its rows."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        rank = plan.layout.owner(row)
        local = int(np.flatnonzero(plan.layout.positions(rank) == row)[0])
        by_rank.setdefault(rank, []).append((local, row))
    homes = [(rank, sorted(found)) for rank, found in sorted(by_rank.items())]
    order = [row for _, found in homes for _, row in found]
    return order, [(rank, tuple(local for local, _ in found)) for rank, found in homes]


def _route(plan: Plan) -> Route:
    route = planner(plan.schedule, plan.demand)
    if isinstance(route, AllGather):
        raise Unsupported(
            "schedule allgather brings all blocks at once: there are no hops to follow one by one; try ring, direct or "
            "double_ring, or mode='all'"
        )
    return route


def _visits(plan: Plan, rank: int) -> Iterator[tuple[int, Cuts]]:
    """(owner, cuts) of the blocks that a rank has or gets: its own, then arrivals as the route lists them."""
    route = _route(plan)
    yield rank, WHOLE
    for edge in route.arrivals(rank):
        yield edge.owner, route.cuts(edge)


def _errors(
    plan: Plan, source: Source, order: list[int], scale: float, out: torch.Tensor, lse: torch.Tensor
) -> tuple[float, float]:
    worst = [0.0, 0.0]
    for i, row in enumerate(order):
        truth = exact_row(plan.pattern, source, row, scale)
        for place, (found, exact) in enumerate(((out[0, :, i], truth.out), (lse[0, :, i], truth.lse))):
            worst[place] = max(worst[place], gap(found.numpy(), exact))
    return worst[0], worst[1]


def gap(found: np.ndarray, exact: np.ndarray) -> float:
    """Largest error over the largest entry of the truth, or over 1; infinite where something is NaN, or -inf in one."""
    seen = np.isfinite(exact)
    if not np.array_equal(np.isfinite(found), seen):
        return float("inf")
    if not seen.any():
        return 0.0
    return float(np.abs(found[seen] - exact[seen]).max() / max(1.0, np.abs(exact[seen]).max()))
