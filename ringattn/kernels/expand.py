"""A kernel for rows that are expanded to keys and values at the visit, a chunk at a time, see `ra.Rows`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import InvalidInput
from ..plan.row_sets import Ranges, RowSet
from ..plan.steps import Part
from ..plan.visit import Visit
from ..plan.work import Work
from .contract import CallData, KernelPass, Pair, QueryRows, Tensors, VisitKernel, WrappingKernel
from .memory import differentiable, wide, wide_zeros
from .pad import hide_rows

#: Bytes of the keys and values of a chunk, unless the caller gives its rows.
CHUNK_BYTES = 1 << 27


@dataclass(frozen=True)
class Chunk:
    """Part of a visit: the keys and values of some rows of a block, which are expanded together.

    `rows` are those of the block of keys, which stay if queries visit. In `visit`, works count from the first of them.
    `part` names these rows of a block of keys that visits, with the key/value heads of the rank. `prepared` is what the
    inner kernel found for the pass or, if queries visit, for the chunk.
    """

    rows: range
    part: Part
    visit: Visit
    prepared: Any = None


class Expanding(WrappingKernel):
    """Expands rows at each visit, and lets the kernel `inner` attend to the result.

    `expand(*tensors, *weights)` gives (k, v) for rows of a block; if `takes_heads`, it has an argument `heads`, the
    key/value heads of a rank in a Ulysses group. `group` query heads share a key/value head. A block's last tensor
    flags padded rows if there is a `column`, the number that hides them. The gradients of `weights` that require one
    stay on the rank; they are summed over visits in fp32 (fp64 for fp64).
    """

    name = "expanding"

    def __init__(
        self,
        inner: VisitKernel,
        expand: Callable[..., Any],
        group: int,
        chunk: int,
        column: float | None,
        takes_heads: bool,
    ) -> None:
        super().__init__(inner)
        self.expand, self.group, self.chunk, self.column = expand, group, chunk, column
        self.takes_heads = takes_heads
        self.weights: Tensors = ()

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, self.chunk, self.group

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        """The chunks of each visit, with the tables of the inner kernel, and what it found for the pass."""
        kv_heads = max(heads // self.group, 1)  # of the expanded rows, not of the block
        chunks = [[*cut(visit, self.chunk, tuple(range(kv_heads)))] for visit in visits]
        found = [one.visit for of_visit in chunks for one in of_visit]
        pairs = [sum(work.pairs for visit in of for work in visit.works) for of in (visits, found)]
        assert pairs[0] == pairs[1], "the chunks of the visits lose pairs"

        def tables(chunks: list[Chunk], rows: int) -> tuple[list[Chunk], Any]:
            of = [chunk.visit for chunk in chunks]
            made, prepared = self.inner.prepare(of, heads, kv_heads, rows, backward=backward)
            ready = zip(chunks, made, strict=True)
            return [replace(x, visit=replace(x.visit, table=y), prepared=prepared) for x, y in ready], prepared

        if any(visit.keys_stay for visit in visits):  # what stays are the keys of a chunk
            return [[x for one in of for x in tables([one], len(one.rows))[0]] for of in chunks], None
        flat, prepared = tables([one for of in chunks for one in of], rows)
        ready = iter(flat)
        return [[next(ready) for _ in of] for of in chunks], prepared

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return ExpandingPass(self, call, q, block)


def cut(visit: Visit, size: int, heads: tuple[int, ...]) -> Iterator[Chunk]:
    """The chunks of a visit that have pairs, with at most `size` rows of keys each; `heads` are the rank's."""
    runs = [run for work in visit.works for run in work.k]
    if not runs:
        return
    row_set, first = visit.part.row_set, visit.first
    held = None if visit.keys_stay or not isinstance(row_set, RowSet) else row_set.rows[0]
    for start in range(min(run[0] for run in runs), max(run[-1] for run in runs) + 1, size):
        works = [x for work in visit.works if (x := _narrow(work, start, start + size)) is not None]
        if not works:
            continue
        low, high = (
            min(run[0] for work in works for run in work.k),
            max(run[-1] for work in works for run in work.k) + 1,
        )
        works = [replace(work, k=tuple(range(r.start - low, r.stop - low, r.step) for r in work.k)) for work in works]
        kept = Part("kv", visit.part.owner, RowSet(heads, (_take(held, low, high) if held else (range(low, high),),)))
        # Sums of expanded rows are new in each chunk; those of visiting queries are new in the first one.
        part, begins = (visit.part, first) if visit.keys_stay else (kept, True)
        shape = visit.shape if visit.keys_stay else (len(heads), high - low)
        yield Chunk(range(low, high), kept, replace(visit, part=part, works=works, shape=shape, first=begins))
        first = False


def _narrow(work: Work, start: int, stop: int) -> Work | None:
    """The pairs of a work with key rows start .. stop - 1; None if there are none."""
    first, last = (sum(len(range(r.start, min(r.stop, end), r.step)) for r in work.k) for end in (start, stop))
    top = 0 if work.lo is None else max(0, first + work.lo)  # the rows that see one of these keys
    bottom = len(work.q) if work.hi is None else min(len(work.q), last + work.hi)
    return work.narrow((top, bottom), (first, last)) if first < last and top < bottom else None


def _take(ranges: Ranges, first: int, last: int) -> Ranges:
    """Members number first .. last - 1 of ranges."""
    parts, start = [], 0
    for run in ranges:
        parts.append(run[max(first - start, 0) : max(last - start, 0)])
        start += len(run)
    return tuple(part for part in parts if part)


