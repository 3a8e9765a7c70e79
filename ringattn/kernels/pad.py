"""Head dims that no library takes, the gradient of lse, and padded keys: all by columns that change no other number."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from ..errors import InvalidInput, Unsupported

#: Columns added for the gradient of lse, and for padded keys: libraries want multiples of 8.
EXTRA = 8
#: The logit of a padded key is minus this. Kernels keep logits in fp32, but the columns must be finite in their dtype.
HIDDEN = 1e30
HIDDEN_FP16 = 1e6


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
    wide = pad(x, (0, EXTRA))
    wide[..., x.shape[-1]] = column
    return wide


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

    q' = [q, c, 0 ...] and k' = [k, -c or 0, 0 ...] with scale * c * c = HIDDEN: the weight of a flagged key is exactly
    0, its logit that of no row, and rows that see flagged keys only come out with lse < floor. Flagged rows of k and v
    are zeroed, so that whatever is in them, NaN too, stays there.
    """
    size = HIDDEN_FP16 if q.dtype == torch.float16 else HIDDEN
    column = (size / abs(scale)) ** 0.5 if scale else float("inf")
    if not 0 < column <= torch.finfo(q.dtype).max:
        raise Unsupported(
            f"key_padding_mask cannot be honoured with scale={scale} in {q.dtype}: no finite column hides a key; "
            "try a scale near 1 / sqrt(head_dim)"
        )
    hidden = mask[:, None, :, None]
    wide_q = with_column(q, column if scale > 0 else -column)
    wide_k = with_column(k.masked_fill(hidden, 0), mask[:, None].to(k.dtype) * -column)
    return wide_q, wide_k, v.masked_fill(hidden, 0), -size / 2
