"""Block-sparse patterns: the base of all of them, and the one that is a table."""

from __future__ import annotations

import hashlib
import re
import zlib
from abc import abstractmethod
from base64 import b85decode, b85encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from typing import Any

import numpy as np

from ..errors import InvalidInput
from .base import ONE_HEAD, Pattern
from .ranges import ceil_div, clip, intersect, joined
from .tile import Tile, make


def whole(value: object, name: str, least: int) -> int:
    """`value`, checked to be an integer >= least."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidInput(f"{name}={value!r} must be an integer >= {least}")
    return int(value)


class BlockTable(Pattern):
    """A pattern whose pairs are whole blocks of `block` x `block` tokens."""

    block: int

    @abstractmethod
    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        """The maximal runs of adjacent key blocks in [first, last] that query block `row` sees, ascending."""

    @abstractmethod
    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        """Query blocks in [low, high]: all that see a key block in [first, last], and perhaps more.

        The ranges may overlap; a family that returns few of them finds at once that distant blocks do not meet.
        """

    def same(self, heads: range) -> Iterator[range]:
        """The heads, in groups that see the same blocks."""
        yield heads

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for row, queries in self._candidates(q, k):
            for group in self.same(heads):
                for run in self._runs(group, row, k):
                    tile = make(group, queries, self._clip(k, run))
                    if tile is not None:
                        yield tile

    def keys(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for group in self.same(heads):
            first = k[0] // self.block if k else 0
            seen = np.zeros(k[-1] // self.block + 1 - first if k else 0, dtype=bool)
            for row, _ in self._candidates(q, k):
                for run in self._runs(group, row, k):
                    seen[run.start - first : run.stop - first] = True
                if seen.all():
                    break  # many rows together often see all
            for start, stop in _edges(seen):
                rows = self._clip(k, range(first + start, first + stop))
                if rows:
                    yield group, rows

    def queries(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        for group in self.same(heads):
            seeing = (
                row for row, _ in self._candidates(q, k) if any(self._clip(k, r) for r in self._runs(group, row, k))
            )
            for run in joined(range(row, row + 1) for row in seeing):
                yield group, self._clip(q, run)

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        total = 0
        for row, queries in self._candidates(q, k):
            for group in self.same(heads):
                seen = sum(len(self._clip(k, run)) for run in self._runs(group, row, k))
                total += len(group) * len(queries) * seen
        return total

    def _candidates(self, q: range, k: range) -> Iterator[tuple[int, range]]:
        """(row of blocks, its queries in `q`), ascending: all that see a key block between the ends of `k`, or more."""
        if not q or not k:
            return
        near = self.rows(q[0] // self.block, q[-1] // self.block, k[0] // self.block, k[-1] // self.block)
        done = -1
        for row in merge(*(self._occupied(part, q) for part in near)):
            if row != done:
                done = row
                queries = self._clip(q, range(row, row + 1))
                if queries:
                    yield row, queries

    def _runs(self, heads: range, row: int, k: range) -> Iterator[range]:
        return self.runs(heads[0], row, k[0] // self.block, k[-1] // self.block)

    def _clip(self, rows: range, blocks: range) -> range:
        """The `rows` in a run of blocks."""
        return clip(rows, blocks.start * self.block, blocks.stop * self.block - 1)

    def _occupied(self, rows: range, q: range) -> Iterator[int]:
        """The `rows` that hold a position of `q`, or nearly so: a wide step of `q` jumps over most of them."""
        if not rows:
            return
        inside = clip(q, rows[0] * self.block, (rows[-1] + 1) * self.block - 1)
        if len(rows) <= len(inside) or q.step <= self.block:
            yield from rows
        else:
            yield from (position // self.block for position in inside if position // self.block in rows)

    def total_of(self, tokens: int) -> int:
        """Number of blocks of a sequence."""
        return ceil_div(tokens, self.block)


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(BlockTable):
    """Query block i of head h sees key block j iff table[h, i, j]; blocks are `block` tokens, the last may be short.

    `table` is bool [heads or 1, blocks, blocks]: an array, a nested list, or the string that `repr` prints.
    """

    block: int
    table: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", whole(self.block, "BlockSparse: block", 1))
        object.__setattr__(self, "table", _table(self.table))

    def check(self, tokens: int, heads: int) -> None:
        held, total = self.table.shape[1], self.total_of(tokens)
        if held != total:
            raise InvalidInput(
                f"BlockSparse: the table has {held:,} x {held:,} blocks of {self.block:,} tokens, but {tokens:,} tokens "
                f"make {total:,} blocks; try a table of {total:,} x {total:,} blocks, or another block"
            )
        if len(self.table) not in (1, heads):
            raise InvalidInput(
                f"BlockSparse: the table is for {len(self.table)} heads, but there are {heads}; "
                "give one table per head, or one for all"
            )

    def same(self, heads: range) -> Iterator[range]:
        if len(self.table) == 1:
            yield heads
        else:
            yield from (range(head, head + 1) for head in intersect(heads, range(len(self.table))))

    def rows(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        seen = self.table[:, low : high + 1, first : last + 1].any(axis=(0, 2))
        return [range(low + start, low + stop) for start, stop in _edges(seen)]

    def runs(self, head: int, row: int, first: int, last: int) -> Iterator[range]:
        seen = self.table[head if len(self.table) > 1 else 0, row, first : last + 1]
        for start, stop in _edges(seen):
            yield range(first + start, first + stop)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        rows = self.table[head] if len(self.table) > 1 else self.table[0]
        return rows[q // self.block, k // self.block]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.table.setflags(write=False)  # pickle does not keep this

    @cached_property
    def _packed(self) -> bytes:
        return np.packbits(self.table).tobytes()

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(repr((self.block, self.table.shape)).encode() + self._packed).digest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSparse) and self._digest == other._digest

    @cached_property
    def _text(self) -> str:
        shape = "x".join(map(str, self.table.shape))
        return f"{shape}:{b85encode(zlib.compress(self._packed, 9)).decode()}"

    def __repr__(self) -> str:
        return f"BlockSparse({self.block}, {self._text!r})"


def _edges(seen: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of each run of True."""
    change = np.flatnonzero(np.diff(seen, prepend=False, append=False))
    return [(int(start), int(stop)) for start, stop in change.reshape(-1, 2)]


