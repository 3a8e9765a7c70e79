"""A scalar dropout by SplitMix64, written from its paper, dense attention in fp64 with it, and what real ranks run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ringattn as ra

TOKENS, HEADS, KV_HEADS, BATCH, DIM = 31, 4, 2, 2, 8
DROPOUT = ra.Dropout(0.3, seed=(1 << 62) + 12_345)
Tensors = tuple[torch.Tensor, ...]


def splitmix(seed: int, index: int) -> int:
    """Number `index` of the generator SplitMix64 with this seed."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def dense_factors(dropout: ra.Dropout, tokens: int = TOKENS) -> torch.Tensor:
    """By what every weight is multiplied, fp64 [B, H, N, N], number by number."""
    assert dropout.seed is not None
    factors = torch.zeros(BATCH, HEADS, tokens, tokens, dtype=torch.float64)
    for element in range(BATCH):
        for head in range(HEADS):
            for query in range(tokens):
                stream = splitmix(splitmix(splitmix(dropout.seed, element), head), query)
                for key in range(tokens):
                    if splitmix(stream, key) % 2**64 >> 33 >= dropout.p * 2**31:
                        factors[element, head, query, key] = 1 / (1 - dropout.p)
    return factors


def make_leaves(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[list[torch.Tensor], Tensors]:
    """([q, k, v, sinks], (dO, dlse))."""
    source = torch.Generator().manual_seed(11)
    shapes = [(BATCH, HEADS, tokens, DIM), *[(BATCH, KV_HEADS, tokens, DIM)] * 2, (HEADS,)]
    shapes += [(BATCH, HEADS, tokens, DIM), (BATCH, HEADS, tokens)]
    *leaves, grad, grad_lse = (torch.randn(s, generator=source, dtype=torch.float64).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in leaves], (grad, grad_lse)


def differentiate(out: torch.Tensor, lse: torch.Tensor, leaves: list[torch.Tensor], grads: Tensors) -> Tensors:
    """(out, lse, gradients), of the rows that see a key."""
    seen = lse.detach().isfinite()
    found = torch.autograd.grad((out, lse[seen]), leaves, (grads[0].to(out.dtype), grads[1].to(lse.dtype)[seen]))
    return out.detach(), lse.detach(), *found


def dense(
    leaves: list[torch.Tensor],
    grads: Tensors,
    visible: torch.Tensor,
    factors: torch.Tensor,
    *,
    softcap: float | None = None,
    sinks: bool = False,
    output_scale: float = 1.0,
) -> Tensors:
    """`differentiate` of dense softmaxes in fp64, whose pairs count `visible` times [H or B, H, N, N]."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    q, k, v, sink = exact
    logits = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT * DIM**-0.5
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = (logits + visible.double().log().clamp(min=-1e9)).masked_fill(visible == 0, -torch.inf)
    if sinks:
        logits = torch.cat([logits, sink[:, None, None].expand(*logits.shape[:3], 1)], -1)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0)[..., : q.shape[2]] * factors
    out = weights @ v.repeat_interleave(HEADS // KV_HEADS, 1) * output_scale
    return differentiate(out, lse, exact if sinks else exact[:3], grads)


def told(call: Callable[[], Any]) -> str:
    """What a call raised, or "fine"."""
    try:
        call()
    except ra.RingAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def on_ranks(rank: int) -> dict[str, Any]:
    """How far real ranks are from virtual ones with the same seed, and what wrong calls are told."""
    size, found = dist.get_world_size(), {}
    whole, (grad, grad_lse) = make_leaves()
    layout = ra.make_layout("zigzag", tokens=TOKENS, ranks=size)

    def shard(x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        return layout.shard_tensor(x.detach(), rank, dim).contiguous()

    local = [shard(x).requires_grad_() for x in whole[:3]]

    def ring(dropout: Any, **options: Any) -> Tensors:
        out, lse = ra.ring_attention(*local, ra.Causal(), layout="zigzag", dropout=dropout, return_lse=True, **options)
        return differentiate(out, lse, local, (shard(grad), shard(grad_lse, -1)))

    def virtual(dropout: Any) -> Tensors:
        out, lse = ra.virtual_attention(
            *whole[:3], ra.Causal(), ranks=size, layout="zigzag", dropout=dropout, return_lse=True
        )
        out, lse, *gradients = differentiate(out, lse, whole[:3], (grad, grad_lse))
        return shard(out), shard(lse, -1), *map(shard, gradients)

    def equal(a: Tensors, b: Tensors) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    found["given"] = equal(ring(DROPOUT), virtual(DROPOUT))
    torch.manual_seed(0)
    expected = virtual(0.3), virtual(0.3)
    torch.manual_seed(rank)  # the seeds are those of rank 0
    drawn = ring(0.3), ring(0.3)
    found["drawn"] = all(map(equal, drawn, expected)) and not equal(*drawn)
    module = ra.nn.RingAttention(ra.Causal(), group=dist.group.WORLD, layout="zigzag", dropout=0.3)
    torch.manual_seed(rank)
    out = checkpoint(module, *local, use_reentrant=False)
    found["recomputed"] = equal(torch.autograd.grad(out, local, shard(grad)), _plain(module, rank, local, shard(grad)))
    found["seeds"] = told(lambda: ring(ra.Dropout(0.3, seed=rank)))
    found["p"] = told(lambda: ring(ra.Dropout(0.3 + rank / 10, seed=1)))
    found["one"] = told(lambda: ring(DROPOUT if rank == 0 else 0.0))
    found["kernel"] = told(lambda: ring(DROPOUT, kernel="aten_cpu" if rank == 0 else "auto"))
    found["after"] = equal(ring(DROPOUT), virtual(DROPOUT))
    return found


def _plain(module: ra.nn.RingAttention, rank: int, local: list[torch.Tensor], grad: torch.Tensor) -> Tensors:
    """The gradients without checkpointing, from the same state of torch's generator."""
    torch.manual_seed(rank)
    return torch.autograd.grad(module(*local), local, grad)
