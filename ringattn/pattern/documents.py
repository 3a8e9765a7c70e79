"""Packed documents: a query attends the keys of its own document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput
from ..text import shorten
from .base import ONE_HEAD, Pattern, Run, check_integer
from .ranges import clip
from .tile import Tile, make_tile

if TYPE_CHECKING:
    import torch

    Integers = Sequence[int] | np.ndarray | torch.Tensor

EXAMPLE = "Documents([512, 256, 256])"


@dataclass(frozen=True, init=False)
class Documents(Pattern):
    """Several documents packed into one sequence: a query attends exactly the keys of its own document.

    `lengths` are the tokens of each document, in order; they must sum to the tokens of the sequence, and a length may
    be 0. `cu_seqlens`, instead of `lengths`, are the cumulative lengths that FlashAttention's varlen functions take: 0,
    512, 768, 1024 for documents of 512, 256 and 256 tokens. Both may be a list, a tuple, or a one-dimensional integer
    array or tensor. Combine with `Causal()` for language models: `Causal() & Documents([512, 256, 256])`.

    A positional array or tensor that begins with 0 is read as cu_seqlens. For an array of lengths whose first document
    is empty write `Documents(x.tolist())`.

    Raises InvalidInput for negative or non-integer values and for decreasing cu_seqlens; a plan raises it if the
    lengths do not sum to its tokens.
    """

    lengths: tuple[int, ...]

    def __init__(self, lengths: Integers | None = None, *, cu_seqlens: Integers | None = None) -> None:
        if (lengths is None) == (cu_seqlens is None):
            raise InvalidInput(f"Documents takes lengths or cu_seqlens, one of them; try {EXAMPLE}")
        values = _read_integers(lengths if cu_seqlens is None else cu_seqlens)
        if cu_seqlens is not None or (values[:1] == (0,) and not isinstance(lengths, list | tuple)):
            values = _subtract_neighbors(values)
        self._normalize(lengths=values)

    def __hash__(self) -> int:
        return self._hash  # cached: plans are looked up by pattern often, and there may be a million lengths

    @cached_property
    def _hash(self) -> int:
        return hash(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each document, then the end of the last document: the cu_seqlens."""
        return tuple(accumulate(self.lengths, initial=0))

    def check(self, tokens: int, heads: int) -> None:
        total = self.starts[-1]
        if total != tokens:
            if total < tokens:
                hint = f"try adding a last document of {tokens - total:,} tokens"
            elif self.lengths[0] == 0 and self.lengths[-1] == tokens:
                hint = "the lengths look like cu_seqlens; try Documents(cu_seqlens=...)"
            else:
                hint = f"drop {total - tokens:,} tokens"
            raise InvalidInput(
                f"Documents: the {len(self.lengths)} lengths sum to {total:,}, the sequence has {tokens:,} tokens; "
                f"{hint}"
            )

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        first = bisect_right(self.starts, max(q[0], k[0])) - 1
        last = bisect_right(self.starts, min(q[-1], k[-1])) - 1
        for document in range(first, min(last, len(self.lengths) - 1) + 1):
            low, high = self.starts[document], self.starts[document + 1] - 1
            tile = make_tile(heads, clip(q, low, high), clip(k, low, high))
            if tile is not None:
                yield tile

    def key_run(self, first: int, last: int) -> Run:
        starts = self.starts
        return starts[bisect_right(starts, first) - 1], starts[bisect_right(starts, last)] - 1

    def query_run(self, first: int, last: int) -> Run:
        return self.key_run(first, last)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        document = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return document[q] == document[k]


def _read_integers(source: object) -> tuple[int, ...]:
    """The Python ints >= 0 of a list, a tuple, or a one-dimensional integer array or tensor."""
    values = source.tolist() if hasattr(source, "tolist") else source
    if not isinstance(values, list | tuple):
        raise InvalidInput(f"Documents({source!r}): give the list of lengths; try {EXAMPLE}")
    hint = f"{EXAMPLE}, or a one-dimensional tensor of integers"
    # There may be a million lengths: plain ints, the usual case, are checked without a function call.
    return tuple(
        value if type(value) is int and value >= 0 else check_integer(value, "Documents: a length", 0, hint)
        for value in values
    )


def _subtract_neighbors(cumulative: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths that these cumulative lengths describe."""
    if cumulative[:1] != (0,) or any(a > b for a, b in pairwise(cumulative)):
        raise InvalidInput(
            "Documents: cu_seqlens begin with 0, never decrease, and end with the number of tokens, such as "
            f"[0, 512, 768, 1024]; got {shorten(str(list(cumulative)), 100)}"
        )
    return tuple(b - a for a, b in pairwise(cumulative))