def _table(value: object) -> np.ndarray:
    """A private, read-only bool [heads or 1, blocks, blocks]."""
    if isinstance(value, str):
        table = _from_text(value)
    else:
        try:
            found = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"BlockSparse: the table is not a rectangular array ({error})") from None
        binary = found.dtype == bool or (found.dtype.kind in "iu" and np.isin(found, (0, 1)).all())
        if found.size and not binary:
            raise InvalidInput(
                f"BlockSparse: the table must hold bools, or the integers 0 and 1, got dtype {found.dtype}; "
                "try scores > threshold, or top_k(block, k, scores)"
            )
        table = np.array(found, dtype=bool)
    if table.ndim == 2:
        table = table[None]
    if table.ndim != 3 or not len(table) or table.shape[1] != table.shape[2]:
        raise InvalidInput(
            f"BlockSparse: the table has shape {table.shape}, expected [heads or 1, blocks, blocks]: "
            "the query blocks are the key blocks; try np.ones((1, 8, 8), bool)"
        )
    table.setflags(write=False)
    return table


def _from_text(text: str) -> np.ndarray:
    """The table that the string in a repr holds."""
    try:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+):(.*)", text)
        if match is None:
            raise ValueError("it does not start with HEADSxROWSxCOLUMNS:")
        shape = tuple(int(size) for size in match.groups()[:3])
        size = shape[0] * shape[1] * shape[2]
        # Never inflates to more than the shape asks for, and one byte that proves a wrong text.
        reader = zlib.decompressobj()
        packed = reader.decompress(b85decode(match.group(4)), ceil_div(size, 8) + 1)
        if len(packed) != ceil_div(size, 8) or not reader.eof:
            raise ValueError(f"it does not hold the {ceil_div(size, 8)} bytes that the shape needs")
    except (ValueError, zlib.error) as error:
        raise InvalidInput(
            f"BlockSparse: the string {text[:40]!r} is no table that a repr printed: {error}; give an array instead"
        ) from None
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=size).astype(bool).reshape(shape)
