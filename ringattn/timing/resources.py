"""What ranks do and links carry in one pass, apart from when."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .solvers.recurrence import Phase, Ring

#: Relative difference of two sums that are the same.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Loads:
    """Seconds by rank, float64 [ranks]: of visits, of merging, of interference, of stalls."""

    compute: np.ndarray
    merge: np.ndarray
    interference: np.ndarray
    stalls: np.ndarray

    @classmethod
    def none(cls, ranks: int) -> Loads:
        """Nothing yet."""
        return cls(*(np.zeros(ranks) for _ in range(4)))

    def add(self, ring: Ring, phase: Phase) -> None:
        """What ranks do in a phase. Stalls stand apart."""
        for total, value in (
            (self.compute, phase.compute),
            (self.merge, phase.merge),
            (self.interference, ring.busy(phase) - phase.merge - phase.compute),
        ):
            total += phase.steps * value

    def causes(self, seconds: float) -> tuple[float, dict[str, float]]:
        """Mean seconds of visits, and what makes the time longer than that, by cause; together they are `seconds`.

        Each cause is how much the busiest rank's time grows when it is added; what is left is waiting for messages.
        """
        done = self.compute.copy()
        mean = float(done.mean())
        longest = float(done.max())
        # Sums of the same numbers in another order differ by their rounding.
        found = {"imbalance": longest - mean if longest - mean > ROUNDING * longest else 0.0}
        for name, more in (("merge", self.merge), ("interference", self.interference), ("stalls", self.stalls)):
            done += more
            found[name], longest = float(done.max()) - longest, float(done.max())
        found["wait"] = seconds - longest if seconds - longest > ROUNDING * seconds else 0.0
        return mean, found


@dataclass(frozen=True)
class Traffic:
    """Bytes of one pass: in all, on the link (one rank to another) that carries most, and the messages. Counted."""

    total: int
    busiest: int
    links: int
    messages: int

    @classmethod
    def of(cls, carried: np.ndarray, messages: int, straight: np.ndarray) -> Traffic:
        """That of links between neighbours, which carry so many bytes each in so many messages, and of the bytes of
        messages between other ranks, which are one per link."""
        every = np.concatenate([carried[carried > 0], straight])
        # Sums of all ranks may be larger than int64.
        total = sum(every.tolist())
        return cls(total, int(every.max(initial=0)), len(every), messages + len(straight))


def survey(ring: Ring, copies: int = 1) -> tuple[Loads, Traffic]:
    """Loads of the ranks of a ring, one of all where they are alike, and the traffic of `copies` such rings."""
    alike = isinstance(ring.phases, tuple) and not ring.stalls and all(_plain(phase) for phase in ring.phases)
    loads = Loads.none(1 if alike else ring.ranks)
    carried: dict[int, np.ndarray] = {}
    straight: list[np.ndarray] = []
    messages = 0
    for phase in ring.phases() if callable(ring.phases) else ring.phases:
        loads.add(ring, phase)
        for lane in phase.messages:
            sent = np.broadcast_to(np.asarray(lane.bytes, dtype=np.int64) * np.isfinite(lane.seconds), (ring.ranks,))
            messages += copies * phase.steps * int(np.count_nonzero(sent))
            carried[lane.sign] = carried.get(lane.sign, 0) + phase.steps * sent
        straight += [] if phase.direct is None else [phase.direct.bytes]
    for stall in ring.stalls:
        loads.stalls[stall.rank] += stall.seconds
    neighbours = np.concatenate([*carried.values(), np.zeros(0, dtype=np.int64)])
    found = Traffic.of(neighbours, messages, np.concatenate([*straight, np.zeros(0, dtype=np.int64)]))
    return loads, replace(found, total=copies * found.total, links=copies * found.links)


def _plain(phase: Phase) -> bool:
    """Whether all ranks are busy alike in a phase."""
    values = (phase.compute, phase.merge, *(lane.seconds for lane in phase.messages))
    return not any(isinstance(value, np.ndarray) for value in values)
