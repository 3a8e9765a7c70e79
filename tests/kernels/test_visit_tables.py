"""Tables of visits against loops over their works: the pairs, the owners of rows, what flags say, and sizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from oracle import mark_pairs

import ringattn as ra
from ringattn.kernels.tables import FRESH, LAST, Bounds
from ringattn.kernels.visit import Config, Tiles, VisitTables, VisitTriton
from ringattn.plan.steps import Part
from ringattn.plan.visit import Visit
from ringattn.plan.work import Work, find_tiles, join_keys, join_repetitions, lower


class Reader:
    """A table as its description says that it is to be read, one integer at a time."""

    def __init__(self, table: np.ndarray, block: int) -> None:
        assert table.dtype == np.int32 and table.ndim == 1
        self.table, self.block = table.tolist(), block
        self.count, self.segments, self.entries, self.bounds = self.table[:4]
        assert self.segments == 4 + 8 * self.count
        self.programs = [self.table[4 + 8 * i : 12 + 8 * i] for i in range(self.count)]
        assert all(program[7] == 0 for program in self.programs)

    def segments_of(self, program: list[int]) -> list[list[int]]:
        first = self.segments + 8 * program[4]
        assert first + 8 * program[5] <= self.entries
        return [self.table[first + 8 * i : first + 8 * i + 8] for i in range(program[5])]

    def entry(self, number: int) -> tuple[int, int]:
        at = self.entries + 2 * number
        assert self.entries <= at < at + 4 <= self.bounds, "a kernel reads the next entry, too"
        return self.table[at], self.table[at + 1]

    def work(self, program: list[int]) -> int:
        """The tiles through which a program walks."""
        return sum(segment[3] + segment[4] for segment in self.segments_of(program))

    def count_pairs(self, heads: int, rows: int, others: int, columns: int) -> np.ndarray:
        """How often each pair is computed: [own heads, own rows, other heads, other rows]."""
        found = np.zeros((heads, rows, others, columns), np.int64)
        for program in self.programs:
            head, first, step, count = program[:4]
            for other, other_step, entry, partial, full, distance, *rest in self.segments_of(program):
                assert rest == [0, 0] and partial + full > 0
                for number in range(entry, entry + partial):
                    start, at = self.entry(number)
                    for i in range(self.block):
                        low, high = self.table[self.bounds + at + 2 * i : self.bounds + at + 2 * i + 2]
                        assert (0 <= low < high <= self.block and i < count) or low == high == 0
                        for j in range(low, high):
                            assert 0 <= start + j * other_step < columns
                            found[head, first + i * step, other, start + j * other_step] += 1
                assert not full or count == self.block, "all rows of a tile see a full tile"
                for number in range(full):
                    start = self.entry(entry + partial + (0 if distance else number))[0] + number * distance
                    last = start + (self.block - 1) * other_step
                    assert start >= 0 and last < columns, "a kernel does not clamp the rows of full tiles"
                    for i in range(self.block):
                        found[head, first + i * step, other, start : last + 1 : other_step] += 1
        return found

    def owned(self, heads: int, rows: int) -> np.ndarray:
        """The flags of each row [heads, rows], -1 where no program has the row; no two programs have one."""
        flags = np.full((heads, rows), -1)
        for head, first, step, count, _, _, flag, _ in self.programs:
            assert 1 <= count <= self.block and 0 <= flag <= FRESH | LAST
            of = flags[head, first : first + (count - 1) * step + 1 : step]
            assert len(of) == count and (of == -1).all()
            of[:] = flag
        return flags


def random_works(source: random.Random, heads: int, kv_heads: int, rows: int, keys: int) -> list[Work]:
    """Works as planners make them and stranger ones: steps, several runs of keys, bands, repetitions, rows twice."""
    works: list[Work] = []
    for _ in range(source.choice((0, 1, 1, 2, 3, 5))):
        step, repeat, q_shift, k_shift = source.choice((1, 1, 2, 3)), 1, 0, 0
        first = source.choice((0, source.randrange(rows)))
        q = range(first, rows, step)[: source.choice((1, rows, source.randint(1, rows)))]
        runs: list[range] = []
        key, key_step = 0, source.choice((1, 1, 2, 4))
        while key < keys and len(runs) < source.choice((1, 1, 2, 3)):
            start = source.choice((key, source.randrange(key, keys)))
            runs.append(range(start, keys, key_step)[: source.choice((keys, source.randint(1, keys)))])
            key = runs[-1][-1] + 1
        if len(runs) == 1 and source.random() < 0.4:
            q, span = q[: source.randint(1, 4)], runs[0][: source.randint(1, 4)]
            runs, q_shift, k_shift = [span], q[-1] - q[0] + source.randint(1, 3), source.choice((0, 1, 3))
            room = (rows - 1 - q[-1]) // q_shift, (keys - 1 - span[-1]) // k_shift if k_shift else rows
            repeat = source.randint(1, 1 + min(room))
        lo = source.choice((None, None, 0, source.randint(-9, 9)))
        hi = source.choice((None, None, source.randint(-5, 29)))
        if lo is not None and hi is not None and hi < lo:
            hi = lo + source.choice((0, 3))
        group = heads // kv_heads
        head = source.randrange(heads)
        some = (range(heads), range(kv_heads)), (range(head, head + 1), range(head // group, head // group + 1))
        work = Work(*source.choice(some), q, tuple(runs), lo, hi, repeat, q_shift, k_shift)
        works += [work] * source.choice((1, 1, 1, 2))  # branches can have the same pairs
    return works


def pairs_of(works: Sequence[Work], heads: int, kv_heads: int, rows: int, keys: int) -> np.ndarray:
    """How often works show each pair [heads, rows, kv heads, keys]."""
    found = np.zeros((heads, rows, kv_heads, keys), np.int64)
    for work in works:
        group = len(work.heads) // len(work.kv)
        for turn in range(work.repeat):
            columns = [j + turn * work.k_shift for run in work.k for j in run]
            for i, row in enumerate(work.q):
                for j, column in enumerate(columns):
                    if (work.lo is None or i - j >= work.lo) and (work.hi is None or i - j <= work.hi):
                        for number, head in enumerate(work.heads):
                            found[head, row + turn * work.q_shift, work.kv[number // group], column] += 1
    return found


def make_kernel(block: int) -> VisitTriton:
    config = Config(block, 4, 1)
    return VisitTriton().derive(tiles=Tiles(block, config, config, config))


def check_staying(readers: Sequence[Reader], heads: int, rows: int, touched: Sequence[np.ndarray]) -> list[bool]:
    """What stays is FRESH at its first program and LAST at its last one; whether each visit has rows that are shared.

    touched [heads, rows] of each visit: the rows that have pairs.
    """
    flags = [reader.owned(heads, rows) for reader in readers]
    for head in range(heads):
        for row in range(rows):
            of = [int(flag[head, row]) for flag in flags if flag[head, row] != -1]
            assert of, "every row is written"
            assert [bool(x & FRESH) for x in of] == [True] + [False] * (len(of) - 1)
            assert [bool(x & LAST) for x in of] == [False] * (len(of) - 1) + [True]
    assert all((flag[some] != -1).all() for flag, some in zip(flags, touched, strict=True))
    return [bool(((flag != -1) & (flag != FRESH | LAST)).any()) for flag in flags]


@pytest.mark.parametrize("seed", range(120))
def test_tables_have_the_pairs_of_their_works(seed: int) -> None:
    """Of one to four visits to rows that stay, by keys or by queries, in a forward and in a backward."""
    source = random.Random(seed)
    kv_heads, block = source.choice((1, 2)), source.choice((2, 4, 4, 8, 16))
    heads = kv_heads * source.choice((1, 2))
    rows, queries_visit = source.choice((1, source.randint(1, 45))), source.random() < 0.5
    sizes = [source.choice((1, source.randint(1, 45))) for _ in range(source.randint(1, 4))]
    visits, wanted = [], []
    for owner, size in enumerate(sizes):
        n, m = (size, rows) if queries_visit else (rows, size)
        works = random_works(source, heads, kv_heads, n, m)
        part = Part("q" if queries_visit else "kv", owner)
        shape = (heads if queries_visit else kv_heads, size)
        visits.append(Visit(part, works, shape, first=source.random() < 0.5))
        wanted.append(pairs_of(works, heads, kv_heads, n, m))
    kernel, stay_heads = make_kernel(block), kv_heads if queries_visit else heads
    for backward in (False, True):
        tables, count = kernel.prepare(visits, heads, kv_heads, rows, backward=backward)
        assert count == len(visits)
        for by_key in (False, True) if backward else (False,):
            readers = [Reader(table.host[by_key], block) for table in tables]
            own_heads, other_heads = (kv_heads, heads) if by_key else (heads, kv_heads)
            touched = []
            for reader, pairs in zip(readers, wanted, strict=True):
                want = pairs.transpose(2, 3, 0, 1) if by_key else pairs
                assert (reader.count_pairs(own_heads, want.shape[1], other_heads, want.shape[3]) == want).all()
                tiles = [reader.work(program) for program in reader.programs]
                assert tiles == sorted(tiles, reverse=True), "programs with most work come first"
                touched.append((want > 0).any((2, 3)))
            if by_key == queries_visit:
                shared = check_staying(readers, stay_heads, rows, touched)
                assert backward or [table.merges for table in tables] == shared
            else:
                for reader, visit, some in zip(readers, visits, touched, strict=True):
                    flags = reader.owned(*visit.shape)
                    if visit.first:
                        assert (flags == FRESH).all()
                    else:
                        assert (flags[some] == 0).all() and (flags != FRESH).all()
                assert backward or all(table.merges for table in tables)


def only_table(works: Sequence[Work], heads: int, rows: int, kv_heads: int, keys: int, block: int) -> Reader:
    visit = Visit(Part("kv", 0), works, (kv_heads, keys), first=True)
    (table,), _ = make_kernel(block).prepare([visit], heads, kv_heads, rows, backward=False)
    return Reader(table.host[0], block)


def bounds_of(reader: Reader) -> np.ndarray:
    """[n, block * 2]"""
    return np.array(reader.table[reader.bounds :]).reshape(-1, 2 * reader.block)


def works_of(pattern: Any, tokens: int, heads: int, group: int) -> list[Work]:
    every = (range(tokens),)
    return join_repetitions(join_keys(lower(find_tiles(pattern.bind(heads, tokens), every, every, heads), group)))


def test_full_tiles_at_equal_distances_are_one_entry() -> None:
    """A program of a causal mask has one entry for the diagonal and one for the run before it, however long."""
    tokens, block = 32 * 8, 8
    reader = only_table(works_of(ra.Causal(), tokens, 2, 2), 2, tokens, 1, tokens, block)
    assert reader.count == 2 * 32
    for program in reader.programs:
        tile = program[1] // block
        (segment,) = reader.segments_of(program)
        assert segment[3:5] == [1, tile] and (segment[5] == block or tile == 0)
    # A head's segments serve both heads: 32 diagonal tiles, 31 runs, and the entry behind the last.
    assert reader.bounds - reader.entries == 2 * (32 + 31 + 1)
    assert reader.entries - reader.segments == 8 * 2 * 32
    assert len(bounds_of(reader)) == 1
    assert bounds_of(reader)[0].tolist() == [x for i in range(block) for x in (0, i + 1)]


def test_full_tiles_of_a_mask_with_steps_are_one_run() -> None:
    """Rows 1, 4, 7 ... of queries see keys 2, 7, 12 ...: tiles are read in place, and their distance counts steps."""
    works = [Work(range(1), range(1), range(1, 96, 3), (range(2, 160, 5),))]
    reader = only_table(works, 1, 96, 1, 160, 8)
    busy = [program for program in reader.programs if program[5]]
    assert len(busy) == 4 and all(program[2] == 3 and program[1] % 3 == 1 for program in busy)
    for program in busy:
        (segment,) = reader.segments_of(program)
        assert segment[1:] == [5, segment[2], 0, 4, 40, 0, 0] and reader.entry(segment[2])[0] == 2
    assert not len(bounds_of(reader))


def test_runs_that_do_not_adjoin_are_entries() -> None:
    works = [Work(range(1), range(1), range(8), (range(16), range(24, 40)))]
    (program,) = only_table(works, 1, 8, 1, 40, 8).programs
    reader = only_table(works, 1, 8, 1, 40, 8)
    (segment,) = reader.segments_of(program)
    assert segment[3:6] == [0, 4, 0]
    assert [reader.entry(segment[2] + i)[0] for i in range(4)] == [0, 8, 24, 32]


def test_works_that_adjoin_in_a_tile_are_one_full_tile() -> None:
    """The parts of a tile that several works show are joined, and joined again into a run."""
    works = [Work(range(1), range(1), range(8), (range(first, last),)) for first, last in ((0, 5), (5, 8), (8, 24))]
    reader = only_table(works, 1, 8, 1, 24, 8)
    ((_, _, _, partial, full, distance, *_),) = reader.segments_of(reader.programs[0])
    assert (partial, full, distance) == (0, 3, 8)


def test_equal_bounds_are_kept_once() -> None:
    """Of a window, and of documents of one length, however many tiles they have; and tables grow with tiles alone."""
    sizes = []
    for tokens in (128, 256):
        window = only_table(works_of(ra.Causal() & ra.Window(10), tokens, 1, 1), 1, tokens, 1, tokens, 16)
        # The diagonal tile, which for the first rows lies at the edge, and the tile before it.
        assert 2 <= len(bounds_of(window)) <= 3
        documents = only_table(works_of(ra.Documents([8] * (tokens // 8)), tokens, 1, 1), 1, tokens, 1, tokens, 16)
        found = bounds_of(documents)
        assert len(found) == len(np.unique(found, axis=0)) <= 3
        sizes.append([len(window.table) - 32 * len(bounds_of(window)), len(documents.table) - found.size])
    programs = 8
    assert [b - a for a, b in zip(*sizes, strict=True)] == [programs * (8 + 8 + 2 * 2), programs * (8 + 8 + 2)]


def test_numbers_of_bounds_do_not_collide() -> None:
    """Whatever numbers describe a tile, equal numbers of bounds mean equal rows."""
    source, block, bounds = np.random.default_rng(0), 4, Bounds(4)
    n = 3000
    start = source.integers(0, 9, n) * block
    first = source.integers(0, 40, n)
    ratio = source.integers(1, 6, n)
    i0 = np.maximum(-(-(start - first) // ratio), 0)
    i1 = (start + block - 1 - first) // ratio
    fits = i0 <= i1
    distance, others = source.integers(-9, 4, n), source.integers(1, 30, n)
    low, high = source.integers(-30, 9, n), source.integers(-3, 40, n)
    columns = [x[fits] for x in (start, first, i0, i1, ratio, distance, others, low, high)]
    numbers = bounds.shapes(*columns)
    rows = bounds.array()
    for number, (begin, origin, a, b, step, edge, count, least, most) in zip(
        numbers.tolist(), zip(*(x.tolist() for x in columns), strict=True), strict=True
    ):
        wanted = [(0, 0)] * block
        for k, i in enumerate(range(a, b + 1)):
            seen = [j for j in range(block) if edge <= j < edge + count and k + least <= j < k + most]
            if seen:
                wanted[origin + i * step - begin] = (seen[0], seen[-1] + 1)
        assert rows[number].tolist() == [*map(list, wanted)]


@pytest.mark.parametrize(
    ("pattern", "heads", "group"),
    [
        (ra.Dilated((16, 48), (2, 3)), 4, 2),
        (ra.Dilated((16, 40), (1, 3), causal=True, mix="group"), 4, 1),
        (ra.BlockSparse(5, np.random.default_rng(3).random((2, 10, 10)) < 0.5), 2, 2),
        (ra.pattern.mix(ra.Causal(), ra.Window(5, 5), ra.Strided(4)), 2, 1),
        (ra.Causal() & (ra.Sinks(3) | ra.Window(6)), 1, 1),
    ],
)
def test_masks_of_patterns(pattern: Any, heads: int, group: int) -> None:
    """The table of a whole mask has its pairs, as often as the mask has them."""
    tokens, kv_heads = 48, heads // group
    works = works_of(pattern, tokens, heads, group)
    reader = only_table(works, heads, tokens, kv_heads, tokens, 8)
    found = reader.count_pairs(heads, tokens, kv_heads, tokens)
    marked = np.zeros((heads, tokens, tokens), np.int64)
    for work in works:
        mark_pairs(marked, work, kv_heads)
    mask = np.broadcast_to(pattern.mask(tokens, heads), (heads, tokens, tokens)).astype(np.int64)
    assert (marked == mask).all()
    for head in range(heads):
        assert (found[head, :, head // group] == mask[head]).all()
        assert found[head].sum() == mask[head].sum(), "no pair with another key/value head"
    assert (reader.owned(heads, tokens) == FRESH | LAST).all()


def test_tiles_of_rows_have_the_step_on_which_works_agree() -> None:
    """LongNet reads dilated rows in place; a head whose works disagree has tiles of adjoining rows."""
    alone, both = (
        Work(range(1), range(1), range(0, 32, 4), (range(0, 32, 4),)),
        Work(range(1, 2), range(1), range(1, 32, 2), (range(0, 32, 2),)),
    )
    third = Work(range(1, 2), range(1), range(0, 32, 4), (range(8),))
    reader = only_table([alone, both, third], 2, 32, 1, 32, 8)
    steps = {(program[0], program[2]) for program in reader.programs}
    assert steps == {(0, 4), (1, 1)}


def test_a_pass_without_visits_or_works() -> None:
    kernel = make_kernel(8)
    tables, count = kernel.prepare([], 2, 1, 10, backward=False)
    assert count == 0 and list(tables) == []
    visits = [Visit(Part("kv", i), (), (1, 3), first=i == 0) for i in range(2)]
    for backward in (False, True):
        (one, other), count = kernel.prepare(visits, 2, 1, 10, backward=backward)
        assert count == 2 and isinstance(one, VisitTables)
        assert (Reader(one.host[0], 8).owned(2, 10) == FRESH | LAST).all()
        assert other.programs == (0,) * (1 + backward) and one.nbytes == sum(x.nbytes for x in one.host)
        assert not one.merges and not other.merges
        if backward:
            assert (Reader(one.host[1], 8).owned(1, 3) == FRESH).all()


def test_rows_beyond_32_bits_are_refused() -> None:
    with pytest.raises(AssertionError, match="32-bit"):
        only_table([Work(range(1), range(1), range(1), (range(1 << 32, (1 << 32) + 1),))], 1, 1, 1, (1 << 32) + 1, 8)
