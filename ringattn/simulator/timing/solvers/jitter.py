"""Visits with varying times: samples runs of the ring, or of smaller rings whose time per step is extrapolated.

The time of a visit is its mean times a gamma variable of mean 1 (exponential if the standard deviation equals the
mean). In a ring of K steps, the slowest rank has waited for the worst path through the times of its neighbors:
last-passage percolation. The time is T = K rate + b K^(1/3), whose second term describes both drift and fluctuation
(Johansson 2000), so T / K is linear in K^(-2/3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import mean, stdev

import numpy as np

from ....errors import InvalidInput, Unsupported
from ...progress import track
from .recurrence import Phase, Ring
from .stencil import solve_stencil

#: Runs per ring, and the two-sided 95 % quantile of Student's t with REPEATS - 1 degrees of freedom.
REPEATS, STUDENT = 8, 2.365
#: The most ranks x steps of a ring that is run itself; the ranks of the uniform rings that represent a larger one.
MOST_RUN, SIZES = 1 << 21, (128, 256, 512, 1024)


@dataclass(frozen=True)
class SampledTime:
    """Mean seconds of runs with jitter, and the 95 % interval (`low`, `high`) of that mean.

    `extrapolated` is True if smaller rings were run; `why` describes the runs for the report.
    """

    seconds: float
    low: float
    high: float
    extrapolated: bool
    why: str


def check_seed(seed: object) -> None:
    """Raise InvalidInput unless `seed` is an integer >= 0."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InvalidInput(f"seed={seed!r}: expected an integer >= 0; try seed=0")


def sample_ring(ring: Ring, jitter: float, seed: int) -> SampledTime:
    """The time of a ring whose visits vary by `jitter` (standard deviation / mean).

    Raises Unsupported for rings that are too large to run and not uniform enough to extrapolate.
    """
    generator = np.random.default_rng(seed)
    steps = sum(phase.steps for phase in ring.phases) if isinstance(ring.phases, tuple) else None
    if steps is None or ring.ranks * steps <= MOST_RUN:
        return sample_runs(
            lambda: _run_once(ring, jitter, generator), f"{REPEATS} runs of the ring itself, seed {seed}"
        )
    assert isinstance(ring.phases, tuple)
    if ring.stalls or any(phase.arrays for phase in ring.phases):
        raise Unsupported(
            f"jitter on {ring.ranks:,} ranks x {steps:,} steps: above {MOST_RUN:,}, times are extrapolated from "
            "smaller rings, for which all ranks and links must be equal; try a machine with ranks_per_node=1 and no "
            "slow ranks, or fewer ranks"
        )
    # The longest phase, for as many steps as ranks, represents all steps.
    longest = max(ring.phases, key=lambda phase: phase.steps)

    def extrapolate() -> float:
        per_step = [
            _run_once(replace(ring, ranks=n, phases=(replace(longest, steps=n),)), jitter, generator) / n for n in SIZES
        ]
        slope, level = np.polyfit([n ** (-2 / 3) for n in SIZES], per_step, 1)
        return steps * (float(level) + float(slope) * steps ** (-2 / 3))

    why = f"T / K = rate + b K^(-2/3) fitted to rings of {SIZES[0]} .. {SIZES[-1]} ranks, seed {seed}"
    return sample_runs(extrapolate, why, extrapolated=True)


def sample_runs(run: Callable[[], float], why: str, *, extrapolated: bool = False) -> SampledTime:
    """The time over REPEATS runs; `run` returns the seconds of one. Other arguments as in SampledTime."""
    run_seconds = [run() for _ in track(range(REPEATS), REPEATS, "runs with jitter")]
    middle, half_width = mean(run_seconds), STUDENT * stdev(run_seconds) / len(run_seconds) ** 0.5
    return SampledTime(middle, middle - half_width, middle + half_width, extrapolated, why)


def draw_factors(jitter: float, generator: np.random.Generator, count: int) -> np.ndarray:
    """`count` gamma variables of mean 1 and standard deviation `jitter`."""
    shape = 1 / jitter**2
    return generator.gamma(shape, 1 / shape, count)


def _run_once(ring: Ring, jitter: float, generator: np.random.Generator) -> float:
    """Seconds of one run."""

    def vary_phases() -> Iterator[Phase]:
        for phase in ring.phases() if callable(ring.phases) else ring.phases:
            for _ in range(phase.steps):
                yield replace(phase, steps=1, compute=phase.compute * draw_factors(jitter, generator, ring.ranks))

    return solve_stencil(replace(ring, phases=vary_phases)).seconds
