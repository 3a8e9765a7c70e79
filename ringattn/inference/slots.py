"""Which slots of a cache hold the tokens of a batch, and which slots a query sees by a layer's pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidInput
from ..pattern import Pattern
from ..pattern.views import UNSHIFTED, Shifts, Slotted, find_tokens
from ..plan.row_sets import Ranges
from .holdings import find_needed
from .partials import RowGroups

#: Two lengths that show whether a pattern is for one length only, and whether its queries see a bounded run of keys.
LENGTHS = 1 << 20, 1 << 21
#: How far after the last token to look for queries that see a key.
HORIZON = 1 << 60


@dataclass(frozen=True)
class SlottedPattern:
    """A pattern for layers of a cache; it translates positions of tokens to slots, their places in the cache.

    Slots differ from positions in rows with padding; see `Shifts`.
    """

    bound: Pattern
    heads: int
    #: Whether the pattern is for one length only.
    fixed: bool

    @classmethod
    def of(cls, pattern: Pattern, heads: int, max_tokens: int | None) -> SlottedPattern:
        """Make a SlottedPattern for `heads` heads; a pattern for one length only is bound to `max_tokens`.

        Raises InvalidInput if such a pattern does not fit, or if `max_tokens` is missing for it.
        """
        one, other = (pattern.bind(heads, tokens) for tokens in LENGTHS)
        try:
            for tokens in LENGTHS:
                pattern.check(tokens, heads)
            fixed = one != other
        except InvalidInput:
            fixed = True
        if fixed:
            if max_tokens is None:
                raise InvalidInput(f"{pattern!r} is for one length only; give max_tokens=, set to that length")
            pattern.check(max_tokens, heads)
            one = pattern.bind(heads, max_tokens)
        return cls(one, heads, fixed)

    def view(self, shifts: Sequence[Shifts]) -> Pattern:
        """The pattern over slots instead of positions, for a batch whose rows have these shifts."""
        if all(of_row == UNSHIFTED for of_row in shifts):
            return Slotted(self.bound) if self.fixed else self.bound
        return Slotted(self.bound, tuple(shifts))

    def groups(self, shifts: Sequence[Shifts]) -> RowGroups:
        """Pairs (pattern over slots, rows of the batch that have this pattern); None stands for all rows."""
        view = self.view(shifts)
        if view.rows is None:
            return [(view, None)]
        groups: dict[Pattern, list[int]] = {}
        for row in range(view.rows):
            groups.setdefault(view.row(row), []).append(row)
        return [*groups.items()]

    def find_needed(self, shifts: Sequence[Shifts], first: int, last: int | None, stop: int) -> Ranges:
        """Ranges of slots that contain every key before `stop` that some queries see; they may contain other slots.

        The queries are at slots `first` to `last`; None: no end.
        """
        if last is None and not self.bound.endless:
            return (range(stop),)
        views = [view for view, _ in self.groups(shifts)]
        return find_needed(views, range(first, HORIZON if last is None else last), range(stop), self.heads)

    @property
    def is_bounded(self) -> bool:
        """Whether queries see a limited number of keys, however long the sequence becomes."""
        if self.fixed or not self.bound.endless:
            return False
        counts = [sum(map(len, find_needed([self.bound], range(n, HORIZON), range(n), self.heads))) for n in LENGTHS]
        return counts[0] == counts[1] < LENGTHS[0]


def add_tokens(shifts: Shifts, length: int, new: range, runs: Ranges) -> tuple[int, Shifts]:
    """Add the slots `new` to a row that has `length` tokens; returns its new number of tokens and its new shifts.

    The slots in `runs` hold tokens; the others hold padding.
    """
    added: list[tuple[int, int | None]] = [*shifts, (new.start, None)]
    for run in runs:
        added += [(run.start, run.start - length), (run.stop, None)]
        length += len(run)
    return length, _shorten([*added, (new.stop, new.stop - length)])


def crop_tokens(shifts: Shifts, cut: int, length: int) -> tuple[int, Shifts]:
    """Remove the slots from `cut` on from a row of `length` slots; returns its number of tokens and its new shifts."""
    count = sum(len(range(run.start, min(run.stop, cut))) for run in find_tokens(shifts))
    return count, _shorten([*(shift for shift in shifts if shift[0] < cut), (cut, None), (length, length - count)])


def find_slot(shifts: Shifts, position: int) -> int:
    """The slot of a position."""
    for run in find_tokens(shifts):
        if position < len(run):
            return run[position]
        position -= len(run)
    raise AssertionError("every position has a slot")


def _shorten(shifts: Sequence[tuple[int, int | None]]) -> Shifts:
    """Drop shifts overwritten at the same slot, and shifts that change nothing."""
    kept: list[tuple[int, int | None]] = []
    for shift in dict(shifts).items():
        if not kept or kept[-1][1] != shift[1]:
            kept.append(shift)
    return tuple(kept)
