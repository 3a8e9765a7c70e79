"""A pass of a band that hides something: pairs and rows of any ranks at any steps, counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from ...plan.schedules.relay import Way
from ..rates import Faults, Rates
from ..solvers.recurrence import Phase, Ring, Value
from .banded import Banded
from .breakpoints import owners
from .direct_costs import DirectCosts
from .last_receivers import PART, LastReceivers
from .neighbor_messages import NeighborMessages, scaled
from .traffic import BandTraffic

#: Counts of this many ranks x steps live as long as their plan.
REMEMBERED = 1 << 21


@dataclass(frozen=True)
class Counted:
    """A pass of a band that hides something: pairs and rows are counted in closed form.

    `band` and `ways` are those of the blocks that travel: where queries do, the band is transposed.
    """

    rates: Rates
    faults: Faults
    band: Banded
    ways: tuple[Way, ...]

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(self.band.ranks)

    @cached_property
    def course(self) -> BandTraffic:
        """What travels."""
        return BandTraffic.of(self.rates.plan, self.rates.backward)

    @cached_property
    def reach(self) -> int:
        """Hops that the block makes that goes farthest."""
        return self.rates.plan.cache.answer(
            ("Counted.reach", self.band, self.ways), lambda: max((self._reach(way) for way in self.ways), default=0)
        )

    @property
    def steps(self) -> int:
        """Steps of the pass: sums that go home straight do so after the last visit."""
        homeward = self.course.straight > 0 and not self.course.back and self.reach > 0
        return self.reach + 1 + homeward

    @cached_property
    def straight(self) -> LastReceivers:
        """What goes straight between owners and the ranks where rows stop."""
        return self.rates.plan.cache.answer(
            ("Counted.straight", self.band, self.ways, self.course),
            lambda: LastReceivers.of(self.band, self.ways, self.course, self.reach),
        )

    @cached_property
    def across(self) -> LastReceivers:
        """What of that goes between ranks that are no neighbours."""
        return self.straight.some(~self.straight.beside)

    @cached_property
    def signs(self) -> tuple[int, ...]:
        """Directions in which ranks send to a neighbour."""
        beside = [sign for sign in (1, -1) if len(self.straight.keys(sign > 0)[0])]
        return tuple(dict.fromkeys([*(self._sign(way) for way in self.ways), *beside]))

    def _sign(self, way: Way) -> int:
        """The direction of messages along a way. Of two ranks each is the next one of the other."""
        return 1 if self.band.ranks == 2 else -way.sign if self.course.back else way.sign

    @cached_property
    def _beside(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """By direction, what goes straight to a neighbour."""
        found = {sign: self.straight.keys(sign > 0) for sign in self.signs}
        return {sign: keys for sign, keys in found.items() if len(keys[0])}

    @cached_property
    def _turns(self) -> np.ndarray:
        """step * ranks + rank where runs of ranks begin that send as many bytes straight to a neighbour; ascending."""
        found = [np.zeros(0, dtype=np.int64)]
        for keys, size in self._beside.values():
            begins = np.append(True, (np.diff(keys) != 1) | (np.diff(size) != 0))
            found += [keys[begins], keys[np.append(begins[1:], True)] + 1]
        return np.unique(np.concatenate(found))

    def turns(self, first: int, last: int) -> np.ndarray:
        """Those of steps first .. last - 1, counted from step `first`."""
        low, high = np.searchsorted(self._turns, (first * self.band.ranks, last * self.band.ranks))
        return self._turns[low:high] - first * self.band.ranks

    def ring(self) -> Ring:
        """The ring problem, counted step by step: once where that is little, else whenever it is asked for."""
        if self.band.ranks * self.steps <= REMEMBERED:
            steps = self.rates.plan.cache.answer(
                ("Counted.steps", self.band, self.ways, self.course), lambda: list(self._each())
            )
            counted: Callable[[], Iterable[np.ndarray]] = lambda: steps  # noqa: E731
        else:
            counted = self._each

        def phases() -> Iterator[Phase]:
            for step, counts in enumerate(counted()):
                crossing = self.crossing(step, step + 1)
                phase = self.phase(counts, crossing=crossing, steps=np.asarray(step))
                yield phase if crossing is None else replace(phase, chords=crossing.chords.inside(step, step + 1))

        return Ring(self.band.ranks, phases, self.rates.buffers, self.rates.gamma, stalls=self.faults.stalls)

    def _each(self) -> Iterator[np.ndarray]:
        return (self.at(self.ranks, np.asarray(step)) for step in range(self.steps))

    def away(self, steps: np.ndarray) -> np.ndarray:
        """The distance of owners of the blocks that are visited at steps."""
        return self.reach - steps if self.course.back else steps

    def at(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Pairs of one head and query rows that are merged of ranks at steps, and for each of `signs` the bytes that they
        send to that neighbour: int64 [2 + signs, ...]."""
        return np.concatenate([self._visited(ranks, steps), self._sent(ranks, steps)])

    def _visited(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Pairs of one head and query rows that are merged, int64 [2, ...]."""
        found = np.zeros((2, *np.broadcast_shapes(ranks.shape, steps.shape)), dtype=np.int64)
        away = self.away(steps)
        for index, way in enumerate(self.ways or (Way(+1, 0),)):
            # At distance 0 a rank visits its own block, whatever the ways.
            visiting = (away <= way.limit) & ((away > 0) | (index == 0))
            owner = (ranks - way.sign * away) % self.band.ranks
            found[0] += self.band.seen(ranks, owner) * visiting
            merged = visiting & self.rates.merges(away == 0)
            if self.rates.machine.merge is not None and merged.any():
                # Blocks of keys are visited by queries of the rank, blocks of queries by keys of it.
                turned = self.rates.turned
                band = self.band.transposed if turned else self.band
                found[1] += merged * band.rows_seeing(*((owner, ranks) if turned else (ranks, owner)))
        return found

    def _sent(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Bytes that ranks send to a neighbour, for each of `signs`: int64 [signs, ...]."""
        found = np.zeros((len(self.signs), *np.broadcast_shapes(ranks.shape, steps.shape)), dtype=np.int64)
        away = self.away(steps)
        for way in self.ways:
            sent = found[self.signs.index(self._sign(way))]
            for cargo in self.course.cargo:
                hop = away - cargo.lag
                owner = (ranks - way.sign * (hop + self.course.back)) % self.band.ranks
                rows = self.band.rows_beyond(owner, way.sign, hop + 1, way.limit)
                sent += rows * (hop >= cargo.lag) * cargo.row_bytes
        for sign, (keys, size) in self._beside.items():
            wanted = steps * self.band.ranks + ranks
            place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found[self.signs.index(sign)] += size[place] * (keys[place] == wanted)
        return found

    def many(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The same of many ranks, part by part."""
        steps = np.broadcast_to(steps, (len(ranks), *steps.shape[1:]))
        parts = range(0, max(len(ranks), 1), PART)
        return np.concatenate([self.at(ranks[i : i + PART], steps[i : i + PART]) for i in parts], axis=1)

    def moving(self, sent: np.ndarray, ranks: np.ndarray | None, beside: np.ndarray | None) -> NeighborMessages:
        """The messages to neighbours of one step on the machine, of bytes by `signs`."""
        faults = self.faults if ranks is None else self.faults.at(ranks)
        return NeighborMessages(self.rates, faults, [*zip(self.signs, sent, strict=True)], ranks, beside)

    def phase(
        self,
        counts: np.ndarray,
        ranks: np.ndarray | None = None,
        crossing: DirectCosts | None = None,
        steps: np.ndarray | None = None,
    ) -> Phase:
        """One step on the machine, of all ranks or of `ranks`, neighbours along the last axis, with the chords that
        `crossing` has at `steps` in what their messages take. Without stalls."""
        faults = self.faults if ranks is None else self.faults.at(ranks)
        merge = scaled(self.rates.merge(self.band.heads), faults)
        beside: np.ndarray | None = None
        longest: Value = 0.0
        if crossing is not None and steps is not None:
            beside, longest = crossing.at(self.ranks if ranks is None else ranks, steps)
        moving = self.moving(counts[2:], ranks, beside)
        lanes = tuple(moving.lane(sign) for sign, size in moving.sizes.items() if np.any(size))
        return Phase(1, scaled(counts[0] * self.pair, faults), merge * counts[1], lanes, longest=longest)

    def crossing(self, first: int, last: int) -> DirectCosts | None:
        """The chords of steps first .. last - 1 on the machine; None where there are none."""
        found = self.across.between(first, last)
        if not len(found.step):
            return None
        none = np.zeros((2, 2, 1, 1))

        def lanes(ranks: np.ndarray, steps: np.ndarray) -> NeighborMessages:
            return self.moving(self._sent(ranks, steps), ranks, none)

        return DirectCosts.of(self.rates, self.faults, found, lanes)

    @property
    def pair(self) -> float:
        """Seconds of a pair that all heads see."""
        return self.band.heads * self.rates.pair

    def _reach(self, way: Way) -> int:
        """Hops of the block that goes farthest along a way: rows beyond a distance only shrink."""

        def reached(distance: int) -> bool:
            some = np.unique(owners(self.band, way, np.array([distance - 1])))
            return bool(self.band.rows_beyond(some, way.sign, distance, way.limit).any())

        low, high = 0, 1
        while high <= way.limit and reached(high):
            low, high = high, 2 * high
        high = min(high, way.limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if reached(middle) else (low, middle)
        return low

    def hidden(self) -> tuple[Ring, int, str] | None:
        """The uniform ring with the same makespan, where one rank is at least as busy as any other, and as any message
        takes, at every step: then no rank begins a step later than that one, which waits for nobody. With its steps,
        and what was compared.
        """
        if len(self.ways) > 1:
            return None
        sign = self.ways[0].sign if self.ways else 1
        rank, compared, runs = self.rates.plan.cache.answer(
            ("Counted.busiest", self.rates.machine.merge is None),
            lambda: self._busiest(self.ways[0].limit if self.ways else 0, sign),
        )
        if rank is None:
            return None
        merge = self.rates.merge(self.band.rows * self.band.heads)
        # The first visit is to the own block.
        phases = tuple(
            Phase(count, pairs * self.rates.pair, merge * (index > 0 and pairs > 0))
            for index, (pairs, count) in enumerate(runs)
        )
        ring = Ring(self.band.ranks, phases)
        if self.ways:
            busy = [ring.busy(phase) for phase in (phases if runs[-1][1] > 1 else phases[:-1])]
            if min(float(np.min(value)) for value in busy) < self._longest(sign):  # nothing moves at the last step
                return None
        words = (
            f"{compared:,} pair counts: rank {rank} has the most at every step, and a whole block takes no longer than any "
            "of its visits"
        )
        return ring, sum(count for _, count in runs), words

    def _longest(self, sign: int) -> float:
        """Seconds of the message of a whole block on the slowest link."""
        block = self.band.rows * sum(cargo.row_bytes for cargo in self.course.cargo)
        size = np.full(self.band.ranks, float(block))
        return float(np.max(NeighborMessages(self.rates, self.faults, [(sign, size)]).lane(sign).seconds))

    def _busiest(self, limit: int, sign: int) -> tuple[int | None, int, list[tuple[int, int]]]:
        """A rank that has as many pairs as any at each step up to `limit`, and merges all its rows where any rank merges,
        or None, how many counts were compared, and its pairs as (pairs, steps) runs, the first step by itself.

        A visit's chunks are apart by rank - owner, which has two values at a step, before and after the turn of the
        ring, and, where a rank has two chunks, by 2 ranks - 1 - rank - owner, over which the most is taken.
        """
        band, ranks, steps = self.band, self.band.ranks, np.arange(limit + 1)
        apart = sign * steps
        found = []
        for distance in (apart, np.where(steps > 0, apart - sign * ranks, apart)):
            pairs = band.area(distance)
            found.append(pairs if band.chunks == 1 else pairs + band.area(-distance))
        most, count = np.maximum(*found), 2 * len(steps)
        if band.chunks == 2:
            across = np.arange(2 * ranks - 1) - (2 * ranks - 1)
            most = most + np.max(band.area(across) + band.area(-across))
            count += len(across)
        for rank in (ranks - 1, 0):
            visits = np.full_like(steps, rank), (rank - sign * steps) % ranks
            pairs = band.pairs(*visits)
            merged = self.rates.machine.merge is None or (band.rows_seeing(*visits) == band.rows)[pairs > 0].all()
            if (pairs >= most * band.heads).all() and merged:
                runs = [(value, len(list(run))) for value, run in groupby(pairs[1:].tolist())]
                return rank, count, [(int(pairs[0]), 1), *runs]
        return None, count, []
