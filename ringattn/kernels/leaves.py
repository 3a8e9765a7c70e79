"""A kernel that computes leaves and joins them in trees, so that bits do not depend on ranks; see `plan.leaves`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..pattern.tile import Tile
from ..plan.leaves import LeafPair, LeafVisit, Nodes, Tree
from ..plan.row_sets import Ranges
from ..plan.visit import Visit
from ..plan.work import Work
from .calls import Kernel
from .contract import CallData, KernelPass, Pair, QueryRows, Tensors, WrappingKernel
from .dropout import key_steps, row_streams
from .memory import as_dtype, empty_rows, wide, wide_zeros
from .pad import HIDDEN, crop_to, delta, with_column, with_delta
from .softmax import begin_sums, join_, join_sinks

#: Leaves are computed with a multiple of this many rows, of which the last may be padding: bits of calls with few rows
#: depend on where they lie in memory.
ALIGNED = 16
#: The most query rows, or keys, times heads of the pairs of leaves that are one call.
CALL_ROWS = 1 << 14


class LeafCall(NamedTuple):
    """Pairs of leaves of equal shape and mask, which are one call of the op; dimension 0 of its tensors counts them.

    `queries` and `keys` say where they are in `LeafTable`. `hidden`, on the CPU, are the pairs that the mask hides, if
    `work` does not say it; `empty` are the rows without a key, if any.
    """

    pairs: tuple[LeafPair, ...]
    queries: slice | Tensor
    keys: slice | Tensor
    work: Work
    hidden: Tensor | None
    empty: Tensor | None


class LeafTable(NamedTuple):
    """The calls of a visit, and the rows of the leaves of queries and keys that they read, by the length of a leaf."""

    queries: dict[int, list[range]]
    keys: dict[int, list[range]]
    calls: tuple[LeafCall, ...]


class Leafwise(WrappingKernel):
    """Computes the pairs of leaves by the op of the kernel `inner`, always from aligned copies of whole leaves.

    Bits of the op depend on the numbers and shapes of a call, but not on its place in memory or among other pairs.
    """

    inner: Kernel

    def __init__(self, inner: Kernel, device: torch.device) -> None:
        super().__init__(inner)
        self.device, self.max_head_dim = device, inner.max_head_dim
        self.name, self.padded, self.dropout = inner.name, inner.padded, inner.dropout

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        """The calls of each visit, and the numbers of the leaves of keys that each leaf of queries meets."""
        leaves = [visit.leaves for visit in visits if visit.leaves is not None]
        by_query = {leaf: seen for visit in leaves for leaf, seen in visit.by_query.items()}
        return [_tabulate(visit.pairs, heads, kv_heads, self.device) for visit in leaves], by_query

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return LeafPass(self.inner.derive(dropout=self.dropout), call, q, block)


def _tabulate(pairs: Sequence[LeafPair], heads: int, kv_heads: int, device: torch.device) -> LeafTable:
    queries, keys = _by_length(pair.q for pair in pairs), _by_length(pair.k for pair in pairs)
    at = [{run: i for runs in side.values() for i, run in enumerate(runs)} for side in (queries, keys)]
    groups: dict[tuple[int, int, tuple[Tile, ...]], list[tuple[int, int, LeafPair]]] = {}
    for pair in pairs:
        place = (at[0][pair.q], at[1][pair.k], pair)
        groups.setdefault((len(pair.q), len(pair.k), pair.tiles), []).append(place)
    return LeafTable(queries, keys, tuple(_calls_of(groups, heads, kv_heads, device)))


def _pad(length: int) -> int:
    return -(-length // ALIGNED) * ALIGNED


def _by_length(runs: Iterable[range]) -> dict[int, list[range]]:
    found: dict[int, list[range]] = {}
    for run in sorted({*runs}, key=lambda run: run.start):
        found.setdefault(len(run), []).append(run)
    return found


def _calls_of(
    groups: dict[tuple[int, int, tuple[Tile, ...]], list[tuple[int, int, LeafPair]]],
    heads: int, kv_heads: int, device: torch.device,
) -> Iterator[LeafCall]:  # fmt: skip
    for (rows, columns, tiles), group in groups.items():
        n, m = map(_pad, (rows, columns))
        work = Work(range(heads), range(kv_heads), range(n), (range(m),))
        hidden = empty = None
        if tiles == (Tile(range(heads), range(rows), range(columns), 0),) and rows == columns:
            work = replace(work, lo=0)
        elif tiles != (Tile(range(heads), range(rows), range(columns)),) or columns < m:
            work, hidden = replace(work, lo=0), torch.from_numpy(_hide(tiles, heads, n, m))
            unseeing = hidden.all(-1)
            empty = unseeing.to(device) if bool(unseeing.any()) else None
        for part in _cut(group, max(CALL_ROWS // (max(n, m) * heads), 1)):
            queries, keys, found = zip(*part, strict=True)
            yield LeafCall(found, _place(queries, device), _place(keys, device), work, hidden, empty)


def _cut(group: Sequence[tuple[int, int, LeafPair]], most: int) -> Iterator[list[tuple[int, int, LeafPair]]]:
    """Pairs of one call each, at most `most`, a leaf of queries after the other, so that few nodes wait.

    Where it can be, a call has one leaf of queries and neighboring leaves of keys, which need no copies.
    """
    part: list[tuple[int, int, LeafPair]] = []
    for each in sorted(group, key=lambda each: each[:2]):
        follows = bool(part) and (each[0], each[1] - 1) == part[-1][:2]
        if len(part) == most or (2 * len(part) >= most and not follows):
            yield part
            part = []
        part.append(each)
    yield part


def _place(at: Sequence[int], device: torch.device) -> slice | Tensor:
    """Where the leaves of a call are in a stack: a slice if they are neighbors, or one leaf for all pairs."""
    count = 1 if len({*at}) == 1 else len(at)
    if (*at,) == (*range(at[0], at[0] + count),) * (len(at) // count):
        return slice(at[0], at[0] + count)
    return torch.tensor(at, device=device)


def _hide(tiles: Sequence[Tile], heads: int, rows: int, keys: int) -> np.ndarray:
    """The pairs of two leaves that no tile has, bool [1 or H, rows, keys], all of the padding among them."""
    hidden = np.ones((heads, rows, keys), dtype=bool)
    for tile in tiles:
        q, k = np.array(tile.q), np.array(tile.k)
        low, high = (limit if x is None else x for x, limit in ((tile.lo, -keys), (tile.hi, rows)))
        distance = q[:, None] - k
        hidden[np.ix_([*tile.heads], q, k)] &= (distance < low) | (distance > high)
    return hidden[:1] if (hidden == hidden[:1]).all() else hidden


def _stack(x: Tensor, by_length: dict[int, list[range]], fill: float = 0.0) -> dict[int, Tensor]:
    """Copies of leaves of x [B, H, n, ...], [leaves, B, H, length, ...] by padded length, each aligned."""
    batch, heads, _, *width = x.shape
    stacks = {}
    for length, runs in by_length.items():
        stacks[length] = found = x.new_empty((len(runs), batch, heads, _pad(length), *width))
        found[:, :, :, length:] = fill
        for target, run in zip(found, runs, strict=True):
            target[:, :, :length] = x[:, :, run.start : run.stop]
    return stacks


def _take(stacks: Iterable[dict[int, Tensor]], length: int, at: slice | Tensor, pairs: int) -> Iterator[Tensor]:
    """The leaves of a call, [pairs * B, H, length, ...], of each tensor; a slice of one is the same leaf for all."""
    for each in stacks:
        found = each[length][at]
        yield found.expand(pairs, *found.shape[1:]).flatten(0, 1)


def _own(trees: Iterable[Tree[Any]]) -> None:
    """Copy the nodes that wait for another visit out of the results of their calls, all of which each would keep."""
    for tree in trees:
        for name, node in tree.nodes.items():
            tree.nodes[name] = tuple([x.clone() if x.untyped_storage().nbytes() > x.nbytes else x for x in node])


class LeafSums:
    """The output of a rank's queries: trees of (out, lse) by leaf, and the rows of the leaves that are complete."""

    def __init__(self, call: CallData, q: Tensor, width: int, out: Tensor | None) -> None:
        self.out = empty_rows((*q.shape[:3], width), q.dtype, q.device) if out is None else out
        self.lse = empty_rows(q.shape[:3], torch.float64, q.device)
        begin_sums(self.out, self.lse)
        self.trees: dict[int, Tree[Pair]] = {
            leaf: Tree(seen, lambda one, other: join_(*one, *other)) for leaf, seen in call.prepared.items()
        }

    def put(self, pair: LeafPair, node: Pair) -> None:
        """Add the result of two leaves."""
        tree = self.trees[pair.query]
        tree.put(0, pair.key - pair.first, node)
        if tree.root is not None:
            for total, x in zip((self.out, self.lse), tree.root, strict=True):
                total[:, :, pair.q.start : pair.q.stop] = x[:, :, : len(pair.q)]
            del self.trees[pair.query]


