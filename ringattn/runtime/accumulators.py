"""Rows of tensors that a call of the kernel reads and writes, and the output rows of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from ..kernels.base import wide
from ..plan.work import Work, shift_range
from .memory_pool import Pool, empty, memory_pool
from .merge_plan import KernelCall, Section
from .softmax import merge_

#: Query rows times heads times batch of one call: bounds what a kernel allocates for it.
BATCH_ROWS = 1 << 18
#: Bytes of a cache line and of the widest registers of CPUs.
LINE = 64

Pair = tuple[torch.Tensor, torch.Tensor]


def batches(work: Work, q: torch.Tensor) -> Iterator[slice]:
    """Parts of the batch that one call takes; one element where the work's repetitions are the batch."""
    size = len(q) if work.repeat == 1 else 1
    size = max(1, min(size, BATCH_ROWS // (len(work.q) * len(work.heads))))
    for first in range(0, len(q), size):
        yield slice(first, first + size)


def lined_up(x: torch.Tensor) -> torch.Tensor:
    """x where its rows are whole cache lines, or where it is contiguous and begins with one; else a copy that does.

    Matrix products add in another order at other addresses. With this a shard gives the same bits whether it is a tensor
    of its own, as on a real rank, or a view of the whole sequence, as on a virtual one.
    """
    if x.shape[-1] * x.element_size() % LINE == 0 or (x.is_contiguous() and x.data_ptr() % LINE == 0):
        return x
    return empty(x.shape, x.dtype, x.device).copy_(x)


class KernelInputs:
    """What calls of the kernel read: views, but for keys that must be gathered from several runs, in a workspace."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.stores: dict[int, torch.Tensor] = {}

    def of(
        self, work: Work, batch: slice, by_query: Sequence[torch.Tensor], by_key: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The rows of a call in each tensor. Gathered keys hold until the next call."""
        found = [select(x[batch], work.heads, work.q, work) for x in by_query]
        for place, x in enumerate(by_key):
            runs = [select(x[batch], work.kv, run, work, work.k_shift) for run in work.k]
            found.append(runs[0] if len(runs) == 1 else self._gather(place, runs, work.keys))
        return found

    def close(self) -> None:
        """Give the workspaces back to the pool."""
        while self.stores:
            self.pool.give(self.stores.popitem()[1])

    def _gather(self, place: int, runs: list[torch.Tensor], keys: int) -> torch.Tensor:
        one = runs[0]
        shape = (*one.shape[:2], keys, one.shape[3])
        size = prod(shape) * one.element_size()
        if place not in self.stores or self.stores[place].numel() < size:
            if place in self.stores:
                self.pool.give(self.stores[place])
            self.stores[place] = self.pool.take(1 << (size - 1).bit_length())  # few sizes, so that they are met again
        return torch.cat(runs, 2, out=self.stores[place][:size].view(one.dtype).view(shape))


def select(x: torch.Tensor, heads: range, rows: range, work: Work, shift: int | None = None) -> torch.Tensor:
    """The view of x [B, H, n, ...] at these heads and rows; repetitions, `shift` rows apart, stand for the batch."""
    one = x[:, heads.start : heads.stop : heads.step, rows.start : rows.stop : rows.step]
    if work.repeat == 1:
        return one
    shift = work.q_shift if shift is None else shift
    return one.as_strided((work.repeat, *one.shape[1:]), (shift * x.stride(2), *one.stride()[1:]))


def add_(x: torch.Tensor, heads: range, runs: tuple[range, ...], work: Work, shift: int, part: torch.Tensor) -> None:
    """Add `part` [B or repeat, heads, rows, D or more] to x [B, H, n, D] where it came from."""
    first = 0
    for run in runs:
        piece = part[:, :, first : first + len(run), : x.shape[-1]]
        first += len(run)
        # Repetitions that overlap are added in turns, so that no call writes an element twice.
        turns = min(work.repeat, -(-(run[-1] + 1 - run[0]) // shift) if shift else work.repeat)
        for turn in range(turns):
            mine = piece[turn::turns] if turns > 1 else piece
            place = replace(work, repeat=len(mine) if work.repeat > 1 else 1)
            select(x, heads, shift_range(run, turn * shift), place, turns * shift).add_(mine)


class OutputAccumulator:
    """The output rows of one rank. Rows with one partial are written once; others are merged in fp32 or fp64.

    An output of that dtype is its own accumulator; a narrower one has an accumulator per section, while the
    section is open. lse is gathered in fp64: each rounding of it would be an error of the backward's probabilities.
    Where no output is given, a first partial that covers all rows is not even copied.
    """

    def __init__(self, q: torch.Tensor, value_dim: int, out: torch.Tensor | None) -> None:
        self.q, self.shape, self.out = q, (*q.shape[:3], value_dim), out
        self.lse = q.new_empty(0)
        self.pool = memory_pool(q.device)
        self.open: dict[Section, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def add(
        self, section: Section, piece: KernelCall, part: torch.Tensor, part_lse: torch.Tensor, batch: slice
    ) -> None:
        """Take in the partial of a call for some elements of the batch."""
        if self.out is None and part.shape == self.shape and part.dtype == wide(self.q.dtype) == self.q.dtype:
            self.out, self.lse = part, part_lse if section.single else part_lse.double()
            self.open[section] = part, None
            return
        work = replace(piece.work, q=shift_range(piece.work.q, -section.rows.start))
        total, lse = (select(x[batch], work.heads, work.q, work) for x in self._section(section))
        if piece.first:
            total.copy_(part)
            lse.copy_(part_lse)
        else:
            merge_(total, lse, part, part_lse)

    def close(self, section: Section) -> None:
        """No partial of this section is left to come."""
        total, store = self.open.pop(section)
        if store is not None:
            self._rows(self.out, section.rows).copy_(total)
            self.pool.give(store)

    def finish(self, empty: Sequence[range], bad: torch.Tensor | None = None) -> Pair:
        """(out, lse); rows that saw no key are 0 and -inf, others that are flagged in `bad` [B, H, n] are NaN."""
        self._allocate()
        assert self.out is not None
        for rows in empty:
            self._rows(self.out, rows).zero_()
            self._rows(self.lse, rows).fill_(-torch.inf)
        if bad is not None:
            self.out.masked_fill_((bad & (self.lse != -torch.inf)).unsqueeze(-1), torch.nan)
        if self.out.numel():
            # A bad key shows in all columns of out (see `kernels.base.marked`).
            self.lse.masked_fill_(self.out[..., 0].isnan(), torch.nan)
        return self.out, self.lse.to(wide(self.q.dtype))

    def _section(self, section: Section) -> Pair:
        self._allocate()
        if section not in self.open:
            target = self._rows(self.out, section.rows)
            dtype, store = wide(self.q.dtype), None
            if not section.single and target.dtype != dtype:
                batch, heads, rows, width = target.shape
                store = self.pool.take(target.numel() * dtype.itemsize)
                target = store.view(dtype).view(batch, rows, heads, width).transpose(1, 2)
            if section.filled:
                target.zero_()
                self._rows(self.lse, section.rows).fill_(-torch.inf)
            self.open[section] = target, store
        return self.open[section][0], self._rows(self.lse, section.rows)

    def _rows(self, x: torch.Tensor | None, rows: range) -> torch.Tensor:
        assert x is not None
        return x[:, :, rows.start : rows.stop]

    def _allocate(self) -> None:
        if self.lse.numel():
            return
        batch, heads, rows, width = self.shape
        # As the kernels lay out theirs, so that a merge walks memory in order.
        if self.out is None:
            self.out = empty((batch, rows, heads, width), self.q.dtype, self.q.device).transpose(1, 2)
        self.lse = empty((batch, rows, heads), torch.float64, self.q.device).transpose(1, 2)
