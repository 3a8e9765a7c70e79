"""Block-sparse families with several distances or window widths: dilated and hierarchical blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm
from typing import ClassVar

import numpy as np

from ..errors import InvalidInput
from .families import Family
from .ranges import clip, join_runs
from .tile import Tile

#: Offsets of `dilated_blocks` if neither offsets nor a density is given.
OFFSETS = (1, 2, 4)
#: Strides of the levels of `hierarchical` under a density; the windows are in the same proportion.
STRIDES = (1, 4, 16)


@dataclass(frozen=True, repr=False)
class DilatedBlocks(Family):
    """Query block i attends the key blocks i, i - offset and i + offset for each of `offsets` (default 1, 2, 4).

    `block` is the tokens of a block, an offset is a number of blocks. With `density`, query block i attends the first n
    existing key blocks in this order: i, then i -+ 1, i -+ 2, i -+ 4 and so on for the powers of two, then i -+ 3,
    i -+ 5, i -+ 6 and so on for the other distances, each time the left block first.
    """

    spelling: ClassVar[str] = "dilated_blocks"
    width_field: ClassVar[str] = "offsets"
    example: ClassVar[str] = "dilated_blocks(128, offsets=(1, 2, 4))"

    block: int
    offsets: tuple[int, ...] | None = None
    density: float | None = None
    total: int | None = None

    def _check_fields(self) -> None:
        if self.density is not None:
            return
        offsets = OFFSETS if self.offsets is None else self.offsets
        if not isinstance(offsets, list | tuple):
            raise InvalidInput(f"dilated_blocks: offsets={offsets!r} must be a list of integers; try offsets=(1, 2, 4)")
        distances = {self._integer("an offset", offset, 0) for offset in offsets}
        self._normalize(offsets=tuple(sorted(distances)))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        candidates = range(low, high + 1)
        if self.offsets is not None:
            signed = [sign * offset for offset in (0, *self.offsets) for sign in (-1, 1)]
            return [clip(candidates, first - offset, last - offset) for offset in signed]
        kept, total = self.kept_and_total()
        powers = (total - 1).bit_length()
        # Distances that are not powers of two occur only if a row keeps more blocks than there are powers in the
        # sequence; a row at an end of the sequence reaches the fewest powers.
        spread = kept if kept > 1 + powers else 0
        near = [clip(candidates, first - spread, last + spread)]
        for t in range(min(powers, kept - 1)):
            # Before distance 2 ** t on one side come the block itself, t powers on that side and at most t (or t + 1)
            # on the other side. If these fill the row, distance 2 ** t is reached only where the other side is short.
            short = 1 << (kept - 2 - t)
            right = candidates if 2 * t + 2 < kept else clip(candidates, 0, short - 1)
            left = candidates if 2 * t + 1 < kept else clip(candidates, total - short, total - 1)
            near += [clip(right, first - (1 << t), last - (1 << t)), clip(left, first + (1 << t), last + (1 << t))]
        return near

    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if self.offsets is None:
            runs: Iterable[range] = _kept_runs(row, *self.kept_and_total())
        else:
            signed = {sign * offset for offset in self.offsets for sign in (-1, 1)} | {0}
            runs = (range(row + offset, row + offset + 1) for offset in sorted(signed))
        yield from join_runs(clip(run, first, last) for run in runs)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        if self.offsets is not None:
            return np.isin(np.abs(i - j), (0, *self.offsets))
        seen = np.zeros(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        for row in np.unique(i):
            seen |= (i == row) & np.isin(j, self._keys_by_priority(int(row)))
        return seen

    def _keys_by_priority(self, row: int) -> list[int]:
        """The key blocks that query block `row` attends under `density`, in the order of the class docstring."""
        kept, total = self.kept_and_total()
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
def _kept_runs(row: int, kept: int, total: int) -> list[range]:
    """The key blocks of a query block that keeps `kept` of `total`: O(log total) ascending runs, which may overlap."""
    left, right = row, total - 1 - row  # blocks on either side
    powers = [
        row + sign * (1 << t)
        for t in range(max(left, right).bit_length())
        for sign, room in ((-1, left), (1, right))
        if 1 << t <= room
    ]
    near = range(row, row + 1)
    if len(powers) > kept - 1:
        del powers[kept - 1 :]
    else:
        # The rest of the row holds the other distances up to `reach`, found by bisection, and perhaps one block more.
        spare = kept - 1 - len(powers)
        reach, beyond = 0, max(left, right) + 1
        while beyond - reach > 1:
            middle = (reach + beyond) // 2
            if _count_non_powers(min(middle, left)) + _count_non_powers(min(middle, right)) <= spare:
                reach = middle
            else:
                beyond = middle
        near = range(row - min(reach, left), row + min(reach, right) + 1)
        if _count_non_powers(min(reach, left)) + _count_non_powers(min(reach, right)) < spare:
            powers.append(row - reach - 1)
    return sorted([near, *(range(j, j + 1) for j in powers)], key=lambda run: run.start)


def _count_non_powers(most: int) -> int:
    """How many of the integers 1 .. most are not powers of two."""
    return most - most.bit_length()


@dataclass(frozen=True, repr=False)
class Hierarchical(Family):
    """Query block i attends the key blocks i - w .. i + w for each level (stride, w) with i % stride == 0.

    `block` is the tokens of a block; w = -1 attends every key block. With `density`, the strides are 1, 4 and 16, the
    windows are in the same proportion, and the mean over the query blocks comes nearest to the density.
    """

    spelling: ClassVar[str] = "hierarchical"
    width_field: ClassVar[str] = "levels"
    example: ClassVar[str] = "hierarchical(128, levels=((1, 1), (4, 4), (16, -1)))"

    block: int
    levels: tuple[tuple[int, int], ...] | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        if self.density is not None or self.levels is None:
            return None
        return self.block * lcm(*(stride for stride, _ in self.levels))

    def _check_fields(self) -> None:
        self._require_width()
        if self.levels is None:
            return
        pairs = self.levels
        if not isinstance(pairs, list | tuple) or not all(isinstance(x, list | tuple) and len(x) == 2 for x in pairs):
            raise InvalidInput(f"hierarchical: levels={pairs!r} must be a list of (stride, w); try ((1, 1), (4, -1))")
        self._normalize(levels=tuple((self._integer("a stride", s, 1), self._integer("a w", w, -1)) for s, w in pairs))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        for stride, w in self.resolved:
            candidates = range(low + -low % stride, high + 1, stride)
            yield candidates if w < 0 else clip(candidates, first - w, last + w)

    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        widths = [w for stride, w in self.resolved if row % stride == 0]
        if -1 in widths:
            yield range(first, last + 1)
        elif widths:  # the windows are concentric, so the widest contains the others
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
        """The levels; under a density, the levels whose mean query block comes nearest to the density."""
        if self.levels is not None:
            return self.levels
        _, total = self.kept_and_total()
        target = (self.density or 0.0) * total * total
        low, high = 0, 32 * total + 32  # at the high end every query block attends everything
        while high - low > 1:
            middle = (low + high) // 2
            if _count_block_pairs(_scaled_levels(middle), total) <= target:
                low = middle
            else:
                high = middle
        distances = {scale: abs(_count_block_pairs(_scaled_levels(scale), total) - target) for scale in (low, high)}
        return _scaled_levels(min(distances, key=distances.__getitem__))


def _scaled_levels(scale: int) -> tuple[tuple[int, int], ...]:
    """Levels with windows of stride * scale / 32, rounded. At most one window grows from a scale to the next."""
    return tuple((stride, (scale * stride + 16) // 32) for stride in STRIDES)


def _count_block_pairs(levels: tuple[tuple[int, int], ...], total: int) -> int:
    """The exact number of (query block, key block) pairs of these levels, if each stride divides the next."""
    pairs = 0
    for index, (stride, w) in enumerate(levels):
        keys = range(total)
        pairs += Tile(range(1), range(0, total, stride), keys, -w, w).pairs
        if index + 1 < len(levels):  # query blocks of the next stride have the next, wider window instead
            pairs -= Tile(range(1), range(0, total, levels[index + 1][0]), keys, -w, w).pairs
    return pairs


dilated_blocks = DilatedBlocks
hierarchical = Hierarchical
