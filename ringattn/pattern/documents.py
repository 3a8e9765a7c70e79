"""Packed documents: each query attends the keys of its own document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..errors import InvalidInput
from ..text import shorten, shown
from .base import FAR, ONE_HEAD, And, Pattern, Position, Run, Side, check_integer
from .tile import Tile, clip, make_tile

if TYPE_CHECKING:
    import torch

    Integers = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor

EXAMPLE = "Documents([512, 256, 256])"


@dataclass(frozen=True, init=False, repr=False)
class Documents(Pattern):
    """Several documents packed into one sequence: a query attends exactly the keys of its own document.

    `lengths` are the tokens of each document, in order; they must sum to the tokens of the sequence, and a length may
    be 0. Instead of `lengths`, `cu_seqlens` takes the cumulative lengths of FlashAttention's varlen functions: 0, 512,
    768, 1024 for documents of 512, 256 and 256 tokens. Either may be a list, a tuple, or a one-dimensional integer
    array or tensor. For language models, combine with `Causal()`: `Causal() & Documents([512, 256, 256])`.

    `Documents([[512, 512], [1024]])` gives each row of a batch its own documents; the batch must have exactly that many
    rows. `cu_seqlens` may have rows, too. Positions start at 0 in each row. If all rows are equal, one row is kept.

    `Documents(lengths, q_lengths=)` is for queries that are not the tokens of the keys, see `ring_attention`: document
    i has q_lengths[i] queries, which attend its lengths[i] keys. Both may have rows.

    A positional array or tensor that begins with 0 is read as cu_seqlens. If it holds lengths and the first document is
    empty, write `Documents(x.tolist())`.

    Raises InvalidInput for negative or non-integer values and for decreasing cu_seqlens; a plan raises it if the
    lengths do not sum to its tokens.
    """

    #: The length of each document, or one tuple of lengths per batch row.
    lengths: tuple[int, ...] | tuple[tuple[int, ...], ...]
    #: The number of queries of each document; None: the queries are the same tokens as the keys.
    q_lengths: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None

    endless = True

    def __init__(
        self, lengths: Integers | None = None, *, cu_seqlens: Integers | None = None, q_lengths: Integers | None = None
    ) -> None:
        if (lengths is None) == (cu_seqlens is None):
            raise InvalidInput(f"Documents takes either lengths or cu_seqlens; try {EXAMPLE}")
        is_array = hasattr(lengths, "tolist")
        lengths_of = (
            _read_rows(lengths, None if is_array else False) if cu_seqlens is None else _read_rows(cu_seqlens, True)
        )
        own_of = [None] if q_lengths is None else _read_rows(q_lengths, False)
        count = max(len(lengths_of), len(own_of))
        rows = [*zip(*(x * count if len(x) == 1 else x for x in (lengths_of, own_of)), strict=False)]
        for mine, others in rows:
            if len(rows) < count or (others is not None and len(others) != len(mine)):
                raise InvalidInput(
                    f"Documents: {len(others or own_of)} q_lengths but {len(mine)} lengths; give equally many"
                )
        one = len(set(rows)) == 1
        both = rows[0] if one else tuple(zip(*rows, strict=True))
        self._normalize(lengths=both[0], q_lengths=None if q_lengths is None else both[1])

    def __repr__(self) -> str:
        own = "" if self.q_lengths is None else f", q_lengths={self.q_lengths!r}"
        return f"Documents(lengths={self.lengths!r}{own})"

    __hash__ = Pattern.kept_hash  # plans are looked up by pattern often, and there may be a million lengths

    @property
    def varies(self) -> bool:
        return True

    @property
    def rows(self) -> int | None:
        return len(self.lengths) if self.lengths and isinstance(self.lengths[0], tuple) else None

    def row(self, index: int) -> Documents:
        if self.rows is None:
            return self
        if not -self.rows <= index < self.rows:
            raise InvalidInput(f"row {index} of Documents with {self.rows} rows; try row({self.rows - 1}), the last")
        own = None if self.q_lengths is None else cast("tuple[int, ...]", self.q_lengths[index])
        return Documents(cast("tuple[int, ...]", self.lengths[index]), q_lengths=own)

    def split(self, length: int) -> Documents:
        """The same tokens with each document cut, from its start, into documents of at most `length` tokens."""
        rows = [self.row(row).starts for row in range(self.rows or 1)]
        cut = [[*sorted({x for a, b in pairwise(row) for x in range(a, b, length)}), row[-1]] for row in rows]
        return Documents(cu_seqlens=cut if self.rows else cut[0])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The cumulative lengths (cu_seqlens): the first position of each document, then the end of the last one.

        Raises InvalidInput if each batch row has its own documents.
        """
        return tuple(accumulate(self._of_all_rows, initial=0))

    @cached_property
    def q_starts(self) -> tuple[int, ...]:
        """The first query of each document, then the end of the last document."""
        own = cast("tuple[int, ...] | None", self.q_lengths)
        return self.starts if own is None else tuple(accumulate(own, initial=0))

    @property
    def _of_all_rows(self) -> tuple[int, ...]:
        """The lengths that all rows of a batch share. Raises InvalidInput if rows differ."""
        if self.rows is not None:
            raise InvalidInput(f"Documents of {self.rows} batch rows where one sequence is expected; try .row(0)")
        return cast("tuple[int, ...]", self.lengths)

    def check(self, tokens: int, heads: int) -> None:
        if self.rows is not None:
            for index in range(self.rows):
                self.row(index).check(tokens, heads)
            return
        if self.q_lengths is not None:
            self.check_sides(tokens, tokens, heads)
            return
        total, lengths = self.starts[-1], self._of_all_rows
        if total != tokens:
            if total < tokens:
                hint = f"try adding a last document of {tokens - total:,} tokens"
            elif lengths[0] == 0 and lengths[-1] == tokens:
                hint = "the lengths look like cu_seqlens; try Documents(cu_seqlens=...)"
            else:
                hint = f"drop {total - tokens:,} tokens"
            raise InvalidInput(
                f"Documents: the {len(lengths)} lengths sum to {total:,}, the sequence has {tokens:,} tokens; {hint}"
            )

    def check_sides(self, keys: int, queries: int, heads: int) -> None:
        if self.rows is not None:
            for index in range(self.rows):
                self.row(index).check_sides(keys, queries, heads)
        elif self.q_lengths is None:
            # If the queries are only part of the sequence, such as a chunk of a prompt, later documents do not matter.
            super().check_sides(max(keys, self.starts[-1]), queries, heads)
        elif (total := self.starts[-1]) != keys:
            raise InvalidInput(f"Documents: the lengths sum to {total:,}, but there are {keys:,} keys")
        elif (total := self.q_starts[-1]) != queries:
            raise InvalidInput(f"Documents: the q_lengths sum to {total:,}, but there are {queries:,} queries")

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        starts, q_starts = self.starts, self.q_starts
        first = max(bisect_right(q_starts, q[0]), bisect_right(starts, k[0])) - 1
        last = min(bisect_right(q_starts, q[-1]), bisect_right(starts, k[-1])) - 1
        for document in range(first, min(last, len(self.lengths) - 1) + 1):
            rows = clip(q, q_starts[document], q_starts[document + 1] - 1)
            tile = make_tile(heads, rows, clip(k, starts[document], starts[document + 1] - 1))
            if tile is not None:
                yield tile

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        if self.q_lengths is not None:
            return None
        starts = self.starts
        if not isinstance(first, np.ndarray):
            return starts[bisect_right(starts, first) - 1], starts[bisect_right(starts, last)] - 1
        edges = np.array(starts, dtype=np.int64)
        # There may be far more positions than documents, so search the edges among the ascending positions.
        firsts, lasts = (np.diff(np.searchsorted(positions, edges)) for positions in (first, last))
        return np.repeat(edges[:-1], firsts), np.repeat(edges[1:] - 1, lasts)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        lengths = self._of_all_rows
        document = np.repeat(np.arange(len(lengths)), lengths)
        own = document if self.q_lengths is None else np.repeat(np.arange(len(lengths)), self.q_lengths)
        return own[q] == document[k]


