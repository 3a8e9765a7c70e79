"""Which places of a cache each rank holds in the layers of one pattern, and which of these new tokens see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, islice

import numpy as np

from ..cache import cached
from ..layout import Layout
from ..layout.composed import Composed
from ..pattern.base import Pattern
from ..pattern.tile import Tile, clip, find_runs, locate, merge_runs, shift_range
from ..plan.row_sets import Ranges
from ..plan.work import Work, join_keys, localize, lower

#: Works of a step with at most so many keys are one kernel call, on keys that are copied together.
SHORT_KEYS = 256
#: Tiles of several places are looked for in each of them, where they are more than one for so many places.
PLACES_OF_A_TILE = 8
#: A pattern that answers in more pieces which keys later queries see keeps all keys.
MOST_PIECES = 4096
#: By rank and block the local rows to keep.
Kept = list[list[Ranges]]


@dataclass(frozen=True)
class HeldRows(Composed):
    """The rows of a cache and of a new chunk: each rank has those at its `shards`, in this order."""

    shards: tuple[Ranges, ...]

    def __post_init__(self) -> None:
        Layout.__post_init__(self)

    __hash__ = Layout.kept_hash

    @property
    def name(self) -> str:
        return "cache"

    @cached_property
    def digest(self) -> str:
        return sha256(repr(self.shards).encode()).hexdigest()[:16]

    @cached
    def span(self, ranks: range) -> tuple[Ranges, bool]:
        ranges = tuple(run for rank in ranks for run in self.shards[rank])
        return merge_runs(ranges) if len(ranks) > 1 and all(run.step == 1 for run in ranges) else ranges, True

    @cached_property
    def domain(self) -> Ranges:
        ranges = [run for shard in self.shards for run in shard]
        if all(run.step == 1 for run in ranges):
            return merge_runs(ranges)
        return find_runs(np.bincount(np.concatenate([np.arange(r.start, r.stop, r.step) for r in ranges])) > 0)

    def owner(self, position: int) -> int:
        return next(rank for rank, shard in enumerate(self.shards) if any(position in run for run in shard))

    def grouped(self, size: int) -> Layout:
        groups = (self.shards[first : first + size] for first in range(0, self.ranks, size))
        return hold([tuple(run for shard in group for run in shard) for group in groups])


def hold(shards: Sequence[Ranges]) -> HeldRows:
    """The layout of these shards."""
    return HeldRows(sum(len(run) for shard in shards for run in shard), len(shards), (), tuple(shards))


class Holdings:
    """The places that ranks hold in the layers of one pattern: by rank and block (`store.Block`), in local order.

    Ranks add rows to their last block only. With `copies` every rank holds all places. A query before place `floor`
    may miss keys that were dropped. Of the new tokens, whose layers are called one after another: `keys` says how those
    held and those of a chunk are cut, `needed` which places later queries see, and `kept` the rows that then stay.
    """

    def __init__(self, ranks: int, *, copies: bool) -> None:
        self.ranks, self.copies, self.floor = ranks, copies, 0
        self.held: list[list[list[range]]] = [[[]] for _ in range(ranks)]
        self.keys: HeldRows | None = None
        self.needed: Ranges | None = None
        self.kept: Kept | None = None
        self._later: list[list[list[range]]] | None = None
        self._works: dict[object, tuple[Work, ...]] = {}

    def begin(self, shards: Sequence[Ranges], needed: Ranges | None, floor: int, page: int, *, prompt: bool) -> None:
        """Add the places that each rank owns of new tokens, of a `prompt` or of a step.

        `needed` are those that queries from `floor` on see; None: nothing is let go now.
        """
        self.keys = hold([(*held, *own) for held, own in zip(self.shards(), shards, strict=True)]) if prompt else None
        count = sum(len(run) for shard in shards for run in shard)
        if self.copies and prompt and needed is not None:
            shards = [tuple(split(shard, needed)[0]) for shard in shards]
        clips = sum(len(run) for shard in shards for run in shard) < count
        if self.copies:
            shards = [tuple(run for shard in shards for run in shard)] * self.ranks
        for blocks, shard in zip(self.held, shards, strict=True):
            for run in shard:
                append(blocks[-1], run)
        self.needed, self.kept = needed, None if needed is None else self.keep(needed, page)
        if self.kept is not None or clips:
            self.floor = floor

    def shards(self) -> list[Ranges]:
        """The places of each rank, of which none is another's: of copies, a rank has `part` of its rows."""
        held = [tuple(run for block in blocks for run in block) for blocks in self.held]
        if not self.copies:
            return held
        rows = sum(map(len, held[0]))
        return [tuple(take(held[rank], self.part(rank, rows))) for rank in range(self.ranks)]

    def part(self, rank: int, rows: int) -> range:
        """Which of `rows` rows, that all ranks hold, are those of a rank."""
        return range(rows * rank // self.ranks, rows * (rank + 1) // self.ranks)

    def keep(self, runs: Ranges, least: int = 1) -> Kept | None:
        """The local rows inside of `runs`, all that is held after `settle`; None where fewer than `least` rows fall."""
        kept: Kept = []
        later: list[list[list[range]]] = []
        rows = remaining = 0
        for blocks in self.held:
            pairs = [split(block, runs) for block in blocks]
            later.append([places for places, _ in pairs])
            kept.append([local for _, local in pairs])
            rows += sum(len(run) for block in blocks for run in block)
            remaining += sum(len(run) for places, _ in pairs for run in places)
        if rows - remaining < least * (self.ranks if self.copies else 1):
            return None
        self._later = later
        return kept

    def settle(self) -> None:
        """Forget what `keep` has dropped: the layers have attended to it for the last time."""
        self.held, self._later, self.keys, self.kept = self._later or self.held, None, None, None
        self._works.clear()

    def seal(self, rank: int) -> None:
        """Begin a new block."""
        self.held[rank].append([])

    def works(self, rank: int, block: int, pattern: Pattern, q: range, heads: int, group: int) -> tuple[Work, ...]:
        """What queries at places `q` see of a block of a rank: works on its local rows."""
        key = rank, block, pattern, q, heads, group
        if key not in self._works:
            self._works[key] = make_works(pattern, q, self.held[rank][block], heads, group)
        return self._works[key]


def find_needed(patterns: Iterable[Pattern], queries: range, keys: range, heads: int) -> Ranges:
    """The keys that queries see in some head and row of a batch, in runs, or more keys than these."""
    found: list[range] = []
    for pattern in patterns:
        pairs = islice(pattern.paired("keys", queries, keys, range(heads)), MOST_PIECES + 1)
        pieces = [range(rows[0], rows[-1] + 1) for _, rows in pairs]
        found += pieces if len(pieces) <= MOST_PIECES else [keys]
    return merge_runs(found)


def take(places: Sequence[range], rows: range) -> Iterator[range]:
    """The places of adjacent local rows."""
    first = 0
    for run in places:
        if some := run[max(rows.start - first, 0) : max(rows.stop - first, 0)]:
            yield some
        first += len(run)


def append(block: list[range], run: range) -> None:
    """Add a range of places, joined with the last one where it goes on."""
    if block and block[-1].step == run.step and block[-1][-1] + run.step == run.start:
        block[-1] = range(block[-1].start, run.stop, run.step)
    else:
        block.append(run)


def split(block: Sequence[range], runs: Ranges) -> tuple[list[range], Ranges]:
    """(the places of a block inside of `runs`, their local rows)."""
    parts: list[range] = []
    local: list[range] = []
    first = 0
    for places in block:
        for run in runs:
            part = clip(places, run.start, run.stop - 1)
            if part:
                append(parts, part)
                append(local, shift_range(locate(part, places), first))
        first += len(places)
    return parts, tuple(local)


def make_works(pattern: Pattern, q: range, places: Sequence[range], heads: int, group: int) -> tuple[Work, ...]:
    """The works of queries at places `q` on local rows, which are at `places` one after another.

    The pattern is asked for many places at once, and again for half of them where tiles are many, or have bands.
    """
    starts = [0, *accumulate(map(len, places))]
    table = np.array([(r.start, r.step, r[-1], start) for r, start in zip(places, starts, strict=False)])
    tiles: list[Tile] = []
    dense: dict[tuple[range, range, int], list[range]] = {}

    def add(tile: Tile) -> None:
        if tile.dense:
            append(dense.setdefault((tile.heads, tile.q, tile.branch), []), tile.k)
        else:
            tiles.append(tile)

    def visit(first: int, last: int) -> None:
        parts, most = places[first:last], 1 + (last - first) // PLACES_OF_A_TILE
        hull = parts[0] if len(parts) == 1 else range(min(r[0] for r in parts), max(r[-1] for r in parts) + 1)
        some = islice(pattern.tiles(q, hull, range(heads)), None if len(parts) == 1 else most + 1)
        found = [part for tile in some for part in tile.refine()]
        if len(parts) == 1:
            for tile in found:
                add(localize(tile, q, hull, 0, starts[first]))
        elif len(found) <= most and all(tile.dense for tile in found):
            for tile in found:
                for keys in locate_keys(tile.k, *table[first:last].T):
                    add(Tile(tile.heads, locate(tile.q, q), keys, branch=tile.branch))
        else:
            visit(first, (first + last) // 2)
            visit((first + last) // 2, last)

    if places:
        visit(0, len(places))
    tiles += [Tile(*key[:2], keys, branch=key[2]) for key, runs in dense.items() for keys in runs]
    return tuple(join_keys(lower(tiles, group), lambda work: work.keys <= SHORT_KEYS))


def locate_keys(
    keys: range, begins: np.ndarray, steps: np.ndarray, lasts: np.ndarray, starts: np.ndarray
) -> Iterator[range]:
    """The local rows of `keys`, as few ranges, in places with these bounds and first rows: `intersect` of arrays."""
    shared, offset = np.gcd(steps, keys.step), keys.start - begins
    strides = keys.step // shared
    inverse = np.array([pow(a, -1, m) for a, m in zip((steps // shared).tolist(), strides.tolist(), strict=True)])
    rows = offset // shared % strides * inverse % strides
    rows -= (rows - np.maximum(-(-offset // steps), 0)) // strides * strides
    counts = ((np.minimum(lasts, keys[-1]) - begins) // steps - rows) // strides + 1
    meets = (counts > 0) & (offset % shared == 0)
    rows, counts, strides = (rows + starts)[meets], counts[meets], strides[meets]
    cuts = np.flatnonzero((np.diff(rows) != (counts * strides)[:-1]) | np.diff(strides)) + 1
    for row, count, stride in zip(*(np.split(x, cuts) for x in (rows, counts, strides)), strict=True):
        if len(row):
            yield range(int(row[0]), int(row[0] + count.sum() * stride[0]), int(stride[0]))
