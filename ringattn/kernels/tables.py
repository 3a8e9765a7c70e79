"""The mask of a visit as tables of integers, from which the kernels of `kernels.visit` read what to compute.

A program of these kernels owns a tile of rows, of queries or of keys, and walks through tiles of the other side. Row
number i of a tile is `first + i * step`, so rows of a dilated mask are read in place. A visit has one int32 table:

- a header: the number of programs, and where segments, entries and bounds begin, counted in integers
- programs [P, 8]: head, first row, step, rows, first segment, segments, flags, 0; those with most work come first
- segments [S, 8]: head of the other side, step, first entry, partial tiles, full tiles, distance of full tiles, 0, 0
- entries [E, 2]: first row of a tile of the other side, and where its bounds begin (0 for full tiles); one more at the
  end, because kernels read the next entry early. Full tiles at equal distances are one entry.
- bounds [n, block, 2]: for each row of the own tile, the first visible row of the other tile and the one after the last

Every row has one owner, so nothing is added atomically, and every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..plan.work import Work

#: Flags of a program: its rows have no result yet, and no later visit changes them.
FRESH, LAST = 1, 2
#: Integers of a header, of a program or a segment, and of an entry.
HEADER, RECORD, ENTRY = 4, 8, 2
#: Larger than every distance of rows.
FAR = 1 << 40


@dataclass(frozen=True, eq=False)
class Side:
    """The rows of one side, queries or keys: how many heads own tiles, how many rows each has, and rows per tile."""

    heads: int
    rows: int
    block: int

    def starts(self, step: int) -> np.ndarray:
        """For rows first, first + step ...: the number of the first tile of each first row 0 .. step, int64."""
        counts = ((self.rows - np.arange(step) + step - 1) // step).clip(0)
        return np.concatenate(([0], np.cumsum(-(-counts // self.block))))

    def tiles(self, step: int) -> np.ndarray:
        """(first row, rows) of all tiles [n, 2], in which every row lies once."""
        starts = self.starts(step)
        remainder = np.repeat(np.arange(step), np.diff(starts))
        first = remainder + (np.arange(starts[-1]) - starts[remainder]) * self.block * step
        return np.stack([first, np.minimum(self.block, -(-(self.rows - first) // step))], 1)


@dataclass(frozen=True, eq=False)
class HeadWalk:
    """The segments of one head's programs, by tile of its rows; heads with equal works share one walk.

    `segments` [S, 7]: tile, contributor, step, first entry, partial tiles, full tiles, distance of full tiles.
    """

    segments: np.ndarray
    touched: np.ndarray


class VisitTable:
    """The programs of a visit before their flags are known; `pack` makes the table.

    works: the pairs of the visit. own: the side that owns tiles. by_key: that side are the keys.
    steps: for each head of `own`, the step of its tiles, from `find_steps`.
    """

    def __init__(self, works: Iterable[Work], own: Side, steps: Sequence[int], *, by_key: bool) -> None:
        self.own, self.steps = own, steps
        self._entries: list[np.ndarray] = []
        self._bounds = Bounds(own.block)
        self._count = 0
        groups = _by_heads(works)
        columns = {heads: _columns(works, by_key=by_key) for heads, works in groups.items()}
        partners_of = _partners(groups, by_key=by_key)
        walks: dict[object, HeadWalk] = {}
        #: For each head: its walk, and the heads of the other side that contribute to it.
        self.heads: list[tuple[HeadWalk, np.ndarray]] = []
        for head in range(own.heads):
            partners = partners_of.get(head, {})
            key = steps[head], tuple(map(tuple, partners.values()))
            if key not in walks:
                walks[key] = self._walk(steps[head], [[columns[x] for x in of] for of in partners.values()])
            self.heads.append((walks[key], np.array([*partners], np.int64)))

    def _walk(self, step: int, contributions: list[list[np.ndarray]]) -> HeadWalk:
        parts = []
        for number, works in enumerate(contributions):
            found = self._segments(np.concatenate(works), step)
            parts.append(np.insert(found, 1, number, axis=1))
        segments = np.concatenate([np.zeros((0, 7), np.int64), *parts])
        segments = segments[np.argsort(segments[:, 0], kind="stable")]
        return HeadWalk(segments, np.unique(segments[:, 0]))

    def _segments(self, works: np.ndarray, step: int) -> np.ndarray:
        """The segments [n, 6] of works on one head of each side: tile, step, first entry, partial, full, distance."""
        block, starts = self.own.block, self.own.starts(step)
        a, n, a_step, b, m, b_step, lo, hi = works.T
        # The own rows are a + a_step * i; tile number `tile` of the head's lattice begins at row `start`.
        lattice = np.where(n == 1, step, a_step)
        first, last = a // step, (a + (n - 1) * lattice) // step
        index, number = _expand(first // block, last // block + 1)
        tile, start = starts[a[index] % step] + number, number * block
        ratio = lattice[index] // step
        i0 = np.maximum(-(-(start - first[index]) // ratio), 0)
        i1 = np.minimum((start + block - 1 - first[index]) // ratio, n[index] - 1)
        # Rows j of the other side, which are rows v + j of the lattice of that step and remainder.
        b_step = np.where(m == 1, 1, b_step)
        v, m, lo, hi = (b // b_step)[index], m[index], lo[index], hi[index]
        j0, j1 = np.maximum(i0 - hi, 0), np.minimum(i1 - lo, m - 1)
        some = (i0 <= i1) & (j0 <= j1)
        t0, t1 = (v + j0) // block, (v + j1) // block + 1
        f0 = -(-(v + np.maximum(i1 - hi, 0)) // block)
        f1 = np.minimum(v + m, i0 - lo + v + 1) // block
        f0, f1 = np.maximum(f0, t0), np.minimum(f1, t1)
        none = ~some | (ratio > 1) | (i1 - i0 < block - 1) | (f0 >= f1)
        f0, f1 = np.where(none, t1, f0), np.where(none, t1, f1)
        t0, t1 = np.where(some, t0, 0), np.where(some, t1, 0)
        f0, f1 = np.where(some, f0, 0), np.where(some, f1, 0)
        # Partial tiles lie before and after the full ones.
        sides = [_expand(t0, f0), _expand(f1, t1)]
        at, cell = (np.concatenate(x) for x in zip(*sides, strict=True))
        distance = v[at] - cell * block
        shift = i0[at] + distance
        shapes = self._bounds.shapes(
            start[at], first[index][at], i0[at], i1[at], ratio[at], distance, m[at], shift - hi[at], shift - lo[at] + 1
        )
        steps = b_step[index]
        origin = (b % b_step)[index]
        rows = origin[at] + cell * block * steps[at]
        partial, whole = self._join(np.stack([tile[at], steps[at], rows], 1), shapes)
        fulls = np.stack([tile, steps, origin + f0 * block * steps, f1 - f0], 1)[f0 < f1]
        return self._list(partial, np.concatenate([fulls, np.insert(whole, 3, 1, axis=1)]))

    def _join(self, cells: np.ndarray, shapes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(partial [n, 4], full [n, 3]) tiles: cells [n, 3] of (tile, step, first row), joined where several meet.

        The fourth column of partial tiles is where their bounds begin. `shapes` are numbers of bounds.
        """
        order = np.lexsort((shapes, *cells.T[::-1]))
        cells, shapes = cells[order], shapes[order]
        begins = np.flatnonzero(np.append(True, (cells[1:] != cells[:-1]).any(1))) if len(cells) else np.zeros(0, int)
        counts = np.diff(np.append(begins, len(cells)))
        single = begins[counts == 1]
        partial = [np.column_stack([cells[single], shapes[single] * self.own.block * 2])]
        full: list[np.ndarray] = [np.zeros((0, 3), np.int64)]
        for begin, count in zip(begins[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
            for shape in self._bounds.join(tuple(shapes[begin : begin + count].tolist())):
                cell = cells[begin : begin + 1]
                if shape is None:
                    full.append(cell)
                else:
                    partial.append(np.insert(cell, 3, shape * self.own.block * 2, axis=1))
        return np.concatenate(partial), np.concatenate(full)

    def _list(self, partial: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Append the entries of partial [n, 4] and full [n, 4] tiles, the latter in runs; returns the segments."""
        block = self.own.block
        full = full[np.lexsort((full[:, 2], full[:, 1], full[:, 0]))]
        if len(full):  # join runs that follow each other
            after = full[:, 2] + full[:, 3] * block * full[:, 1]
            fresh = np.append(True, (full[1:, :2] != full[:-1, :2]).any(1) | (full[1:, 2] != after[:-1]))
            at = np.flatnonzero(fresh)
            full = np.column_stack([full[at, :3], np.add.reduceat(full[:, 3], at)])
        keys = np.concatenate([partial[:, :2], full[:, :2]])
        pairs, inverse = np.unique(keys, axis=0, return_inverse=True)
        inverse = inverse.ravel()
        of_partial, of_full = inverse[: len(partial)], inverse[len(partial) :]
        runs = np.bincount(of_full, minlength=len(pairs))
        tiles = np.bincount(of_full, full[:, 3], minlength=len(pairs)).astype(np.int64)
        # A single run is one entry; of several runs, each tile is one.
        alone = runs[of_full] == 1
        run, number = _expand(np.zeros(len(full), np.int64), np.where(alone, 1, full[:, 3]))
        rows = full[run, 2] + number * block * full[run, 1]
        partials = np.bincount(of_partial, minlength=len(pairs))
        listed = np.concatenate([of_partial, of_full[run]])
        kind = np.repeat([0, 1], [len(partial), len(run)])
        entries = np.concatenate([partial[:, 2:4], np.column_stack([rows, np.zeros_like(rows)])])
        order = np.lexsort((entries[:, 0], kind, listed))
        begins = np.searchsorted(listed[order], np.arange(len(pairs)))
        segments = np.column_stack(
            [pairs, self._count + begins, partials, tiles, np.where(runs == 1, block * pairs[:, 1], 0)]
        )
        self._entries.append(entries[order])
        self._count += len(entries)
        return segments

    def pack(self, flags: Sequence[np.ndarray], fill: Sequence[np.ndarray]) -> np.ndarray:
        """The table. For each head, `flags` of all tiles, and in `fill` the untouched tiles that get a program, too."""
        programs, segments, count = [], [], 0
        lattices = {step: self.own.tiles(step) for step in set(self.steps)}
        for head, (walk, partners) in enumerate(self.heads):
            step = self.steps[head]
            tiles = np.concatenate([walk.touched, fill[head]])
            begins, ends = (np.searchsorted(walk.segments[:, 0], tiles, side) for side in ("left", "right"))
            lengths = ends - begins
            lattice = lattices[step][tiles]
            before = np.append(0, np.cumsum(walk.segments[:, 4:6].sum(1)))
            work = before[ends] - before[begins]
            columns = [np.full(len(tiles), head), lattice[:, 0], np.full(len(tiles), step), lattice[:, 1]]
            programs.append(np.column_stack([*columns, count + begins, lengths, flags[head][tiles], work]))
            of = walk.segments
            zeros = np.zeros((len(of), 2), np.int64)
            segments.append(np.column_stack([partners[of[:, 1]], of[:, 2:], zeros]))
            count += len(of)
        listed = np.concatenate(programs) if programs else np.zeros((0, RECORD), np.int64)
        listed = listed[np.argsort(-listed[:, 7], kind="stable")]
        listed[:, 7] = 0
        entries = [*self._entries, np.zeros((1, ENTRY), np.int64)]
        parts = [listed, *segments], entries, [self._bounds.array()]
        sizes = [len(listed) * RECORD, count * RECORD, sum(map(len, entries)) * ENTRY]
        offsets = HEADER + np.cumsum(sizes)
        header = np.array([len(listed), *offsets])
        table = np.concatenate([header, *(x.ravel() for part in parts for x in part)])
        assert table.max(initial=0) < 1 << 31, "rows and offsets of a table are 32-bit integers"
        return table.astype(np.int32)


class Bounds:
    """The different bounds of partial tiles, by number."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._numbers: dict[int, int] = {}
        self._arrays: list[np.ndarray] = []
        self._joined: dict[tuple[int, ...], tuple[int | None, ...]] = {}

    def shapes(
        self,
        start: np.ndarray,
        first: np.ndarray,
        i0: np.ndarray,
        i1: np.ndarray,
        ratio: np.ndarray,
        distance: np.ndarray,
        others: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
    ) -> np.ndarray:
        """The number of each tile's bounds. Own row k * ratio + r0, 0 <= k < count, sees rows max(e0, k + low) ..."""
        block = self.block
        r0, count = first + i0 * ratio - start, i1 - i0 + 1
        ratio = np.where(count == 1, 1, ratio)
        e0, e1 = distance.clip(0), (others + distance).clip(0, block)
        low, high = low.clip(-block, block) + block, high.clip(-block, block) + block
        keys = np.zeros(len(r0), np.int64)
        for column in (r0, count, ratio, e0, e1, low, high):
            keys = keys * (2 * block + 1) + column
        unique, at, inverse = np.unique(keys, return_index=True, return_inverse=True)
        fresh = [i for i, key in enumerate(unique.tolist()) if key not in self._numbers]
        if fresh:
            at = at[fresh]
            row = np.arange(block) - r0[at, None]
            k = row // ratio[at, None]
            inside = (row >= 0) & (row % ratio[at, None] == 0) & (k < count[at, None])
            lower = np.maximum(e0[at, None], k + low[at, None] - block)
            upper = np.minimum(e1[at, None], np.where(high[at, None] == 2 * block, block, k + high[at, None] - block))
            inside &= lower < upper
            pairs = np.stack([np.where(inside, lower, 0), np.where(inside, upper, 0)], -1)
            for i, pair in zip(fresh, pairs, strict=True):
                self._numbers[int(unique[i])] = self._add(pair)
        numbers = np.array([self._numbers[key] for key in unique.tolist()], np.int64)
        return numbers[inverse.ravel()]

    def _add(self, pair: np.ndarray) -> int:
        self._arrays.append(pair)
        return len(self._arrays) - 1

    def join(self, numbers: tuple[int, ...]) -> tuple[int | None, ...]:
        """The numbers of bounds that together show what `numbers` do, each row at most once; None is a full tile.

        Rows that adjoin are joined. Pairs that two works have in common, as branches can, stay in two bounds.
        """
        if numbers not in self._joined:
            pairs = np.stack([self._arrays[number] for number in numbers])
            empty = pairs[..., 0] == pairs[..., 1]
            order = np.argsort(np.where(empty, self.block, pairs[..., 0]), 0, kind="stable")
            pairs = np.take_along_axis(pairs, order[..., None], 0)
            layers = np.zeros_like(pairs)
            used, rows = np.zeros(self.block, np.int64), np.arange(self.block)
            for lower, upper in (pair.T for pair in pairs):
                seen = lower < upper
                grows = seen & (used > 0) & (layers[used - 1, rows, 1] == lower)
                layers[used[grows] - 1, rows[grows], 1] = upper[grows]
                added = seen & ~grows
                layers[used[added], rows[added]] = np.column_stack([lower, upper])[added]
                used += added
            whole = np.array([0, self.block])
            self._joined[numbers] = tuple(
                None if (layer == whole).all() else self._add(layer) for layer in layers[: used.max(initial=0)]
            )
        return self._joined[numbers]

    def array(self) -> np.ndarray:
        return np.stack(self._arrays) if self._arrays else np.zeros((0, self.block, 2), np.int64)


def find_steps(visits: Iterable[Iterable[Work]], heads: int, *, by_key: bool) -> list[int]:
    """For each head, the step of the tiles in which all its rows lie: that of its works if they agree, else 1."""
    found: list[set[int]] = [set() for _ in range(heads)]
    for works in visits:
        for work in works:
            runs = work.k if by_key else (work.q,)
            steps = {run.step for run in runs if len(run) > 1}
            for head in work.kv if by_key else work.heads:
                found[head] |= steps
    return [steps.pop() if len(steps) == 1 else 1 for steps in found]


#: (query heads, key/value heads) of works.
Heads = tuple[range, range]


def _by_heads(works: Iterable[Work]) -> dict[Heads, list[Work]]:
    groups: dict[Heads, list[Work]] = {}
    for work in works:
        groups.setdefault((work.heads, work.kv), []).append(work)
    return groups


def _partners(groups: Iterable[Heads], *, by_key: bool) -> dict[int, dict[int, list[Heads]]]:
    """For each head that owns tiles: the heads of the other side that it meets, each with the groups of both."""
    found: dict[int, dict[int, list[Heads]]] = {}
    for heads, kv_heads in groups:
        group = len(heads) // len(kv_heads)
        for number, head in enumerate(heads):
            kv = kv_heads[number // group]
            own, other = (kv, head) if by_key else (head, kv)
            found.setdefault(own, {}).setdefault(other, []).append((heads, kv_heads))
    return {own: dict(sorted(partners.items())) for own, partners in found.items()}


def _columns(works: Iterable[Work], *, by_key: bool) -> np.ndarray:
    """Works [n, 8], by runs of keys: (first row, rows, step) of the own side and of the other, and the band lo, hi."""
    lines = []
    for repeated in works:
        for work in repeated.repetitions():
            before, q = 0, (work.q.start, len(work.q), work.q.step)
            for run in work.k:
                k = run.start, len(run), run.step
                lo = -FAR if work.lo is None else work.lo + before
                hi = FAR if work.hi is None else work.hi + before
                lines.append((*k, *q, -hi, -lo) if by_key else (*q, *k, lo, hi))
                before += len(run)
    return np.array(lines, np.int64).reshape(-1, 8)


def _expand(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, number): every number from first[index] to last[index] - 1, for each index in turn."""
    counts = (last - first).clip(0)
    index = np.repeat(np.arange(len(first)), counts)
    return index, first[index] + np.arange(len(index)) - (np.cumsum(counts) - counts)[index]
