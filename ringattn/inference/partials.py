"""Attention of replicated queries to the rows of one rank, and the merge of all ranks' partials in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..call.compile import CompiledCall
from ..kernels.base import as_dtype, positive, wide
from ..pattern.base import Pattern
from ..plan.work import Work
from ..runtime.accumulators import OutputAccumulator, Pair, RowViews, align_rows, select_inputs
from ..runtime.memory import MergeSpace, empty
from ..runtime.merge_plan import KernelCall, Section
from ..runtime.rank_program import batches
from ..runtime.softmax import merge_
from ..transport.base import Message, Post, Program, Tags, Wait
from .holdings import Holdings
from .store import LayerStore

#: (pattern, the rows of the batch that it is for; None: all).
RowGroups = Sequence[tuple[Pattern, Sequence[int] | None]]


def attend(
    q: Tensor, places: range, store: LayerStore, holdings: Holdings, rank: int, groups: RowGroups, call: CompiledCall
) -> Pair:
    """(out [B, H, T, Dv], lse [B, H, T]) in fp32 (fp64 for fp64) of queries at `places` over the rows of one rank."""
    q, kernel, (_, scale) = align_rows(q), call.kernel, positive(call.scale)
    (count, heads, rows, _), group = q.shape, q.shape[1] // call.sizes["kv_heads"]
    found: list[tuple[Work, slice | None, Pair]] = []
    for index, block in enumerate(store.blocks):
        for pattern, members in groups if block.count else ():
            works = kernel.calls_of(holdings.works(rank, index, pattern, places, heads, group))
            for part, tensors in block.batches(members, count) if works else ():
                query, block_rows = RowViews(q if part is None else q[part]), RowViews(*tensors)
                for work in works:
                    for batch in batches(work, count) if part is None else (None,):
                        (x,), (k, v) = select_inputs(work, batch, query, block_rows)
                        pair = kernel.forward(x, as_dtype(k, q.dtype), as_dtype(v, q.dtype), work, scale)
                        found.append((work, batch or part, pair))
    kind, width = wide(q.dtype), call.sizes["value_dim"]
    if len(found) == 1 and found[0][2][1].shape == (count, heads, rows) and not found[0][0].gathered:
        out, lse = found[0][2]
        return as_dtype(out, kind), as_dtype(lse, kind)
    total = OutputAccumulator(q, width, empty((count, rows, heads, width), kind, q.device).transpose(1, 2))
    section = Section(range(rows), single=False, filled=True)
    for work, batch, pair in found:
        total.add(section, KernelCall(work, work.q, first=False), *pair, batch)
    return total.finish(() if found else (range(rows),), None)


def merge_ranks(rank: int, size: int, out: Tensor, lse: Tensor, way: str, tags: Tags, label: str) -> Program[Pair]:
    """The partials of all ranks, merged in rank order: equal bits on all ranks.

    "gather": every rank sends its partial to all others and merges them: size - 1 messages, one round. "scatter": each
    rank merges its share of the (head, row) pairs and sends it to all others: twice the messages, 2 / size the bytes.
    """
    if size == 1:
        return out, lse
    mine = torch.cat((out, lse[..., None]), 3).transpose(0, 1).contiguous()
    flat = mine.view(-1, out.shape[3] + 1)
    number = len(flat)
    cuts = [slice(number * i // size, number * (i + 1) // size) for i in range(size)]
    shares = [slice(0, number)] * size if way == "gather" else cuts
    share = shares[rank]
    inbox = empty((size, share.stop - share.start, flat.shape[1]), out.dtype, out.device)
    inbox[rank].copy_(flat[share])
    yield from exchange(rank, size, lambda peer: flat[shares[peer]], lambda peer: inbox[peer], tags.of(0), label)
    space = MergeSpace()
    total = inbox[0]
    for part in inbox[1:]:
        a, b = total[None, None], part[None, None]
        merge_(a[..., :-1], a[..., -1], b[..., :-1], b[..., -1], space=space)
    if way == "scatter":
        whole = empty(flat.shape, out.dtype, out.device)
        whole[share].copy_(total)
        yield from exchange(rank, size, lambda peer: whole[share], lambda peer: whole[cuts[peer]], tags.of(1), label)
        total = whole
    merged = total.view(mine.shape).transpose(0, 1)
    return merged[..., :-1], merged[..., -1]


def exchange(
    rank: int, size: int, send: Callable[[int], Tensor], receive: Callable[[int], Tensor], tag: int, label: str
) -> Program[None]:
    """Send a contiguous tensor to every other rank, and receive one from each; empty ones are no messages."""
    peers = [peer for peer in range(size) if peer != rank]
    sends = tuple(Message(peer, tag, _bytes(send(peer))) for peer in peers if send(peer).numel())
    receives = tuple(Message(peer, tag, _bytes(receive(peer))) for peer in peers if receive(peer).numel())
    if sends or receives:
        yield Wait((yield Post(sends, receives, label)))


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8).view(-1)
