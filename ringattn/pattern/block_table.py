"""Block-sparse patterns: their common base, and `BlockSparse`, which is given as a table of blocks."""

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

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from .base import ONE_HEAD, Pattern, Side, check_integer
from .tile import Tile, ceil_div, clip, find_runs, intersect, join_runs, make_tile


class BlockTable(Pattern):
    """Base of patterns that show or hide whole blocks of `block` queries x `block` keys; last blocks may be shorter."""

    block: int

    @abstractmethod
    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterable[range]:
        """The key blocks in [first, last] that query block `row` attends, ascending, as the fewest possible ranges."""

    @abstractmethod
    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        """Ranges that include every query block in [low, high] that attends a key block in [first, last].

        The ranges may overlap and may include other query blocks. If they are few, a planner quickly sees that distant
        blocks have no pair.
        """

    def equal_heads(self, heads: range) -> Iterator[range]:
        """`heads`, split into groups that attend the same blocks."""
        yield heads

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for row, queries in self._query_rows(q, k):
            for group in self.equal_heads(heads):
                for run in self._key_runs(group, row, k):
                    tile = make_tile(group, queries, self._clip(k, run))
                    if tile is not None:
                        yield tile

    def paired(self, side: Side, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[tuple[range, range]]:
        if not q or not k:
            return
        for group in self.equal_heads(heads):
            found = (self._paired_keys if side == "keys" else self._paired_queries)(q, k, group)
            rows = k if side == "keys" else q
            yield from ((group, inside) for blocks in found if (inside := self._clip(rows, blocks)))

    def _paired_keys(self, q: range, k: range, heads: range) -> Iterable[range]:
        """The key blocks that a query of `q` attends, as runs."""
        first = k[0] // self.block
        seen = np.zeros(k[-1] // self.block + 1 - first, dtype=bool)
        for row, _ in self._query_rows(q, k):
            for run in self._key_runs(heads, row, k):
                seen[run.start - first : run.stop - first] = True
            if seen.all():
                break  # many query blocks together often attend every key block
        return find_runs(seen, first)

    def _paired_queries(self, q: range, k: range, heads: range) -> Iterable[range]:
        """The query blocks that attend a key of `k`, as runs."""
        rows = (row for row, _ in self._query_rows(q, k))
        attending = (row for row in rows if any(self._clip(k, run) for run in self._key_runs(heads, row, k)))
        return join_runs(range(row, row + 1) for row in attending)

    def count(self, q: range, k: range, heads: range = ONE_HEAD) -> int:
        total = 0
        for row, queries in self._query_rows(q, k):
            for group in self.equal_heads(heads):
                keys = sum(len(self._clip(k, run)) for run in self._key_runs(group, row, k))
                total += len(group) * len(queries) * keys
        return total

    def block_count(self, tokens: int) -> int:
        """The number of blocks of a sequence of `tokens` tokens."""
        return ceil_div(tokens, self.block)

    def _query_rows(self, q: range, k: range) -> Iterator[tuple[int, range]]:
        """(query block, its members of `q`), ascending; covers all that attend a key between the ends of `k`."""
        if not q or not k:
            return
        near = self.query_blocks(q[0] // self.block, q[-1] // self.block, k[0] // self.block, k[-1] // self.block)
        previous = -1
        for row in merge(*(self._occupied_blocks(blocks, q) for blocks in near)):
            if row != previous:
                previous = row
                queries = self._clip(q, range(row, row + 1))
                if queries:
                    yield row, queries

    def _occupied_blocks(self, blocks: range, q: range) -> Iterator[int]:
        """The `blocks` that contain a member of `q`, ascending; also others if excluding them would cost more."""
        if not blocks:
            return
        inside = clip(q, blocks[0] * self.block, (blocks[-1] + 1) * self.block - 1)
        if len(blocks) <= len(inside) or q.step <= self.block:
            yield from blocks
        else:  # a wide step of q skips most blocks
            yield from (position // self.block for position in inside if position // self.block in blocks)

    def _key_runs(self, heads: range, row: int, k: range) -> Iterable[range]:
        return self.key_runs(heads[0], row, k[0] // self.block, k[-1] // self.block)

    def _clip(self, rows: range, blocks: range) -> range:
        """The members of `rows` in a run of blocks."""
        return clip(rows, blocks.start * self.block, blocks.stop * self.block - 1)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class BlockSparse(BlockTable):
    """Query block i of head h attends key block j iff table[h, i, j].

    A block is `block` tokens; the last block may be shorter. `table` is bool [heads or 1, blocks, blocks] or [blocks,
    blocks]: an array, a nested list, or the text that `repr` prints. A table of one head holds for all heads. The
    attribute `table` is a read-only copy, bool [heads or 1, blocks, blocks].

    Raises InvalidInput for another shape or dtype; a plan raises it if the blocks or heads do not match the sequence.
    """

    block: int
    table: np.ndarray

    def __init__(self, block: int, table: ArrayLike) -> None:
        block = check_integer(block, "BlockSparse: block", 1, "BlockSparse(128, table)")
        checked = _read_text(table) if isinstance(table, str) else _read_array(table)
        if checked.ndim == 2:
            checked = checked[None]
        if checked.ndim != 3 or not len(checked) or checked.shape[1] != checked.shape[2]:
            raise InvalidInput(f"BlockSparse: the table is {checked.shape}, expected [heads or 1, blocks, blocks]")
        checked.setflags(write=False)
        self._normalize(block=block, table=checked)

    def check(self, tokens: int, heads: int) -> None:
        rows, blocks = self.table.shape[1], self.block_count(tokens)
        if rows != blocks:
            raise InvalidInput(
                f"BlockSparse: the table has {rows:,} x {rows:,} blocks of {self.block:,} tokens, but {tokens:,} "
                f"tokens make {blocks:,} blocks; try a table of {blocks:,} x {blocks:,} blocks, or another block"
            )
        if len(self.table) not in (1, heads):
            raise InvalidInput(f"BlockSparse: the table is for {len(self.table)} heads, but there are {heads}")

    def equal_heads(self, heads: range) -> Iterator[range]:
        if len(self.table) == 1:
            yield heads
        else:
            yield from (range(head, head + 1) for head in intersect(heads, range(len(self.table))))

    def query_blocks(self, low: int, high: int, first: int, last: int) -> Iterable[range]:
        return find_runs(np.asarray(self.table[:, low : high + 1, first : last + 1].any(axis=(0, 2))), low)

    def key_runs(self, head: int, row: int, first: int, last: int) -> Iterable[range]:
        return find_runs(self.table[head if len(self.table) > 1 else 0, row, first : last + 1], first)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        table = self.table[head] if len(self.table) > 1 else self.table[0]
        return table[q // self.block, k // self.block]

    def __reduce__(self) -> tuple[type[BlockSparse], tuple[int, np.ndarray]]:
        return type(self), (self.block, self.table)  # plain pickling would make the table writable

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


def _read_array(source: ArrayLike) -> np.ndarray:
    """A bool copy of an array or nested list. Raises InvalidInput unless it holds bools, or the integers 0 and 1."""
    try:
        array = np.asarray(source)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"BlockSparse: the table is not a rectangular array ({error}); try equal rows") from None
    binary = array.dtype == bool or (array.dtype.kind in "iu" and np.isin(array, (0, 1)).all())
    if array.size and not binary:
        raise InvalidInput(f"BlockSparse: the table must hold bools, or 0 and 1, got {array.dtype}; try scores > 0")
    return np.array(array, dtype=bool)


def _read_text(text: str) -> np.ndarray:
    """The bool table that `repr` printed as HEADSxROWSxCOLUMNS:BITS, where BITS are packed, deflated and base85."""
    try:
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+):(.*)", text)
        if match is None:
            raise ValueError("it does not start with HEADSxROWSxCOLUMNS:")
        shape = tuple(int(size) for size in match.groups()[:3])
        bits = shape[0] * shape[1] * shape[2]
        # Inflate at most one byte more than the shape needs: enough to detect wrong text of any size.
        reader = zlib.decompressobj()
        packed = reader.decompress(b85decode(match.group(4)), ceil_div(bits, 8) + 1)
        if len(packed) != ceil_div(bits, 8) or not reader.eof:
            raise ValueError(f"it does not hold the {ceil_div(bits, 8)} bytes that the shape needs")
    except (ValueError, OverflowError, zlib.error) as error:
        raise InvalidInput(f"BlockSparse: {text[:40]!r} is not a table that repr printed: {error}") from None
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=bits).astype(bool).reshape(shape)
