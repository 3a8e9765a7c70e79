"""The forward of a band that hides something: pairs and rows of any ranks at any clocks, counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ..schedules.relay import Way
from ..sizes import ITEM_BYTES
from ..steps import Part
from .banded import Banded
from .edges import places
from .lanes import lane, scaled
from .rates import Faults, Rates
from .ring import Phase, Ring

#: Counts of this many ranks x clocks live as long as their plan.
REMEMBERED = 1 << 21


@dataclass(frozen=True)
class Counted:
    """The forward of a band that hides something: pairs and rows are counted in closed form."""

    rates: Rates
    faults: Faults
    band: Banded
    ways: tuple[Way, ...]

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(self.band.ranks)

    def ring(self, clocks: int) -> Ring:
        """The ring problem of so many clocks, counted clock by clock: once where that is little, else whenever it is
        asked for."""
        if self.band.ranks * clocks <= REMEMBERED:
            memory, key = self.rates.plan.memory, ("clocks", self.ways)
            if key not in memory:
                memory[key] = list(self._each(clocks))
            counted: Callable[[], Iterable[np.ndarray]] = lambda: memory[key]  # noqa: E731
        else:
            counted = lambda: self._each(clocks)  # noqa: E731
        return Ring(
            self.band.ranks,
            lambda: map(self.phase, counted()),
            self.rates.buffers,
            self.rates.gamma,
            stalls=self.faults.stalls,
        )

    def _each(self, clocks: int) -> Iterator[np.ndarray]:
        return (self.at(self.ranks, np.asarray(clock)) for clock in range(clocks))

    def at(self, ranks: np.ndarray, clocks: np.ndarray) -> np.ndarray:
        """Pairs of one head and visits of ranks at clocks, and for each way the rows that they send: int64 [2 + ways, ...]."""
        shape = np.broadcast_shapes(ranks.shape, clocks.shape)
        found = np.zeros((2 + len(self.ways), *shape), dtype=np.int64)
        for index, way in enumerate(self.ways or (Way(+1, 0),)):
            owners = (ranks - way.sign * clocks) % self.band.ranks
            # At clock 0 a rank visits its own block, whatever the ways.
            visiting = (clocks <= way.limit) & ((clocks > 0) | (index == 0))
            seen = self.band.seen(ranks, owners) * visiting
            found[0] += seen
            found[1] += seen > 0
            if self.ways:
                found[2 + index] = self.band.rows_beyond(owners, way.sign, clocks + 1, way.limit)
        return found

    def phase(self, counts: np.ndarray, ranks: np.ndarray | None = None) -> Phase:
        """One clock on the machine, of all ranks or of `ranks`, neighbours along the last axis. Without stalls."""
        faults = self.faults if ranks is None else self.faults.at(ranks)
        merge = scaled(self.rates.merge(self.band.rows), faults)
        sizes = [(way.sign, rows * self.row_bytes) for way, rows in zip(self.ways, counts[2:], strict=True)]
        lanes = tuple(lane(self.rates, faults, sign, size, sizes, ranks) for sign, size in sizes if size.any())
        return Phase(1, scaled(counts[0] * self.pair, faults), merge * counts[1], lanes)

    @property
    def pair(self) -> float:
        """Seconds of a pair that all heads see."""
        return self.band.heads * self.rates.pair

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a block on its way."""
        plan = self.rates.plan
        item = ITEM_BYTES[plan.part_dtype(Part("kv", 0))]
        return plan.batch * plan.kv_heads * (plan.head_dim + plan.value_dim) * item

    def reach(self) -> int:
        """Hops that the block makes that goes farthest: rows beyond a distance only shrink."""
        most = 0
        for way in self.ways:

            def reached(distance: int, way: Way = way) -> bool:
                ranks = places(self.band, [way], np.array([distance - 1]))
                owners = np.unique(ranks - way.sign * (distance - 1)) % self.band.ranks
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

    def hidden(self) -> tuple[Ring, int, str] | None:
        """The uniform ring with the same makespan, where one rank is at least as busy as any other, and as any message
        takes, at every clock: then no rank begins a clock later than that one, which waits for nobody. With its clocks,
        and what was compared.
        """
        if len(self.ways) > 1:
            return None
        sign = self.ways[0].sign if self.ways else 1
        memory = self.rates.plan.memory
        if "busiest" not in memory:
            memory["busiest"] = self._busiest(self.ways[0].limit if self.ways else 0, sign)
        rank, compared, runs = memory["busiest"]
        if rank is None:
            return None
        merge = self.rates.merge(self.band.rows)
        phases = tuple(Phase(count, pairs * self.rates.pair, merge * (pairs > 0)) for pairs, count in runs)
        ring = Ring(self.band.ranks, phases)
        if self.ways:
            busy = [ring.busy(phase) for phase in (phases if runs[-1][1] > 1 else phases[:-1])]
            if min(float(np.min(value)) for value in busy) < self._longest(sign):  # nothing moves at the last clock
                return None
        words = (
            f"{compared:,} pair counts: rank {rank} has the most at every clock, and a whole block takes no longer than any "
            "of its visits"
        )
        return ring, sum(count for _, count in runs), words

    def _longest(self, sign: int) -> float:
        """Seconds of the message of a whole block on the slowest link."""
        size = np.full(self.band.ranks, float(self.band.rows * self.row_bytes))
        return float(np.max(lane(self.rates, self.faults, sign, size, [(sign, size)]).seconds))

    def _busiest(self, limit: int, sign: int) -> tuple[int | None, int, list[tuple[int, int]]]:
        """A rank that has as many pairs as any at each clock up to `limit`, or None, how many counts were compared, and
        its pairs as (pairs, clocks) runs.

        A visit's chunks are apart by rank - owner, which has two values at a clock, before and after the turn of the
        ring, and, where a rank has two chunks, by 2 ranks - 1 - rank - owner, over which the most is taken.
        """
        band, ranks, clocks = self.band, self.band.ranks, np.arange(limit + 1)
        apart = sign * clocks
        found = []
        for distance in (apart, np.where(clocks > 0, apart - sign * ranks, apart)):
            pairs = band.area(distance)
            found.append(pairs if band.chunks == 1 else pairs + band.area(-distance))
        most, count = np.maximum(*found), 2 * len(clocks)
        if band.chunks == 2:
            across = np.arange(2 * ranks - 1) - (2 * ranks - 1)
            most = most + np.max(band.area(across) + band.area(-across))
            count += len(across)
        for rank in (ranks - 1, 0):
            pairs = band.pairs(np.full_like(clocks, rank), (rank - sign * clocks) % ranks)
            if (pairs >= most * band.heads).all():
                return rank, count, [(value, len(list(run))) for value, run in groupby(pairs.tolist())]
        return None, count, []
