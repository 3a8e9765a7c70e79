"""Block-sparse families defined by a formula on block indices, so that no table is stored for long sequences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import ClassVar

import numpy as np

from ..errors import InvalidInput
from .base import check_integer
from .block_table import BlockTable
from .ranges import ceil_div, clip, join_runs


class Family(BlockTable):
    """A block-sparse pattern set either by its own width parameter or by `density`.

    `density` is the fraction of the key blocks that a query block keeps, 0 < density <= 1. It becomes a number of
    blocks only if `total`, the number of blocks of the sequence, is known: `bind` sets it, as every plan does. Without
    `total` the methods that need it raise InvalidInput. All parameters are checked on construction (InvalidInput).
    """

    #: The function name that `repr` prints and `parse_pattern` reads.
    spelling: ClassVar[str]
    #: The name of the parameter that `density` replaces.
    width_field: ClassVar[str]
    #: A correct spelling, for error messages.
    example: ClassVar[str]
    density: float | None
    total: int | None

    def __post_init__(self) -> None:
        self._normalize(block=self._integer("block", self.block, 1))
        if self.density is not None:
            width = getattr(self, self.width_field)
            if width is not None:
                raise InvalidInput(
                    f"{self.spelling}: {self.width_field}={width!r} and density={self.density!r}; give one"
                )
            self._normalize(density=check_density(self.density, self.spelling))
        if self.total is not None:
            self._normalize(total=self._integer("total", self.total, 0))
        self._check_fields()

    @property
    def period(self) -> int | None:
        return self.block if self.density is None else None  # a density depends on the length of the sequence

    @abstractmethod
    def _check_fields(self) -> None:
        """Check and normalize the parameters of the family."""

    def _require_width(self) -> None:
        """Raise InvalidInput if neither the width parameter nor `density` is given."""
        if self.density is None and getattr(self, self.width_field) is None:
            raise InvalidInput(f"{self.spelling}: give {self.width_field}= or density=; try {self.example}")

    def _integer(self, name: str, value: object, least: int) -> int:
        return check_integer(value, f"{self.spelling}: {name}", least, self.example)

    def bind(self, heads: int, tokens: int) -> BlockTable:
        return self if self.density is None else replace(self, total=self.block_count(tokens))

    def check(self, tokens: int, heads: int) -> None:
        self.bind(heads, tokens)

    def _query_rows(self, q: range, k: range) -> Iterator[tuple[int, range]]:
        if self.density is not None:
            self.kept_and_total()  # raise before the first result if the length is unknown
        return super()._query_rows(q, k)

    def kept_and_total(self) -> tuple[int, int]:
        """(key blocks that a query block keeps, key blocks of the sequence) under `density`."""
        if self.density is None or self.total is None:
            raise InvalidInput(
                f"{self!r}: a density needs the tokens; try .bind(heads, tokens), or {self.width_field}="
            )
        return kept_blocks(self.density, self.total), self.total

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
        raise InvalidInput(f"{name}: density={density!r} must be a fraction, 0 < density <= 1; try density=0.25")
    return float(density)


def kept_blocks(density: float, total: int) -> int:
    """The number of `total` blocks that `density` keeps: rounded to the nearest integer, at least 1."""
    return min(total, max(1, round(density * total)))


class BlockWindows(Family):
    """The first `globals` blocks attend every block and are attended by every block; the others add a local window.

    Query block i >= globals attends the key blocks 0 .. globals-1 and i - blocks .. i + blocks. With `density`, it
    attends the globals and one window of n other blocks, which starts at i - n // 2, shifted inward at the ends.
    """

    globals: int
    blocks: int | None

    @property
    def period(self) -> int | None:
        return None if self.globals else super().period  # globals are at the start of the sequence

    def _check_fields(self) -> None:
        self._require_width()
        if self.blocks is not None:
            self._normalize(blocks=self._integer("blocks", self.blocks, 0))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        candidates = range(low, high + 1)
        if first < self.globals:
            return [candidates]
        global_rows = clip(candidates, 0, self.globals - 1)
        if self.blocks is not None:
            return [global_rows, clip(candidates, first - self.blocks, last + self.blocks)]
        width, total = self._width_and_total()
        # The window moves right with its query block, so the query blocks whose window meets [first, last] are
        # adjacent.
        least = low if first < self.globals + width else first - width + 1 + width // 2
        most = high if last >= total - width else last + width // 2
        return [global_rows, clip(candidates, least, most)]

    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        if row < self.globals:
            yield range(first, last + 1)
            return
        if self.blocks is not None:
            window = range(max(0, row - self.blocks), row + self.blocks + 1)
        else:
            width, total = self._width_and_total()
            start = max(self.globals, min(row - width // 2, total - width))
            window = range(start, start + width)
        yield from join_runs(clip(run, first, last) for run in (range(self.globals), window))

    def _width_and_total(self) -> tuple[int, int]:
        """(blocks of a window, key blocks of the sequence) under `density`."""
        kept, total = self.kept_and_total()
        return kept - self.globals, total

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        i, j = q // self.block, k // self.block
        is_global = (i < self.globals) | (j < self.globals)
        if self.blocks is not None:
            return is_global | (np.abs(i - j) <= self.blocks)
        width, total = self._width_and_total()
        offset = j - np.clip(i - width // 2, self.globals, max(self.globals, total - width))
        return is_global | ((offset >= 0) & (offset < width))


@dataclass(frozen=True, repr=False)
class LocalWindow(BlockWindows):
    """Query block i attends the key blocks i - blocks .. i + blocks; `block` is the tokens of a block.

    With `density`, query block i attends n adjacent key blocks that start at i - n // 2, shifted inward at the ends of
    the sequence. The block form of Longformer's window (Beltagy et al. 2020, arXiv:2004.05150).
    """

    spelling: ClassVar[str] = "local_window"
    width_field: ClassVar[str] = "blocks"
    example: ClassVar[str] = "local_window(128, blocks=4)"
    globals: ClassVar[int] = 0  # type: ignore[misc]

    block: int
    blocks: int | None = None
    density: float | None = None
    total: int | None = None


@dataclass(frozen=True, repr=False)
class StridedBlocks(Family):
    """Query block i attends key block j iff (i - j) % stride == 0; `block` is the tokens of a block.

    With `density`, query block i attends the n key blocks (i + floor(m * total / n)) % total for 0 <= m < n. The block
    form of the strided attention of Sparse Transformers (Child et al. 2019, arXiv:1904.10509).
    """

    spelling: ClassVar[str] = "strided_blocks"
    width_field: ClassVar[str] = "stride"
    example: ClassVar[str] = "strided_blocks(128, stride=8)"

    block: int
    stride: int | None = None
    density: float | None = None
    total: int | None = None

    def _check_fields(self) -> None:
        self._require_width()
        if self.stride is not None:
            self._normalize(stride=self._integer("stride", self.stride, 1))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        candidates = range(low, high + 1)
        width = last - first + 1
        if self.stride is not None:
            if width >= self.stride or len(candidates) <= width:
                return [candidates]
            return [range(low + (j - low) % self.stride, high + 1, self.stride) for j in range(first, last + 1)]
        kept, total = self.kept_and_total()
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
            yield from join_runs(range(j, j + 1) for j in self._kept_keys(row, first, last))

    def _kept_keys(self, row: int, first: int, last: int) -> Iterator[int]:
        """The key blocks in [first, last] that query block `row` attends under `density`, ascending."""
        kept, total = self.kept_and_total()
        # Key blocks left of the query block are reached by offsets that wrap around the end of the sequence.
        for wrap, low, high in ((total, first, min(last, row - 1)), (0, max(first, row), last)):
            least, most = low - row + wrap, high - row + wrap
            for m in range(ceil_div(least * kept, total), ceil_div((most + 1) * kept, total)):
                yield row - wrap + m * total // kept

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        distance = k // self.block - q // self.block
        if self.stride is not None:
            return distance % self.stride == 0
        kept, total = self.kept_and_total()
        return np.isin(distance % max(1, total), np.arange(kept, dtype=np.int64) * total // max(1, kept))


@dataclass(frozen=True, repr=False)
class GlobalLocal(BlockWindows):
    """The first `globals` blocks attend every block and are attended by every block; the others add a local window.

    Query block i >= globals attends the key blocks 0 .. globals-1 and i - blocks .. i + blocks; `block` is the tokens
    of a block. With `density`, it attends the globals and one window of the other blocks, n key blocks in all. The
    global and local attention of Longformer (Beltagy et al. 2020, arXiv:2004.05150) in blocks.
    """

    spelling: ClassVar[str] = "global_local"
    width_field: ClassVar[str] = "blocks"
    example: ClassVar[str] = "global_local(128, globals=1, blocks=4)"

    block: int
    globals: int = 1
    blocks: int | None = None
    density: float | None = None
    total: int | None = None

    def _check_fields(self) -> None:
        super()._check_fields()
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


local_window = LocalWindow
strided_blocks = StridedBlocks
global_local = GlobalLocal
