"""Measured times of the attention kernel by tile shape, and the time of a plan's pairs that follows from them.

A call takes t = overhead + FLOPs / F(shape, rows, keys), with F interpolated between measured sizes: linear in the
logarithms, so that it never leaves the range of its neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from ..cache import Value
from ..errors import InvalidInput, Unsupported, did_you_mean
from ..pattern.tile import Tile
from ..work import Work

if TYPE_CHECKING:
    from ..plan import Plan

#: Shapes of tiles: all pairs of rows x keys; a causal triangle over rows; a band of `keys` keys per row.
SHAPES = ("dense", "triangle", "band")
#: Sizes up to this factor beyond the measured ones are extrapolated without a flag.
BEYOND = 2.0
#: The share of a plan's pairs that may lie in tiles further beyond.
STRAY = 0.1
#: Visits of a rank that are looked at, beside those of itself and of its neighbours.
LOOKED_AT = 8


@dataclass(frozen=True)
class Grid:
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
    grids: tuple[Grid, ...]
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
    def _grids(self) -> dict[tuple[str, bool], Grid]:
        return {(grid.shape, grid.backward): grid for grid in self.grids}

    def grid(self, shape: str, backward: bool) -> Grid:
        """The measured rates of a tile shape in one direction."""
        return self._grids[shape, backward]

    def check(self, plan: Plan) -> None:
        """Raise Unsupported where the plan's dtype or head dim is far from the measured one."""
        if self.extrapolate:
            return
        for name, mine, wanted in (("dtype", self.dtype, plan.dtype), ("head_dim", self.head_dim, plan.head_dim)):
            near = mine == wanted if isinstance(mine, str) else 1 / BEYOND <= wanted / mine <= BEYOND  # type: ignore[operator]
            if not near:
                raise Unsupported(
                    f"the kernel times of this machine were measured with {name}={mine}, and the plan has {wanted}; "
                    f"measure with ringattn calibrate {name}={wanted}, or allow it with machine.extrapolate=true"
                )


def seconds_per_pair(plan: Plan, times: KernelTimes, flops: float, backward: bool, ranks: Iterable[int]) -> float:
    """Seconds of the kernel per (query, key, head, branch) pair of one batch element, over visits of some `ranks`.

    `flops` are those of one pair; of a plan with teams, `ranks` are places between them. Raises Unsupported where more
    than a tenth of the pairs lie in tiles of more than twice the measured sizes.
    """

    def find() -> float:
        times.check(plan)
        return _seconds_per_pair(plan, times, flops, backward, ranks)

    return plan.memory.answer(("seconds per pair", times, flops, backward), find)


def _seconds_per_pair(plan: Plan, times: KernelTimes, flops: float, backward: bool, ranks: Iterable[int]) -> float:
    seconds = pairs = stray = 0.0
    largest: tuple[int, int] = (0, 0)
    overhead = times.overhead[backward] / plan.batch
    inner, _ = plan.member(0)
    for weight, rank, owner in _visits(inner, ranks):
        for work in inner.demand.batched(rank, owner):
            seconds += weight * overhead
            for shape, rows, keys, count in lowered(work):
                grid = times.grid(shape, backward)
                seconds += weight * count * flops / grid.rate(rows, keys)
                pairs += weight * count
                if not grid.covers(rows, keys):
                    stray += weight * count
                    largest = max(largest, (rows, keys))
    if not pairs:
        return 0.0
    if stray > STRAY * pairs and not times.extrapolate:
        top = times.grid("dense", backward)
        raise Unsupported(
            f"tiles of {largest[0]:,} rows x {largest[1]:,} keys: the kernel times of this machine end at "
            f"{top.rows[-1]:,} x {top.keys[-1]:,}, and at most {BEYOND:g} times as much is extrapolated; measure larger "
            "ones with ringattn calibrate rows=[...], or allow it with machine.extrapolate=true"
        )
    return seconds / pairs


def _visits(plan: Plan, looked_at: Iterable[int]) -> Iterator[tuple[float, int, int]]:
    """(weight, rank, owner) of visits: all of few ranks; of many, own and neighbours' blocks, and evenly spaced others."""
    ranks = plan.ranks
    near = sorted({0, 1 % ranks, (ranks - 1) % ranks})
    rest = sorted({2 + (ranks - 4) * i // (LOOKED_AT - 1) for i in range(LOOKED_AT)} if ranks > 3 else set())
    shares = [(distance, 1.0) for distance in near] + [(distance, (ranks - 3) / len(rest)) for distance in rest]
    for rank in looked_at:
        for distance, share in shares:
            owner = (rank + distance) % ranks
            if plan.demand.visits(rank, owner):
                yield share, rank, owner


def lowered(work: Work) -> Iterator[tuple[str, int, int, int]]:
    """(shape, rows, keys, pairs over heads and repetitions) of the tiles that kernels make of a work."""
    rows, keys, times = len(work.q), work.keys, len(work.heads) * work.repeat
    if work.dense:
        yield "dense", rows, keys, rows * keys * times
        return
    pairs = Tile(range(1), range(rows), range(keys), work.lo, work.hi).pairs * times
    if work.hi is not None:
        yield "band", rows, max(pairs // (rows * times), 1), pairs
        return
    assert work.lo is not None
    # Keys that every row sees, then a triangle, as the kernels split it.
    wide = min(max(-work.lo, 0), keys)
    if wide:
        yield "dense", rows, wide, rows * wide * times
    if pairs - rows * wide * times > 0:
        yield "triangle", rows, 1, pairs - rows * wide * times
