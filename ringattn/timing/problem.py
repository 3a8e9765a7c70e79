"""From a plan on a machine to a ring problem, where the plan is a ring whose numbers are known of all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from ..schedules.relay import Way
from ..schedules.ring import Ring as RingSchedule
from ..sizes import ITEM_BYTES
from ..steps import Kind, Part
from .banded import Banded, banded
from .rates import Faults, Rates
from .ring import NEVER, Lane, Phase, Ring, Value, shifted

if TYPE_CHECKING:
    from ..plan import Plan

#: Counts of this many ranks x clocks live as long as their plan.
REMEMBERED = 1 << 21
#: Bytes that one message of a clock carries: those of each rank, or of all.
Bytes = np.ndarray | float


@dataclass(frozen=True)
class Problem:
    """A ring problem, its clocks, and what of the plan was compared to see it.

    Where `copies` > 1, the plan's ranks are so many copies of those of `ring` one after another. `bound`: only the
    makespan is that of the plan.
    """

    ring: Ring
    clocks: int
    compared: str
    copies: int = 1
    bound: bool = False

    def whole(self) -> Ring:
        """The ring of all ranks."""
        return self.ring if self.copies == 1 else repeated(self.ring, self.copies)


def problem(rates: Rates, faults: Faults, most: int) -> Problem | str:
    """The ring problem of a plan, or why it is none that is known of all ranks at once.

    `most` is the largest number of ranks x clocks whose numbers are computed one by one.
    """
    plan = rates.plan
    if plan.schedule != "ring":
        return f"the schedule {plan.schedule} is no ring"
    band = banded(plan)
    if band is None:
        return "the mask is not one band over equal chunks of contiguous or zigzag ranks"
    ways = tuple(RingSchedule(plan.demand).ways)
    if rates.machine.shared and rates.machine.inner > 1 and len(ways) > 1:
        return "both directions share the way out of a node"
    if rates.machine.shared and 1 < rates.machine.inner < plan.ranks and rates.backward and not band.dense:
        return "messages of the backward share the way out of a node"
    if band.dense and len(ways) <= 1:
        return _dense(rates, faults, band, ways)
    if rates.backward:
        return "the backward of a mask that is not dense sends blocks beyond neighbours"
    counted = _Counted(rates, faults, band, ways)
    if not faults and not rates.gamma and rates.buffers == 1:
        hidden = counted.hidden()
        if hidden is not None:
            return hidden
    few = counted.reach(np.array([0, plan.ranks // 2, plan.ranks - 1]))
    if plan.ranks * (few + 1) <= most and "reach" not in plan.memory:
        plan.memory["reach"] = counted.reach(counted.ranks)
    clocks = plan.memory.get("reach", few) + 1
    if plan.ranks * clocks > most:
        return (
            f"the numbers of {plan.ranks:,} ranks x {clocks:,} clocks or more differ, of which up to {most:,} are counted "
            "(more only where a rank is busy for as long as any other and as any message at every clock)"
        )
    return Problem(
        counted.ring(clocks), clocks, f"{band_words(band)}; {clocks:,} clocks x {plan.ranks:,} ranks were counted"
    )


def band_words(band: Banded) -> str:
    """What was compared of a band, for people."""
    low, high = (("-inf", "inf")[i] if x is None else f"{x:,}" for i, x in enumerate((band.lo, band.hi)))
    mask = "all pairs" if band.dense else f"{low} <= q - k <= {high}"
    return (
        f"the mask's tiles: one, {mask}, over all {band.heads} heads; {band.rows:,} tokens on each of {band.ranks:,} "
        "ranks (integers of the whole plan, no sample)"
    )


def _lane(
    rates: Rates,
    faults: Faults,
    sign: int,
    size: Bytes,
    batch: Sequence[tuple[int, Bytes]],
    distinct: int | None = None,
) -> Lane:
    """The messages of a lane, of all ranks or of the first `distinct`.

    Those of one rank and kind of link in a clock follow each other, so that each ends with the last of `batch`, all lanes
    of the clock, at its sender or its receiver.
    """
    near = {s: rates.near(s, distinct) for s, _ in batch}
    moved, gaps = {}, {}
    for s, other in batch:
        seconds, gap = rates.message(other, near[s])
        empty = np.equal(other, 0)
        factor = 1.0 if faults.slow_links is None else faults.slow_links
        moved[s], gaps[s] = np.where(empty, 0.0, seconds * factor), np.where(empty, 0.0, gap * factor)
    out = moved[sign]
    into = out  # by sender: what its receiver gets in all
    for s, _ in batch:
        if s != sign:
            out = out + np.where(near[s] == near[sign], moved[s], 0.0)
            came = (shifted(shifted(np.asarray(x), s), -sign) for x in (moved[s], near[s]))
            other, alike = came
            into = into + np.where(alike == near[sign], other, 0.0)
    seconds = np.where(np.equal(size, 0), NEVER, np.maximum(out, into))
    return Lane(sign, _few(seconds), _few(gaps[sign]), size)


def repeated(ring: Ring, copies: int) -> Ring:
    """The ring whose ranks are those of `ring`, so many times over."""
    assert isinstance(ring.phases, tuple) and not ring.stalls

    def wide(value: Value) -> Value:
        return np.tile(value, copies) if isinstance(value, np.ndarray) else value

    phases = tuple(
        replace(
            phase,
            compute=wide(phase.compute),
            merge=wide(phase.merge),
            lanes=tuple(Lane(x.sign, wide(x.seconds), wide(x.gap), wide(x.bytes)) for x in phase.lanes),
        )
        for phase in ring.phases
    )
    return replace(ring, ranks=ring.ranks * copies, phases=phases)


def _few(value: np.ndarray) -> Value:
    """One number where all are equal."""
    value = np.atleast_1d(value)
    return float(value[0]) if bool((value == value[0]).all()) else value


def _times(seconds: Value, faults: Faults) -> Value:
    return seconds if faults.slow is None else seconds * faults.slow


def _dense(rates: Rates, faults: Faults, band: Banded, ways: tuple[Way, ...]) -> Problem:
    """Everybody sees everything: all visits and all blocks are alike."""
    plan, ranks = rates.plan, rates.plan.ranks
    inner = min(rates.machine.inner, ranks)
    distinct = inner if not faults and ranks % inner == 0 else ranks
    pairs = band.rows**2 * band.heads
    compute = _times(pairs * rates.pair, faults)
    merge = _times(rates.merge(band.rows), faults)
    sign, runs = (ways[0].sign if ways else 1), [(ranks, 0.0)]
    if not rates.backward:
        runs = [(ranks - 1, float(_bytes(plan, "kv"))), (1, 0.0)]
    elif ranks > 1 and plan.rotates == "keys":
        sign = -sign
        # Clocks ranks - 1 .. 0: the block goes back until its owner's neighbour has it, dK and dV until the owner.
        block, sums = float(_bytes(plan, "kv")), float(_bytes(plan, "grad"))
        runs = [(1, block if ranks > 2 else 0.0), (ranks - 3, block + sums), (min(2, ranks - 1), sums)]
    elif ranks > 1:
        sign = RingSchedule(plan.transposed).ways[0].sign
        # Clocks 0 .. ranks: dQ begins a clock after the queries, and goes home after the last visit.
        block, sums = float(_bytes(plan, "q") + _bytes(plan, "row")), float(_bytes(plan, "dq"))
        last = sums if ranks > 2 else 0.0
        runs = [(min(2, ranks - 1), block), (ranks - 3, block + sums), (1, last), (1, sums)]
    phases = []
    clock = 0
    for length, size in runs:
        if length < 1:
            continue
        lanes = (_lane(rates, faults, sign, size, [(sign, size)], distinct),) if size else ()
        visiting = max(0, min(length, ranks - clock))
        if visiting:
            phases.append(Phase(visiting, compute, merge, lanes))
        if length > visiting:
            phases.append(Phase(length - visiting, 0.0, 0.0, lanes))
        clock += length
    ring = Ring(distinct, tuple(phases), rates.buffers, rates.gamma, stalls=faults.stalls)
    words = f"{band_words(band)}, so that all visits and all blocks are equal"
    return Problem(ring, sum(phase.clocks for phase in phases), words, ranks // distinct)


def _bytes(plan: Plan, kind: Kind) -> int:
    return plan.part_bytes(Part(kind, 0))


@dataclass(frozen=True)
class Counts:
    """One clock of all ranks: pairs and visits, int64 [ranks], and by direction the bytes sent, float64 [ranks]."""

    pairs: np.ndarray
    visits: np.ndarray
    sizes: list[tuple[int, np.ndarray]]


@dataclass(frozen=True)
class _Counted:
    """The forward of a band that hides something: pairs and rows are counted for all ranks, clock by clock."""

    rates: Rates
    faults: Faults
    band: Banded
    ways: tuple[Way, ...]

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(self.band.ranks)

    def ring(self, clocks: int) -> Ring:
        """The ring problem of so many clocks, counted once where that is little, else whenever it is asked for."""
        if self.band.ranks * clocks <= REMEMBERED:
            memory = self.rates.plan.memory
            if "clocks" not in memory:
                memory["clocks"] = list(self.counts())
            counted: Callable[[], Iterable[Counts]] = lambda: memory["clocks"]  # noqa: E731
        else:
            counted = self.counts
        return Ring(
            self.band.ranks,
            lambda: map(self.phase, counted()),
            self.rates.buffers,
            self.rates.gamma,
            stalls=self.faults.stalls,
        )

    def counts(self) -> Iterator[Counts]:
        """The pairs of each rank at each clock, until there are no messages, and the bytes that it sends each way."""
        clock, moving = 0, True
        while moving:
            pairs, visits = np.zeros((2, self.band.ranks), dtype=np.int64)
            # At clock 0 a rank visits its own block, whatever the ways.
            for sign in {way.sign for way in self.ways if clock <= way.limit} if clock else {1}:
                seen = self.band.pairs(self.ranks, (self.ranks - sign * clock) % self.band.ranks)
                pairs += seen
                visits += seen > 0
            sizes = [(way.sign, self._sent(way, clock)) for way in self.ways]
            moving = any(size.any() for _, size in sizes)
            yield Counts(pairs, visits, sizes)
            clock += 1

    def phase(self, counts: Counts) -> Phase:
        """One clock on the machine."""
        merge = _times(self.rates.merge(self.band.rows), self.faults)
        lanes = tuple(
            _lane(self.rates, self.faults, sign, size, counts.sizes) for sign, size in counts.sizes if size.any()
        )
        return Phase(1, _times(counts.pairs * self.rates.pair, self.faults), merge * counts.visits, lanes)

    def _sent(self, way: Way, clock: int) -> np.ndarray:
        """Bytes that each rank sends along a way at a clock, float64 [ranks]."""
        if clock >= way.limit:
            return np.zeros(self.band.ranks)
        owners = (self.ranks - way.sign * clock) % self.band.ranks
        rows = self.band.rows_beyond(owners, way.sign, clock + 1, way.limit)
        return rows * self._row_bytes()

    def _row_bytes(self) -> float:
        plan = self.rates.plan
        item = ITEM_BYTES[plan.part_dtype(Part("kv", 0))]
        return float(plan.batch * plan.kv_heads * (plan.head_dim + plan.value_dim) * item)

    def reach(self, owners: np.ndarray) -> int:
        """Hops that the one of these owners' blocks makes that goes farthest: rows beyond a distance only shrink."""
        most = 0
        for way in self.ways:

            def reached(distance: int, way: Way = way) -> bool:
                return bool(self.band.rows_beyond(owners, way.sign, distance, way.limit).any())

            low, high = 0, 1
            while high <= way.limit and reached(high):
                low, high = high, 2 * high
            high = min(high, way.limit + 1)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if reached(middle) else (low, middle)
            most = max(most, low)
        return most

    def hidden(self) -> Problem | None:
        """The uniform ring with the same makespan, where one rank is at least as busy as any other, and as any message
        takes, at every clock: then no rank begins a clock later than that one, which waits for nobody.
        """
        if len(self.ways) > 1:
            return None
        band, last = self.band, self.band.ranks - 1
        limit = self.ways[0].limit if self.ways else 0
        sign = self.ways[0].sign if self.ways else 1
        clocks = np.arange(limit + 1)
        most, compared = self._busiest(clocks, sign)
        message = self._longest(sign) if limit else 0.0
        for rank in (last, 0):
            pairs = band.pairs(np.full_like(clocks, rank), (rank - sign * clocks) % band.ranks)
            busy = pairs * self.rates.pair + self.rates.merge(band.rows) * (pairs > 0)
            if (pairs >= most).all() and (busy[:-1] >= message).all():
                alike = [(value, len(list(run))) for value, run in groupby(pairs.tolist())]
                phases = tuple(
                    Phase(count, value * self.rates.pair, self.rates.merge(band.rows) * (value > 0))
                    for value, count in alike
                )
                words = (
                    f"{band_words(band)}; {compared} pair counts: rank {rank} has the most at every clock, and a whole "
                    "block takes no longer than any of its visits"
                )
                return Problem(Ring(band.ranks, phases), len(clocks), words, bound=True)
        return None

    def _longest(self, sign: int) -> float:
        """Seconds of the message of a whole block on the slowest link."""
        size = np.full(self.band.ranks, self.band.rows * self._row_bytes())
        return float(np.max(_lane(self.rates, self.faults, sign, size, [(sign, size)]).seconds))

    def _busiest(self, clocks: np.ndarray, sign: int) -> tuple[np.ndarray, str]:
        """The most pairs that any rank computes at each clock, and how many counts were compared.

        A visit's chunks are apart by rank - owner, which has two values at a clock, before and after the turn of the
        ring, and, where a rank has two chunks, by 2 ranks - 1 - rank - owner, over which the most is taken.
        """
        band, ranks = self.band, self.band.ranks
        apart = sign * clocks
        turned = apart - sign * ranks
        found, count = [], 2 * len(clocks)
        for distance in (apart, np.where(clocks > 0, turned, apart)):
            pairs = band._area(distance)
            found.append(pairs if band.chunks == 1 else pairs + band._area(-distance))
        most = np.maximum(*found)
        if band.chunks == 2:
            across = np.arange(2 * ranks - 1) - (2 * ranks - 1)
            most = most + np.max(band._area(across) + band._area(-across))
            count += len(across)
        return most * band.heads, f"{count:,}"