def _add(one: Tensors, other: Tensors) -> Tensors:
    return tuple([x.add_(y) for x, y in zip(one, other, strict=True)])


class LeafGrads:
    """The gradients of some rows: trees by leaf, and the sums of the leaves that are complete, in fp32 or fp64."""

    def __init__(self, of: Tensors) -> None:
        self.totals = tuple(map(wide_zeros, of))
        self.trees: dict[int, Tree[Tensors]] = {}

    def put(self, leaf: int, rows: range, seen: Ranges, name: tuple[int, int], node: Tensors) -> None:
        """Add a node (level, index) of a leaf, which has these rows and meets the leaves `seen`."""
        if leaf not in self.trees:
            self.trees[leaf] = Tree(seen, _add)
        tree = self.trees[leaf]
        tree.put(*name, node)
        if tree.root is not None:
            for total, x in zip(self.totals, tree.root, strict=True):
                # Sums begin with a zero, so that its sign does not depend on what was added.
                total[:, :, rows.start : rows.stop] += crop_to(x[:, :, : len(rows)], total.shape[-1])
            del self.trees[leaf]

    def finish(self) -> Tensors:
        assert not self.trees, "a node is missing"
        return self.totals


class BlockGrads(LeafGrads):
    """The gradients of a rank's own block, to which other ranks send nodes."""

    def join(self, nodes: Nodes, tensors: Tensors) -> None:
        """Add nodes that have arrived; the tensors hold their rows, one node after another."""
        first = 0
        for leaf, level, index in nodes.names:
            rows, seen = nodes.by_leaf[leaf]
            part = tuple([x[:, :, first : first + len(rows)].clone() for x in tensors])
            self.put(leaf, rows, seen, (level, index), part)
            first += len(rows)


