"""Packs works of a visit into one work of several sequences, which is one call of an op with cumulative lengths.

Neighbouring works, such as documents, are read and written as views. Works with gaps, such as dilated classes, rows of
blocks and documents of a striped layout, are gathered: their rows and keys are copied for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan.work import Work, join_keys, join_repetitions
from .cuda_device import window_bounds

#: Works with more rows x heads than this stay separate calls, for the fastest op; and a call that replaces others
#: copies at most this many for each of them. At about this size, attention or a copy on an H100 takes as long as a
#: launch. Estimated from data sheets, not measured on a GPU.
ALONE_ROWS = 1 << 15
#: Maximum rows x heads of a gathered call, which bounds its memory.
GATHERED_ROWS = 1 << 18
#: A gathered call makes about as many launches as this many calls on views. Counted, with merges by torch.
GATHER_CALLS = 2
#: How many of the latest groups a work may join; earlier ones are full or differ.
OPEN_GROUPS = 8
#: Maximum sequences of a packed work. CUDA grids have at most 65,535.
MOST_SEQUENCES = 1 << 15


@dataclass(frozen=True)
class _Window:
    """The window of neighbouring works, counted from the last row and key of each; None is unbounded.

    `keys` and `rows` are the maxima over all works, `free_keys` and `free_rows` those over works without the bound.
    """

    left: int | None
    right: int | None
    keys: int
    rows: int
    free_keys: int
    free_rows: int

    @classmethod
    def of(cls, work: Work) -> _Window:
        left, right = window_bounds(work)
        keys, rows = work.keys, len(work.q)
        return cls(left, right, keys, rows, keys if left is None else 0, rows if right is None else 0)

    def join(self, other: _Window) -> _Window | None:
        """One window that hides in both groups of works exactly what their windows hide; None if there is none.

        Also None if flash misreads the window. A bound of at least (keys or rows of a work) - 1 hides nothing in the
        work. Flash compares the bounds with the largest number of keys of a sequence (see `flash_reads`), which changes
        the hidden pairs only if a sequence has more rows than that number.
        """
        if None not in (self.left, other.left) and self.left != other.left:
            return None
        if None not in (self.right, other.right) and self.right != other.right:
            return None
        joined = _Window(
            other.left if self.left is None else self.left,
            other.right if self.right is None else self.right,
            *(max(getattr(x, name) for x in (self, other)) for name in ("keys", "rows", "free_keys", "free_rows")),
        )
        left, right = joined.left, joined.right
        if left is None and right is None:
            return joined
        hides_more = (left is not None and left < joined.free_keys - 1) or (
            right is not None and right < joined.free_rows - 1
        )
        return None if hides_more or joined.rows > joined.keys else joined


def pack(calls: list[Work], *, repeats_keys: bool = True) -> list[Work]:
    """Combine the calls computed together into fewer calls, with the same pairs.

    Works whose rows and keys are adjacent become one call, on views of the tensors. Other works become one call on
    copies of their rows and keys, if that makes fewer calls. If `repeats_keys` is False, no key may occur in two
    sequences of such a call.
    """
    views = _chain(calls)
    if len(views) <= GATHER_CALLS:
        return views
    alone = [work for work in views if _size(work) > ALONE_ROWS]
    short = [part for work in views if _size(work) <= ALONE_ROWS for part in work.sequences or work.repetitions()]
    cut = join_keys(_cut_rows(short), lambda work: True)
    ways = short, cut, [part for work in cut for part in _by_head(work)]
    choices = [views, *([*alone, *_gather(works)] for works in ways if len(works) <= MOST_SEQUENCES)]
    most = ALONE_ROWS * len(views)
    choices = [works for works in choices if sum(work.copied_rows for work in works) <= most]
    if not repeats_keys:
        choices = [works for works in choices if not any(map(_repeats_keys, works))]
    return min(choices, key=lambda works: sum(GATHER_CALLS if work.gathered else 1 for work in works))


def _cut_rows(works: list[Work]) -> Iterator[Work]:
    """The works, cut where rows of others begin or end: two works of the same heads then share all rows or none."""
    ends: dict[object, set[int]] = {}

    def cuts(work: Work) -> set[int]:
        return ends.setdefault((work.heads, work.q.step, work.q.start % work.q.step), set())

    for work in works:
        cuts(work).update((work.q[0], work.q[-1] + work.q.step))
    for work in works:
        inside = sorted((end - work.q[0]) // work.q.step for end in cuts(work) if work.q[0] <= end <= work.q[-1])
        for first, last in pairwise((*inside, len(work.q))):
            yield work.narrow_rows(first, last)


def _gather(works: list[Work]) -> Iterator[Work]:
    """The works packed into gathered calls, one per group; groups that need few calls on views become these calls."""
    groups: list[_Group] = []
    for work in sorted(works, key=lambda work: work.q.start):
        if not any(group.take(work) for group in groups[-OPEN_GROUPS:]):
            groups.append(_Group(work))
    for group in groups:
        views = _chain(group.works)
        yield from views if len(views) <= GATHER_CALLS else [_packed(group.works, group.window)]


class _Group:
    """Works for one call: with equal numbers of heads, no shared rows, and one window for all."""

    def __init__(self, work: Work) -> None:
        self.works, self.window, self.size = [work], _Window.of(work), _size(work)
        #: The rows of works by their heads. Works come in the order of their first rows; the last row is in the last.
        self.taken = {work.heads: [work.q]}

    def take(self, work: Work) -> bool:
        """Add the work to the group if it fits; returns whether it was added."""
        first, size = self.works[0], self.size + _size(work)
        if (len(work.heads), len(work.kv)) != (len(first.heads), len(first.kv)) or size > GATHERED_ROWS:
            return False
        window = self.window.join(_Window.of(work)) if len(self.works) < MOST_SEQUENCES else None
        if window is None or any(_meet(work.heads, heads) and self._has(heads, work.q) for heads in self.taken):
            return False
        rows = self.taken.setdefault(work.heads, [])
        rows.insert(len(rows) if not rows or work.q[-1] >= rows[-1][-1] else 0, work.q)
        self.works.append(work)
        self.window, self.size = window, size
        return True

    def _has(self, heads: range, rows: range) -> bool:
        """Whether a work of these heads has one of the rows."""
        taken = self.taken[heads]
        return rows[0] <= taken[-1][-1] and any(_meet(rows, others) for others in taken)


def _meet(a: range, b: range) -> bool:
    """Whether two ranges have a common member."""
    if a[-1] < b[0] or b[-1] < a[0]:
        return False
    return not set(a).isdisjoint(b)


def _size(work: Work) -> int:
    """Rows x heads of q, k and v that a call copies if the work is gathered, over all repetitions."""
    return work.repeat * (len(work.q) * len(work.heads) + 2 * work.keys * len(work.kv))


def _by_head(work: Work) -> Iterator[Work]:
    """The work as one work for each key/value head."""
    group = len(work.heads) // len(work.kv)
    for number, kv in enumerate(work.kv):
        yield replace(work, heads=work.heads[number * group : (number + 1) * group], kv=range(kv, kv + 1))


def _repeats_keys(work: Work) -> bool:
    """Whether some key is in two sequences of a gathered work, or twice in one."""
    if not work.gathered:
        return False
    heads, rows = _places(work, by_key=True)
    places = heads + rows * (1 + heads.max())
    return len(np.unique(places)) < places.size


def _chain(calls: list[Work]) -> list[Work]:
    """The calls, with those packed into one whose rows and keys are neighbours; never more calls."""
    chains: list[tuple[list[Work], _Window]] = []
    #: The number of the chain that ends before these rows and keys of these heads.
    ending: dict[object, int] = {}
    for work in sorted((work for call in calls for work in _sequences(call)), key=lambda work: work.q.start):
        if not _is_packable(work):
            chains.append(([work], _Window.of(work)))
            continue
        number = ending.pop((work.heads, work.kv, work.q.start, work.k[0].start), len(chains))
        works, window = chains[number] if number < len(chains) else ([], _Window.of(work))
        joined = window.join(_Window.of(work)) if 0 < len(works) < MOST_SEQUENCES else None
        if joined is None:
            number = len(chains)
            chains.append(([work], _Window.of(work)))
        else:
            works.append(work)
            chains[number] = works, joined
        ending[work.heads, work.kv, work.q.stop, work.k[0].stop] = number
    packed = [_packed(works, window) for works, window in chains if len(works) > 1]
    alone = [works[0] for works, _ in chains if len(works) == 1]
    packed += [work for work in alone if work.repeat > 1]
    packed += join_repetitions(work for work in alone if work.repeat == 1)
    return packed if len(packed) < len(calls) else calls


def _packed(works: list[Work], window: _Window) -> Work:
    rows = [work.q for work in works]
    runs = [run for work in works for run in work.k]
    return replace(
        works[0],
        q=range(min(q[0] for q in rows), max(q[-1] for q in rows) + 1),
        k=(range(min(run[0] for run in runs), max(run[-1] for run in runs) + 1),),
        lo=None if window.right is None else -window.right,
        hi=window.left,
        sequences=tuple(works),
    )


def _sequences(call: Work) -> Iterator[Work]:
    """The repetitions of a call. If every row sees one key, each row is a repetition."""
    if not _is_packable(call):
        yield call
        return
    for work in call.repetitions():
        if work.lo is None or work.lo != work.hi:
            yield work
            continue
        for row in range(len(work.q)):
            yield work.narrow((row, row + 1), (row - work.lo, row - work.lo + 1))


def _is_packable(work: Work) -> bool:
    """Whether a call has adjacent rows and adjacent keys, few enough that a launch takes longer than the call."""
    steps = {work.q.step, *(run.step for run in work.k)}
    return steps == {1} and len(work.k) == 1 and len(work.q) * len(work.heads) <= ALONE_ROWS


def _sizes(work: Work) -> list[tuple[int, int]]:
    """(rows, keys) of each sequence of a packed work, or of the work itself."""
    return [(len(part.q), part.keys) for part in work.sequences or (work,)]


def cumulative(work: Work, batch: int, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """The cumulative lengths of a work for flash's varlen call: (cum_seq_q, cum_seq_k, max_q, max_k).

    They are for `batch` batch elements, one after another. The first two are int32 on `device`, begin with 0, and are
    cached in the work; the others are ints.
    """

    def make() -> Any:
        ends = np.cumsum([(0, 0), *_sizes(work) * batch], 0).astype(np.int32)
        rows, keys = (torch.as_tensor(np.ascontiguousarray(side), device=device) for side in ends.T)
        return rows, keys, *(max(sizes) for sizes in zip(*_sizes(work), strict=True))

    return _keep(work, (cumulative, batch, device), make)


def _places(work: Work, *, by_key: bool) -> tuple[np.ndarray, np.ndarray]:
    """(heads [n or 1, heads of a sequence], rows [n, 1]) of the rows, or keys, of the sequences of a gathered work."""
    runs = [part.k if by_key else (part.q,) for part in work.sequences]
    heads = np.array([part.kv if by_key else part.heads for part in work.sequences])
    rows = np.concatenate([np.arange(run.start, run.stop, run.step) for part in runs for run in part])
    if (heads == heads[0]).all():
        return heads[:1], rows[:, None]
    return np.repeat(heads, [sum(map(len, part)) for part in runs], 0), rows[:, None]


def _indices(work: Work, device: torch.device, *, by_key: bool, first: int) -> Any:
    """(rows, heads) from `_places` as tensors on a device; rows count from row `first`."""

    def make() -> Any:
        heads, rows = _places(work, by_key=by_key)
        return tuple(torch.as_tensor(x, device=device) for x in (rows - first, heads))

    return _keep(work, (_indices, by_key, first, device), make)


def gather(x: Tensor, work: Work, *, by_key: bool = False, first: int = 0) -> Tensor:
    """Copy the rows (or keys, if `by_key`) of a work's sequences from x [B, H, n, ...], one sequence after another.

    x begins at row `first` of the block. Returns [B, heads of a sequence, rows, ...].
    """
    rows, heads = _indices(work, x.device, by_key=by_key, first=first)
    return x.transpose(1, 2)[:, rows, heads].transpose(1, 2)


def scatter(x: Tensor, work: Work, part: Tensor, *, first: int = 0) -> None:
    """Write `part` to the rows of x [B, H, n, ...] from which `gather` copies, in the same order."""
    rows, heads = _indices(work, x.device, by_key=False, first=first)
    x.transpose(1, 2)[:, rows, heads] = part.transpose(1, 2).to(x.dtype)


def scatter_add(x: Tensor, work: Work, part: Tensor, *, by_key: bool) -> None:
    """Add `part` to the rows (or keys, if `by_key`) of x [B, H, n, D] from which `gather` copies, in the same order.

    Uses index_add_ on a flattened view of x, which also sums keys that several sequences share.
    """
    batch, heads, rows, width = x.shape
    by_batch, by_head, by_row, by_column = x.stride()
    unit = gcd(by_head, by_row)
    count = ((heads - 1) * by_head + (rows - 1) * by_row) // unit + 1

    def make() -> Any:
        at_heads, at_rows = _places(work, by_key=by_key)
        return torch.as_tensor(((at_rows * by_row + at_heads * by_head) // unit).ravel(), device=x.device)

    places = _keep(work, (scatter_add, by_key, by_head, by_row, x.device), make)
    flat = x.as_strided((batch, count, width), (by_batch, unit, by_column))
    flat.index_add_(1, places, part.transpose(1, 2).reshape(batch, -1, width).to(x.dtype))


def _keep(work: Work, key: object, make: Callable[[], Any]) -> Any:
    """The result of `make`, computed once per work. Its tensors outlive the inference mode of the caller."""
    if key not in work.memo:
        with torch.inference_mode(False):
            work.memo[key] = make()
    return work.memo[key]
