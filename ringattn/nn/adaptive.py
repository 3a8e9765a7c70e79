"""Block-sparse attention whose blocks are chosen by a small learned scorer, from pooled queries and keys."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInput
from ..functional import gathered
from ..kernels.base import wide
from ..pattern import BlockSparse, Causal, Full, local_window, top_k
from .core import RingAttention


class AdaptiveAttention(RingAttention):
    """Every query block attends the `k` key blocks (or the fraction `density`) that score best, per head.

    A block is summarised by the mean of its keys and of its queries; score[i, j] = <A query_i, B key_j> / sqrt(rank)
    with learned A [H, D, rank] and B [K, D, rank], all blocks in one matrix product. The score is also added to the
    logits of the selected blocks, as `rank` more columns of q and k: through that soft bias, inside the one softmax,
    the gradient reaches A and B. Summaries are detached: q and k learn from attention, not from their pooling.
    In training, Gumbel noise times `noise` on the scores lets other blocks be tried; every call draws from (seed, call).

    causal=True is causal-safe: a query block is summarised by the queries up to its first position, its own block is
    always attended, without bias and masked inside; so nothing depends on a later token. A selection is one for the
    batch (scores are averaged over it). On real ranks only block sums are gathered, and all ranks select alike.

    `blocks` of the last call is the table selected, bool [H, blocks, blocks]. The rest is as in `RingAttention`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        block: int = 128,
        k: int | None = None,
        density: float | None = None,
        kv_heads: int | None = None,
        rank: int = 8,
        noise: float = 1.0,
        seed: int = 0,
        causal: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Full(), **options)
        kv_heads = num_heads if kv_heads is None else kv_heads
        for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("block", block), ("rank", rank)):
            if not isinstance(value, int) or value < 1:
                raise InvalidInput(f"{name}={value!r} must be an integer >= 1")
        if kv_heads < 1 or num_heads % kv_heads:
            raise InvalidInput(f"num_heads must be a multiple of kv_heads >= 1, got {num_heads} and {kv_heads}")
        top_k(block, k, np.zeros((1, 1)), density=density)  # one of them, and in its range
        self.block, self.k, self.density, self.causal = block, k, density, causal
        self.rank, self.noise, self.seed = rank, noise, seed
        self.query = nn.Parameter(torch.empty(num_heads, head_dim, rank, device=device, dtype=dtype))
        self.key = nn.Parameter(torch.empty(kv_heads, head_dim, rank, device=device, dtype=dtype))
        self.blocks: np.ndarray | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with the deviation 1 / sqrt(head_dim), so that scores are of the size of attention's logits."""
        for weight in (self.query, self.key):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None, call: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(out, lse) of tensors [B, H, N, D], whatever `order` is. A recomputation passes the `call` of its forward."""
        causal = is_causal or self.causal
        place = self.positions(q, k, v)  # on real ranks also the handshake: from here on shapes are right on all
        self._check(q, k)
        # Mean query of a block; causally, of the `block` positions that end with its first.
        own, ahead = place // self.block, -(-place // self.block)
        queries, keys = self._summaries(q, k, ahead if causal else own, own, key_padding_mask)
        a = torch.einsum("bhnd,hdr->bhnr", queries.to(self.query.dtype), self.query)
        b = torch.einsum("bhnd,hdr->bhnr", keys.to(self.key.dtype), self.key)
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("bhir,bhjr->hij", a, b.repeat_interleave(group, 1)).detach() / len(q) / self.rank**0.5
        table = self._select(scores, causal, self.next_call() if call is None else call)
        scale = self.options["scale"]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        # scale * <column of q, column of k> = score
        factor = (self.rank**0.5 * abs(scale)) ** -0.5 if scale else 0.0
        wide_q = torch.cat((q, (a[:, :, own] * factor * (1 if scale >= 0 else -1)).to(q.dtype)), -1)
        wide_k = torch.cat((k, (b[:, :, own] * factor).to(k.dtype)), -1)
        run: dict[str, Any] = {"key_padding_mask": key_padding_mask, "scale": scale}
        if not causal:
            return self._run(wide_q, wide_k, v, _passing(self.block, table), **run)
        own_block = self._run(q, k, v, local_window(self.block, blocks=0) & Causal(), **run)
        others = table & ~np.eye(table.shape[1], dtype=bool)
        if not others.any():
            return own_block
        return _merged(*own_block, *self._run(wide_q, wide_k, v, _passing(self.block, others), **run))

    def achieved_density(self, tokens: int, heads: int = 1) -> float:
        """Counted: the fraction of key blocks that the last call selected, of any sequence; 0 before the first call."""
        return 0.0 if self.blocks is None else float(self.blocks.mean())

    def _check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        wanted = (*self.query.shape[:2], self.key.shape[0])
        found = (q.shape[1], q.shape[3], k.shape[1])
        if found != wanted:
            raise InvalidInput(
                f"q has {found[0]} heads of dim {found[1]} and k {found[2]} heads, but the scorer was made for "
                f"num_heads={wanted[0]}, head_dim={wanted[1]}, kv_heads={wanted[2]}"
            )

    def _summaries(
        self, q: torch.Tensor, k: torch.Tensor, q_block: torch.Tensor, k_block: torch.Tensor, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of the queries [B, H, blocks, D] and keys [B, K, blocks, D] of all blocks, on all ranks alike."""
        dtype = wide(q.dtype)
        shown = torch.ones(len(q), q.shape[2], device=q.device, dtype=dtype) if mask is None else (~mask).to(dtype)
        # Padding may hold anything: it is taken out before it is multiplied.
        known = k.detach() if mask is None else k.detach().masked_fill(mask[:, None, :, None], 0)
        everyone = torch.ones_like(shown)
        total = int(k_block.max()) + 1 if len(k_block) else 0
        sums = [
            _sums(q.detach().to(dtype), everyone, q_block, total + 1),
            _sums(known.to(dtype), shown, k_block, total + 1),
        ]
        if self.sharded:
            sums = self._all_sums(sums, total)
            total = sums[1].shape[2] - 1
        queries, keys = (x[:, :, :total, :-1] / x[:, :, :total, -1:].clamp(min=1) for x in sums)
        return queries, keys

    def _all_sums(self, sums: list[torch.Tensor], total: int) -> list[torch.Tensor]:
        """The sums of all ranks, added in rank order so that all ranks get the same bits."""
        touched = [x[..., -1].any(0).any(0).nonzero().flatten().cpu() for x in sums]
        record = struct.pack("<3q", total, *map(len, touched))
        for rows, x in zip(touched, sums, strict=True):
            record += rows.numpy().tobytes() + x[:, :, rows.to(x.device)].cpu().contiguous().numpy().tobytes()
        records = gathered(record, **self._where)
        heads = [struct.unpack_from("<3q", raw) for raw in records]
        most = max(head[0] for head in heads)
        whole = [x.new_zeros((*x.shape[:2], most + 1, x.shape[3]), device="cpu") for x in sums]
        for raw, head in zip(records, heads, strict=True):
            at = struct.calcsize("<3q")
            for x, count in zip(whole, head[1:], strict=True):
                rows = torch.from_numpy(np.frombuffer(raw, np.int64, count, at).copy())
                at += rows.nbytes
                shape = (*x.shape[:2], count, x.shape[3])
                part = np.frombuffer(raw, x.numpy().dtype, prod(shape), at).copy()
                at += part.nbytes
                x.index_add_(2, rows, torch.from_numpy(part).view(shape))
        return [x.to(sums[0].device) for x in whole]

    def _select(self, scores: torch.Tensor, causal: bool, call: int) -> np.ndarray:
        scores = scores.float().cpu()
        if self.training and self.noise:
            source = torch.Generator().manual_seed((self.seed * 1_000_003 + call) % (1 << 62))
            uniform = torch.rand(scores.shape, generator=source).clamp(1e-20, 1 - 1e-7)
            scores = scores - self.noise * torch.log(-torch.log(uniform))
        if not scores.shape[-1]:
            return np.zeros((1, 0, 0), dtype=bool)
        kept = top_k(self.block, self.k, scores.numpy(), causal=causal, density=self.density)
        self.blocks = kept.table
        return kept.table

    def extra_repr(self) -> str:
        size = f"k={self.k}" if self.density is None else f"density={self.density}"
        return f"block={self.block}, {size}, rank={self.rank}, causal={self.causal}"


def _passing(block: int, table: np.ndarray) -> BlockSparse:
    """A pattern that the next call will not see again: no cache shall keep what is planned for it."""
    pattern = BlockSparse(block, table)
    object.__setattr__(pattern, "transient", True)
    return pattern


def _sums(x: torch.Tensor, weight: torch.Tensor, block: torch.Tensor, total: int) -> torch.Tensor:
    """Sums of x [B, H, n, D] over the rows of each block, and their number as one more column: [B, H, total, D + 1]."""
    column = weight[:, None, :, None].expand(*x.shape[:3], 1)
    found = x.new_zeros((*x.shape[:2], total, x.shape[3] + 1))
    return found.index_add_(2, block, torch.cat((x * column, column), -1))


def _merged(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of two partials as one softmax, differentiable. Rows of the first see a key."""
    gate = torch.sigmoid(other_lse - lse).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, other, gate), torch.logaddexp(lse, other_lse)
