"""Packed documents: a query attends the keys of its own document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from ..errors import InvalidInput
from .base import ONE_HEAD, Pattern, Run
from .tile import Tile, make


@dataclass(frozen=True)
class Documents(Pattern):
    """`lengths` are the tokens of each document, in order; they sum to the length of the sequence."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, list | tuple):
            raise InvalidInput(f"Documents({self.lengths!r}): give the list of lengths; try Documents([512, 256, 256])")
        object.__setattr__(self, "lengths", tuple(self.lengths))
        for length in self.lengths:
            if isinstance(length, bool) or not isinstance(length, int) or length < 0:
                raise InvalidInput(
                    f"Documents: a length must be an integer >= 0, got {length!r}; try Documents([512, 256, 256])"
                )

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
            hint = f"try adding a last document of {tokens - held:,}" if held < tokens else f"drop {held - tokens:,}"
            raise InvalidInput(
                f"Documents: the {len(self.lengths)} lengths sum to {held:,}, the sequence has {tokens:,} tokens; "
                f"{hint} tokens"
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


def _within(r: range, low: int, high: int) -> range:
    """The members of `r` in [low, high)."""
    first = r.start if r.start >= low else r.start + -(-(low - r.start) // r.step) * r.step
    return range(first, min(r.stop, high), r.step)
