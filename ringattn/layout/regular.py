"""Layouts defined by a formula or by balancing work, and `make_layout`, which makes any layout from its name."""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import accumulate, groupby, pairwise
from math import gcd
from operator import itemgetter
from typing import Any

import numpy as np

from ..cache import Cache, cached
from ..dtypes import check_type
from ..errors import InvalidInput
from ..pattern import Pattern, as_pattern
from ..pattern.base import check_integer
from ..pattern.tile import merge_runs
from ..text import did_you_mean, shown
from . import MAX_RANGES as MAX_RANGES
from . import Layout as Layout
from . import check_sizes, nonempty
from .leafwise import LEAVES, make_leafwise, read_leafwise
from .packing import BOUND_OF_ONE, pack

#: The default layout of plans, whole tensors and the command line. Calls on shards have no default, because a wrong
#: guess would silently give wrong results.
DEFAULT_LAYOUT = "contiguous"
#: Cache limits in bytes: for the spans of one striped layout, and for the balanced layouts of this process.
SPAN_BYTES, BALANCED_BYTES = 1 << 21, 1 << 24


@dataclass(frozen=True)
class Contiguous(Layout):
    """A layout that cuts the sequence into one run of adjacent positions per rank, of about equal lengths.

    Rank r owns the positions tokens * r // ranks .. tokens * (r + 1) // ranks - 1.
    """

    @property
    def name(self) -> str:
        return "contiguous"

    @lru_cache(maxsize=4096)  # noqa: B019 (keeps layouts alive, but layouts and spans are a few numbers: 2 MiB at most)
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        bounds = [self.tokens * i // self.ranks for i in (ranks.start, ranks.stop)]
        return nonempty(range(*bounds)), True

    def owner(self, position: int) -> int:
        return ((position + 1) * self.ranks - 1) // self.tokens


@dataclass(frozen=True)
class Zigzag(Layout):
    """The sequence is split into 2 * ranks chunks, and rank r owns the chunks r and 2 * ranks - 1 - r.

    Each rank then has about as many query-key pairs of a causal pattern as every other rank. Source: the context
    parallelism of Llama 3 (Dubey et al. 2024, arXiv:2407.21783) and of zhuzilin/ring-flash-attention.
    """

    @property
    def name(self) -> str:
        return "zigzag"

    @lru_cache(maxsize=4096)  # noqa: B019 (keeps layouts alive, but layouts and spans are a few numbers: 2 MiB at most)
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        chunks = 2 * self.ranks
        bounds = (ranks.start, ranks.stop), (chunks - ranks.stop, chunks - ranks.start)
        low, high = (range(*(self.tokens * i // chunks for i in pair)) for pair in bounds)
        if low and high and low.stop == high.start:
            return (range(low.start, high.stop),), True
        return nonempty(low, high), True

    def owner(self, position: int) -> int:
        chunk = ((position + 1) * 2 * self.ranks - 1) // self.tokens
        return min(chunk, 2 * self.ranks - 1 - chunk)


@dataclass(frozen=True)
class Striped(Layout):
    """A layout that gives blocks of `block` tokens to the ranks in turn: rank r owns p iff p // block % ranks == r.

    Source: Striped Attention (Brandon et al. 2023, arXiv:2311.09431), which has block = 1.
    """

    block: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._normalize(block=check_integer(self.block, "striped: block", 1, "striped(64)"))

    @property
    def name(self) -> str:
        return f"striped({self.block})"

    @cached_property
    def cache(self) -> Cache:
        return Cache(SPAN_BYTES)

    @cached
    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        width = len(ranks) * self.block
        if len(ranks) == self.ranks:
            return nonempty(range(self.tokens)), True
        if len(ranks) > 1 and min(width, self._rounds) > MAX_RANGES:
            return nonempty(range(self.tokens)), False
        return self._select(ranks.start * self.block, width), True

    @property
    def _rounds(self) -> int:
        """The number of rounds in which each rank gets one block; the last round may be incomplete."""
        return -(-self.tokens // (self.ranks * self.block))

    def _select(self, first: int, width: int) -> tuple[range, ...]:
        """The positions p with first <= p % (ranks * block) < first + width, as the fewest ranges.

        These are `width` ranges with a step, or one range of step 1 per round.
        """
        period = self.ranks * self.block
        if width <= self._rounds:
            return nonempty(*(range(first + i, self.tokens, period) for i in range(width)))
        starts = range(first, self.tokens, period)
        return nonempty(*(range(start, min(start + width, self.tokens)) for start in starts))

    def owner(self, position: int) -> int:
        return position // self.block % self.ranks

    def grouped(self, size: int) -> Layout:
        return replace(self, ranks=self.ranks // size, block=self.block * size)


@dataclass(frozen=True)
class GivenRows(Layout):
    """A layout with explicit shard lengths: each rank r owns the next `counts[r]` positions after those of rank r - 1.

    Raises InvalidInput if the counts do not sum to `tokens`.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (total := sum(self.counts), len(self.counts)) != (self.tokens, self.ranks):
            asked = f"{self.tokens:,} tokens on {self.ranks} ranks; give the rows of each rank"
            raise InvalidInput(f"{self.name} has {total:,} tokens on {len(self.counts)} ranks, the call has {asked}")

    @property
    def name(self) -> str:
        return f"rows({', '.join(map(str, self.counts))})"

    @cached_property
    def _firsts(self) -> list[int]:
        """The first position of each rank, then the number of tokens."""
        return [*accumulate(self.counts, initial=0)]

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        return nonempty(range(self._firsts[ranks.start], self._firsts[ranks.stop])), True

    def owner(self, position: int) -> int:
        return bisect_right(self._firsts, position) - 1

    def grouped(self, size: int) -> Layout:
        return GivenRows(self.tokens, self.ranks // size, tuple(b - a for a, b in pairwise(self._firsts[::size])))


#: The layout of `ring_attention` in which ranks first exchange the row counts of their shards, see `name_rows`.
ROWS = "rows"
_COUNTS = r"\brows\s*\(\s*(\d+(?:\s*,\s*\d+)*)\s*\)"
#: Name prefixes of layouts made of layouts.
COMPOSED = "shifted", "joined"
_FORMULAS: dict[str, Callable[..., Layout]] = {"contiguous": Contiguous, "zigzag": Zigzag, "striped": Striped}
_balanced = Cache(BALANCED_BYTES)


def _read_name(name: str) -> tuple[str, int | None]:
    """(kind of layout, number of tokens in parentheses or None). Raises InvalidInput for an unknown name."""
    if name.strip() == "auto":
        raise InvalidInput(
            "layout 'auto' is chosen together with the schedule, from everything that a plan knows, before tensors are "
            "sharded; take layout = make_plan(pattern, tokens=..., ranks=..., heads=..., layout='auto').layout, shard "
            "with it and pass it to the call"
        )
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(?:(block|chunk)\s*=\s*)?(\d+|auto)\s*\))?\s*", name)
    kind, keyword, size = match.groups() if match is not None else (name, None, None)
    expected_keyword = {"striped": "block", "balanced": "chunk"}.get(kind)
    valid_kind = match is not None and (kind in _FORMULAS or kind == "balanced")
    size_allowed = size is None or (expected_keyword and keyword in (None, expected_keyword))
    if not valid_kind or not size_allowed or (size == "auto" and kind != "balanced"):
        hint = did_you_mean(kind, [*_FORMULAS, "balanced", "auto"])
        expected = "contiguous, zigzag, striped, striped(block), rows(11, 9), balanced or balanced(chunk)"
        raise InvalidInput(f"unknown layout {name!r}; {hint}expected {expected}")
    return kind, None if size in (None, "auto") else int(size)


def check_layout(layout: object, name: str = "layout") -> None:
    """Raise InvalidInput unless `layout`, the argument called `name`, is a Layout or text."""
    if not isinstance(layout, str | Layout):
        raise InvalidInput(
            f"{name}={shown(layout)}: expected a Layout, or its name, such as 'zigzag' or 'shifted(zigzag, 1000)'"
        )


def layout_name(name: str) -> str:
    """The canonical spelling of a layout name: " striped( block = 8 ) " -> "striped(8)", "striped" -> "striped(1)".

    "balanced" without a chunk and "rows" without counts stay as they are. Raises InvalidInput for an unknown name.
    """
    if name.strip() == ROWS:
        return ROWS
    found = re.search(_COUNTS, name)
    if name.lstrip().startswith(COMPOSED):
        return _read_composed(name, None, len(found[1].split(",")) if found else 1).name
    if (counts := _read_counts(name)) is not None:
        return GivenRows(sum(counts), len(counts), counts).name
    if name.lstrip().startswith(LEAVES):
        inner, length = read_leafwise(name)
        return f"{LEAVES}({layout_name(inner)}, {length})"
    kind, size = _read_name(name)
    if kind == "balanced":
        Balanced(0, 1, 1 if size is None else size, ())
        return kind if size is None else f"{kind}({size})"
    return _make_formula(name, 0, 1).name


@lru_cache(maxsize=256)
def _make_formula(name: str, tokens: int, ranks: int) -> Layout:
    kind, block = _read_name(name)
    return _FORMULAS[kind](tokens, ranks) if block is None else _FORMULAS[kind](tokens, ranks, block)


def _read_counts(name: str) -> tuple[int, ...] | None:
    """The counts of a name such as "rows(11, 9)"; None for another name."""
    match = re.fullmatch(rf"\s*{_COUNTS}\s*", name)
    return None if match is None else tuple(map(int, match[1].split(",")))


def name_rows(layout: Any, rows: Sequence[int]) -> Any:
    """`layout`, but "rows" completed to "rows(n0, n1, ...)", in which rank r has rows[r] rows."""
    return f"rows({', '.join(map(str, rows))})" if layout == ROWS else layout


def _read_composed(name: str, tokens: int | None, ranks: int) -> Layout:
    from .composed import read_composed  # rarely used

    def make(name: str, tokens: int | None) -> Layout:
        if name.lstrip().startswith(COMPOSED):
            return _read_composed(name, tokens, ranks)
        return make_layout(name, tokens=sum(_read_counts(name) or ()) if tokens is None else tokens, ranks=ranks)

    return read_composed(name, tokens, make)


def restore_layout(name: str, tokens: int, ranks: int, runs: Sequence[Sequence[int]]) -> Layout:
    """Recreate a "balanced" layout from its stored `runs` of (first chunk, owner), without its pattern.

    Raises InvalidInput if `name` is not "balanced(chunk)", or if `runs` do not assign every chunk to exactly one rank.
    """
    kind, chunk = _read_name(name)
    if kind != "balanced" or chunk is None:
        raise InvalidInput(f"layout {name!r} is not stored with the ranks of its chunks; only balanced(chunk) is")
    return Balanced(tokens, ranks, chunk, tuple((int(first), int(owner)) for first, owner in runs))


def read_masks(
    patterns: Sequence[Pattern | str], weights: Sequence[int] | None = None
) -> tuple[tuple[Pattern, int], ...]:
    """A (pattern, weight) pair for each pattern, with text parsed; weights default to 1.

    Raises InvalidInput for weights that do not fit the patterns.
    """
    check_type("patterns", patterns, "Sequence")
    check_type("weights", weights, "Sequence | ndarray | None")
    weights = [1] * len(patterns) if weights is None else weights
    whole = all(isinstance(weight, int | float | np.number) and weight >= 0 == weight % 1 for weight in weights)
    if len(weights) != len(patterns) or not whole or not any(weights):
        raise InvalidInput(
            f"patterns={shown(patterns)} with weights={shown(weights)}: give a list of patterns and the number "
            "of layers of each, such as patterns=['Causal() & Window(1023)', 'Causal()'], weights=[5, 1]"
        )
    return tuple((as_pattern(pattern), int(weight)) for pattern, weight in zip(patterns, weights, strict=True))


def make_layout(
    name: str | Layout,
    *,
    tokens: int,
    ranks: int,
    pattern: Pattern | str | None = None,
    patterns: Sequence[Pattern | str] | None = None,
    weights: Sequence[int] | None = None,
    heads: int = 1,
    most_runs: int | None = None,
) -> Layout:
    """The layout called `name`, for `tokens` positions over `ranks` ranks; returns a Layout of these sizes unchanged.

    Names: "contiguous", "zigzag", "striped", "striped(64)" (with the tokens per block), "balanced" and "balanced(256)"
    (with the tokens per chunk).

    Only "balanced" needs `pattern` and `heads` (query heads). It gives all ranks about equally many tokens and
    query-key pairs, with few rows to receive, so the result depends on the pattern. A packed document stays whole on
    one rank if it fits. If several patterns use the same shards, as in the layers of a model, pass them as `patterns`,
    and in `weights` the number of layers of each (default: 1); then pass the returned Layout to every call. `most_runs`
    limits the runs of adjacent positions on each rank, as recurrent layers need; it works for patterns in which each
    query attends one run of keys.

    "rows(11, 9)" gives the first 11 positions to rank 0 and the next 9 to rank 1. "leaves(zigzag, 64)" is the zigzag
    layout with borders at multiples of 64 tokens, in packed documents (of `pattern`) at multiples in each document, as
    a call with reproducible=64 needs them.

    Two kinds of layouts have positions other than 0 .. tokens-1: "shifted(zigzag, 1000)" begins at position 1000, and
    "joined(zigzag[1000], shifted(zigzag, 1000)[24])" has the positions of both parts, of 1000 and 24 tokens.

    Raises InvalidInput for an unknown name, for tokens < 0 or ranks < 1, for "balanced" without a pattern, for weights
    that do not fit, for "auto" (which only `make_plan` and `make_plans` resolve), and for a Layout with other sizes.
    """
    sizes = check_sizes(tokens, ranks)
    tokens, ranks = sizes["tokens"], sizes["ranks"]
    if isinstance(name, Layout):
        if (name.tokens, name.ranks) != (tokens, ranks):
            raise InvalidInput(
                f"the layout {name.name} was made for {name.tokens:,} tokens over {name.ranks} ranks, the call has "
                f"{tokens:,} tokens over {ranks}; pass x.transpose(1, 2) where tensors are [batch, tokens, heads, "
                f"head_dim], or make_layout({name.name!r}, tokens={tokens}, ranks={ranks}, ...)"
            )
        return name
    check_layout(name)
    if name.lstrip().startswith(COMPOSED):
        return _read_composed(name, tokens, ranks)
    if (counts := _read_counts(name)) is not None:
        return GivenRows(tokens, ranks, counts)
    if name.lstrip().startswith(LEAVES):
        mask = None if pattern is None else as_pattern(pattern)
        return make_leafwise(name, tokens, mask, lambda inner, count: _make_formula(inner, count, ranks))
    kind, chunk = _read_name(name)
    if kind != "balanced":
        return _make_formula(name, tokens, ranks)
    if patterns is None and pattern is not None:
        patterns = [pattern]
    elif patterns is None or pattern is not None:
        raise InvalidInput(
            f"layout {name!r} needs either pattern or patterns to weigh chunks, got {pattern=} and {patterns=}; try "
            f"make_layout({name!r}, tokens={tokens}, ranks={ranks}, pattern=..., heads=...), as in the attention call"
        )
    masks = read_masks(patterns, weights)
    if any(mask.transient for mask, _ in masks):
        return balance(tokens, ranks, chunk, masks, heads, most_runs)
    key = tokens, ranks, chunk, masks, heads, most_runs
    return _balanced.answer(key, lambda: balance(*key))


#: Chunks per rank if the layout's name has no chunk size; a chunk longer than ALIGNED tokens is a multiple of ALIGNED.
CHUNKS, ALIGNED = 8, 128


@dataclass(frozen=True)
class Balanced(Layout):
    """A layout that distributes chunks of `chunk` tokens so that all ranks compute about equally many pairs.

    With packed documents a chunk is one token, see `pack`. With other masks, a rank owns at most ceil(chunks / ranks)
    chunks. Its chunks are adjacent, unless the busiest ranks would then have more than 1.05 times the mean number of
    pairs, see `deal`.

    `runs` holds (first chunk, owner) for each run of chunks, ascending. To balance patterns, use `make_layout`. Raises
    InvalidInput if `runs` do not assign every chunk to exactly one rank.
    """

    chunk: int
    runs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._normalize(chunk=check_integer(self.chunk, "balanced: chunk", 1, "balanced(128)"))
        joined = groupby(((first, owner) for first, owner in self.runs), key=itemgetter(1))
        self._normalize(runs=tuple(next(same_owner) for _, same_owner in joined))
        firsts = [first for first, _ in self.runs]
        last = (self.tokens - 1) // self.chunk
        ascending = all(a < b for a, b in pairwise(firsts))
        if firsts[:1] != [0][: self.tokens] or not ascending or firsts[-1:] > [last]:
            raise InvalidInput(
                f"balanced: the runs must begin at chunk 0, ascend and end by chunk {last}, got {shown(self.runs)}"
            )
        if not all(0 <= owner < self.ranks for _, owner in self.runs):
            raise InvalidInput(f"balanced: owners must be ranks 0 .. {self.ranks - 1}, got {shown(self.runs)}")

    __hash__ = Layout.kept_hash  # every call looks up its plan by layout

    @cached_property
    def digest(self) -> str:
        """16 hex digits that identify the partition, so that ranks detect differences before the first message."""
        return sha256(repr(self.runs).encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        return f"balanced({self.chunk})"

    @cached_property
    def _starts(self) -> list[int]:
        return [first * self.chunk for first, _ in self.runs]

    @cached_property
    def _shards(self) -> dict[int, tuple[range, ...]]:
        ranges: dict[int, list[range]] = {}
        for (start, stop), (_, owner) in zip(pairwise([*self._starts, self.tokens]), self.runs, strict=True):
            ranges.setdefault(owner, []).append(range(start, stop))
        return {owner: merge_runs(parts) for owner, parts in ranges.items()}

    def owner(self, position: int) -> int:
        return self.runs[bisect_right(self._starts, position) - 1][1]

    def grouped(self, size: int) -> Layout:
        runs = tuple((first, owner // size) for first, owner in self.runs)
        return Balanced(self.tokens, self.ranks // size, self.chunk, runs)

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        if len(ranks) == 1:  # exact whatever the number of ranges: a single rank cannot be halved
            return self._shards.get(ranks[0], ()), True
        parts = merge_runs(r for rank in ranks for r in self.shard(rank))
        if len(parts) <= MAX_RANGES:
            return parts, True
        # Keep the MAX_RANGES - 1 widest gaps between the ranges, and fill the others.
        gaps = sorted(range(1, len(parts)), key=lambda i: parts[i].start - parts[i - 1].stop)
        bounds = [0, *sorted(gaps[1 - MAX_RANGES :]), len(parts)]
        return tuple(range(parts[a].start, parts[b - 1].stop) for a, b in pairwise(bounds)), False


def balance(
    tokens: int, ranks: int, chunk: int | None, masks: Sequence[tuple[Pattern, int]], heads: int, most_runs: int | None
) -> Balanced:
    """A layout that balances the work of all `masks`, given as (pattern, weight), over `heads` query heads.

    If every query attends one run of keys and `chunk` is None, `pack` chooses the positions of each rank, so that few
    rows have to travel. For other masks, such as block masks, chunks are dealt out by their numbers of pairs, which
    takes O(chunks) calls of `count` for each pattern. There are then at least 8 chunks per rank; a chunk longer than
    128 tokens is a multiple of 128. If few rows hold most of the pairs, as with global blocks, only a smaller chunk can
    balance them. Raises InvalidInput for invalid sizes, for a pattern that does not fit, and if dealing gives a rank
    more than `most_runs` runs.
    """
    # Report wrong numbers before the patterns are counted.
    sized, _ = Contiguous(tokens, ranks), Balanced(0, 1, 1 if chunk is None else chunk, ())
    tokens, ranks, heads = sized.tokens, sized.ranks, check_integer(heads, "heads", 1, "heads=8")
    if most_runs is not None:
        check_integer(most_runs, "most_runs", 1, "most_runs=16")
    for pattern, _ in masks:
        pattern.check(tokens, heads)

    def dealt(chunk: int) -> Balanced:
        positions, costs = range(tokens), []
        spans = [positions[start : start + chunk] for start in range(0, tokens, chunk)]
        for pattern, weight in masks:
            bound = pattern.bind(heads, tokens)
            rows = [bound.row(index) for index in range(bound.rows or 1)]  # batch rows may have their own patterns
            costs.append([weight * sum(row.count(span, positions, range(heads)) for row in rows) for span in spans])
        # Divide by the common factor: a pattern that is the same for all heads gives one layout for any head count.
        common = gcd(*(cost for mask in costs for cost in mask)) or 1
        shares = deal([[cost // common for cost in mask] for mask in costs], ranks)
        runs = sorted((i, rank) for rank, share in enumerate(shares) for i in share)
        return Balanced(tokens, ranks, chunk, tuple(runs))

    if chunk is None:
        chunk = max(tokens // (CHUNKS * ranks), 1)
        chunk -= chunk % ALIGNED if chunk > ALIGNED else 0
        if found := pack(tokens, ranks, masks, most_runs, lambda step: dealt(max(chunk // step, 1) * step)):
            step, shares = found
            parts = sorted((first, rank) for rank, share in enumerate(shares) for first, _ in share)
            return Balanced(tokens, ranks, step, tuple(parts))
    layout = dealt(chunk)
    if most_runs is not None and (runs := max(len(layout.shard(rank)) for rank in range(ranks))) > most_runs:
        raise InvalidInput(f"balanced: {runs} runs of chunks on a rank, more than most_runs={most_runs}; try zigzag")
    return layout


def deal(masks: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """The chunks of each rank, ascending, at most ceil(chunks / ranks) per rank, with about equal costs per mask.

    `masks[m][i]` is the cost of chunk i under mask m. Because ranks wait for each other in every layer, the cost of a
    distribution is the cost of the busiest rank, summed over the masks. Each rank gets a run of adjacent chunks,
    equally many per rank, if that costs at most 1.05 times the mean. Otherwise the cheapest of three kinds of
    distributions wins: these runs, chunks dealt out by their cost in all masks together, or by their cost in one of
    them.
    """
    chunks = len(masks[0])
    runs = [list(range(chunks * r // ranks, chunks * (r + 1) // ranks)) for r in range(ranks)]
    masks = [mask for mask in masks if any(mask)]
    if 100 * ranks * _busiest(masks, runs) <= BOUND_OF_ONE * sum(map(sum, masks)):
        return runs
    alone = [[mask] for mask in masks] if len(masks) > 1 else []
    return min(runs, *(_deal(dealt, ranks) for dealt in (masks, *alone)), key=lambda shares: _busiest(masks, shares))


def _deal(masks: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """The chunks of each rank: deals the heaviest chunk first, each to a rank with room for it.

    With one mask that is the least loaded rank. With several it is the rank with the smallest sum of cost x load ^ 16
    over the masks (load relative to the mean), in which the masks that load the rank most dominate.
    """
    costs = np.array(masks, dtype=float).T
    chunks, most, means = len(costs), -(-len(costs) // ranks), costs.sum(0) / ranks
    loads, counts = np.zeros((ranks, len(masks))), np.zeros(ranks, dtype=int)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for chunk in np.argsort(-costs.sum(1), kind="stable").tolist():
        powers = (loads + costs[chunk]) / means
        for _ in range(4):  # not np.power, whose last bit depends on the CPU
            powers = powers * powers
        raised = np.where(counts < most, (powers * costs[chunk]).sum(1), np.inf)
        equal = np.flatnonzero(raised == raised.min())
        rank = equal[np.lexsort((counts[equal], loads[equal].sum(1)))[0]]
        insort(shares[rank], chunk)
        loads[rank] += costs[chunk]
        counts[rank] += 1
    # Number the ranks by their first chunk, so that neighbours in the ring hold chunks near to each other.
    return sorted(shares, key=lambda share: share or [chunks])


def _busiest(masks: Sequence[Sequence[int]], shares: list[list[int]]) -> int:
    """The cost of the busiest rank in each mask, summed over the masks."""
    return sum(max(sum(mask[i] for i in share) for share in shares) for mask in masks)