class ExpandingPass(KernelPass):
    """One pass of an `Expanding`."""

    def __init__(self, kernel: Expanding, call: CallData, q: Tensor, block: Tensors) -> None:
        self.kernel, self.call, self.q, self.block = kernel, call, q, block
        first = call.heads.start // kernel.group
        self.heads = range(first, first + max(len(call.heads) // kernel.group, 1))
        self._weights = [None if not x.requires_grad else wide_zeros(x) for x in kernel.weights]
        if call.stays.kind == "q":
            with torch.no_grad():  # a kernel may look at the first key, see `Centre`; a rank may have none
                rows = tuple(x[:, :, :1] if x.shape[2] else x.new_zeros((*x.shape[:2], 1, x.shape[3])) for x in block)
                k, v = (x[:, :, : block[0].shape[2]] for x in self._expand(rows))
            self.inner = kernel.inner.begin(call, q, (k, v))

    def new_sums(self, out: Tensor | None) -> Any:
        return self.inner.new_sums(out)

    def finish(self, sums: Any) -> Pair:
        return self.inner.finish(sums)

    def new_grads(self) -> Any:
        return (
            self.inner.new_grads()
            if self.call.stays.kind == "q"
            else tuple(map(wide_zeros, differentiable(self.block)))
        )

    def finish_grads(self, grads: Any) -> Tensors:
        stay = self.inner.finish_grads(grads) if self.call.stays.kind == "q" else grads
        return *stay, *(x for x in self._weights if x is not None)

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> None:
        for chunk in visit.table:
            with torch.no_grad():
                expanded = self._expand(tuple(x[:, :, chunk.rows.start : chunk.rows.stop] for x in block))
            self._inner(chunk, expanded).visit_forward(chunk.visit, q, expanded, sums)
            del expanded  # free it before the next chunk is expanded

    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: Any, travel: Tensors) -> None:
        keys_stay = visit.keys_stay
        if visit.first and not (keys_stay and visit.table):
            for x in travel:
                x.zero_()
        for chunk in visit.table:
            # No hook of the caller's graph keeps what this graph saves.
            with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                leaves = [x[:, :, chunk.rows.start : chunk.rows.stop].detach() for x in block]
                wanted = [x.requires_grad_() for x in differentiable(leaves)]
                results = self._expand(tuple(leaves))
            expanded = results[0].detach(), results[1].detach()
            inner = self._inner(chunk, expanded)
            if keys_stay:
                grads = inner.new_grads()
                inner.visit_backward(chunk.visit, rows, expanded, grads, travel)
                of_keys = inner.finish_grads(grads)
            else:
                of_keys = tuple(torch.empty_like(x, dtype=wide(x.dtype)) for x in expanded)
                inner.visit_backward(chunk.visit, rows, expanded, stay, of_keys)
            self._pull_back(
                results,
                of_keys,
                wanted,
                [x[:, :, chunk.rows.start : chunk.rows.stop] for x in (stay if keys_stay else travel)],
            )
            del results, expanded, of_keys

    def _inner(self, chunk: Chunk, expanded: Pair) -> KernelPass:
        """The pass of the inner kernel; if queries visit, one whose keys that stay are those of the chunk."""
        if self.call.stays.kind == "q":
            return self.inner
        stays = chunk.part._replace(owner=self.call.stays.owner)
        return self.kernel.inner.begin(replace(self.call, stays=stays, prepared=chunk.prepared), self.q, expanded)

    def _expand(self, rows: Tensors) -> Pair:
        """k and v of these rows for the heads of this rank, with hidden keys where a row is padding."""
        named, heads = (
            {"heads": self.heads} if self.kernel.takes_heads else {},
            slice(self.heads.start, self.heads.stop),
        )
        k, v = expand_rows(partial(self.kernel.expand, **named), rows, self.kernel.weights, self.kernel.column)
        return (k, v) if len(self.heads) == k.shape[1] else (k[:, heads], v[:, heads])

    def _pull_back(self, results: Pair, grads: Tensors, rows: list[Tensor], totals: Sequence[Tensor]) -> None:
        """Add the gradients of expanded rows to those of the rows, and to those of the weights."""
        weights = [x for x in self.kernel.weights if x.requires_grad]
        pairs = [(x, y.to(x.dtype)) for x, y in zip(results, grads, strict=True) if x.requires_grad]
        if not pairs:  # quantised rows, and weights without a gradient
            return
        found = torch.autograd.grad([x for x, _ in pairs], [*rows, *weights], [y for _, y in pairs], allow_unused=True)
        sums = *totals, *(x for x in self._weights if x is not None)
        for total, grad in zip(sums, found, strict=True):
            if grad is not None:
                total += grad


def expand_rows(expand: Callable[..., Any], rows: Tensors, weights: Tensors, column: float | None) -> Pair:
    """k and v of these rows; with a `column`, the last tensor flags padding, and the number hides its keys."""
    rows, flags = (rows, ()) if column is None else (rows[:-1], rows[-1:])
    k, v = expand(*rows, *weights)
    if not k.shape[2] == v.shape[2] == rows[0].shape[2]:
        raise InvalidInput(
            f"expand= made {k.shape[2]} keys and {v.shape[2]} values of {rows[0].shape[2]} rows; it must "
            "make one of each row"
        )
    return (k, v) if column is None else hide_rows(k, v, flags[0], column)


def _same(x: Any) -> Any:
    return x
