"""Which slots of a cache each rank holds in the layers of one pattern, and which of them new tokens see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np

from ..cache import cached
from ..call.compile import CompiledCall
from ..layout import Layout
from ..layout.composed import Composed
from ..pattern.base import Pattern
from ..pattern.simple import Full
from ..pattern.tile import append_run, find_runs, index_ranges, merge_runs
from ..plan.row_sets import Ranges
from ..plan.work import Work, find_tiles, join_dense, join_keys, lower

#: A step copies up to this many keys together and attends to them in one kernel call.
SHORT_KEYS = 256
#: If the keys that later queries see are more runs than this, all keys are kept.
MOST_PIECES = 4096
#: The local rows to keep, by rank and block.
Kept = list[list[Ranges]]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class HeldRows(Composed):
    """The layout of the tokens in a cache and of a new chunk: rank r holds the rows `shards[r]`, in this order."""

    shards: tuple[Ranges, ...]

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

    def grouped(self, size: int) -> Layout:
        groups = (self.shards[first : first + size] for first in range(0, self.ranks, size))
        shards = tuple(tuple(run for shard in group for run in shard) for group in groups)
        return replace(self, ranks=len(shards), shards=shards)


class Holdings:
    """Records which slots of a cache each rank holds, for all layers with the same pattern.

    A slot is the place of a token in the cache; padding has slots, too. `held` lists slots by rank and block
    (`store.Block`), in local order; new rows are added only to a rank's last block. With `copies`, every rank holds all
    slots. New queries must be at slot `floor` or later, because keys that earlier queries see may have been dropped.
    While layers process new tokens, `keys` is the layout of the held slots and the new chunk, `needed` are the slots
    that later queries see, and `kept` are the rows to keep afterwards.
    """

    def __init__(self, ranks: int, *, copies: bool) -> None:
        self.ranks, self.copies, self.floor = ranks, copies, 0
        self.held: list[list[list[range]]] = [[[]] for _ in range(ranks)]
        self.keys: HeldRows | None = None
        self.needed: Ranges | None = None
        self.kept: Kept | None = None
        self._later: list[list[list[range]]] | None = None
        self._answers: dict[object, Any] = {}

    def begin(self, shards: Sequence[Ranges], needed: Ranges | None, floor: int, page: int, *, prompt: bool) -> None:
        """Add slots for new tokens; rank r holds those in `shards[r]`.

        Set `prompt` for a prompt chunk, not for a step. `needed` are the slots that queries from slot `floor` on see;
        with None, no slot is dropped now.
        """
        count = sum(len(run) for shard in shards for run in shard)
        if prompt:
            keys = tuple((*held, *own) for held, own in zip(self.shards(), shards, strict=True))
            self.keys = HeldRows(sum(len(run) for shard in keys for run in shard), self.ranks, (), keys)
        if self.copies and prompt and needed is not None:
            shards = [tuple(split(shard, needed)[0]) for shard in shards]
        clips = sum(len(run) for shard in shards for run in shard) < count
        if self.copies:
            shards = [tuple(run for shard in shards for run in shard)] * self.ranks
        for blocks, shard in zip(self.held, shards, strict=True):
            for run in shard:
                append_run(blocks[-1], run)
        self.needed, self.kept = needed, None if needed is None else self.keep(needed, page)
        if self.kept is not None or clips:
            self.floor = floor

    def shards(self) -> list[Ranges]:
        """The slots of each rank, without overlap.

        If every rank holds a copy of all slots, each rank is assigned only its share of them (`part`).
        """
        held = [tuple(run for block in blocks for run in block) for blocks in self.held]
        if not self.copies:
            return held
        rows = sum(map(len, held[0]))
        return [tuple(take(held[rank], self.part(rank, rows))) for rank in range(self.ranks)]

    def part(self, rank: int, rows: int) -> range:
        """The share of a rank in `rows` rows: an equal, consecutive part for each rank."""
        return range(rows * rank // self.ranks, rows * (rank + 1) // self.ranks)

    def keep(self, runs: Ranges, least: int = 1) -> Kept | None:
        """Choose the slots in `runs` to keep; returns their local rows, by rank and block. `settle` drops the others.

        Returns None and keeps everything if fewer than `least` rows would be dropped.
        """
        pairs = [[split(block, runs) for block in blocks] for blocks in self.held]
        later = [[slots for slots, _ in blocks] for blocks in pairs]
        rows, remaining = (sum(len(r) for blocks in x for block in blocks for r in block) for x in (self.held, later))
        if rows - remaining < least * (self.ranks if self.copies else 1):
            return None
        self._later = later
        return [[local for _, local in blocks] for blocks in pairs]

    def settle(self) -> None:
        """Drop the rows that `keep` did not choose; call this after all layers have used them for the last time."""
        self.held, self._later, self.keys, self.kept = self._later or self.held, None, None, None
        self._answers.clear()

    def seal(self, rank: int) -> None:
        """Close the last block of a rank, so that later rows begin a new one."""
        self.held[rank].append([])

    def calls(self, rank: int, block: int, pattern: Pattern, q: range, call: CompiledCall) -> tuple[Work, ...]:
        """The kernel calls that compute attention of the queries at slots `q` to one block of a rank.

        Each call is a `Work` whose keys are local rows of the block.
        """
        key = rank, block, pattern, q, call
        return self.once(key, lambda: self._find_calls(self.held[rank][block], pattern, q, call))

    def once(self, key: object, make: Callable[[], Answer]) -> Answer:
        """What `make` returns, made once for all layers that process the same new tokens."""
        if key not in self._answers:
            self._answers[key] = make()
        return cast(Answer, self._answers[key])

    def _find_calls(self, held: list[range], pattern: Pattern, q: range, call: CompiledCall) -> tuple[Work, ...]:
        heads, group = call.sizes["heads"], call.sizes["heads"] // call.sizes["kv_heads"]

        def find(pattern: Pattern, q: range, held: list[range]) -> tuple[Work, ...]:
            tiles = join_dense(find_tiles(pattern, (q,), held, heads))
            return tuple(
                call.kernel.single().calls_of(join_keys(lower(tiles, group), lambda work: work.keys <= SHORT_KEYS))
            )

        # A token that sees all rows needs the same calls as an earlier one that saw all of as many rows.
        run = pattern.run("keys", q[0], q[0]) if len(q) == 1 and held else None
        if run is None or run[0] > min([r[0] for r in held]) or max([r[-1] for r in held]) > run[1]:
            return find(pattern, q, held)
        rows = sum(map(len, held))
        return call.cache.answer((find_tiles, rows), lambda: find(Full(), range(1), [range(rows)]))


def find_needed(patterns: Iterable[Pattern], queries: range, keys: range, heads: int) -> Ranges:
    """Ranges that contain every key that a query sees in any head and row of the batch, and possibly other keys."""
    found: list[range] = []
    for pattern in patterns:
        pairs = islice(pattern.paired("keys", queries, keys, range(heads)), MOST_PIECES + 1)
        pieces = [range(rows[0], rows[-1] + 1) for _, rows in pairs]
        found += pieces if len(pieces) <= MOST_PIECES else [keys]
    return merge_runs(found)


def take(slots: Sequence[range], rows: range) -> Iterator[range]:
    """The slots of the local rows `rows`, as ranges; `slots` are the slots of all local rows in order."""
    first = 0
    for run in slots:
        if some := run[max(rows.start - first, 0) : max(rows.stop - first, 0)]:
            yield some
        first += len(run)


def split(block: Sequence[range], runs: Ranges) -> tuple[list[range], Ranges]:
    """The slots of a block that are in `runs`, and their local rows in the block."""
    find = index_ranges(block) if block else None
    local = merge_runs(rows for run in runs for rows in find(run)) if find else ()
    parts: list[range] = []
    for slots in (slots for rows in local for slots in take(block, rows)):
        append_run(parts, slots)
    return parts, local
