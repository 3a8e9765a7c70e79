"""Works of documents, packed into one work of several sequences: one call of an op that takes cumulative lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..plan.work import Work, join_repetitions
from .bands import window_bounds

#: Works of more rows times heads stay calls of their own, for the fastest op. About where attention on an H100 takes as
#: long as a launch: estimated, not measured.
ALONE_ROWS = 1 << 15
#: Sequences of a packed work at most. CUDA grids have at most 65,535.
MOST_SEQUENCES = 1 << 15


@dataclass(frozen=True)
class _Window:
    """The window of neighbouring works, counted from the last row and key of each; None is unbounded.

    `keys` and `rows` are the most of any work; `free_keys` and `free_rows` the most of those without the bound.
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
        """The window that hides the same pairs of all works; None if there is none, or flash misreads it.

        A bound of one less than the keys, or rows, of a work hides nothing of the work. Flash compares the bounds with
        the most keys of a sequence (see `bands.flash_reads`), which hides no other pairs if no sequence has more rows.
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


def pack(calls: list[Work]) -> list[Work]:
    """The calls of a visit, where calls whose rows and keys are neighbours are packed into one; never more calls."""
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
    return replace(
        works[0],
        q=range(works[0].q.start, works[-1].q.stop),
        k=(range(works[0].k[0].start, works[-1].k[0].stop),),
        lo=None if window.right is None else -window.right,
        hi=window.left,
        cuts=tuple((len(work.q), work.keys) for work in works),
    )


def _sequences(call: Work) -> Iterator[Work]:
    """The repetitions of a call. Where every row sees one key, every row is a repetition."""
    if not _is_packable(call):
        yield call
        return
    for work in call.singles():
        if work.lo is None or work.lo != work.hi:
            yield work
            continue
        for row in range(len(work.q)):
            yield work.narrow((row, row + 1), (row - work.lo, row - work.lo + 1))


def _is_packable(work: Work) -> bool:
    """Whether a call holds adjacent rows and adjacent keys, few enough that a launch takes longer."""
    steps = {work.q.step, *(run.step for run in work.k)}
    return steps == {1} and len(work.k) == 1 and len(work.q) * len(work.heads) <= ALONE_ROWS


def cumulative(work: Work, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(cum_seq_q, cum_seq_k, max_q, max_k) of a packed work, for `batch` elements of the batch one after another."""

    def make() -> Any:
        ends = np.cumsum([(0, 0), *work.cuts * batch], 0).astype(np.int32)
        rows, keys = (torch.as_tensor(np.ascontiguousarray(side), device=device) for side in ends.T)
        return rows, keys, *(max(sizes) for sizes in zip(*work.cuts, strict=True))

    return _keep(work, (cumulative, batch, device), make)


def visible_runs(work: Work, device: torch.device, *, by_key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, stop) of the keys that each row of a packed work sees; `by_key`: of the rows that see each key."""

    def make() -> Any:
        sizes, lo, hi = np.array(work.cuts).T, work.lo, work.hi
        if by_key:  # row i sees key j iff -hi <= j - i <= -lo
            lo, hi = (None if bound is None else -bound for bound in (hi, lo))
            sizes = sizes[::-1]
        (count, seen), (stops, seen_stops) = sizes, sizes.cumsum(1)
        first, stop = np.repeat(seen_stops - seen, count), np.repeat(seen_stops, count)
        # What is as far from the end of its sequence.
        same = np.arange(count.sum()) + np.repeat(seen_stops - stops, count)
        first = first if hi is None else np.maximum(first, same - hi)
        stop = stop if lo is None else np.minimum(stop, same - lo + 1)
        return tuple(torch.as_tensor(x, device=device) for x in (first, stop))

    return _keep(work, (visible_runs, by_key, device), make)


def _keep(work: Work, key: object, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once for a work. Tensors outlive the inference mode of the caller."""
    if key not in work.kept:
        with torch.inference_mode(False):
            work.kept[key] = make()
    return work.kept[key]
