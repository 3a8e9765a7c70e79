"""Attention of replicated queries to the rows of one rank, and the merge of all ranks' partials in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call.compile import CompiledCall
from ..kernels.contract import Pair
from ..kernels.memory import MergeSpace, align_rows, as_dtype, empty, wide
from ..kernels.softmax import merge_
from ..kernels.sums import KernelCall, OutputAccumulator, Section
from ..kernels.views import RowViews, batches, select_inputs
from ..pattern.base import Pattern
from ..plan.work import Work
from ..transport.base import Message, Post, Program, Tags, Wait
from .holdings import Holdings
from .store import LayerStore

#: Pairs of a pattern and the rows of the batch that have it (None: all).
RowGroups = Sequence[tuple[Pattern, Sequence[int] | None]]


def attend(
    q: Tensor, slots: range, store: LayerStore, holdings: Holdings, rank: int, groups: RowGroups, call: CompiledCall
) -> Pair:
    """Attention of the queries at `slots` to the keys that one rank holds: (out [B, H, T, Dv], lse [B, H, T]).

    The results are in fp32 (fp64 for fp64).
    """
    q, kernel, scale = align_rows(q), call.kernel.single(), call.factor
    count, heads, rows, _ = q.shape
    found: list[tuple[Work, slice | None, Pair]] = []
    for index, block in enumerate(store.blocks):
        for pattern, members in groups if block.count else ():
            works = holdings.calls(rank, index, pattern, slots, call)
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


def merge_ranks(rank: int, size: int, out: Tensor, lse: Tensor, merge: str, tags: Tags, label: str) -> Program[Pair]:
    """Merge the partial results of all ranks in rank order; every rank gets the merged (out, lse), with equal bits.

    - "gather": every rank sends its partial result to all others and merges all of them: size - 1 messages, one round.
    - "scatter": every rank merges its share of the (head, row) pairs and sends it to all others: twice as many messages
      with 2 / size of the bytes.
    """
    if size == 1:
        return out, lse
    mine = torch.cat((out, lse[..., None]), 3).transpose(0, 1).contiguous()
    flat = mine.view(-1, out.shape[3] + 1)
    number = len(flat)
    cuts = [slice(number * i // size, number * (i + 1) // size) for i in range(size)]
    share = cuts[rank] if merge == "scatter" else slice(0, number)
    inbox = empty((size, share.stop - share.start, flat.shape[1]), out.dtype, out.device)
    inbox[rank].copy_(flat[share])
    sends = [as_bytes(flat)] * size if merge == "gather" else [as_bytes(flat[cut]) for cut in cuts]
    yield from exchange(rank, sends, as_bytes(inbox).view(size, -1).unbind(), tags.of(0), label)
    space, partials = MergeSpace(), inbox[:, None, None]
    first, *others = zip(partials[..., :-1].unbind(), partials[..., -1].unbind(), strict=True)
    for part in others:
        merge_(*first, *part, space=space)
    total = inbox[0]
    if merge == "scatter":
        whole = empty(flat.shape, out.dtype, out.device)
        whole[share].copy_(total)
        parts = [as_bytes(whole[cut]) for cut in cuts]
        yield from exchange(rank, [parts[rank]] * size, parts, tags.of(1), label)
        total = whole
    merged = total.view(mine.shape).transpose(0, 1)
    return merged[..., :-1], merged[..., -1]


def exchange(rank: int, sends: Sequence[Tensor], receives: Sequence[Tensor], tag: int, label: str) -> Program[None]:
    """Send `sends[r]` to each other rank r and receive `receives[r]` from it; an empty tensor is not a message."""
    send, receive = (
        tuple([Message(peer, tag, data) for peer, data in enumerate(side) if peer != rank and data.numel()])
        for side in (sends, receives)
    )
    if send or receive:
        yield Wait((yield Post(send, receive, label)))


def gather_rows(rank: int, counts: Sequence[int], mine: Tensor, tag: int, label: str) -> Program[Tensor]:
    """The rows [B, H, n, D] of all ranks, in rank order, of which rank r has counts[r]."""
    mine = mine.contiguous()
    inbox = [mine if p == rank else mine.new_empty((*mine.shape[:2], n, mine.shape[3])) for p, n in enumerate(counts)]
    yield from exchange(rank, [as_bytes(mine)] * len(counts), [*map(as_bytes, inbox)], tag, label)
    return torch.cat(inbox, 2)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as the data of a message."""
    return x.view(torch.uint8).view(-1)
