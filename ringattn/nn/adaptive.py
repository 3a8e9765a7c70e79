"""Block-sparse attention whose blocks are chosen by a small learned scorer, from pooled queries and keys."""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InvalidInput, Mismatch
from ..functional import exchange, uncompiled
from ..kernels.base import wide
from ..pattern import BlockSparse, Causal, Full, local_window, top_k
from ..runtime.autocast import cast_inputs
from .core import RingAttention

#: Layout of the record that a rank sends: tokens of a block, blocks, seed, and the touched blocks of queries and of keys.
HEAD = "<5q"


class AdaptiveAttention(RingAttention):
    """Every query block attends the `k` key blocks (or the fraction `density`) that score best, per head.

    A block is summarised by the mean of its keys and of its queries; score[i, j] = <A query_i, B key_j> / sqrt(rank)
    with learned A [H, D, rank] and B [K, D, rank], all blocks in one matrix product. The score is also added to the
    logits of the selected blocks, as `rank` more columns of q and k: through that soft bias, inside the one softmax,
    the gradient reaches A and B. Summaries are detached: q and k learn from attention, not from their pooling.
    In training, Gumbel noise times `noise` on the scores lets other blocks be tried; rank 0 draws its seed.

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
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < float("inf"):
            raise InvalidInput(f"noise={noise!r} must be a number >= 0; 0 turns it off")
        if kv_heads < 1 or num_heads % kv_heads:
            raise InvalidInput(f"num_heads must be a multiple of kv_heads >= 1, got {num_heads} and {kv_heads}")
        top_k(block, k, np.zeros((1, 1)), density=density)  # one of them, and in its range
        self.block, self.k, self.density, self.causal = block, k, density, causal
        self.rank, self.noise = rank, noise
        self.query = nn.Parameter(torch.empty(num_heads, head_dim, rank, device=device, dtype=dtype))
        self.key = nn.Parameter(torch.empty(kv_heads, head_dim, rank, device=device, dtype=dtype))
        self.blocks: np.ndarray | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with the deviation 1 / sqrt(head_dim), so that scores are of the size of attention's logits."""
        for weight in (self.query, self.key):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    @uncompiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False,
        key_padding_mask: torch.Tensor | None = None, return_lse: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(out, lse) of tensors [B, H, N, D], whatever `order` is. The parts are merged by lse: it is there anyway."""
        q, k, v = cast_inputs(q, k, v)
        causal = is_causal or self.causal
        place = self._places(q, k, v, key_padding_mask)  # on real ranks also the handshake
        # Mean query of a block; causally, of the `block` positions that end with its first.
        own, ahead = place // self.block, -(-place // self.block)
        queries, keys, seed = self._summaries(q, k, ahead if causal else own, own, key_padding_mask)
        with self.telling():
            a = torch.einsum("bhnd,hdr->bhnr", queries.to(self.query.dtype), self.query)
            b = torch.einsum("bhnd,hdr->bhnr", keys.to(self.key.dtype), self.key)
            wider = b.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = torch.einsum("bhir,bhjr->hij", a, wider).detach() / max(len(q), 1) / self.rank**0.5
            table = self._select(scores, causal, seed)
            scale = self.options["scale"]
            scale = q.shape[-1] ** -0.5 if scale is None else scale
            # scale * <column of q, column of k> = score
            factor = (self.rank**0.5 * abs(scale)) ** -0.5 if scale else 0.0
            wide_q = torch.cat((q, (a[:, :, own] * factor * (1 if scale >= 0 else -1)).to(q.dtype)), -1)
            wide_k = torch.cat((k, (b[:, :, own] * factor).to(k.dtype)), -1)
            run: dict[str, Any] = {"key_padding_mask": key_padding_mask, "scale": scale}
            own_blocks = local_window(self.block, blocks=0) & Causal()
            others = table & ~np.eye(table.shape[1], dtype=bool) if causal else table
            selected = _passing(self.block, others)
        if not causal:
            return self._run(wide_q, wide_k, v, selected, **run)
        own_block = self._run(q, k, v, own_blocks, **run)
        if not others.any():
            return own_block
        return _merged(*own_block, *self._run(wide_q, wide_k, v, selected, **run))

    def achieved_density(self, tokens: int, heads: int = 1) -> float:
        """Counted: the fraction of key blocks that the last call selected, of any sequence; 0 before the first call."""
        return 0.0 if self.blocks is None else float(self.blocks.mean())

    def _places(self, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        """Global positions of the rows; raises on all ranks alike where the arguments of one are wrong."""
        wrong = None
        if isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.ndim == k.ndim == 4:
            wanted, found = (*self.query.shape[:2], len(self.key)), (q.shape[1], q.shape[3], k.shape[1])
            if found != wanted:
                wrong = InvalidInput(
                    f"q has {found[0]} heads of dim {found[1]} and k {found[2]} heads, but the scorer was made for "
                    f"num_heads={wanted[0]}, head_dim={wanted[1]}, kv_heads={wanted[2]}"
                )
        return self.positions(q, k, v, key_padding_mask=mask, wrong=wrong)

    def _summaries(
        self, q: torch.Tensor, k: torch.Tensor, q_block: torch.Tensor, k_block: torch.Tensor, mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Means of the queries [B, H, blocks, D] and keys [B, K, blocks, D] of all blocks, and a seed: on all ranks
        alike. The seed comes from torch's own generator, which checkpoints restore for a recomputation."""
        if not self.sharded:
            sums, total, seed = self._own_sums(q, k, q_block, k_block, mask)
        else:
            with exchange("block sums", **self._where.options) as told:
                sums, total, seed = self._own_sums(q, k, q_block, k_block, mask)
                told.mine = _packed(sums, self.block, total, seed)
        with self.telling():
            if self.sharded:
                sums, seed = _all_sums(sums, self.block, told.records)
                total = sums[1].shape[2] - 1
            queries, keys = (x[:, :, :total, :-1] / x[:, :, :total, -1:].clamp(min=1) for x in sums)
            return queries, keys, seed

    def _own_sums(
        self, q: torch.Tensor, k: torch.Tensor, q_block: torch.Tensor, k_block: torch.Tensor, mask: Any
    ) -> tuple[list[torch.Tensor], int, int]:
        """The sums of this rank's queries and keys by blocks, the number of blocks that it has rows up to, a seed."""
        dtype = wide(q.dtype)
        shown = torch.ones(len(q), q.shape[2], device=q.device, dtype=dtype) if mask is None else (~mask).to(dtype)
        total = int(k_block.max()) + 1 if len(k_block) else 0
        # Padding may hold anything: it is taken out before it is multiplied.
        known = (x.detach() if mask is None else x.detach().masked_fill(mask[:, None, :, None], 0) for x in (q, k))
        blocks = ((q_block, total + 1), (k_block, total + 1))
        sums = [_sums(x.to(dtype), shown, *where) for x, where in zip(known, blocks, strict=True)]
        seed = int(torch.randint(1 << 62, (), device="cpu")) if self.training and self.noise else 0
        return sums, total, seed

    def _select(self, scores: torch.Tensor, causal: bool, seed: int) -> np.ndarray:
        scores = scores.float().cpu()
        if self.training and self.noise:
            source = torch.Generator().manual_seed(seed)
            uniform = torch.rand(scores.shape, generator=source, device="cpu").clamp(1e-20, 1 - 1e-7)
            scores = scores - self.noise * torch.log(-torch.log(uniform))
        if not scores.shape[-1]:
            return np.zeros((1, 0, 0), dtype=bool)
        kept = top_k(self.block, self.k, scores.numpy(), causal=causal, density=self.density)
        self.blocks = kept.table
        return kept.table

    def extra_repr(self) -> str:
        size = f"k={self.k}" if self.density is None else f"density={self.density}"
        return f"block={self.block}, {size}, rank={self.rank}, causal={self.causal}"


