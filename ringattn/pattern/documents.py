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
from .base import ONE_HEAD, Pattern, Run
from .tile import Tile, make

if TYPE_CHECKING:
    import torch

    Numbers = Sequence[int] | np.ndarray | torch.Tensor


@dataclass(frozen=True, init=False)
class Documents(Pattern):
    """`lengths` are the tokens of each document, in order; they sum to the length of the sequence.

    `cu_seqlens`, in place of `lengths`, are the first position of each document and the end of the last: 0, 512, 768,
    1024 for documents of 512, 256 and 256 tokens. Either may be a list, a tuple, or an integer tensor or array of one
    dimension. `Documents(x)` reads a list or tuple as lengths, and a tensor or array as cu_seqlens where it begins with
    0, else as lengths. For a tensor of lengths whose first document is empty write `Documents(x.tolist())`.
    """

    lengths: tuple[int, ...]

    def __init__(self, lengths: Numbers | None = None, *, cu_seqlens: Numbers | None = None) -> None:
        if (lengths is None) == (cu_seqlens is None):
            raise InvalidInput("Documents takes lengths or cu_seqlens, one of them; try Documents([512, 256, 256])")
        if cu_seqlens is not None:
            found = _lengths(_integers(cu_seqlens))
        else:
            found = _integers(lengths)
            if found[:1] == (0,) and not isinstance(lengths, list | tuple):
                found = _lengths(found)
        for length in found:
            if length < 0:
                raise InvalidInput(
                    f"Documents: a length must be an integer >= 0, got {length!r}; try Documents([512, 256, 256])"
                )
        object.__setattr__(self, "lengths", found)

    def __hash__(self) -> int:
        return self._hash  # plans look patterns up often, and there may be a million lengths

    @cached_property
    def _hash(self) -> int:
        return hash(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First position of each document, and the end of the last."""
        return tuple(accumulate(self.lengths, initial=0))

    def check(self, tokens: int, heads: int) -> None:
        held = self.starts[-1]
        if held != tokens:
            if held < tokens:
                hint = f"try adding a last document of {tokens - held:,} tokens"
            elif self.lengths[0] == 0 and self.lengths[-1] == tokens:
                hint = "they look like cu_seqlens; try Documents(cu_seqlens=...)"
            else:
                hint = f"drop {held - tokens:,} tokens"
            raise InvalidInput(
                f"Documents: the {len(self.lengths)} lengths sum to {held:,}, the sequence has {tokens:,} tokens; "
                f"{hint}"
            )

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        first = bisect_right(self.starts, max(q[0], k[0])) - 1
        last = bisect_right(self.starts, min(q[-1], k[-1])) - 1
        for document in range(first, min(last, len(self.lengths) - 1) + 1):
            low, high = self.starts[document], self.starts[document + 1]
            tile = make(heads, _within(q, low, high), _within(k, low, high))
            if tile is not None:
                yield tile

    def key_run(self, first: int, last: int) -> Run:
        starts = self.starts
        return starts[bisect_right(starts, first) - 1], starts[bisect_right(starts, last)] - 1

    def query_run(self, first: int, last: int) -> Run:
        return self.key_run(first, last)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        name = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return name[q] == name[k]


def _integers(given: object) -> tuple[int, ...]:
    """The integers of a list, a tuple, or a tensor or array of one dimension."""
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple):
        raise InvalidInput(f"Documents({given!r}): give the list of lengths; try Documents([512, 256, 256])")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInput(
                f"Documents: a length must be an integer >= 0, got {value!r}; try Documents([512, 256, 256]), or a "
                "one-dimensional tensor of integers"
            )
    return tuple(values)


def _lengths(cumulative: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of documents whose first positions, and the end of the last, are given."""
    if cumulative[:1] != (0,) or any(a > b for a, b in pairwise(cumulative)):
        raise InvalidInput(
            "Documents: cu_seqlens begin with 0, never decrease, and end with the number of tokens, such as "
            f"[0, 512, 768, 1024]; got {_short(cumulative)}"
        )
    return tuple(b - a for a, b in pairwise(cumulative))


def _short(values: tuple[int, ...]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _within(r: range, low: int, high: int) -> range:
    """The members of `r` in [low, high)."""
    first = r.start if r.start >= low else r.start + -(-(low - r.start) // r.step) * r.step
    return range(first, min(r.stop, high), r.step)
