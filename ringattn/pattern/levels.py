"""Block-sparse families of many distances: dilated and hierarchical blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm
from typing import ClassVar

import numpy as np

from ..errors import InvalidInput
from .block_table import whole
from .families import Family
from .ranges import clip, joined
from .tile import Tile

OFFSETS = (1, 2, 4)
#: Strides of the levels under a density; the windows are in the same proportion.
STRIDES = (1, 4, 16)


@dataclass(frozen=True, repr=False)
class DilatedBlocks(Family):
    """Query block i sees key block i and, for each of `offsets`, the blocks i - offset and i + offset.

    With `density`: the first n that exist of i, i -+ 1, i -+ 2, i -+ 4 and so on over the powers of two, then
    of i -+ 3, i -+ 5, i -+ 6 and so on over the other distances; the left one goes first.
    """

    written: ClassVar[str] = "dilated_blocks"
    width: ClassVar[str] = "offsets"

    block: int
    offsets: tuple[int, ...] | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        return self.block if self.density is None else None  # a density counts blocks of the whole sequence

    def _validate(self) -> None:
        if self.density is not None:
            return
        offsets = OFFSETS if self.offsets is None else self.offsets
        if not isinstance(offsets, list | tuple):
            raise InvalidInput(f"dilated_blocks: offsets={offsets!r} must be a list of integers; try offsets=(1, 2, 4)")
        distances = {whole(offset, "dilated_blocks: an offset", 0) for offset in offsets}
        object.__setattr__(self, "offsets", tuple(sorted(distances)))

    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        every = range(low, high + 1)
        if self.offsets is not None:
            signed = [sign * d for d in (0, *self.offsets) for sign in (-1, 1)]
            return [clip(every, first - away, last - away) for away in signed]
        kept, total = self.size()
        powers = (total - 1).bit_length()
        # Only where a row has more places than the powers in the sequence (fewest at the edge) do others matter.
        spread = kept if kept > 1 + powers else 0
        near = [clip(every, first - spread, last + spread)]
        for t in range(min(powers, kept - 1)):
            # The block itself, t powers on this side and at most t (t + 1) on the other come before 2 ** t: where
            # the other side has room for all of them, and they fill the row, the other side must be short.
            short = 1 << (kept - 2 - t)
            right = every if 2 * t + 2 < kept else clip(every, 0, short - 1)
            left = every if 2 * t + 1 < kept else clip(every, total - short, total - 1)
            near += [clip(right, first - (1 << t), last - (1 << t)), clip(left, first + (1 << t), last + (1 << t))]
        return near

    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if self.offsets is None:
            found: Iterable[range] = _kept(row, *self.size())
        else:
            signed = {sign * offset for offset in self.offsets for sign in (-1, 1)} | {0}
            found = (range(row + offset, row + offset + 1) for offset in sorted(signed))
        yield from joined(clip(run, first, last) for run in found)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        if self.offsets is not None:
            return np.isin(np.abs(i - j), (0, *self.offsets))
        seen = np.zeros(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        for row in np.unique(i):
            seen |= (i == row) & np.isin(j, self._in_order(int(row)))
        return seen

    def _in_order(self, row: int) -> list[int]:
        """The key blocks of a row under `density`, one by one in the order of their priority."""
        kept, total = self.size()
        powers = [1 << t for t in range(total.bit_length())]
        chosen = [row][:kept]
        for distance in (*powers, *(d for d in range(3, total) if d & (d - 1))):
            for key in (row - distance, row + distance):
                if len(chosen) < kept and 0 <= key < total:
                    chosen.append(key)
            if len(chosen) == kept:
                break
        return chosen


@lru_cache(maxsize=1024)
def _kept(row: int, kept: int, total: int) -> list[range]:
    """Ascending runs (they may overlap) of the key blocks of a row that keeps `kept` of `total`, in O(log total) of them."""
    left, right = row, total - 1 - row
    powers = [
        row + sign * (1 << t) for t in range(max(left, right).bit_length())
        for sign, room in ((-1, left), (1, right)) if 1 << t <= room
    ]  # fmt: skip
    near = range(row, row + 1)
    if len(powers) > kept - 1:
        del powers[kept - 1 :]
    else:
        # Distances that are no powers: all up to `reach`, which is found by bisection, and perhaps one more.
        spare = kept - 1 - len(powers)
        reach, beyond = 0, max(left, right) + 1
        while beyond - reach > 1:
            middle = (reach + beyond) // 2
            if _others(min(middle, left)) + _others(min(middle, right)) <= spare:
                reach = middle
            else:
                beyond = middle
        near = range(row - min(reach, left), row + min(reach, right) + 1)
        if _others(min(reach, left)) + _others(min(reach, right)) < spare:
            powers.append(row - reach - 1)
    return sorted([near, *(range(j, j + 1) for j in powers)], key=lambda run: run.start)


def _others(most: int) -> int:
    """How many of 1 .. most are no powers of two."""
    return most - most.bit_length()


@dataclass(frozen=True, repr=False)
class Hierarchical(Family):
    """Query block i sees, for each level (stride, w) with i % stride == 0, the key blocks i - w .. i + w (-1: all).

    With `density`: strides 1, 4 and 16 with windows in that proportion; the mean row keeps the density.
    """

    written: ClassVar[str] = "hierarchical"
    width: ClassVar[str] = "levels"

    block: int
    levels: tuple[tuple[int, int], ...] | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        if self.density is not None or self.levels is None:
            return None
        return self.block * lcm(*(stride for stride, _ in self.levels))

    def _validate(self) -> None:
        self._need_width("128, levels=((1, 1), (4, 4), (16, -1))")
        if self.levels is None:
            return
        pairs = self.levels
        if not isinstance(pairs, list | tuple) or not all(isinstance(x, list | tuple) and len(x) == 2 for x in pairs):
            raise InvalidInput(
                f"hierarchical: levels={pairs!r} must be a list of (stride, w); try levels=((1, 1), (4, 4), (16, -1))"
            )
        checked = tuple((whole(s, "hierarchical: a stride", 1), whole(w, "hierarchical: a w", -1)) for s, w in pairs)
        object.__setattr__(self, "levels", checked)

    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        for stride, w in self.resolved:
            every = range(low + -low % stride, high + 1, stride)
            yield every if w < 0 else clip(every, first - w, last + w)

    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        widths = [w for stride, w in self.resolved if row % stride == 0]
        if -1 in widths:
            yield range(first, last + 1)
        elif widths:  # the windows are concentric: the widest holds the others
            run = clip(range(first, last + 1), row - max(widths), row + max(widths))
            if run:
                yield run

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        seen = np.zeros(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        for stride, w in self.resolved:
            seen |= (i % stride == 0) & ((w < 0) | (np.abs(i - j) <= w))
        return seen

    @cached_property
    def resolved(self) -> tuple[tuple[int, int], ...]:
        """The levels; under a density those whose mean row comes nearest to it."""
        if self.levels is not None:
            return self.levels
        _, total = self.size()
        target = (self.density or 0.0) * total * total
        low, high = 0, 32 * total + 32  # the high end sees everything
        while high - low > 1:
            middle = (low + high) // 2
            if _pairs(_levels(middle), total) <= target:
                low = middle
            else:
                high = middle
        return _levels(min(low, high, key=lambda scale: abs(_pairs(_levels(scale), total) - target)))


def _levels(scale: int) -> tuple[tuple[int, int], ...]:
    """Windows scale / 32 x the strides, rounded. No two of them grow at the same scale, so that steps are small."""
    return tuple((stride, (scale * stride + 16) // 32) for stride in STRIDES)


def _pairs(levels: tuple[tuple[int, int], ...], total: int) -> int:
    """Exact number of (row, key) blocks that these levels see, where each stride divides the next."""
    pairs = 0
    for n, (stride, w) in enumerate(levels):
        every = range(total)
        pairs += Tile(range(1), range(0, total, stride), every, -w, w).pairs
        if n + 1 < len(levels):  # rows of the next stride have its wider window instead
            pairs -= Tile(range(1), range(0, total, levels[n + 1][0]), every, -w, w).pairs
    return pairs


dilated_blocks = DilatedBlocks
hierarchical = Hierarchical
