"""Block-sparse families, by formula: no table is made, however long the sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import ClassVar

import numpy as np

from ..errors import InvalidInput
from .block_table import BlockTable, whole
from .ranges import ceil_div, clip, joined


class Family(BlockTable):
    """A rule on block indices, set by a width or by `density`, the fraction of the key blocks that a row keeps.

    A density is a number of blocks only where `total`, the number of blocks of the sequence, is known: a plan
    tells it (`bind`).
    """

    written: ClassVar[str]
    width: ClassVar[str]
    density: float | None
    total: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", whole(self.block, f"{self.written}: block", 1))
        if self.density is not None:
            given = getattr(self, self.width)
            if given is not None:
                raise InvalidInput(
                    f"{self.written}: {self.width}={given!r} and density={self.density!r} both set the width; give one"
                )
            object.__setattr__(self, "density", check_density(self.density, self.written))
        if self.total is not None:
            object.__setattr__(self, "total", whole(self.total, f"{self.written}: total", 0))
        self._validate()

    @abstractmethod
    def _validate(self) -> None:
        """Check and normalise the fields of the family."""

    def bind(self, heads: int, tokens: int) -> BlockTable:
        return self if self.density is None else replace(self, total=self.total_of(tokens))  # type: ignore[type-var]

    def check(self, tokens: int, heads: int) -> None:
        self.bind(heads, tokens)

    def _candidates(self, q: range, k: range) -> Iterator[tuple[int, range]]:
        if self.density is not None:
            self.size()  # an error where the length is not known
        return super()._candidates(q, k)

    def size(self) -> tuple[int, int]:
        """(kept, total) key blocks of a row under `density`."""
        if self.density is None or self.total is None:
            raise InvalidInput(
                f"{self!r}: a density is a number of blocks only where the length of the sequence is known; a plan "
                f"knows it, elsewhere write .bind(heads, tokens), or {self.width}= instead of density="
            )
        return share(self.density, self.total), self.total

    def __repr__(self) -> str:
        words = [str(self.block)]
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.name != "block" and (value is not None or field.default is MISSING):
                words.append(f"{field.name}={value!r}")
        return f"{self.written}({', '.join(words)})"

    def _need_width(self, example: str) -> None:
        if self.density is None and getattr(self, self.width) is None:
            raise InvalidInput(f"{self.written}: give {self.width}= or density=; try {self.written}({example})")


def check_density(density: object, name: str) -> float:
    """`density`, checked to be a fraction in (0, 1]."""
    if isinstance(density, bool) or not isinstance(density, int | float | np.floating) or not 0 < density <= 1:
        raise InvalidInput(f"{name}: density={density!r} must be a fraction, 0 < density <= 1; try density=0.25")
    return float(density)


def share(density: float, total: int) -> int:
    """Number of blocks, of `total`, that a density keeps: the nearest, at least one."""
    return min(total, max(1, round(density * total)))


@dataclass(frozen=True, repr=False)
class LocalWindow(Family):
    """Query block i sees the key blocks i - blocks .. i + blocks.

    With `density`: the n nearest to i as one window, i - n // 2 first, shifted inward at the edges.
    """

    written: ClassVar[str] = "local_window"
    width: ClassVar[str] = "blocks"

    block: int
    blocks: int | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        return self.block if self.density is None else None  # a density counts blocks of the whole sequence

    def _validate(self) -> None:
        self._need_width("128, blocks=4")
        if self.blocks is not None:
            object.__setattr__(self, "blocks", whole(self.blocks, "local_window: blocks", 0))

    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        if self.blocks is not None:
            return [clip(range(low, high + 1), first - self.blocks, last + self.blocks)]
        kept, total = self.size()
        # Windows move right with their row, so those that reach [first, last] are neighbours.
        least = low if first < kept else first - kept + 1 + kept // 2
        most = high if last >= total - kept else last + kept // 2
        return [clip(range(low, high + 1), least, most)]

    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if self.blocks is not None:
            yield range(max(first, row - self.blocks), min(last, row + self.blocks) + 1)
        else:
            kept, total = self.size()
            start = max(0, min(row - kept // 2, total - kept))
            yield range(max(first, start), min(last + 1, start + kept))

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        if self.blocks is not None:
            return np.abs(i - j) <= self.blocks
        kept, total = self.size()
        before = j - np.clip(i - kept // 2, 0, total - kept)
        return (before >= 0) & (before < kept)


@dataclass(frozen=True, repr=False)
class StridedBlocks(Family):
    """Query block i sees key block j iff (i - j) % stride == 0.

    With `density`: the n key blocks i + floor(m * total / n), 0 <= m < n, modulo total.
    """

    written: ClassVar[str] = "strided_blocks"
    width: ClassVar[str] = "stride"

    block: int
    stride: int | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        return self.block if self.density is None else None  # a density counts blocks of the whole sequence

    def _validate(self) -> None:
        self._need_width("128, stride=8")
        if self.stride is not None:
            object.__setattr__(self, "stride", whole(self.stride, "strided_blocks: stride", 1))

    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        every = range(low, high + 1)
        wide = last - first + 1
        if self.stride is not None:
            if wide >= self.stride or len(every) <= wide:
                return [every]
            return [range(low + (j - low) % self.stride, high + 1, self.stride) for j in range(first, last + 1)]
        kept, total = self.size()
        if kept * wide >= total or len(every) <= 2 * kept:
            return [every]
        offsets = [m * total // kept for m in range(kept)]
        shifts = [shift for offset in offsets for shift in (offset, offset - total)]
        return [clip(every, first - shift, last - shift) for shift in shifts]

    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if self.stride is not None:
            start = first + (row - first) % self.stride
            yield from joined(range(j, j + 1) for j in range(start, last + 1, self.stride))
        else:
            yield from joined(range(j, j + 1) for j in self._kept(row, first, last))

    def _kept(self, row: int, first: int, last: int) -> Iterator[int]:
        """The key blocks in [first, last] of a row under `density`, ascending."""
        kept, total = self.size()
        # The blocks left of the row are those whose offset wraps around.
        for turn, low, high in ((total, first, min(last, row - 1)), (0, max(first, row), last)):
            least, most = low - row + turn, high - row + turn
            for m in range(ceil_div(least * kept, total), ceil_div((most + 1) * kept, total)):
                yield row - turn + m * total // kept

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        away = k // self.block - q // self.block
        if self.stride is not None:
            return away % self.stride == 0
        kept, total = self.size()
        return np.isin(away % max(1, total), np.arange(kept, dtype=np.int64) * total // max(1, kept))


@dataclass(frozen=True, repr=False)
class GlobalLocal(Family):
    """The first `globals` blocks see all and are seen by all; the others see their local window, too.

    With `density`: the other rows see the globals and one window of the remaining blocks, n in all.
    """

    written: ClassVar[str] = "global_local"
    width: ClassVar[str] = "blocks"

    block: int
    globals: int = 1
    blocks: int | None = None
    density: float | None = None
    total: int | None = None

    @property
    def period(self) -> int | None:
        return self.block if self.density is None and not self.globals else None

    def _validate(self) -> None:
        self._need_width("128, globals=1, blocks=4")
        object.__setattr__(self, "globals", whole(self.globals, "global_local: globals", 0))
        if self.blocks is not None:
            object.__setattr__(self, "blocks", whole(self.blocks, "global_local: blocks", 0))
        # The slack forgives the rounding of a density such as 3 / 7, which means 3 of 7 blocks.
        if self.density is None or not self.total or not self.globals:
            return
        room = self.density * self.total + 1e-9
        if room < min(self.globals + 1, self.total):  # a short sequence may hold nothing but globals
            least = (self.globals + 1) / self.total
            more = f", or a density >= {least:.4g}" if least <= 1 else ""
            raise InvalidInput(
                f"global_local: density={self.density} of {self.total:,} key blocks is {room:.4g} blocks per row, fewer "
                f"than the {self.globals} globals and one local block; try globals={max(0, int(room) - 1)}{more}"
            )

    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        every = range(low, high + 1)
        if first < self.globals:
            return [every]
        head = clip(every, 0, self.globals - 1)
        if self.blocks is not None:
            return [head, clip(every, first - self.blocks, last + self.blocks)]
        kept, total = self.size()
        wide = kept - self.globals
        least = low if first < self.globals + wide else first - wide + 1 + wide // 2
        most = high if last >= total - wide else last + wide // 2
        return [head, clip(every, least, most)]

    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if row < self.globals:
            yield range(first, last + 1)
            return
        if self.blocks is not None:
            window = range(max(0, row - self.blocks), row + self.blocks + 1)
        else:
            kept, total = self.size()
            wide = kept - self.globals
            start = max(self.globals, min(row - wide // 2, total - wide))
            window = range(start, start + wide)
        yield from joined(clip(run, first, last) for run in (range(self.globals), window))

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        either = (i < self.globals) | (j < self.globals)
        if self.blocks is not None:
            return either | (np.abs(i - j) <= self.blocks)
        kept, total = self.size()
        wide = kept - self.globals
        before = j - np.clip(i - wide // 2, self.globals, max(self.globals, total - wide))
        return either | ((before >= 0) & (before < wide))


local_window = LocalWindow
strided_blocks = StridedBlocks
global_local = GlobalLocal
