"""The places that the tokens of a batch have in a cache, and what queries at places see by the pattern of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInput
from ..pattern import Pattern
from ..pattern.views import IN_PLACE, Marks, Placed, find_tokens
from ..plan.row_sets import Ranges
from .holdings import find_needed
from .partials import RowGroups

#: Lengths at which a pattern is asked whether it is for one length only, and whether it sees a bounded run of keys.
LENGTHS = 1 << 20, 1 << 21
#: How far ahead of the last token queries are looked for that see a key.
HORIZON = 1 << 60


@dataclass(frozen=True)
class PlacedPattern:
    """The pattern of some layers of a cache, which has query heads, and asks it by places; `marks` are by row."""

    bound: Pattern
    heads: int
    #: Whether the pattern is for one length only.
    fixed: bool

    @classmethod
    def of(cls, pattern: Pattern, heads: int, max_tokens: int | None) -> PlacedPattern:
        """The pattern bound to the heads, and to `max_tokens` if it is for one length only. Raises InvalidInput."""
        one, other = (pattern.bind(heads, tokens) for tokens in LENGTHS)
        try:
            for tokens in LENGTHS:
                pattern.check(tokens, heads)
            fixed = one != other
        except InvalidInput:
            fixed = True
        if fixed:
            if max_tokens is None:
                raise InvalidInput(f"{pattern!r} is for one length only; give max_tokens=, the tokens that it is for")
            pattern.check(max_tokens, heads)
            one = pattern.bind(heads, max_tokens)
        return cls(one, heads, fixed)

    def view(self, marks: Sequence[Marks]) -> Pattern:
        """The pattern by places of the cache."""
        if all(of_row == IN_PLACE for of_row in marks):
            return Placed(self.bound) if self.fixed else self.bound
        return Placed(self.bound, tuple(marks))

    def groups(self, marks: Sequence[Marks]) -> RowGroups:
        """The patterns by places of the rows of the batch."""
        view = self.view(marks)
        if view.rows is None:
            return [(view, None)]
        groups: dict[Pattern, list[int]] = {}
        for row in range(view.rows):
            groups.setdefault(view.row(row), []).append(row)
        return [*groups.items()]

    def find_needed(self, marks: Sequence[Marks], first: int, last: int | None, stop: int) -> Ranges:
        """The places before `stop` that queries from `first` on see, or more of them; `last` ends the queries."""
        if last is None and not self.bound.endless:
            return (range(stop),)
        views = [view for view, _ in self.groups(marks)]
        return find_needed(views, range(first, HORIZON if last is None else last), range(stop), self.heads)

    @property
    def is_bounded(self) -> bool:
        """Whether no query sees more keys, however many there are."""
        if self.fixed or not self.bound.endless:
            return False
        counts = [sum(map(len, find_needed([self.bound], range(n, HORIZON), range(n), self.heads))) for n in LENGTHS]
        return counts[0] == counts[1] < LENGTHS[0]


def add_tokens(marks: Marks, length: int, new: range, runs: Ranges) -> tuple[int, Marks]:
    """(tokens, marks) of a row of `length` tokens and the new places, of which those in `runs` are tokens."""
    added: list[tuple[int, int | None]] = [*marks, (new.start, None)]
    for run in runs:
        added += [(run.start, run.start - length), (run.stop, None)]
        length += len(run)
    return length, _shorten([*added, (new.stop, new.stop - length)])


def crop_tokens(marks: Marks, cut: int, length: int) -> tuple[int, Marks]:
    """(the tokens before place `cut`, their marks) of a row; the next place is `length`."""
    count = sum(len(range(run.start, min(run.stop, cut))) for run in find_tokens(marks))
    return count, _shorten([*(mark for mark in marks if mark[0] < cut), (cut, None), (length, length - count)])


def find_place(marks: Marks, position: int) -> int:
    """The place of a position."""
    for run in find_tokens(marks):
        if position < len(run):
            return run[position]
        position -= len(run)
    raise AssertionError("positions have places")


def _shorten(marks: Sequence[tuple[int, int | None]]) -> Marks:
    """The fewest marks: of several at one place the last one, and none that goes on as the one before."""
    kept: list[tuple[int, int | None]] = []
    for mark in marks:
        if kept and kept[-1][0] == mark[0]:
            kept.pop()
        if not kept or kept[-1][1] != mark[1]:
            kept.append(mark)
    return tuple(kept)
