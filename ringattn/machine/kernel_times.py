"""Measured times of the attention kernel by tile shape and size.

A call of the kernel takes t = overhead + FLOPs / F(shape, rows, keys). F is interpolated linearly in the logarithms of
sizes and rates, so that it stays between the rates of the neighbouring measured sizes. If the number of keys is not a
multiple of 16, F is multiplied by a measured factor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..cache import Value
from ..errors import InvalidInput, Unsupported
from ..files import Count, NotNegative, Positive, check_fields
from ..text import did_you_mean

#: Shapes of tiles: all pairs of rows x keys; a causal triangle over rows; a band of `keys` keys per row.
SHAPES = ("dense", "triangle", "band")
#: Tiles with a multiple of this many keys fill the registers of a CPU: AVX-512 computes 16 fp32 numbers at once.
WHOLE_KEYS = 16
#: Sizes up to this factor beyond the measured ones are extrapolated silently.
BEYOND = 2.0


@dataclass(frozen=True)
class TimeGrid:
    """Measured speeds, in useful flop/s, of one tile shape in one direction, for each combination of `rows` and `keys`.

    Triangles are measured once for each of `rows`. `rows` and `keys` ascend; `rates[i][j]` is the speed of a tile with
    rows[i] rows and keys[j] keys. If the number of keys is not a multiple of WHOLE_KEYS, the speed at about keys[j]
    keys is multiplied by `ragged[j]`, or by 1 if `ragged` is None. Raises InvalidInput if sizes, rates and factors do
    not fit together.
    """

    shape: str
    backward: bool
    rows: tuple[Count, ...]
    keys: tuple[Count, ...]
    rates: tuple[tuple[Positive, ...], ...]
    ragged: tuple[Positive, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "kernel times")
        if self.shape not in SHAPES:
            hint = did_you_mean(self.shape, SHAPES)
            raise InvalidInput(f"kernel times: shape={self.shape!r}: {hint}expected one of {', '.join(SHAPES)}")
        for name, sizes in (("rows", self.rows), ("keys", self.keys)):
            if not sizes or any(a >= b for a, b in pairwise(sizes)):
                raise InvalidInput(f"kernel times: {name}={sizes} must be ascending numbers >= 1")
        by_keys = (*self.rates, *([] if self.ragged is None else [self.ragged]))
        if len(self.rates) != len(self.rows) or any(len(numbers) != len(self.keys) for numbers in by_keys):
            raise InvalidInput(
                f"kernel times: {self.shape} needs a rate for each of {self.rows} rows x {self.keys} keys, and "
                "`ragged` (factors for ragged keys), if given, one for each number of keys; measure the missing ones"
            )

    def rate(self, rows: int, keys: int) -> float:
        """Useful flop/s of a tile. Outside the measured sizes, the rate of the nearest measured size."""
        i, x = _locate(self.rows, rows)
        j, y = _locate(self.keys, keys)
        low, high = (_log_at(self.rates[row], j, y) for row in (i, min(i + 1, len(self.rows) - 1)))
        factor = 0.0 if self.ragged is None or keys % WHOLE_KEYS == 0 else _log_at(self.ragged, j, y)
        return math.exp((1 - x) * low + x * high + factor)

    def covers(self, rows: int, keys: int) -> bool:
        """Whether a tile has at most `BEYOND` times as many rows, and as many keys, as the largest measured tile.

        There is no lower limit: the time of a tile smaller than the measured ones is mostly overhead.
        """
        return rows <= BEYOND * self.rows[-1] and keys <= BEYOND * self.keys[-1]


def _log_at(values: tuple[float, ...], index: int, position: float) -> float:
    """The logarithm of the value at `position` (0 to 1, in logarithms) between `values[index]` and the next value."""
    following = values[min(index + 1, len(values) - 1)]
    return (1 - position) * math.log(values[index]) + position * math.log(following)


def _locate(sizes: tuple[int, ...], size: int) -> tuple[int, float]:
    """The index of the interval of `sizes` that contains `size`, and the position in it (0 to 1, in logarithms).

    A size outside the range of `sizes` counts as the nearest end.
    """
    if size <= sizes[0]:
        return 0, 0.0
    if size >= sizes[-1]:
        return len(sizes) - 1, 0.0
    index = bisect_right(sizes, size) - 1
    return index, math.log(size / sizes[index]) / math.log(sizes[index + 1] / sizes[index])


@dataclass(frozen=True)
class KernelTimes(Value):
    """Measured times of the attention kernel for one head dim and one dtype.

    Times for other numbers of heads are scaled with the number of pairs. Raises InvalidInput if the grid of a shape is
    missing or a number is not allowed.
    """

    head_dim: Count
    dtype: str
    #: Seconds of a call with next to no pairs: (forward, backward).
    overhead: tuple[NotNegative, NotNegative]
    grids: tuple[TimeGrid, ...]
    #: Whether sizes, dtypes and head dims far from the measured ones are allowed.
    extrapolate: bool = False
    #: Query heads of the measured tiles; None: unknown.
    heads: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self, "kernel times")
        measured = {(grid.shape, grid.backward) for grid in self.grids}
        every = ((shape, backward) for backward in (False, True) for shape in SHAPES)
        missing = [f"{one[0]} {'backward' if one[1] else 'forward'}" for one in every if one not in measured]
        if missing:
            raise InvalidInput(
                f"kernel times: {', '.join(missing)} missing; measure all shapes with ringattn calibrate"
            )

    __hash__ = Value.kept_hash  # the grids are long

    @cached_property
    def _grids(self) -> dict[tuple[str, bool], TimeGrid]:
        return {(grid.shape, grid.backward): grid for grid in self.grids}

    def grid(self, shape: str, backward: bool) -> TimeGrid:
        """The measured rates of a tile shape in one direction."""
        return self._grids[shape, backward]

    def check(self, dtype: str, head_dim: int) -> None:
        """Raise Unsupported if a plan's dtype is not the measured one, or its head dim is far from the measured one.

        Does nothing if `extrapolate` is set.
        """
        near = 1 / BEYOND <= head_dim / self.head_dim <= BEYOND
        for name, planned, allowed in (("dtype", dtype, dtype == self.dtype), ("head_dim", head_dim, near)):
            if not (allowed or self.extrapolate):
                raise Unsupported(
                    f"the kernel times of this machine were measured with {name}={getattr(self, name)}, but the plan "
                    f"has {name}={planned}; measure with ringattn calibrate {name}={planned}, or allow the difference "
                    "with machine.extrapolate=true"
                )


#: FLOPs of a backward / FLOPs of a forward: five matrix products (recomputed scores, dV, dP, dQ, dK) instead of two.
BACKWARD = 2.5
#: Query rows (in a backward: keys) of one thread block.
BLOCK = 128
#: Memory traffic of a query row in 16-bit elements per column: a forward reads q and writes out; a backward reads q,
#: dout (twice) and out, and clears, reads (in fp32) and writes dq.
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 2, 9


@dataclass(frozen=True)
class KernelRates:
    """The rates of one library's attention kernel on one GPU, for 16-bit inputs; fp32 takes `wide` times as long."""

    #: flash-attn 2, flash-attn 3, cudnn, ...
    library: str
    #: FLOP/s of matrix products and exponentials on a fully occupied GPU, in a forward and in a backward.
    forward: Positive
    backward: Positive
    #: FLOPs that the exponential of one pair costs in addition to its matrix products. It makes small heads slow.
    softmax: NotNegative
    #: Thread blocks that run on the GPU at the same time.
    slots: Count
    #: Bytes/s at which operands are read and written.
    memory: Positive
    #: Seconds between the starts of two kernels.
    launch: NotNegative = 1e-5
    #: Seconds of the small kernels of a ring's visit: slices, casts, and those that merging launches.
    visit: NotNegative = 0.0
    wide: Positive = 8.0

    def __post_init__(self) -> None:
        check_fields(self, "kernel times")

    def pair_seconds(self, blocks: float, *, dense: bool, dims: int, backward: bool, item: int = 2) -> float:
        """Modelled seconds per query-key pair in a kernel call of `blocks` thread blocks.

        `dims` is D + Dv, and `item` the bytes of an element. The GPU runs as many thread blocks at a time as it has
        slots. Equally long blocks end together, except the last one in each slot, and a block runs faster once others
        are done. In a triangle (not `dense`), the longest blocks take twice the mean time, so slots are idle for
        longer.
        """
        tail = self.slots * (0.25 if dense else 1.0)
        rate = (self.backward if backward else self.forward) * blocks / (blocks + tail)
        products = 2 * dims * (BACKWARD if backward else 1.0)
        return (products + self.softmax) / rate * (self.wide if item > 2 else 1.0)

    def start_seconds(self, rows: int, *, dims: int, backward: bool, item: int = 2) -> float:
        """Seconds to start a call and to move its operands; `rows` counts query rows over all heads and sequences."""
        traffic = (BACKWARD_TRAFFIC if backward else FORWARD_TRAFFIC) * rows * dims / 2 * item
        return self.launch + traffic / self.memory
