"""Layouts made of layouts: `Shifted` starts at a later position, `Joined` has several parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..cache import Cache, cached
from ..errors import InvalidInput
from ..pattern.base import check_integer
from ..pattern.tile import index_ranges, merge_runs, shift_range
from ..text import split_commas
from . import Layout

#: Bytes of the spans that one layout caches.
SPANS = 1 << 21


@dataclass(frozen=True)
class Composed(Layout):
    """Base of layouts made of other layouts, `parts`; `tokens` is the total number of positions in the parts."""

    parts: tuple[Layout, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.parts:
            if part.digest or part.stacked > 1:
                raise InvalidInput(
                    f"{part.name} cannot be a part of joined(...); try contiguous, zigzag or striped(64)"
                )
        if {part.ranks for part in self.parts} - {self.ranks}:
            raise InvalidInput(
                f"{self.name} joins layouts for different numbers of ranks; make all of them for {self.ranks} ranks"
            )

    __hash__ = Layout.kept_hash

    @cached_property
    def cache(self) -> Cache:
        return Cache(SPANS)

    @cached
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        spans = [part.span(ranks) for part in self.parts]
        ranges = tuple(r for part, (found, _) in zip(self.parts, spans, strict=True) for r in self._select(part, found))
        if len(ranks) > 1 and all(r.step == 1 for r in ranges):
            ranges = merge_runs(ranges)
        return ranges, all(exact for _, exact in spans)

    def owner(self, position: int) -> int:
        return next(rank for rank in range(self.ranks) if any(position in run for run in self.shard(rank)))

    def grouped(self, size: int) -> Layout:
        return replace(self, ranks=self.ranks // size, parts=tuple(part.grouped(size) for part in self.parts))

    def _select(self, part: Layout, ranges: Iterable[range]) -> Iterable[range]:
        """The positions in this layout of the positions `ranges` of a part."""
        return ranges

    @cached_property
    def domain(self) -> tuple[range, ...]:
        return merge_runs(r for part in self.parts for r in self._select(part, part.domain))

    @cached
    def places(self, rank: int) -> tuple[range, ...]:
        return tuple(places for run in self.shard(rank) for places in index_ranges(self.domain)(run))


@dataclass(frozen=True)
class Shifted(Composed):
    """A layout whose positions are those of its only part, each increased by `first`."""

    first: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._normalize(first=check_integer(self.first, "shifted: the first position", 0, "shifted(zigzag, 1000)"))
        self._check_most(self.first + self.tokens)

    __hash__ = Layout.kept_hash

    @property
    def name(self) -> str:
        return f"shifted({self.parts[0].name}, {self.first})"

    def _select(self, part: Layout, ranges: Iterable[range]) -> Iterable[range]:
        return (shift_range(r, self.first) for r in ranges)


@dataclass(frozen=True)
class Joined(Composed):
    """Several layouts with disjoint positions as one; a rank's local rows are its rows of each part, in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(map(len, self.domain)) != self.tokens:
            raise InvalidInput(f"{self.name}: two parts share positions; try shifted(zigzag, 1000) for a part")

    __hash__ = Layout.kept_hash

    @property
    def name(self) -> str:
        return f"joined({', '.join(f'{part.name}[{part.tokens}]' for part in self.parts)})"


def shift_layout(layout: Layout, first: int) -> Layout:
    """`layout` with every position increased by `first`, on the same rank. Raises InvalidInput if `first` < 0."""
    return Shifted(layout.tokens, layout.ranks, (layout,), first) if first else layout


def join_layouts(layouts: Sequence[Layout]) -> Layout:
    """One layout with all positions of `layouts`, such as those of a cache and of a new chunk.

    Raises InvalidInput if two of the layouts share a position.
    """
    return Joined(sum(part.tokens for part in layouts), layouts[0].ranks, tuple(layouts))


def read_composed(name: str, tokens: int | None, make: Callable[[str, int | None], Layout]) -> Layout:
    """The shifted or joined layout with the given name, such as "shifted(zigzag, 1000)".

    `make` makes each part from its name and number of tokens. If `tokens` is None, the name must give the numbers of
    tokens. Raises InvalidInput if `name` is not the name of a shifted or joined layout.
    """
    match = re.fullmatch(r"\s*(shifted|joined)\s*\((.*)\)\s*", name, re.DOTALL)
    kind, arguments = (match[1], split_commas(match[2])) if match else ("", [])
    if kind == "shifted" and len(arguments) == 2 and arguments[1].strip().isdecimal():
        layout = shift_layout(make(arguments[0], tokens), int(arguments[1]))
    elif kind == "joined":
        sized = [re.fullmatch(r"(.*)\[\s*(\d+)\s*\]\s*", text, re.DOTALL) for text in arguments]
        if None in sized:
            lacking = arguments[sized.index(None)].strip()
            raise InvalidInput(f"layout {name!r}: {lacking!r} lacks its token count; try joined(zigzag[1000], ...)")
        layout = join_layouts([make(part[1], int(part[2])) for part in sized if part])
    else:
        raise InvalidInput(
            f"unknown layout {name!r}; expected shifted(zigzag, 1000) or joined(zigzag[1000], shifted(zigzag, "
            "1000)[24]), with any other layouts in place of zigzag"
        )
    if tokens not in (None, layout.tokens):
        raise InvalidInput(f"layout {name!r} has {layout.tokens:,} tokens, but the call has {tokens:,}")
    return layout
