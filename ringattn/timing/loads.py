"""What ranks do and links carry in one pass, apart from when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ring import Phase, Ring

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
            total += phase.clocks * value

    def causes(self, seconds: float) -> tuple[float, dict[str, float]]:
        """Mean seconds of visits, and what makes the time longer than that, by cause; together they are `seconds`.

        Each cause is how much the busiest rank's time grows when it is added; what is left is waiting for messages.
        """
        done = self.compute.copy()
        mean = float(done.mean())
        longest = float(done.max())
        found = {"imbalance": longest - mean}
        for name, more in (("merge", self.merge), ("interference", self.interference), ("stalls", self.stalls)):
            done += more
            found[name], longest = float(done.max()) - longest, float(done.max())
        # Sums of the same numbers in another order differ by their rounding.
        found["wait"] = seconds - longest if seconds - longest > ROUNDING * seconds else 0.0
        return mean, found


@dataclass(frozen=True)
class Traffic:
    """Bytes of one pass: in all, on the link (one rank to another) that carries most, and the messages. Counted."""

    total: int
    busiest: int
    links: int
    messages: int


def survey(ring: Ring, copies: int = 1) -> tuple[Loads, Traffic]:
    """Loads of the ranks of a ring, one of all where they are alike, and the traffic of `copies` such rings."""
    alike = isinstance(ring.phases, tuple) and not ring.stalls and all(_plain(phase) for phase in ring.phases)
    loads = Loads.none(1 if alike else ring.ranks)
    carried: dict[int, np.ndarray] = {}
    messages = 0
    for phase in ring.phases() if callable(ring.phases) else ring.phases:
        loads.add(ring, phase)
        for lane in phase.lanes:
            sent = np.broadcast_to(np.asarray(lane.bytes, dtype=np.int64) * np.isfinite(lane.seconds), (ring.ranks,))
            messages += copies * phase.clocks * int(np.count_nonzero(sent))
            carried[lane.sign] = carried.get(lane.sign, 0) + phase.clocks * sent
    for stall in ring.stalls:
        loads.stalls[stall.rank] += stall.seconds
    every = np.concatenate(list(carried.values())) if carried else np.zeros(1, dtype=np.int64)
    return loads, Traffic(
        copies * int(every.sum()), int(every.max()), copies * int(np.count_nonzero(every)), messages
    )  # fmt: skip


def _plain(phase: Phase) -> bool:
    """Whether all ranks are busy alike in a phase."""
    values = (phase.compute, phase.merge, *(lane.seconds for lane in phase.lanes))
    return not any(isinstance(value, np.ndarray) for value in values)
