"""Head dims that no library takes, the gradient of lse, and padded keys: all by columns that change no other number.

And out, of which a backward needs no more than delta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from ..errors import InvalidInput, Unsupported
from .base import wide

#: Columns added for the gradient of lse, and for padded keys: libraries want multiples of 8.
EXTRA = 8
#: The logit of a padded key is minus this, or less where the columns that make it would not be finite in their dtype:
#: in fp16 it is minus EXTRA * 65504^2 * scale, 4.3e9 for a head dim of 64. Kernels keep logits in fp32.
HIDDEN = 1e30
#: A logit that hides no more than this is refused: rows of half of it and below would be taken for rows of padding.
LEAST = 1e6
#: A delta that is more than this times the largest entry of its row of dO is the gradient of lse.
FAR = 1024.0


def pad_to(x: torch.Tensor, width: int) -> torch.Tensor:
    """x with zero columns up to `width`; x itself where it is that wide."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def unpadded(x: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` columns."""
    return x if x.shape[-1] == width else x[..., :width]


def with_column(x: torch.Tensor, column: torch.Tensor | float) -> torch.Tensor:
    """x with EXTRA more columns: `column` [..., n] (or a number), then zeros.

    With v' = [v, 1] and dO' = [dO, dlse] a backward computes dP' = dO v^T + dlse, and delta is unchanged: exactly
    the gradient of a loss that uses both out and lse, from a kernel that knows nothing of dlse.
    """
    wider = pad(x, (0, EXTRA))
    wider[..., x.shape[-1]] = column
    return wider


def delta(grad: torch.Tensor, out: torch.Tensor, grad_lse: torch.Tensor | None) -> torch.Tensor:
    """rowsum(dO * out) - dlse, [..., n, 1] in fp32 or fp64: all that a backward needs to know of out and of dlse."""
    dtype = wide(grad.dtype)
    # Contiguous, so that rows are summed in the same order whatever the strides.
    found = (grad.to(dtype) * out.to(dtype)).contiguous().sum(-1, keepdim=True)
    return found if grad_lse is None else found - grad_lse.to(dtype).unsqueeze(-1)


def with_delta(grad: torch.Tensor, delta: torch.Tensor, *, wider: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(dO', out') with rowsum(dO' * out') = delta, for kernels that take out: out' is the multiple of dO that has it.

    `wider`: delta holds the gradient of lse, too, which no row of out gives where dO is small or zero. Then both have
    EXTRA more columns, and dO' is delta in the first of them where it is needed. With v' = [v, 0] it changes no other
    number. A bad delta makes a bad row of out'.
    """
    dtype = wide(grad.dtype)
    tiny = torch.finfo(dtype).tiny
    if wider:
        size = delta.abs()
        peak = grad.abs().amax(-1, keepdim=True).to(dtype)
        grad = with_column(grad, size.where(size > FAR * peak, 0.0).squeeze(-1).to(grad.dtype))
    x = grad.to(dtype)
    peak = x.abs().amax(-1, keepdim=True).clamp(min=tiny)
    unit = x / peak  # its squares neither overflow nor vanish
    return grad, (unit * (delta / peak / unit.square().sum(-1, keepdim=True).clamp(min=0.5))).to(grad.dtype)


def check_padding(mask: Any, k: torch.Tensor) -> None:
    """Raise InvalidInput where `mask` is not bool [B, n] beside the keys k [B, K, n, D]."""
    wanted = (k.shape[0], k.shape[2])
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        found = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidInput(f"key_padding_mask must be a bool tensor, True where a key is padding, got {found}")
    if tuple(mask.shape) != wanted:
        raise InvalidInput(
            f"key_padding_mask must be [batch, tokens] = {wanted}, the keys of this call, got {tuple(mask.shape)}; "
            "a sharded call takes the rows of the local shard"
        )
    if mask.device != k.device:
        raise InvalidInput(f"key_padding_mask is on {mask.device}, the keys are on {k.device}; move it there")


def hide_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(q', k', v', floor): attention of them is that of q, k, v without the keys that `mask` [B, n] flags.

    q' = [q, c, c ...] and k' = [k, -c or 0, the same ...] with scale * EXTRA * c * c = HIDDEN, or as near to it as the dtype
    allows: the weight of a flagged key is exactly 0, its logit that of no row, and rows that see flagged keys only come out
    with lse < floor. Flagged rows of k and v are zeroed, so that whatever is in them, NaN too, stays there.
    """
    factor = EXTRA * abs(scale)
    column = min((HIDDEN / factor) ** 0.5 if factor else float("inf"), torch.finfo(q.dtype).max)
    size = factor * column * column
    if not LEAST <= size < float("inf"):
        raise Unsupported(
            f"key_padding_mask cannot be honoured with scale={scale} in {q.dtype}: no finite column hides a key; "
            "try a scale near 1 / sqrt(head_dim)"
        )
    hidden = mask[:, None, :, None]
    wide_q = pad(q, (0, EXTRA), value=column if scale > 0 else -column)
    wide_k = pad(k.masked_fill(hidden, 0), (0, EXTRA))
    wide_k[..., k.shape[-1] :].masked_fill_(hidden, -column)
    return wide_q, wide_k, v.masked_fill(hidden, 0), -size / 2
