"""Block-sparse attention in which a small learned scorer of pooled queries and keys selects the blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.arguments import cast_inputs
from ..call.autograd import compilable
from ..call.functional import get_transport
from ..errors import InvalidInput, Mismatch, Unsupported
from ..kernels.base import wide
from ..kernels.softmax import merge
from ..pattern import BlockSparse, Causal, Full, local_window, top_k
from ..transport.records import Exchange
from .core import CoreKeywords, RingAttention, check_heads

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..layout.regular import Layout


class SelectedBlocks(BlockSparse):
    """The block-sparse pattern of a single call. Its plan is not cached, since no later call has the same pattern."""

    transient = True


class AdaptiveAttention(RingAttention):
    """Attention in which each query block attends only the `k` highest-scoring key blocks (or the fraction `density`).

    Scores are computed for each head: score[i, j] = <A query_i, B key_j> / sqrt(rank), where query_i and key_j are the
    mean query and the mean key of a block, and A [H, D, rank] and B [K, D, rank] are learned. For selected blocks the
    score is also added to the attention logits, by appending `rank` columns to q and k; the gradient reaches A and B
    through this bias. The means are detached, so scoring sends no gradient to q and k. All elements of a batch share
    one selection, by the mean of their scores.

    num_heads, head_dim, kv_heads: heads and head dim of q, and heads of k and v (default: num_heads).
    block: tokens per block.
    k, density: key blocks per query block, as a number or as a fraction of all key blocks; give exactly one.
    rank: columns of A and B per head.
    noise: scale of the Gumbel noise that training adds to the scores, to try other blocks. Its seed comes from
        torch's generator on rank 0.
    causal: if True, nothing depends on later tokens. A query block is scored by the mean of the `block` queries that
        end with its first query. Every query block also sees itself, without bias and under a causal mask.
    options: those of `RingAttention`. Real ranks exchange only block sums, and all ranks make the same selection.

    After a call, the attribute `blocks` is its selection, bool [H, blocks, blocks].
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
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[CoreKeywords],
    ) -> None:
        super().__init__(Full(), **options)
        kv_heads = num_heads if kv_heads is None else kv_heads
        check_heads(num_heads, kv_heads, head_dim=head_dim, block=block, rank=rank)
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < float("inf"):
            raise InvalidInput(f"noise={noise!r} must be a number >= 0; try noise=0 for no noise")
        top_k(block, k, np.zeros((1, 1)), density=density)  # checks k and density
        self.block, self.k, self.density, self.causal = block, k, density, causal
        self.rank, self.noise = rank, noise
        self.query = nn.Parameter(torch.empty(num_heads, head_dim, rank, device=device, dtype=dtype))
        self.key = nn.Parameter(torch.empty(kv_heads, head_dim, rank, device=device, dtype=dtype))
        self.blocks: np.ndarray | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw A and B from a normal with std 1 / sqrt(head_dim), so that scores are as large as attention's logits."""
        for weight in (self.query, self.key):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        q_layout: str | Layout | None = None,
        key_padding_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """(out [B, H, N, Dv], lse [B, H, N]) for q, k, v [B, H, N, D]; ignores `order` and `return_lse`."""
        if q_layout is not None:
            raise Unsupported(f"q_layout={q_layout!r}: {type(self).__name__} selects blocks of one sequence only")
        # Drawn here, where torch.compile sees it and repeats it if it recomputes this call.
        seed = torch.randint(1 << 62, (), device="cpu") if self.training and self.noise else None
        return self.attend_by(self.query, self.key, q, k, v, is_causal, key_padding_mask, sinks, seed)

    @compilable
    def attend_by(
        self,
        query: Tensor,
        key: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        key_padding_mask: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What `attend` returns, with the scorer's matrices for queries and keys and the noise seed as arguments."""
        q, k, v = cast_inputs(q, k, v)
        causal = is_causal or self.causal
        positions = self._check_and_place(q, k, v, key_padding_mask)  # on real ranks this is also the handshake
        key_block = positions // self.block
        # Causal: the `block` positions that end with a block's first position represent the block.
        query_block = -(-positions // self.block) if causal else key_block
        number = 0 if seed is None else int(seed)
        queries, keys, number = self._block_means(q, k, query_block, key_block, key_padding_mask, number)
        with self.report_errors():
            a = torch.einsum("bhnd,hdr->bhnr", queries.to(query.dtype), query)
            b = torch.einsum("bhnd,hdr->bhnr", keys.to(key.dtype), key)
            b_of_query_heads = b.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = torch.einsum("bhir,bhjr->hij", a, b_of_query_heads).detach() / max(len(q), 1) / self.rank**0.5
            table = self._select(scores, causal, number)
            scale = self.options.scale
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            # scale * <extra columns of q, extra columns of k> = score
            factor = (self.rank**0.5 * abs(scale)) ** -0.5 if scale else 0.0
            wide_q = torch.cat((q, (a[:, :, key_block] * factor * (1 if scale >= 0 else -1)).to(q.dtype)), -1)
            wide_k = torch.cat((k, (b[:, :, key_block] * factor).to(k.dtype)), -1)
            options = replace(self._call_options(), scale=scale)
            biased_table = table & ~np.eye(table.shape[1], dtype=bool) if causal else table
            biased = SelectedBlocks(self.block, biased_table)
            own_block = local_window(self.block, blocks=0) & Causal()
        if not causal:
            out, lse = self._run(wide_q, wide_k, v, biased, options, key_padding_mask=key_padding_mask, sinks=sinks)
            return out, lse
        out, lse = self._run(q, k, v, own_block, options, key_padding_mask=key_padding_mask, sinks=sinks)
        if biased_table.any():
            more = self._run(wide_q, wide_k, v, biased, options, key_padding_mask=key_padding_mask)
            out, lse = merge(out, lse, *more)
        return out, lse

    def achieved_density(self, tokens: int, heads: int = 1) -> float:
        """Fraction of key blocks that the last call selected, 0 before the first call; the arguments are ignored."""
        return 0.0 if self.blocks is None else float(self.blocks.mean())

    def _check_and_place(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Global positions int64 [N] of the rows. If the arguments of one rank are wrong, all ranks raise."""
        with self.report_errors("positions"):
            heads, head_dim, kv_heads = *self.query.shape[:2], len(self.key)
            is_whole = isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4
            if is_whole and (q.shape[1], q.shape[3], k.shape[1]) != (heads, head_dim, kv_heads):
                raise InvalidInput(
                    f"q has {q.shape[1]} heads of dim {q.shape[3]} and k {k.shape[1]} heads, but the scorer was made "
                    f"for num_heads={heads}, head_dim={head_dim}, kv_heads={kv_heads}; make the module for the shapes "
                    "of q and k"
                )
        return self.positions(q, k, v, key_padding_mask=mask)

    def _block_means(
        self, q: Tensor, k: Tensor, query_block: Tensor, key_block: Tensor, mask: Tensor | None, seed: int
    ) -> tuple[Tensor, Tensor, int]:
        """Mean queries [B, H, blocks, D], mean keys [B, K, blocks, D] and the seed, all equal on all ranks."""
        rows = q, k, query_block, key_block, mask
        if self.sharded:
            with Exchange(get_transport(**self._place.keywords), "block sums") as records:
                sums = _block_sums(*rows)
                records.mine = _pack_sums(sums, self.block, seed)
        else:
            sums = _block_sums(*rows)
        with self.report_errors():
            if self.sharded:
                sums, seed = _add_all_sums(sums, self.block, records.records)
            means = sums[:, :, :-1, :-1] / sums[:, :, :-1, -1:].clamp(min=1)
            queries, keys = means.split((q.shape[1], k.shape[1]), 1)
            return queries, keys, seed

    def _select(self, scores: Tensor, causal: bool, seed: int) -> np.ndarray:
        """The selection, bool [H, blocks, blocks], for scores [H, blocks, blocks]; also stored in `blocks`."""
        scores = scores.float().cpu()
        if self.training and self.noise:
            generator = torch.Generator().manual_seed(seed)
            uniform = torch.rand(scores.shape, generator=generator, device="cpu").clamp(1e-20, 1 - 1e-7)
            scores = scores - self.noise * torch.log(-torch.log(uniform))
        if not scores.shape[-1]:
            return np.zeros((1, 0, 0), dtype=bool)
        table: np.ndarray = top_k(self.block, self.k, scores.numpy(), causal=causal, density=self.density).table
        self.blocks = table
        return table

    def extra_repr(self) -> str:
        size = f"k={self.k}" if self.density is None else f"density={self.density}"
        return f"block={self.block}, {size}, rank={self.rank}, causal={self.causal}"


def _block_sums(q: Tensor, k: Tensor, query_block: Tensor, key_block: Tensor, mask: Tensor | None) -> Tensor:
    """Sums of each block's rows without padding, with their number as a last column: [B, H + K, blocks + 1, D + 1].

    The heads of q come first. The blocks are those up to the last one of a key, and one more, for queries after it.
    """
    blocks = int(key_block.max()) + 2 if len(key_block) else 1
    sums = []
    for x, block in ((q, query_block), (k, key_block)):
        rows = F.pad(x.detach().to(wide(x.dtype)), (0, 1), value=1.0)
        rows = rows if mask is None else rows.masked_fill(mask[:, None, :, None], 0)
        sums.append(rows.new_zeros((*rows.shape[:2], blocks, rows.shape[3])).index_add_(2, block, rows))
    return torch.cat(sums, 1)


def _pack_sums(sums: Tensor, block: int, seed: int) -> bytes:
    """This rank's record: [block, blocks + 1, seed], and the sums of the blocks in which this rank has rows."""
    head = torch.tensor([block, sums.shape[2], seed], device="cpu")
    blocks = sums[..., -1].any(0).any(0).nonzero().flatten()
    from safetensors.torch import save  # few programs choose blocks

    return save({"head": head, "blocks": blocks.cpu(), "sums": sums[:, :, blocks].cpu().contiguous()})


def _add_all_sums(sums: Tensor, block: int, records: list[bytes]) -> tuple[Tensor, int]:
    """(sums over all ranks, seed of rank 0). Adds in rank order, so that all ranks get the same bits.

    `sums` are this rank's own; heads and dims are equal on all ranks. Raises Mismatch, naming the rank, if block sizes
    differ.
    """
    from safetensors.torch import load

    found = list(map(load, records))
    heads = [record["head"].tolist() for record in found]
    for rank, (other, *_) in enumerate(heads):
        if other != block:
            raise Mismatch(
                f"rank {rank} has blocks of {other} tokens, this rank of {block}; make the modules of all ranks with "
                "the same block="
            )
    blocks = max(head[1] for head in heads)
    added = sums.new_zeros((*sums.shape[:2], blocks, sums.shape[3]), device="cpu")
    for record in found:
        added.index_add_(2, record["blocks"], record["sums"])
    return added.to(sums.device), heads[0][2]