class LeafPass(KernelPass):
    """One pass of a kernel of leaves."""

    def __init__(self, kernel: Kernel, call: CallData, q: Tensor, block: Tensors) -> None:
        self.kernel, self.call, self.q, self.block = kernel, call, q, block
        self._own: Tensors = ()

    def new_sums(self, out: Tensor | None) -> LeafSums:
        return LeafSums(self.call, self.q, self.block[1].shape[-1], out)

    def finish(self, sums: LeafSums) -> Pair:
        assert not sums.trees, "a leaf of keys is missing"
        if self.call.sinks is None:
            return sums.out, as_dtype(sums.lse, wide(self.q.dtype))
        out, lse = join_sinks(sums.out, sums.lse, self.call.sinks)
        return sums.out.copy_(out), as_dtype(lse, wide(self.q.dtype))

    def new_grads(self) -> LeafGrads:
        return LeafGrads((self.q,))

    def finish_grads(self, grads: LeafGrads) -> Tensors:
        return grads.finish()

    def new_travel(self, block: Tensors) -> Tensors:
        return (BlockGrads(block),) * len(block)  # type: ignore[return-value]  # takes the place of each tensor

    def finish_travel(self, travel: Tensors) -> Tensors:
        return travel[0].finish()  # type: ignore[attr-defined]

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: LeafSums) -> None:
        by_query, by_key = self._numbers(visit)
        rows = [_stack(x, visit.table.queries) for x in (q, *by_query)]
        columns = [_stack(x, visit.table.keys) for x in (*block, *by_key)]
        for call in visit.table.calls:
            query, *streams = _take(rows, len(call.pairs[0].q), call.queries, len(call.pairs))
            k, v, *steps = _take(columns, len(call.pairs[0].k), call.keys, len(call.pairs))
            out, lse = self._kernel_of(call, *streams, *steps).forward(query, k, v, call.work, self.call.scale)
            out, lse = as_dtype(out, wide(q.dtype)), lse.double()
            if call.empty is not None:
                out = out.masked_fill(call.empty.unsqueeze(-1), 0.0)
                lse = lse.masked_fill(call.empty, -torch.inf)
            for pair, *node in zip(call.pairs, out.split(len(q)), lse.split(len(q)), strict=True):
                sums.put(pair, tuple(node))
        _own(sums.trees.values())

    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: LeafGrads, travel: Tensors) -> None:
        leaves, (by_query, by_key) = visit.leaves, self._numbers(visit)
        assert leaves is not None
        (k, v), batch = block, len(rows.q)
        if not self._own:
            grad, out = rows.grad, rows.out
            assert out is not None
            if rows.grad_lse is not None and not by_query:
                out, grad = with_column(out, 0.0), with_column(grad, rows.grad_lse.to(grad.dtype))
            elif rows.grad_lse is not None:  # as in `calls.CallsPass`
                grad, out = with_delta(grad, delta(grad, out, rows.grad_lse), wider=True)
            self._own = grad, rows.q, out
        v = v if rows.grad_lse is None else with_column(v, float(not by_query))
        columns = {leaf: Tree(seen, _add) for leaf, seen in leaves.by_key.items()}
        of_queries = [_stack(x, visit.table.queries) for x in (*self._own, *by_query)]
        of_queries.append(_stack(rows.lse, visit.table.queries, HIDDEN))
        of_keys = [_stack(x, visit.table.keys) for x in (k, v, *by_key)]
        for call in visit.table.calls:
            grad, query, out, *streams, lse = _take(of_queries, len(call.pairs[0].q), call.queries, len(call.pairs))
            keys, values, *steps = _take(of_keys, len(call.pairs[0].k), call.keys, len(call.pairs))
            lse = lse if call.empty is None else lse.masked_fill(call.empty, HIDDEN)
            kernel = self._kernel_of(call, *streams, *steps)
            found = kernel.backward(grad, query, keys, values, out, lse, call.work, self.call.scale)
            parts = (as_dtype(x, wide(x.dtype)).split(batch) for x in found)
            for pair, dq, dk, dv in zip(call.pairs, *parts, strict=True):
                stay.put(pair.query, pair.q, self.call.prepared[pair.query], (0, pair.key - pair.first), (dq,))
                columns[pair.key].put(0, pair.query - pair.first, (dk, dv))
        _own(stay.trees.values())
        self._send(leaves, columns, travel)

    def _numbers(self, visit: Visit) -> tuple[Tensors, Tensors]:
        """What dropout reads by query and by key, which positions alone decide; nothing without dropout."""
        if (dropout := self.kernel.dropout) is None:
            return (), ()
        assert dropout.seed is not None
        (heads, rows), (kv_heads, columns) = map(self.call.places, (self.call.stays, visit.part))
        streams = row_streams(dropout.seed, len(self.q), heads + self.call.heads.start, rows)
        return (streams,), (key_steps(columns).expand(len(self.q), len(kv_heads), -1).unsqueeze(-1),)

    def _kernel_of(self, call: LeafCall, *numbers: Tensor) -> Kernel:
        return self.kernel.derive(hidden=call.hidden, tiles=call.pairs[0].tiles, numbers=numbers or None)

    def _send(self, leaves: LeafVisit, columns: dict[int, Tree[Tensors]], travel: Tensors) -> None:
        """Give the nodes of a visit to this rank's own block, or write them where they travel."""
        rows, widths = {pair.key: pair.k for pair in leaves.pairs}, [x.shape[-1] for x in self.block]
        found = {
            (leaf, *name): tuple([crop_to(x[:, :, : len(rows[leaf])], w) for x, w in zip(node, widths, strict=True)])
            for leaf, tree in columns.items()
            for name, node in tree.nodes.items()
        }
        if leaves.nodes is None:
            own: Any = travel[0]
            for (leaf, *name), node in found.items():
                own.put(leaf, rows[leaf], leaves.by_key[leaf], tuple(name), node)
            _own(own.trees.values())
            return
        assert {*found} == {*leaves.nodes.names}, "the plan names all nodes"
        for total, *parts in zip(travel, *map(found.__getitem__, leaves.nodes.names), strict=True):
            torch.cat(parts, 2, out=total)
