"""The acceptance cases of the seeds on real ranks: every rank holds the whole tensors, and attends with its shard."""

from __future__ import annotations

from typing import Any

import seed_cases
import torch
import torch.distributed as dist
from seed_cases import CASES
from seed_definitions import fast_equals_reference
from seed_rings import RINGS, compare

import ringattn as ra
from ringattn import Layout

Tensor = torch.Tensor


def whole(part: Tensor, layout: Layout, dim: int) -> Tensor:
    """The tensor whose shards along `dim` are the ranks' parts."""
    shape = list(part.shape)
    shape[dim] = layout.tokens
    rows = torch.from_numpy(layout.positions(dist.get_rank()))
    total = part.new_zeros(shape).index_copy(dim, rows, part.detach())
    dist.all_reduce(total)  # all but one of the summands are zero, so nothing is rounded
    return total


class Scatter(torch.autograd.Function):
    """This rank's shard of a tensor that all ranks have; its gradient is put together from all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return layout.shard_tensor(x, dist.get_rank()).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return whole(grad, ctx.layout, 2), None


class Gather(torch.autograd.Function):
    """The whole of the ranks' shards; as every rank has the same loss, its own part of the gradient is all it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return whole(x, layout, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.shard_tensor(grad, dist.get_rank(), 2).clone(), None


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: ra.Pattern, *, layout: str, return_lse: bool = False, **options: Any
) -> Any:
    """`ring_attention` with whole tensors in and out, on every rank."""
    made = ra.make_layout(layout, tokens=q.shape[2], ranks=dist.get_world_size())
    mine = [Scatter.apply(x, made) for x in (q, k, v)]
    out, lse = ra.ring_attention(*mine, pattern, layout=layout, return_lse=True, **options)
    out = Gather.apply(out, made)
    return (out, Gather.apply(lse, made)) if return_lse else out


def acceptance(rank: int, layout: str) -> int:
    """What tests/seeds check of one device and of virtual ranks, each sample under one layout; how many samples.

    The layouts take turns, since messages take their time: zigzag where no number of ranks divides the tokens.
    """

    def here(*arguments: Any, **options: Any) -> Any:
        return attend(*arguments, layout=layout, **options)

    checked = seed_cases.RAGGED[1::2] if layout == "zigzag" else seed_cases.EVEN[::2]
    for sample in checked:
        for case in CASES:
            case(here, sample)
    if layout == "zigzag":
        seed_cases.shapes(here)
        seed_cases.equal_scores_of_eight_tokens(here)
    else:
        seed_cases.full_attention_for_every_ring_size(here)
        seed_cases.no_tokens(here)
    fast_equals_reference([here], causal=layout == "zigzag")
    rings = range(layout == "zigzag", len(RINGS), 2)
    for number in rings:
        compare(here, number)
    return len(checked) + len(rings)
