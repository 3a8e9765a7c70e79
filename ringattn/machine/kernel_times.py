"""Measured times of the attention kernel by tile shape, and the time of a plan's pairs that follows from them.

A call takes t = overhead + FLOPs / F(shape, rows, keys), with F interpolated between measured sizes: linear in the
logarithms, so that it never leaves the range of its neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..cache import Value
from ..errors import InvalidInput, Unsupported, did_you_mean

#: Shapes of tiles: all pairs of rows x keys; a causal triangle over rows; a band of `keys` keys per row.
SHAPES = ("dense", "triangle", "band")
#: Sizes up to this factor beyond the measured ones are extrapolated without a flag.
BEYOND = 2.0


@dataclass(frozen=True)
class TimeGrid:
    """Useful FLOP/s of one tile shape in one direction, measured at rows x keys (a triangle: rows alone).

    `rows` and `keys` ascend; `rates[i][j]` belongs to rows[i], keys[j].
    """

    shape: str
    backward: bool
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise InvalidInput(
                f"kernel times: shape={self.shape!r}: {did_you_mean(self.shape, SHAPES)}expected one of {', '.join(SHAPES)}"
            )
        for name, sizes in (("rows", self.rows), ("keys", self.keys)):
            if not sizes or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 1:
                raise InvalidInput(f"kernel times: {name}={sizes} must be ascending numbers >= 1")
        if len(self.rates) != len(self.rows) or any(len(line) != len(self.keys) for line in self.rates):
            raise InvalidInput(
                f"kernel times: {self.shape} needs a rate for each of {self.rows} rows x {self.keys} keys"
            )
        if not all(math.isfinite(rate) and rate > 0 for line in self.rates for rate in line):
            raise InvalidInput(f"kernel times: the rates of {self.shape} must be FLOP/s > 0; measure them again")

    def rate(self, rows: int, keys: int) -> float:
        """Useful FLOP/s of a tile; that of the nearest measured size outside of them."""
        i, x = _place(self.rows, rows)
        j, y = _place(self.keys, keys)
        corners = [
            [math.log(self.rates[min(a, len(self.rows) - 1)][min(b, len(self.keys) - 1)]) for b in (j, j + 1)]
            for a in (i, i + 1)
        ]
        low, high = ((1 - y) * line[0] + y * line[1] for line in corners)
        return math.exp((1 - x) * low + x * high)

    def covers(self, rows: int, keys: int) -> bool:
        """Whether a size is at most BEYOND times away from the measured ones; below them the overhead tells."""
        return rows <= BEYOND * self.rows[-1] and keys <= BEYOND * self.keys[-1]


def _place(sizes: tuple[int, ...], size: int) -> tuple[int, float]:
    """The interval of `sizes` that holds a size, and how far into it, in logarithms; clamped to the ends."""
    if size <= sizes[0]:
        return 0, 0.0
    if size >= sizes[-1]:
        return len(sizes) - 1, 0.0
    index = bisect_right(sizes, size) - 1
    return index, math.log(size / sizes[index]) / math.log(sizes[index + 1] / sizes[index])


@dataclass(frozen=True)
class KernelTimes(Value):
    """Kernel times measured for one head dim and dtype. `overhead`: seconds of a nearly empty call, (forward, backward).

    Other numbers of heads and batches scale with their pairs. `extrapolate` allows sizes far beyond the measured ones.
    """

    head_dim: int
    dtype: str
    overhead: tuple[float, float]
    grids: tuple[TimeGrid, ...]
    extrapolate: bool = False
    #: Query heads of the measured tiles; None: not known.
    heads: int | None = None

    def __post_init__(self) -> None:
        known = {(grid.shape, grid.backward) for grid in self.grids}
        missing = [
            f"{shape} {('forward', 'backward')[b]}" for b in (0, 1) for shape in SHAPES if (shape, bool(b)) not in known
        ]
        if missing:
            raise InvalidInput(f"kernel times: {', '.join(missing)} missing; measure them with ringattn calibrate")
        if not all(math.isfinite(x) and x >= 0 for x in self.overhead):
            raise InvalidInput(f"kernel times: overhead={self.overhead} must be two times >= 0 in seconds")

    @cached_property
    def _hash(self) -> int:
        return hash((self.head_dim, self.dtype, self.overhead, self.grids, self.extrapolate, self.heads))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _grids(self) -> dict[tuple[str, bool], TimeGrid]:
        return {(grid.shape, grid.backward): grid for grid in self.grids}

    def grid(self, shape: str, backward: bool) -> TimeGrid:
        """The measured rates of a tile shape in one direction."""
        return self._grids[shape, backward]

    def check(self, dtype: str, head_dim: int) -> None:
        """Raise Unsupported where the dtype or head dim of a plan is far from the measured one."""
        if self.extrapolate:
            return
        for name, mine, wanted in (("dtype", self.dtype, dtype), ("head_dim", self.head_dim, head_dim)):
            near = mine == wanted if isinstance(mine, str) else 1 / BEYOND <= wanted / mine <= BEYOND  # type: ignore[operator]
            if not near:
                raise Unsupported(
                    f"the kernel times of this machine were measured with {name}={mine}, and the plan has {wanted}; "
                    f"measure with ringattn calibrate {name}={wanted}, or allow it with machine.extrapolate=true"
                )
