"""Pairs, rows and bytes of a band's pass, for any ranks at any steps, exact and in closed form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ....plan.schedules.ring import Direction
from ..rates import Faults, Rates
from ..solvers.recurrence import DirectMessages, Phase, Ring, Value
from .band import Band, BandTraffic, distinct, find_owner_breakpoints
from .messages import RANKS_AT_A_TIME, DirectCosts, NeighborCosts, find_owner_messages, scale_by_slow_ranks

#: Offsets of a rank and its neighbors.
AROUND = np.arange(-1, 2, dtype=np.int64)


@dataclass(frozen=True)
class BandCounts:
    """Counts the pairs, merged rows and sent bytes of each rank at each step of a pass, for a band that is not dense.

    `band` and `directions` describe the blocks that travel: with pass-Q, the band is transposed.
    """

    rates: Rates
    faults: Faults
    band: Band
    directions: tuple[Direction, ...]

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(self.band.ranks, dtype=np.int64)

    @cached_property
    def traffic(self) -> BandTraffic:
        return BandTraffic.of(self.rates.plan, self.rates.backward)

    @cached_property
    def _reaches(self) -> list[int]:
        """The most hops of any block, for each direction."""
        return self.rates.plan.cache.answer(
            ("reach", self.band, self.directions),
            lambda: [self._find_reach(direction) for direction in self.directions],
        )

    @property
    def reach(self) -> int:
        """The most hops of any block."""
        return max(self._reaches, default=0)

    @property
    def steps(self) -> int:
        """The number of steps in the pass.

        If gradient sums are sent directly to their owners, they take one step after all computation.
        """
        last_sums = self.traffic.direct_row_bytes > 0 and not self.traffic.to_owner and self.reach > 0
        return self.reach + 1 + last_sums

    @property
    def calls(self) -> int:
        """The largest number of calls that any rank's host starts: one per block computed, one per step without any."""
        return self.steps - self.reach + sum(self._reaches)

    @cached_property
    def owner_messages(self) -> DirectMessages:
        """The messages sent directly between owners and the last receivers of their rows, with `seconds` still 0."""
        return self.rates.plan.cache.answer(
            ("owner messages", self.band, self.directions, self.traffic),
            lambda: find_owner_messages(self.band, self.directions, self.traffic, self.reach),
        )

    @cached_property
    def by_sign(self) -> dict[int, DirectMessages]:
        """The direct messages to the next rank (1), to the previous rank (-1), and to others (0).

        Messages to neighbors are joined with the sender's other rows. With two ranks, each is the other's next rank.
        """
        sent, ranks = self.owner_messages, self.band.ranks
        distance = (sent.target - sent.source) % ranks
        signs = np.where(distance == 1, 1, np.where(distance == ranks - 1, -1, 0))
        return {sign: sent.select(signs == sign) for sign in (1, -1, 0)}

    @cached_property
    def signs(self) -> tuple[int, ...]:
        """Directions (+1, -1) in which ranks send to a neighbor."""
        direct = [sign for sign in (1, -1) if len(self.by_sign[sign])]
        return tuple(dict.fromkeys([*(self._message_sign(direction) for direction in self.directions), *direct]))

    @property
    def pair_seconds(self) -> float:
        """Seconds that one (query, key) pair takes in all heads together."""
        return self.band.heads * self.rates.pair

    def distance(self, steps: np.ndarray) -> np.ndarray:
        """How many ranks away the block is that a rank computes with, at each step."""
        return self.reach - steps if self.traffic.to_owner else steps

    def count(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """What `ranks` do at `steps`, int64 [2 + signs, ...]: pairs per head, merged query rows, and bytes sent.

        Bytes are those sent to the neighbor in each of the directions `signs`. Counts RANKS_AT_A_TIME ranks at a time.
        """
        steps = np.broadcast_to(steps, (len(ranks), *steps.shape[1:]))
        starts = range(0, max(len(ranks), 1), RANKS_AT_A_TIME)
        parts = [(ranks[i : i + RANKS_AT_A_TIME], steps[i : i + RANKS_AT_A_TIME]) for i in starts]
        counts = (np.concatenate([self._count_visits(*part), self._count_sent(*part)]) for part in parts)
        return np.concatenate([*counts], axis=1)

    def direct_breakpoints(self, first: int, last: int) -> np.ndarray:
        """Where direct messages to a neighbor change in size from rank to rank, at steps first .. last - 1.

        Each such place is an int64 number (step - first) * ranks + rank.
        """
        keys = self._neighbor_breakpoints
        low, high = np.searchsorted(keys, (first * self.band.ranks, last * self.band.ranks))
        return keys[low:high] - first * self.band.ranks

    def direct_costs(self, first: int, last: int) -> DirectCosts | None:
        """The direct messages of steps first .. last - 1 to ranks that are not neighbors, with their times.

        None if there are none.
        """
        sent = self.by_sign[0].between(first, last)
        if not len(sent):
            return None

        def neighbor_seconds(steps: np.ndarray, ranks: np.ndarray) -> np.ndarray:
            around = (ranks[:, None] + AROUND) % self.band.ranks
            sizes = [*zip(self.signs, self._count_sent(around, steps[:, None]), strict=True)]
            costs = NeighborCosts(self.rates, self.faults.at(around), sizes, around)
            return np.stack([np.broadcast_to(x, around.shape)[:, 1] for x in (*costs.sent, *costs.received)]).reshape(
                2, 2, -1
            )

        return DirectCosts.of(self.rates, self.faults, sent, neighbor_seconds)

    def make_phase(
        self, counted: np.ndarray, ranks: np.ndarray, steps: np.ndarray, direct_costs: DirectCosts | None
    ) -> Phase:
        """The times of one step as a `Phase`, without stalls; `counted` is what `count` returns for `ranks` at `steps`.

        `ranks` must be consecutive along the last axis. `direct_costs` are those of `steps`; they delay the messages to
        neighbors.
        """
        faults = self.faults.at(ranks)
        merge = scale_by_slow_ranks(self.rates.merge(self.band.heads), faults)
        direct_seconds: np.ndarray | None = None
        sent: Value = 0.0
        received: Value = 0.0
        if direct_costs is not None:
            direct_seconds, (sent, received) = direct_costs.at(ranks, steps)
        costs = NeighborCosts(self.rates, faults, [*zip(self.signs, counted[2:], strict=True)], ranks, direct_seconds)
        messages = tuple(costs.messages(sign) for sign, size in costs.sizes.items() if np.any(size))
        compute = scale_by_slow_ranks(counted[0] * self.pair_seconds, faults)
        return Phase(1, compute, merge * counted[1], messages, longest_direct=(sent, received))

    @property
    def ring(self) -> Ring:
        """The `Ring` of all ranks, with no phases yet."""
        return Ring(self.band.ranks, gamma=self.rates.gamma, stalls=self.faults.stalls)

    def each_phase(self) -> Iterator[Phase]:
        """Yield the phase of each step."""
        for step in range(self.steps):
            costs = self.direct_costs(step, step + 1)
            where = self.ranks, np.asarray(step)
            phase = self.make_phase(self.count(*where), *where, costs)
            yield phase if costs is None else replace(phase, direct=costs.messages.between(step, step + 1))

    def _message_sign(self, direction: Direction) -> int:
        """The sign of the hops of messages, to the owner or from it; with two ranks, each is the other's next: 1."""
        return 1 if self.band.ranks == 2 else -direction.sign if self.traffic.to_owner else direction.sign

    @cached_property
    def _neighbor_messages(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Owner messages to neighbors by direction: (keys step * ranks + sender, ascending; bytes)."""
        neighbors = ((sign, self.by_sign[sign]) for sign in self.signs)
        return {s: (sent.step * self.band.ranks + sent.source, sent.bytes) for s, sent in neighbors if len(sent)}

    @cached_property
    def _neighbor_breakpoints(self) -> np.ndarray:
        """Keys step * ranks + rank, ascending, at which the bytes of owner messages to a neighbor change."""
        points = [np.zeros(0, dtype=np.int64)]
        for keys, size in self._neighbor_messages.values():
            begins = np.append(True, (np.diff(keys) != 1) | (np.diff(size) != 0))
            points += [keys[begins], keys[np.append(begins[1:], True)] + 1]
        return distinct(np.concatenate(points))

    def _count_visits(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Pairs of one head, and merged query rows: int64 [2, ...]."""
        counted = np.zeros((2, *np.broadcast_shapes(ranks.shape, steps.shape)), dtype=np.int64)
        distance = self.distance(steps)
        for index, direction in enumerate(self.directions or (Direction(+1, 0),)):
            # At distance 0 a rank visits its own block once, not once per direction.
            visiting = (distance <= direction.limit) & ((distance > 0) | (index == 0))
            owner = (ranks - direction.sign * distance) % self.band.ranks
            counted[0] += self.band.pairs_of_head(ranks, owner) * visiting
            merged = visiting & self.rates.merges(distance == 0)
            if self.rates.machine.merge is not None and merged.any():
                # pass-KV: queries of the rank see keys of the owner; pass-Q: the other way round.
                passes_q = self.rates.passes_q
                band = self.band.transposed if passes_q else self.band
                counted[1] += merged * band.rows_seeing(*((owner, ranks) if passes_q else (ranks, owner)))
        return counted

    def _count_sent(self, ranks: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Bytes sent to a neighbor in each of the directions `signs`: int64 [signs, ...]."""
        sent_bytes = np.zeros((len(self.signs), *np.broadcast_shapes(ranks.shape, steps.shape)), dtype=np.int64)
        distance = self.distance(steps)
        for direction in self.directions:
            sent = sent_bytes[self.signs.index(self._message_sign(direction))]
            for moving in self.traffic.moving:
                hop = distance - moving.lag
                owner = (ranks - direction.sign * (hop + self.traffic.to_owner)) % self.band.ranks
                rows = self.band.rows_beyond(owner, direction.sign, hop + 1, direction.limit)
                sent += rows * (hop >= moving.lag) * moving.row_bytes
        for sign, (keys, size) in self._neighbor_messages.items():
            sender_keys = steps * self.band.ranks + ranks
            place = np.minimum(np.searchsorted(keys, sender_keys), len(keys) - 1)
            sent_bytes[self.signs.index(sign)] += size[place] * (keys[place] == sender_keys)
        return sent_bytes

    def _find_reach(self, direction: Direction) -> int:
        """The most hops of any block, by bisection: the needed rows decrease with the distance."""

        def is_beyond(distance: int) -> bool:
            owners = distinct(find_owner_breakpoints(self.band, direction, np.array([distance - 1], dtype=np.int64)))
            return not self.band.rows_beyond(owners, direction.sign, distance, direction.limit).any()

        return bisect_left(range(1, direction.limit + 1), True, key=is_beyond)
