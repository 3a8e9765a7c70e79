"""Recurrences over the pieces of one rank: chunked functions in plain torch, and those of installed libraries.

A piece is the part of one document, in one batch row, that lies in one run of the rank's positions (`runs.Piece`).
Functions take the flat rows [1, T, ...] of all pieces, which `cu_seqlens` [pieces + 1] delimits, and an initial state
for each. States are fp32, fp64 for fp64. A piece has at least one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call.arguments import computing
from ..kernels.base import wide

#: Rows of a chunk with one decay per head, and with one per channel, whose products are [rows, rows, channels].
CHUNK, CHANNEL_CHUNK = 64, 16
#: With decays for each channel this many chunks are computed at a time.
AT_ONCE = 64
#: The module and name of the library function that replaces each of ours on GPUs.
LIBRARIES = {
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "ssd": ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
}
#: The first row of each piece, then the number of rows: [pieces + 1].
CuSeqlens = Sequence[int] | Tensor
#: The outputs of all rows, and the state after each piece, None unless `output_final_state`.
Result = tuple[Tensor, Tensor | None]


def find(name: str, x: Tensor) -> Callable[..., Result]:
    """The function `name` for tensors like x: that of an installed library if x is on a GPU, else plain torch."""
    module, function = LIBRARIES[name]
    if getattr(x, "is_cuda", False) and find_spec(module.partition(".")[0]) is not None:
        found = getattr(import_module(module), function)
        return _ssd_by_pieces(found) if name == "ssd" else found
    return {"ssd": ssd}.get(name, gated_delta_rule)


def _ssd_by_pieces(function: Callable[..., Any]) -> Callable[..., Result]:
    """`ssd` by mamba_ssm's function, which takes initial states for batch rows but not for pieces."""

    def call(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, cu_seqlens: Sequence[int],
        initial_state: Tensor | None = None, output_final_state: bool = False,
    ) -> Result:  # fmt: skip
        outs, finals = [], []
        for piece, (a, b) in enumerate(pairwise(cu_seqlens)):
            x_, dt_, B_, C_ = (y[:, a:b] for y in (x, dt, B, C))
            state = None if initial_state is None else initial_state[piece : piece + 1]
            out, final = function(x_, dt_, A, B_, C_, CHUNK, initial_states=state, return_final_states=True)
            outs.append(out)
            finals.append(final)
        return torch.cat(outs, 1), (torch.cat(finals) if output_final_state else None)

    return call


class _Product(torch.autograd.Function):
    """a @ b; with `upper` not None the x with (I + a) x = b, which reads only a's strict lower or upper triangle.

    Its gradients are products of this kind: torch's would be rounded by autocast in a backward. That of a triangle has
    numbers outside of it, too.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, upper: bool | None = None) -> Tensor:
        with computing(a.device):
            x = a @ b if upper is None else torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=True)
        ctx.upper = upper
        ctx.save_for_backward(a, b if upper is None else x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, x = ctx.saved_tensors
        if ctx.upper is None:
            return matmul(grad, x.mT).sum_to_size(a.shape), matmul(a.mT, grad).sum_to_size(x.shape), None
        grad = matmul(a.mT, grad, not ctx.upper)
        return -matmul(grad, x.mT), grad, None


matmul: Callable[..., Tensor] = _Product.apply


class _Chunks:
    """Pieces cut into chunks of `size` rows, the first chunks of all pieces before the second ones.

    Pieces are sorted by length, so that those with a chunk number c are the first counts[c].
    """

    def __init__(self, x: Tensor, cu_seqlens: CuSeqlens, size: int) -> None:
        cut = torch.as_tensor(cu_seqlens, device="cpu")
        lengths = cut.diff()
        order = lengths.argsort(descending=True)
        counts = -(-lengths[order] // size)
        steps = torch.arange(int(counts.max()), device="cpu")
        step, piece = (counts[None] > steps[:, None]).nonzero(as_tuple=True)
        rows = step[:, None] * size + torch.arange(size, device="cpu")
        rows = torch.where(rows < lengths[order][piece, None], cut[:-1][order][piece, None] + rows, int(cut[-1]))
        self.counts: list[int] = (counts[None] > steps[:, None]).sum(1).tolist()
        self.order, self.rows = order.to(x.device), rows.to(x.device)
        places = torch.empty(int(cut[-1]) + 1, dtype=torch.int64, device="cpu")
        places[rows.flatten()] = torch.arange(rows.numel(), device="cpu")
        self.places = places[:-1].to(x.device)

    def cut(self, x: Tensor, dtype: torch.dtype, fill: Tensor | None = None) -> Tensor:
        """Split rows x [1, T, ...] into chunks [chunks, size, ...]; short chunks are padded with `fill`, or 0."""
        flat = x[0].to(dtype)
        fill = flat.new_zeros(flat.shape[1:]) if fill is None else fill
        return torch.cat([flat, fill.to(flat.dtype)[None]])[self.rows]

    def join(self, chunks: Tensor) -> Tensor:
        """Undo `cut`: the rows [1, T, ...] from their chunks."""
        return chunks.flatten(0, 1)[self.places][None]

    def scan(
        self, initial: Tensor | None, zero: Tensor, step: Callable[..., Tensor], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(state before each chunk, state after each piece), computed by `step`, which maps states from chunk to chunk.

        `step` gets the states before chunks and returns the states after them.
        """
        state = zero.expand(len(self.order), *zero.shape) if initial is None else initial.to(zero.dtype)[self.order]
        before, ended = [], []
        # Split at once: the backward of a slice fills a tensor as large as the whole.
        parts = zip(*(x.split(self.counts) for x in tensors), strict=True)
        for (count, following), part in zip(pairwise([*self.counts, 0]), parts, strict=True):
            before.append(state)
            state = step(state, *part)
            if following < count:
                ended.append(state[following:])
                state = state[:following]
        finals = torch.cat(ended[::-1])[self.order.argsort()]
        return torch.cat(before), finals


