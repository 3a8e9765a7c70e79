"""Block-sparse patterns defined by a formula on block indices, so that long sequences need no table."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, lru_cache
from math import lcm
from typing import ClassVar

import numpy as np

from ..errors import InvalidInput
from ..text import shown
from .base import check_integer
from .block_table import BlockTable
from .tile import Tile, ceil_div, clip, join_runs

#: Offsets of `dilated_blocks` if neither offsets nor a density is given.
OFFSETS = (1, 2, 4)
#: Strides of the levels of `hierarchical` under a density; the windows are in the same proportion.
STRIDES = (1, 4, 16)


class Family(BlockTable):
    """Base of block-sparse patterns whose width is given either directly or as `density`.

    `density` is the fraction of the key blocks that each query block attends, 0 < density <= 1. It turns into a number
    of blocks once `total`, the number of blocks in the sequence, is known. Every plan sets `total` through `bind`;
    methods that need it raise InvalidInput if it is missing. The constructor raises InvalidInput for wrong parameters.
    """

    #: The function name that `repr` prints and `parse_pattern` reads.
    spelling: ClassVar[str]
    #: The name of the parameter that `density` replaces.
    width_field: ClassVar[str]
    #: A valid call, for error messages.
    example: ClassVar[str]
    density: float | None
    total: int | None

    def __post_init__(self) -> None:
        self._normalize(block=self._integer("block", self.block, 1))
        if self.density is not None:
            width = getattr(self, self.width_field)
            if width is not None:
                raise InvalidInput(
                    f"{self.spelling}: {self.width_field}={shown(width)} and density={shown(self.density)}; give one"
                )
            self._normalize(density=check_density(self.density, self.spelling))
        elif getattr(self, self.width_field) is None:
            raise InvalidInput(f"{self.spelling}: give {self.width_field}= or density=; try {self.example}")
        if self.total is not None:
            self._normalize(total=self._integer("total", self.total, 0))
        self._check_fields()

    @property
    def period(self) -> int | None:
        return self.block if self.density is None else None  # with a density, the length of the sequence matters

    @abstractmethod
    def _check_fields(self) -> None:
        """Check and normalize the parameters of the family."""

    def _integer(self, name: str, value: object, least: int) -> int:
        return check_integer(value, f"{self.spelling}: {name}", least, self.example)

    def bind(self, heads: int, tokens: int) -> BlockTable:
        return self if self.density is None else replace(self, total=self.block_count(tokens))

    def check(self, tokens: int, heads: int) -> None:
        self.bind(heads, tokens)

    def _query_rows(self, q: range, k: range) -> Iterator[tuple[int, range]]:
        if self.density is not None:
            self.blocks_and_total()  # raise before the first result if the length is unknown
        return super()._query_rows(q, k)

    def blocks_and_total(self) -> tuple[int, int]:
        """(number of key blocks that each query block attends, number of key blocks), computed from `density`."""
        if self.density is None or self.total is None:
            raise InvalidInput(
                f"{self!r}: a density needs the tokens; try .bind(heads, tokens), or {self.width_field}="
            )
        return count_blocks(self.density, self.total), self.total

    def __repr__(self) -> str:
        arguments = [str(self.block)]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "block" and (value is not None or field.default is MISSING):
                arguments.append(f"{field.name}={value!r}")
        return f"{self.spelling}({', '.join(arguments)})"


def check_density(density: object, name: str) -> float:
    """`density` as a float. Raises InvalidInput, naming the function `name`, unless 0 < density <= 1."""
    if isinstance(density, bool) or not isinstance(density, int | float | np.floating) or not 0 < density <= 1:
        raise InvalidInput(f"{name}: density={shown(density)} must be a fraction, 0 < density <= 1; try density=0.25")
    return float(density)


def count_blocks(density: float, total: int) -> int:
    """The number of blocks that a fraction `density` of `total` blocks is: rounded, and at least 1."""
    return min(total, max(1, round(density * total)))


@dataclass(frozen=True, repr=False)
class GlobalLocal(Family):
    """A pattern with global blocks, which attend and are attended by all blocks; other blocks also attend a window.

    Query block i >= globals attends the key blocks 0 .. globals-1 and i - blocks .. i + blocks. `block` is the number
    of tokens per block. With `density` in place of `blocks`, it attends density * (number of key blocks) blocks,
    rounded: the globals and one window of other blocks. Source: the global and local attention of Longformer, on blocks
    (Beltagy et al. 2020, arXiv:2004.05150).
    """

    spelling: ClassVar[str] = "global_local"
    width_field: ClassVar[str] = "blocks"
    example: ClassVar[str] = "global_local(128, globals=1, blocks=4)"

    block: int
    globals: int = 1
    blocks: int | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        return None if self.globals else super().period  # globals are at the start of the sequence

    def _check_fields(self) -> None:
        if self.blocks is not None:
            self._normalize(blocks=self._integer("blocks", self.blocks, 0))
        self._normalize(globals=self._integer("globals", self.globals, 0))
        if self.density is None or not self.total or not self.globals:
            return
        room = self.density * self.total + 1e-9  # a density such as 3 / 7, meaning 3 of 7 blocks, may be rounded down
        if room < min(self.globals + 1, self.total):  # a short sequence may consist of globals alone
            least = (self.globals + 1) / self.total
            alternative = f", or a density >= {least:.4g}" if least <= 1 else ""
            raise InvalidInput(
                f"global_local: density={self.density} of {self.total:,} key blocks is {room:.4g} blocks per row, "
                f"fewer than the {self.globals} globals and one local block; "
                f"try globals={max(0, int(room) - 1)}{alternative}"
            )

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        candidates = range(low, high + 1)
        if first < self.globals:
            return [candidates]
        global_rows = clip(candidates, 0, self.globals - 1)
        # Windows move right with their query blocks, so the query blocks whose window meets [first, last] are adjacent.
        least = bisect_right(candidates, first, key=lambda row: self._window(row).stop)
        most = bisect_right(candidates, last, key=lambda row: self._window(row).start)
        return [global_rows, candidates[least:most]]

    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if row < self.globals:
            yield range(first, last + 1)
            return
        yield from join_runs(clip(run, first, last) for run in (range(self.globals), self._window(row)))

    def _window(self, row: int) -> range:
        """The local key blocks of a query block; given `blocks`, the window may extend beyond the sequence."""
        if self.blocks is not None:
            return range(row - self.blocks, row + self.blocks + 1)
        kept, total = self.blocks_and_total()
        width = kept - self.globals
        start = max(self.globals, min(row - width // 2, total - width))
        return range(start, start + width)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        is_global = (i < self.globals) | (j < self.globals)
        if self.blocks is not None:
            return is_global | (np.abs(i - j) <= self.blocks)
        kept, total = self.blocks_and_total()
        width = kept - self.globals
        offset = j - np.clip(i - width // 2, self.globals, max(self.globals, total - width))
        return is_global | ((offset >= 0) & (offset < width))


@dataclass(frozen=True, repr=False)
class LocalWindow(GlobalLocal):
    """A block-sparse sliding window: query block i attends the key blocks i - blocks .. i + blocks.

    `block` is the number of tokens per block. With `density`, query block i attends n adjacent key blocks that start at
    i - n // 2, shifted inward at the ends of the sequence. Source: the window of Longformer, on blocks (Beltagy et al.
    2020, arXiv:2004.05150).
    """

    spelling: ClassVar[str] = "local_window"
    example: ClassVar[str] = "local_window(128, blocks=4)"
    globals: ClassVar[int] = 0  # type: ignore[misc]  # the fields are the others


@dataclass(frozen=True, repr=False)
class StridedBlocks(Family):
    """A block-sparse pattern in which query block i attends every `stride`-th key block j: (i - j) % stride == 0.

    `block` is the number of tokens per block. With `density`, query block i attends the n key blocks (i + floor(m *
    total / n)) % total for 0 <= m < n. Source: the strided attention of Sparse Transformers, on blocks (Child et al.
    2019, arXiv:1904.10509).
    """

    spelling: ClassVar[str] = "strided_blocks"
    width_field: ClassVar[str] = "stride"
    example: ClassVar[str] = "strided_blocks(128, stride=8)"

    block: int
    stride: int | None = None
    density: float | None = None
    total: int | None = None

    def _check_fields(self) -> None:
        if self.stride is not None:
            self._normalize(stride=self._integer("stride", self.stride, 1))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        candidates = range(low, high + 1)
        width = last - first + 1
        if self.stride is not None:
            if width >= self.stride or len(candidates) <= width:
                return [candidates]
            return [range(low + (j - low) % self.stride, high + 1, self.stride) for j in range(first, last + 1)]
        kept, total = self.blocks_and_total()
        if kept * width >= total or len(candidates) <= 2 * kept:
            return [candidates]
        offsets = [m * total // kept for m in range(kept)]
        shifts = [shift for offset in offsets for shift in (offset, offset - total)]
        return [clip(candidates, first - shift, last - shift) for shift in shifts]

    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if self.stride is not None:
            start = first + (row - first) % self.stride
            yield from join_runs(range(j, j + 1) for j in range(start, last + 1, self.stride))
        else:
            yield from join_runs(range(j, j + 1) for j in self._spread_keys(row, first, last))

    def _spread_keys(self, row: int, first: int, last: int) -> Iterator[int]:
        """The key blocks in [first, last] that query block `row` attends under `density`, ascending."""
        kept, total = self.blocks_and_total()
        # Key blocks left of the query block are reached by offsets that wrap around the end of the sequence.
        for wrap, low, high in ((total, first, min(last, row - 1)), (0, max(first, row), last)):
            least, most = low - row + wrap, high - row + wrap
            for m in range(ceil_div(least * kept, total), ceil_div((most + 1) * kept, total)):
                yield row - wrap + m * total // kept

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        distance = k // self.block - q // self.block
        if self.stride is not None:
            return distance % self.stride == 0
        kept, total = self.blocks_and_total()
        return np.isin(distance % max(1, total), np.arange(kept, dtype=np.int64) * total // max(1, kept))


@dataclass(frozen=True, repr=False)
class DilatedBlocks(Family):
    """A block-sparse pattern: query block i attends key blocks i, i - offset and i + offset for each of `offsets`.

    `block` is the number of tokens per block; offsets count blocks (default: 1, 2, 4). With `density`, query block i
    attends the first n existing key blocks in this order: i, then those at distances 1, 2, 4 and so on for the powers
    of two, then those at distances 3, 5, 6 and so on; at each distance, the left block comes first.
    """

    spelling: ClassVar[str] = "dilated_blocks"
    width_field: ClassVar[str] = "offsets"
    example: ClassVar[str] = "dilated_blocks(128, offsets=(1, 2, 4))"

    block: int
    offsets: tuple[int, ...] | None = None
    density: float | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        if self.offsets is None and self.density is None:
            self._normalize(offsets=OFFSETS)
        super().__post_init__()

    def _check_fields(self) -> None:
        offsets = self.offsets
        if offsets is None:
            return
        if not isinstance(offsets, list | tuple):
            raise InvalidInput(
                f"dilated_blocks: offsets={shown(offsets)} must be a list of integers; try offsets=(1, 2, 4)"
            )
        distances = {self._integer("an offset", offset, 0) for offset in offsets}
        self._normalize(offsets=tuple(sorted(distances)))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        candidates = range(low, high + 1)
        if self.offsets is not None:
            signed = [sign * offset for offset in (0, *self.offsets) for sign in (-1, 1)]
            return [clip(candidates, first - offset, last - offset) for offset in signed]
        kept, total = self.blocks_and_total()
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
            runs: Iterable[range] = _nearest_runs(row, *self.blocks_and_total())
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
        kept, total = self.blocks_and_total()
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
def _nearest_runs(row: int, kept: int, total: int) -> list[range]:
    """The key blocks of a query block that keeps `kept` of `total`: O(log total) ascending runs, which may overlap."""
    left, right = row, total - 1 - row  # blocks on either side
    sides = ((-1, left), (1, right))
    exponents = range(max(left, right).bit_length())
    powers = [row + sign * (1 << t) for t in exponents for sign, room in sides if 1 << t <= room]
    near = range(row, row + 1)
    if len(powers) > kept - 1:
        del powers[kept - 1 :]
    else:
        # The rest of the row holds the other distances up to `reach`, found by bisection, and perhaps one block more.
        spare = kept - 1 - len(powers)

        def count(reach: int) -> int:
            return _count_non_powers(min(reach, left)) + _count_non_powers(min(reach, right))

        reach = bisect_right(range(max(left, right) + 1), spare, key=count) - 1
        near = range(row - min(reach, left), row + min(reach, right) + 1)
        if count(reach) < spare:
            powers.append(row - reach - 1)
    return sorted([near, *(range(j, j + 1) for j in powers)], key=lambda run: run.start)


def _count_non_powers(most: int) -> int:
    """How many of the integers 1 .. most are not powers of two."""
    return most - most.bit_length()


@dataclass(frozen=True, repr=False)
class Hierarchical(Family):
    """A block-sparse pattern with several window widths: query blocks at multiples of a larger stride see farther.

    For each level (stride, w), query block i with i % stride == 0 attends the key blocks i - w .. i + w; w = -1 means
    every key block. `block` is the number of tokens per block. With `density`, the strides are 1, 4 and 16, the windows
    are in the same proportion, and the mean over the query blocks is as near to the density as possible.
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
        if self.levels is None:
            return
        pairs = self.levels
        if not isinstance(pairs, list | tuple) or not all(isinstance(x, list | tuple) and len(x) == 2 for x in pairs):
            raise InvalidInput(
                f"hierarchical: levels={shown(pairs)} must be a list of (stride, window in blocks; -1: no limit); try "
                "((1, 1), (4, -1))"
            )
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
        """The levels (stride, w): those given, or for a density the ones that come nearest to it on average."""
        if self.levels is not None:
            return self.levels
        _, total = self.blocks_and_total()
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
    """Levels with windows of stride * scale / 32, rounded. From one scale to the next, at most one window grows."""
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
local_window = LocalWindow
strided_blocks = StridedBlocks
global_local = GlobalLocal