def _packed(sums: list[torch.Tensor], block: int, total: int, seed: int) -> bytes:
    """This rank's record of block sums: those of blocks that it has rows of."""
    touched = [x[..., -1].any(0).any(0).nonzero().flatten().cpu() for x in sums]
    record = struct.pack(HEAD, block, total, seed, *map(len, touched))
    for rows, x in zip(touched, sums, strict=True):
        record += rows.numpy().tobytes() + x[:, :, rows.to(x.device)].cpu().contiguous().numpy().tobytes()
    return record


def _all_sums(sums: list[torch.Tensor], block: int, records: list[bytes]) -> tuple[list[torch.Tensor], int]:
    """The sums of all ranks, added in rank order so that all ranks get the same bits, and the seed of the first.

    `sums` are this rank's, of the same heads and dims as all. Raises a Mismatch that names the rank whose record is of
    another block size, or is none.
    """
    heads = [_head(raw, rank, block, sums) for rank, raw in enumerate(records)]
    most = max(head[1] for head in heads)
    whole = [x.new_zeros((*x.shape[:2], most + 1, x.shape[3]), device="cpu") for x in sums]
    for raw, head in zip(records, heads, strict=True):
        at = struct.calcsize(HEAD)
        for x, count in zip(whole, head[3:], strict=True):
            rows = torch.from_numpy(np.frombuffer(raw, np.int64, count, at).copy())
            at += rows.nbytes
            shape = (*x.shape[:2], count, x.shape[3])
            part = np.frombuffer(raw, x.numpy().dtype, prod(shape), at).copy()
            at += part.nbytes
            x.index_add_(2, rows, torch.from_numpy(part).view(shape))
    return [x.to(sums[0].device) for x in whole], heads[0][2]


def _head(raw: bytes, rank: int, block: int, sums: list[torch.Tensor]) -> tuple[int, ...]:
    """The numbers at the start of a rank's record of block sums, whose length is as they say."""
    size = struct.calcsize(HEAD)
    head = struct.unpack_from(HEAD, raw) if len(raw) >= size else (0,) * 5
    if head[0] not in (0, block):
        raise Mismatch(
            f"rank {rank} has blocks of {head[0]} tokens, the others of {block}; all ranks must pass the same"
        )
    rows = (8 + x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in sums)
    if head[0] != block or len(raw) != size + sum(n * each for n, each in zip(head[3:], rows, strict=True)):
        raise Mismatch(
            f"rank {rank} sent {len(raw):,} bytes that are no block sums of its shard; make the modules of all ranks with "
            "the same arguments"
        )
    return head


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
    """(out, lse) of two partials as one softmax, differentiable; rows that neither saw stay 0 and -inf."""
    dead = (lse == -torch.inf) & (other_lse == -torch.inf)
    a, b = lse.masked_fill(dead, 0.0), other_lse.masked_fill(dead, 0.0)  # -inf minus -inf is NaN, forward and backward
    gate = torch.sigmoid(b - a).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, other, gate), torch.logaddexp(a, b).masked_fill(dead, -torch.inf)