def find_documents(pattern: Pattern) -> Documents | None:
    """The documents of a pattern if all batch rows share them; None without documents, or if batch rows differ."""
    if isinstance(pattern, Documents):
        return pattern if pattern.rows is None and pattern.q_lengths is None else None
    both = pattern.operands if isinstance(pattern, And) else ()
    return next(filter(None, map(find_documents, both)), None)


def _read_rows(source: Any, cumulative: bool | None) -> list[tuple[int, ...]]:
    """The lengths of each row of a batch, or the lengths that all rows share."""
    values = source.tolist() if hasattr(source, "tolist") else source
    if isinstance(values, list | tuple) and values and all(isinstance(row, list | tuple) for row in values):
        return [_read_lengths(row, cumulative) for row in values]
    return [_read_lengths(values, cumulative)]


def _read_lengths(values: object, cumulative: bool | None) -> tuple[int, ...]:
    """The lengths in a list or tuple. If `cumulative` is None, values that begin with 0 are read as cu_seqlens."""
    if not isinstance(values, list | tuple):
        raise InvalidInput(f"Documents({shown(values)}): give the list of lengths; try {EXAMPLE}")
    hint = f"{EXAMPLE}, or a one-dimensional tensor of integers"
    # There may be a million lengths: plain ints, the usual case, are checked without a function call.
    numbers = tuple(
        value if type(value) is int and value >= 0 else check_integer(value, "Documents: a length", 0, hint)
        for value in values
    )
    lengths = _subtract_neighbors(numbers) if cumulative or (cumulative is None and numbers[:1] == (0,)) else numbers
    if (total := sum(lengths)) >= FAR:
        raise InvalidInput(f"Documents: {total:,} tokens are more than a sequence can have; try {EXAMPLE}")
    return lengths


def _subtract_neighbors(cumulative: tuple[int, ...]) -> tuple[int, ...]:
    """The document lengths for these cumulative lengths."""
    if cumulative[:1] != (0,) or any(a > b for a, b in pairwise(cumulative)):
        raise InvalidInput(
            "Documents: cu_seqlens begin with 0, never decrease, and end with the number of tokens, such as "
            f"[0, 512, 768, 1024]; got {shorten(str(list(cumulative)), 100)}"
        )
    return tuple(b - a for a, b in pairwise(cumulative))
