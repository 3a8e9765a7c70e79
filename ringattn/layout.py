"""Where tokens live: which positions of the sequence each rank owns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .balanced import Balanced, balanced
from .cache import Cache
from .errors import InvalidInput, did_you_mean
from .partition import MAX_RANGES, Layout, filled
from .pattern import Pattern, as_pattern

__all__ = [
    "DEFAULT_LAYOUT",
    "MAX_RANGES",
    "Balanced",
    "Contiguous",
    "Layout",
    "Striped",
    "Zigzag",
    "check_layout",
    "layout_name",
    "make_layout",
    "restored_layout",
]

#: The layout where none is named and none can be wrong: of plans, of whole tensors, and on the command line. Where
#: tensors are shards there is no default.
DEFAULT_LAYOUT = "contiguous"


#: Bytes of the ranges that a striped layout remembers, and of the balanced layouts that are.
SPANS, BALANCED = 1 << 21, 1 << 24


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r owns one run of about tokens / ranks positions."""

    @property
    def name(self) -> str:
        return "contiguous"

    def shard(self, rank: int) -> tuple[range, ...]:
        return self.span(range(rank, rank + 1))[0]

    @lru_cache(maxsize=4096)  # noqa: B019 (layouts are a few numbers, and so are their spans: 2 MiB at most)
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        edge = [self.tokens * i // self.ranks for i in (ranks.start, ranks.stop)]
        return filled(range(*edge)), True

    @property
    def regular(self) -> bool:
        return self.tokens >= self.ranks

    def owner(self, position: int) -> int:
        return ((position + 1) * self.ranks - 1) // self.tokens

    def grouped(self, size: int) -> Layout:
        return Contiguous(self.tokens, self.ranks // size)


@dataclass(frozen=True)
class Zigzag(Layout):
    """The sequence is cut into 2P chunks; rank r owns chunks r and 2P-1-r, which balances causal work."""

    @property
    def name(self) -> str:
        return "zigzag"

    def shard(self, rank: int) -> tuple[range, ...]:
        return self.span(range(rank, rank + 1))[0]

    @lru_cache(maxsize=4096)  # noqa: B019 (layouts are a few numbers, and so are their spans: 2 MiB at most)
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        chunks = 2 * self.ranks
        ends = (ranks.start, ranks.stop), (chunks - ranks.stop, chunks - ranks.start)
        low, high = (range(*(self.tokens * i // chunks for i in pair)) for pair in ends)
        if low and high and low.stop == high.start:
            return (range(low.start, high.stop),), True
        return filled(low, high), True

    @property
    def regular(self) -> bool:
        return self.tokens >= 2 * self.ranks

    def owner(self, position: int) -> int:
        chunk = ((position + 1) * 2 * self.ranks - 1) // self.tokens
        return min(chunk, 2 * self.ranks - 1 - chunk)

    def grouped(self, size: int) -> Layout:
        return Zigzag(self.tokens, self.ranks // size)


@dataclass(frozen=True)
class Striped(Layout):
    """Blocks of `block` tokens are dealt to the ranks in turn."""

    block: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise InvalidInput(f"striped: the block is a number of tokens >= 1, got {self.block}; try striped(64)")

    @property
    def name(self) -> str:
        return f"striped({self.block})"

    def shard(self, rank: int) -> tuple[range, ...]:
        return self.span(range(rank, rank + 1))[0]

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        return self._spans.answer(ranks, lambda: self._span(ranks))

    @cached_property
    def _spans(self) -> Cache:
        return Cache(SPANS)

    def _span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        width = len(ranks) * self.block
        if len(ranks) == self.ranks:
            return filled(range(self.tokens)), True
        if len(ranks) > 1 and min(width, self._stripes) > MAX_RANGES:
            return filled(range(self.tokens)), False
        return self._ranges(ranks.start * self.block, width), True

    @property
    def _stripes(self) -> int:
        return -(-self.tokens // (self.ranks * self.block))

    def _ranges(self, first: int, width: int) -> tuple[range, ...]:
        """Positions p with first <= p mod (ranks * block) < first + width, in the fewer of two forms."""
        period = self.ranks * self.block
        if width <= self._stripes:
            return filled(*(range(first + i, self.tokens, period) for i in range(width)))
        starts = range(first, self.tokens, period)
        return filled(*(range(start, min(start + width, self.tokens)) for start in starts))

    def owner(self, position: int) -> int:
        return position // self.block % self.ranks

    def grouped(self, size: int) -> Layout:
        return Striped(self.tokens, self.ranks // size, self.block * size)


_FORMULAS = {"contiguous": Contiguous, "zigzag": Zigzag, "striped": Striped}
_balanced = Cache(BALANCED)


def _read(name: str) -> tuple[str, int | None]:
    """The kind of layout that a name asks for, and the number of tokens in its parentheses."""
    if name.strip() == "auto":
        raise InvalidInput(
            "layout 'auto' is chosen together with the schedule, for all that a plan knows, and before there are shards; "
            "take layout = make_plan(pattern, tokens=..., ranks=..., heads=..., layout='auto').layout, shard with it and "
            "pass it on"
        )
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(?:(block|chunk)\s*=\s*)?(\d+|auto)\s*\))?\s*", name)
    kind = match[1] if match else name
    keyword = {"striped": "block", "balanced": "chunk"}.get(kind)
    known = kind in _FORMULAS or kind == "balanced"
    wrong = match is None or not known or (match[3] and not keyword) or (match[2] and match[2] != keyword)
    if match is None or wrong or (match[3] == "auto" and kind != "balanced"):
        hint = did_you_mean(kind, [*_FORMULAS, "balanced", "auto"])
        raise InvalidInput(
            f"unknown layout {name!r}; {hint}expected contiguous, zigzag, striped, striped(block), balanced or "
            "balanced(chunk)"
        )
    return kind, int(match[3]) if match[3] and match[3] != "auto" else None


def layout_name(name: str) -> str:
    """The plain spelling of a layout's name: that of the layout, but for a balanced one whose chunk is not given."""
    kind, size = _read(name)
    if kind == "balanced":
        return kind if size is None else f"{kind}({size})"
    return _formula(name, 0, 1).name


@lru_cache(maxsize=256)
def _formula(name: str, tokens: int, ranks: int) -> Layout:
    kind, block = _read(name)
    return Striped(tokens, ranks, block) if block is not None else _FORMULAS[kind](tokens, ranks)


def check_layout(name: str) -> None:
    """Raise InvalidInput where no layout has this name, before the sizes are known."""
    kind, size = _read(name)
    if kind == "balanced":
        Balanced(0, 1, 1 if size is None else size, ())
    else:
        _formula(name, 0, 1)


def restored_layout(name: str, tokens: int, ranks: int, runs: Sequence[Sequence[int]]) -> Layout:
    """The balanced layout whose partition was written down, without the pattern that it was made for."""
    kind, chunk = _read(name)
    if kind != "balanced" or chunk is None:
        raise InvalidInput(f"layout {name!r} has no partition beside its name; expected balanced(chunk)")
    return Balanced(tokens, ranks, chunk, tuple((int(first), int(owner)) for first, owner in runs))


def make_layout(
    name: str | Layout, *, tokens: int, ranks: int, pattern: Pattern | str | None = None, heads: int = 1
) -> Layout:
    """The layout called `name`: "contiguous", "zigzag", "striped", "striped(64)", "balanced" or "balanced(256)".

    `balanced` weighs its chunks by the pairs that `pattern` has in them over all `heads`; the others look at neither.
    Where shards meet several patterns, such as those of the layers of a model, pass one Layout to all of them: the name
    stands for another partition under each. A Layout is checked and returned, whatever pattern it was made for.
    """
    if isinstance(name, Layout):
        if (name.tokens, name.ranks) != (tokens, ranks):
            raise InvalidInput(
                f"the layout {name.name} was made for {name.tokens:,} tokens over {name.ranks} ranks, "
                f"the call has {tokens:,} tokens over {ranks}; pass x.transpose(1, 2) where tensors are [batch, tokens, heads, "
                f"head_dim], or make_layout({name.name!r}, tokens={tokens}, ranks={ranks}, ...)"
            )
        return name
    kind, chunk = _read(name)
    if kind != "balanced":
        return _formula(name, tokens, ranks)
    if pattern is None:
        raise InvalidInput(
            f"layout {name!r} weighs chunks by the pairs of a pattern, got pattern=None; try "
            f"make_layout({name!r}, tokens={tokens}, ranks={ranks}, pattern=..., heads=...), as the attention gets them"
        )
    pattern = as_pattern(pattern)
    if pattern.transient:
        return balanced(tokens, ranks, chunk, pattern, heads)
    key = tokens, ranks, chunk, pattern, heads
    return _balanced.answer(key, lambda: balanced(*key))
