"""Solver E: visits whose times vary. Sampled runs of the ring, or of smaller rings whose time per step is extrapolated.

The time of a visit is its mean times a gamma variable of mean 1 (exponential where the standard deviation is the mean).
In a ring of K steps the slowest rank has waited for the worst path through the times of its neighbours: last-passage
percolation. Its time is K rate + b K^(1/3), whose second part is both the drift and the fluctuation (Johansson 2000), so
that T / K is a line in K^(-2/3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mean, stdev

import numpy as np

from ...errors import Unsupported
from ...progress import track
from .recurrence import Phase, Ring
from .stencil import dense

#: Runs per size, and the two-sided 95 % quantile of Student's t with REPEATS - 1 degrees of freedom.
REPEATS, STUDENT = 8, 2.365
#: Rings of up to this many ranks x steps are run as they are; of larger ones, uniform ones of these sizes stand in.
RUN, SIZES = 1 << 21, (128, 256, 512, 1024)


@dataclass(frozen=True)
class Sampled:
    """Mean time of runs with jitter, in seconds, the 95 % interval of that mean, and whether it is extrapolated."""

    seconds: float
    low: float
    high: float
    extrapolated: bool
    why: str

    def at_least(self, seconds: float) -> Sampled:
        """The same of a mean that cannot be below `seconds`."""
        mean_, low, high = (max(value, seconds) for value in (self.seconds, self.low, self.high))
        return replace(self, seconds=mean_, low=low, high=high)


def varied(ring: Ring, jitter: float, seed: int) -> Sampled:
    """The time of a ring whose visits vary by `jitter`, standard deviation over mean. Raises Unsupported."""
    source = np.random.default_rng(seed)
    steps = sum(phase.steps for phase in ring.phases) if isinstance(ring.phases, tuple) else None
    if steps is None or ring.ranks * steps <= RUN:
        return repeated(lambda: _run(ring, jitter, source), f"runs of the ring itself, seed {seed}")
    assert isinstance(ring.phases, tuple)
    values = [
        v for p in ring.phases for v in (p.compute, p.merge, *(x for lane in p.lanes for x in (lane.seconds, lane.gap)))
    ]
    if ring.stalls or any(isinstance(value, np.ndarray) for value in values):
        raise Unsupported(
            f"jitter on {ring.ranks:,} ranks x {steps:,} steps: more than {RUN:,} are extrapolated from smaller rings, "
            "which needs all ranks and links alike; try a machine with ranks_per_node=1 and no slow ranks, or fewer ranks"
        )
    # The longest phase, for as many steps as ranks; the others add as they are.
    main = max(ring.phases, key=lambda phase: phase.steps)
    found = []
    for _ in track(range(REPEATS), REPEATS, "runs with jitter"):
        times = [_run(replace(ring, ranks=n, phases=(replace(main, steps=n),)), jitter, source) / n for n in SIZES]
        slope, level = np.polyfit([n ** (-2 / 3) for n in SIZES], times, 1)
        found.append(steps * (float(level) + float(slope) * steps ** (-2 / 3)))
    return _summed(
        found, True, f"T / K = rate + b K^(-2/3) fitted to rings of {SIZES[0]} .. {SIZES[-1]} ranks, seed {seed}"
    )


def repeated(run: Callable[[], float], why: str) -> Sampled:
    """REPEATS runs."""
    return _summed([run() for _ in track(range(REPEATS), REPEATS, "runs with jitter")], False, why)


def factor(jitter: float, source: np.random.Generator, count: int) -> np.ndarray:
    """`count` gamma variables of mean 1 and standard deviation `jitter`."""
    shape = 1 / jitter**2
    return source.gamma(shape, 1 / shape, count)


def _summed(found: list[float], extrapolated: bool, why: str) -> Sampled:
    middle, around = mean(found), STUDENT * stdev(found) / len(found) ** 0.5
    return Sampled(
        middle, middle - around, middle + around, extrapolated, f"{len(found)} {why}" if not extrapolated else why
    )


def _run(ring: Ring, jitter: float, source: np.random.Generator) -> float:
    """Seconds of one run."""

    def phases() -> Iterator[Phase]:
        for phase in ring.phases() if callable(ring.phases) else ring.phases:
            for _ in range(phase.steps):
                yield replace(phase, steps=1, compute=phase.compute * factor(jitter, source, ring.ranks))

    return dense(replace(ring, phases=phases)).seconds