def _decays(g: Tensor) -> Tensor:
    """exp of the sums of g [..., C, K] over the tokens j+1 .. i, and 0 for j > i: [..., C (i), C (j), K].

    Every sum is made by itself. A difference of two longer sums would lose the small numbers next to a large one, and
    would be NaN after -inf, which resets the state.
    """
    ones = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device)
    sums = g[..., None, :].masked_fill(ones.triu()[..., None], 0.0).cumsum(-3)
    return sums.masked_fill(ones.triu(1)[..., None], -torch.inf).exp()


def _weigh(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """q_i . k_j times the decay from j to i for i >= j, else 0: [..., C, C] of q, k [..., C, K], g [..., C, K or 1]."""
    if g.shape[-1] == 1:
        return matmul(q, k.mT) * _decays(g)[..., 0]

    def products(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
        return (q[..., :, None, :] * k[..., None, :, :] * _decays(g)).sum(-1)

    # Recomputed in the backward: the products of all channels are large.
    parts = zip(q.split(AT_ONCE), k.split(AT_ONCE), g.split(AT_ONCE), strict=True)
    return torch.cat([checkpoint(products, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def _attend(
    chunks: _Chunks, q: Tensor, k: Tensor, u: Tensor, w: Tensor | None, g: Tensor, initial: Tensor | None, outputs: bool
) -> tuple[Tensor, Tensor]:
    """(out [chunks, H, C, V], final states [pieces, H, K, V]) of chunks q, k, w [chunks, H, C, K], u [chunks, H, C, V].

    Each token adds k (u - w S)^T to the state S, where S is that before its chunk; g [chunks, H, C, K or 1] are the
    logarithms of decays.
    """
    later = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)  # the sums over all later tokens
    kept, added = g.sum(-2, keepdim=True).exp().mT, (k * later.exp()).mT

    def step(state: Tensor, kept: Tensor, added: Tensor, u: Tensor, w: Tensor | None = None) -> Tensor:
        return torch.addcmul(matmul(added, u if w is None else u - matmul(w, state)), kept, state)

    zero = u.new_zeros(k.shape[1], k.shape[3], u.shape[3])
    before, finals = chunks.scan(initial, zero, step, kept, added, u, *([] if w is None else [w]))
    if not outputs:
        return u, finals
    new = u if w is None else u - matmul(w, before)
    return matmul(q * g.cumsum(-2).exp(), before) + matmul(_weigh(q, k, g), new), finals


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, cu_seqlens: CuSeqlens,
    initial_state: Tensor | None = None, output_final_state: bool = False, outputs: bool = True,
) -> Result:  # fmt: skip
    """(o [1, T, HV, V], final states [pieces, HV, K, V] or None) of the gated delta rule, or of KDA if g has K columns.

    q, k [1, T, H, K], v [1, T, HV, V], g [1, T, HV] or [1, T, HV, K], beta [1, T, HV]: as in `layers.gated_delta_rule`.
    Without `outputs`, o is not computed, which saves time. Products of (I - beta k k^T) in a chunk have the WY
    representation (arXiv:2406.06484).
    """
    chunks = _Chunks(v, cu_seqlens, CHUNK if g.ndim == 3 else CHANNEL_CHUNK)
    dtype, heads = wide(v.dtype), v.shape[2]
    q, k, v_, g, beta = (
        chunks.cut(x, dtype).movedim(2, 1) for x in (q, k, v, g if g.ndim == 4 else g[..., None], beta[..., None])
    )
    q, k = (x.repeat_interleave(heads // x.shape[1], 1) for x in (q * scale, k))
    corrections = (beta * _weigh(k, k, g)).tril(-1)
    right = torch.cat([beta * v_, beta * k * g.cumsum(2).exp()], 3)
    u, w = matmul(corrections, right, False).split([v.shape[3], k.shape[3]], 3)
    out, finals = _attend(chunks, q, k, u, w, g, initial_state, outputs)
    return chunks.join(out.transpose(1, 2)).to(v.dtype), finals if output_final_state else None


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, cu_seqlens: CuSeqlens,
    initial_state: Tensor | None = None, output_final_state: bool = False, outputs: bool = True,
) -> Result:  # fmt: skip
    """(y [1, T, H, P], final states [pieces, H, P, N] or None) of Mamba-2, see `layers.ssd` for the arguments."""
    chunks, dtype, heads = _Chunks(x, cu_seqlens, CHUNK), wide(x.dtype), x.shape[2]
    dt = dt.to(dtype)[..., None]
    u, step, g, b, c = (chunks.cut(y, dtype).movedim(2, 1) for y in (x, dt, dt * A[:, None], B, C))
    b, c = (y.repeat_interleave(heads // y.shape[1], 1) for y in (b, c))
    initial = None if initial_state is None else initial_state.transpose(-1, -2)
    out, finals = _attend(chunks, c, b, u * step, None, g, initial, outputs)
    return chunks.join(out.transpose(1, 2)).to(x.dtype), finals.mT if output_final_state else None


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Result:
    """(y [1, T, D], final states [pieces, D, N] or None) of Mamba, see `layers.selective_scan`.

    options: cu_seqlens, initial_state and output_final_state, as in `affine_scan`.
    """
    dtype = wide(x.dtype)
    step = dt.to(dtype)[..., None]
    states, finals = affine_scan((step * A).exp(), step * x[..., None] * B[:, :, None], **options)
    return matmul(states, C.to(dtype)[..., None])[..., 0].to(x.dtype), finals


def affine_scan(
    a: Tensor, b: Tensor, *, cu_seqlens: CuSeqlens, matrix: bool = False, initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:  # fmt: skip
    """(all states of S = a S + b [1, T, ...], final states [pieces, ...] or None), see `layers.affine_scan`.

    Doubling within chunks (Hillis & Steele 1986) takes no inverse and no logarithm of a, which may be 0 or negative.
    """
    chunks, dtype = _Chunks(b, cu_seqlens, CHUNK), wide(b.dtype)
    one = torch.eye(a.shape[-1], device=a.device).expand(a.shape[2:]) if matrix else a.new_ones(a.shape[2:])
    decays, states = chunks.cut(a, dtype, one), chunks.cut(b, dtype)
    apply = matmul if matrix else torch.mul
    for apart in (2**x for x in range(CHUNK.bit_length() - 1)):
        later, added = decays[:, apart:], apply(decays[:, apart:], states[:, :-apart])
        decays = torch.cat([decays[:, :apart], apply(later, decays[:, :-apart])], 1)
        states = torch.cat([states[:, :apart], states[:, apart:] + added], 1)
    zero = states.new_zeros(b.shape[2:])
    before, finals = chunks.scan(
        initial_state, zero, lambda state, a, b: apply(a, state) + b, decays[:, -1], states[:, -1]
    )
    states = apply(decays, before[:, None]) + states
    return chunks.join(states).to(b.dtype), finals if output_final_state else None


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, initial_state: Tensor,
    cu_seqlens: Sequence[int],
) -> Tensor:  # fmt: skip
    """The causal depthwise convolution [1, T, C] of rows x [1, T, C] with weight [C, K].

    initial_state: the rows before each piece [pieces, K - 1, C]. Raises what torch's conv1d raises.
    """
    pieces, width = [*pairwise(cu_seqlens)], weight.shape[1] - 1
    parts = [rows for before, (a, b) in zip(initial_state, pieces, strict=True) for rows in (before, x[0, a:b])]
    weight, bias = weight[:, None].to(x.dtype), None if bias is None else bias.to(x.dtype)
    out = F.conv1d(torch.cat(parts).t()[None], weight, bias, groups=x.shape[2])[0].t()
    if len(pieces) > 1:
        out = torch.cat([out[a + i * width : b + i * width] for i, (a, b) in enumerate(pieces)])
    return out[None] if activation is None else F.silu(out)[None]
