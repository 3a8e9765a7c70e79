"""Rows of tensors that a kernel call reads and writes, and the output rows of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from ..kernels.base import spread_marks, wide
from ..plan.work import Work, shift_range
from .memory_pool import Pool, empty, memory_pool
from .merge_plan import KernelCall, Section
from .softmax import add_, merge_

#: Query rows times heads times batch of one call at most: bounds what a kernel allocates for the call.
BATCH_ROWS = 1 << 18
#: Bytes of a cache line and of the widest registers of CPUs.
LINE = 64

#: (out [B, H, n, Dv], lse [B, H, n]).
Pair = tuple[torch.Tensor, torch.Tensor]


def batches(work: Work, q: torch.Tensor) -> Iterator[slice]:
    """The slices of the batch, one per kernel call. A work with repetitions takes one element of the batch per call."""
    size = len(q) if work.repeat == 1 else 1
    size = max(1, min(size, BATCH_ROWS // (len(work.q) * len(work.heads))))
    for first in range(0, len(q), size):
        yield slice(first, first + size)


def align_rows(x: torch.Tensor) -> torch.Tensor:
    """x if its rows are whole cache lines, or if it is contiguous and starts a cache line; else a copy that does.

    Matrix products add in another order at other addresses. With aligned rows a shard gives the same bits whether the
    shard is a tensor of its own, as on a real rank, or a view of the whole sequence, as on a virtual rank.
    """
    if x.shape[-1] * x.element_size() % LINE == 0 or (x.is_contiguous() and x.data_ptr() % LINE == 0):
        return x
    return empty(x.shape, x.dtype, x.device).copy_(x)


class KernelInputs:
    """The rows that kernel calls read: views, or a copy in a workspace where the keys of a call are several runs."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._workspaces: dict[int, torch.Tensor] = {}

    def select(
        self, work: Work, batch: slice, by_query: Sequence[torch.Tensor], by_key: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The rows of a call in each tensor of query or key rows. Copied keys are valid until the next call."""
        selected = [select(x[batch], work.heads, work.q, work) for x in by_query]
        for place, x in enumerate(by_key):
            runs = [select(x[batch], work.kv, run, work, work.k_shift) for run in work.k]
            selected.append(runs[0] if len(runs) == 1 else self._concatenate(place, runs, work.keys))
        return selected

    def close(self) -> None:
        """Give the workspaces back to the pool."""
        while self._workspaces:
            self.pool.give(self._workspaces.popitem()[1])

    def _concatenate(self, place: int, runs: list[torch.Tensor], keys: int) -> torch.Tensor:
        """Runs of key rows as one tensor in workspace number `place`."""
        like = runs[0]
        shape = (*like.shape[:2], keys, like.shape[3])
        size = prod(shape) * like.element_size()
        if place not in self._workspaces or self._workspaces[place].numel() < size:
            if place in self._workspaces:
                self.pool.give(self._workspaces[place])
            # Powers of two: few sizes, so that the pool can reuse them.
            self._workspaces[place] = self.pool.take(1 << (size - 1).bit_length())
        return torch.cat(runs, 2, out=self._workspaces[place][:size].view(like.dtype).view(shape))


def select(x: torch.Tensor, heads: range, rows: range, work: Work, shift: int | None = None) -> torch.Tensor:
    """The view of x [B, H, n, ...] at these heads and rows.

    If the work has repetitions, the view's batch dimension counts the repetitions, which are `shift` rows apart.
    """
    first = x[:, heads.start : heads.stop : heads.step, rows.start : rows.stop : rows.step]
    if work.repeat == 1:
        return first
    shift = work.q_shift if shift is None else shift
    return first.as_strided((work.repeat, *first.shape[1:]), (shift * x.stride(2), *first.stride()[1:]))


def accumulate(
    x: torch.Tensor, heads: range, runs: tuple[range, ...], work: Work, shift: int, part: torch.Tensor
) -> None:
    """Add `part` [B or repeat, heads, rows, D or more] to those rows of x [B, H, n, D] that the call has read."""
    first = 0
    for run in runs:
        rows = part[:, :, first : first + len(run), : x.shape[-1]]
        first += len(run)
        # Overlapping repetitions are added in turns, so that no call writes an element twice.
        turns = min(work.repeat, -(-(run[-1] + 1 - run[0]) // shift) if shift else work.repeat)
        for turn in range(turns):
            repetitions = rows[turn::turns] if turns > 1 else rows
            disjoint = replace(work, repeat=len(repetitions) if work.repeat > 1 else 1)
            add_(select(x, heads, shift_range(run, turn * shift), disjoint, turns * shift), repetitions)


class OutputAccumulator:
    """The output rows of one rank. A row's only partial is written once; other partials are merged in fp32 or fp64.

    An output of that dtype is its own accumulator; a narrower output has one accumulator per section, for as long as
    the section is open. lse is summed in fp64: each rounding of lse would be an error of the backward's probabilities.
    Without a given output, a first partial that covers all rows becomes the output without a copy.
    """

    def __init__(self, q: torch.Tensor, value_dim: int, out: torch.Tensor | None) -> None:
        self.q, self.shape, self.out = q, (*q.shape[:3], value_dim), out
        self.lse = q.new_empty(0)
        self.pool = memory_pool(q.device)
        #: The accumulator of every open section, and the pool's tensor that the accumulator lives in, if any.
        self._open: dict[Section, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def add(self, section: Section, call: KernelCall, part: torch.Tensor, part_lse: torch.Tensor, batch: slice) -> None:
        """Take in the partial of a kernel call for some elements of the batch."""
        if self.out is None and part.shape == self.shape and part.dtype == wide(self.q.dtype) == self.q.dtype:
            self.out, self.lse = part, part_lse if section.single else part_lse.double()
            self._open[section] = part, None
            return
        work = replace(call.work, q=shift_range(call.work.q, -section.rows.start))
        out, lse = (select(x[batch], work.heads, work.q, work) for x in self._open_section(section))
        if call.first:
            out.copy_(part)
            lse.copy_(part_lse)
        else:
            merge_(out, lse, part, part_lse)

    def close(self, section: Section) -> None:
        """Write the accumulator of a section, which has all its partials, to the output."""
        accumulator, store = self._open.pop(section)
        if store is not None:
            self._rows(self.out, section.rows).copy_(accumulator)
            self.pool.give(store)

    def finish(self, empty: Sequence[range], bad: torch.Tensor | None = None) -> Pair:
        """(out, lse) of all rows. Rows in `empty` see no key and get 0 and -inf; flagged rows get NaN.

        `bad` [B, H, n] flags rows with a query that is not finite.
        """
        self._allocate()
        assert self.out is not None
        for rows in empty:
            self._rows(self.out, rows).zero_()
            self._rows(self.lse, rows).fill_(-torch.inf)
        # A bad key shows in column 0 of out, see `kernels.base.forward`.
        marks = self.out[..., 0].isnan()
        if bad is not None:
            marks |= bad & (self.lse != -torch.inf)
        spread_marks(marks, self.out, self.lse.unsqueeze(-1))
        return self.out, self.lse.to(wide(self.q.dtype))

    def _open_section(self, section: Section) -> Pair:
        """The accumulators (out, lse) of a section, allocated and filled when it is first met."""
        self._allocate()
        if section not in self._open:
            target = self._rows(self.out, section.rows)
            dtype, store = wide(self.q.dtype), None
            if not section.single and target.dtype != dtype:
                batch, heads, rows, width = target.shape
                store = self.pool.take(target.numel() * dtype.itemsize)
                target = store.view(dtype).view(batch, rows, heads, width).transpose(1, 2)
            if section.filled:
                target.zero_()
                self._rows(self.lse, section.rows).fill_(-torch.inf)
            self._open[section] = target, store
        return self._open[section][0], self._rows(self.lse, section.rows)

    def _rows(self, x: torch.Tensor | None, rows: range) -> torch.Tensor:
        assert x is not None
        return x[:, :, rows.start : rows.stop]

    def _allocate(self) -> None:
        """Allocate the output and lse, unless they exist."""
        if self.lse.numel():
            return
        batch, heads, rows, width = self.shape
        # Rows before heads in memory, as in the results of the kernels, so that a merge walks memory in order.
        if self.out is None:
            self.out = empty((batch, rows, heads, width), self.q.dtype, self.q.device).transpose(1, 2)
        self.lse = empty((batch, rows, heads), torch.float64, self.q.device).transpose(1, 2)
