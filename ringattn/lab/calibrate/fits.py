"""Numbers of a machine, fitted to raw times. Needs neither torch nor a clock: equal samples give equal numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...errors import InvalidInput
from ...machine.kernel_times import SHAPES, KernelTimes, TimeGrid


@dataclass(frozen=True)
class Sample:
    """Times of repeated calls of the attention kernel on one tile, on all ranks.

    `seconds` are those of each call; `flops` are the useful FLOPs of a call.
    """

    shape: str
    backward: bool
    rows: int
    keys: int
    flops: float
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class LinkFit:
    """Seconds of a message of m bytes: latency + m / bandwidth. Errors are relative, against measured medians."""

    latency: float
    bandwidth: float
    median_error: float
    worst_error: float


def fit_kernel_times(
    samples: Sequence[Sample], overhead: tuple[float, float], head_dim: int, dtype: str, heads: int | None = None
) -> KernelTimes:
    """Kernel times from samples, which form a grid of rows x keys for each shape and direction.

    A dense sample whose number of keys differs from every number of rows in the grid is ragged. The factor of ragged
    keys is (its rate / the rate of the grid), at most 1. A rate is FLOPs / (median seconds - overhead); at most nine
    tenths of the median count as overhead.
    """
    grids = []
    for shape in SHAPES:
        for backward in (False, True):
            by_size = {(s.rows, s.keys): s for s in samples if (s.shape, s.backward) == (shape, backward)}
            sizes = {rows for rows, _ in by_size} if shape == "dense" else {keys for _, keys in by_size}
            ragged = [by_size.pop(x) for x in sorted(by_size, key=lambda size: size[1]) if x[1] not in sizes]
            rows, keys = (tuple(sorted({size[axis] for size in by_size})) for axis in (0, 1))
            rates = tuple(tuple(_rate(by_size[r, k], overhead[backward]) for k in keys) for r in rows)
            grid = TimeGrid(shape, backward, rows, keys, rates)
            if ragged:
                factors = [_rate(s, overhead[backward]) / grid.rate(s.rows, s.keys) for s in ragged]
                grid = replace(grid, ragged=tuple(min(factor, 1.0) for factor in factors))
            grids.append(grid)
    return KernelTimes(head_dim, dtype, overhead, tuple(grids), heads=heads)


def _rate(sample: Sample, overhead: float) -> float:
    middle = median(sample.seconds)
    return sample.flops / max(middle - overhead, middle / 10)


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """The latency >= 0 and bandwidth with the least sum of squared relative errors: weighted linear least squares.

    Raises InvalidInput for times that do not grow with the sizes.
    """
    latency, slope = _fit_line([(1 / t**2, m, t) for m, t in zip(sizes, seconds, strict=True)])
    if slope <= 0:
        raise InvalidInput(
            f"message times do not grow with their sizes ({list(sizes)} bytes: {list(seconds)} s); measure larger "
            "sizes, or measure while the machine is idle"
        )
    errors = [abs(latency + slope * m - t) / t for m, t in zip(sizes, seconds, strict=True)]
    return LinkFit(latency, 1 / slope, median(errors), max(errors))


def _fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(start >= 0, slope) of the line with the least weighted sum of squares through points (weight, x, y).

    The slope is 0 where all x are the same.
    """
    w, wx, wxx = (sum(weight * x**power for weight, x, _ in points) for power in (0, 1, 2))
    wy, wxy = (sum(weight * x**power * y for weight, x, y in points) for power in (0, 1))
    spread = w * wxx - wx * wx
    slope = (w * wxy - wx * wy) / spread if spread > 1e-9 * w * wxx else 0.0
    return ((wy - slope * wx) / w, slope) if wy >= slope * wx else (0.0, wxy / wxx)


def fit_interference(samples: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float]]]) -> float:
    """How much a message slows down the computation that runs at the same time: a share of its own time, 0 to 1.

    `samples` has, for each size, the seconds of (visits alone, messages alone, both at once until both have ended); a
    visit is the computation with one block. The repetitions of the first and the last are paired. For each size, take
    the median of (seconds of both at once - seconds of the longer one alone) / (seconds of the shorter one alone); the
    result is the median over sizes. A message that finds no free core ends after the visit, and the rank waits. If
    messages take more than twice as long as visits, noise exceeds the effect: such sizes are left out. If all sizes are
    such, the one with the smallest ratio counts.
    """
    ratios = [median(message) / median(visit) for visit, message, _ in samples]
    samples = [one for one, ratio in zip(samples, ratios, strict=True) if ratio <= max(2.0, min(ratios))]
    shares = [
        median(b - max(a, median(message)) for a, b in zip(visit, both, strict=True))
        / min(median(visit), median(message))
        for visit, message, both in samples
    ]
    return min(max(0.0, median(shares)), 1.0)


def fit_calls(passes: Sequence[tuple[float, float, float]], least: float) -> tuple[float, float]:
    """(seconds per call, seconds per byte) that best explain the time of passes that the model does not predict.

    `passes` has (measured seconds, bytes of a rank's tensors, measured - modelled seconds), all of one direction. A
    call takes at least 0 seconds, and a byte at least `least` seconds, because every call reads and writes its tensors.
    Weighted linear least squares: the variance of a pass grows with its seconds, as in a sum of independent delays.
    """
    points = [(1 / t, nbytes, left) for t, nbytes, left in passes]
    call, per_byte = _fit_line(points)
    if per_byte >= least:
        return call, per_byte
    left = sum(weight * (y - least * x) for weight, x, y in points)
    return max(0.0, left / sum(weight for weight, *_ in points)), least
