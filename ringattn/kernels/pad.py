"""Head dims that a library does not take, and the gradient of lse: both by columns that change no number."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

#: Columns added for the gradient of lse: libraries want multiples of 8.
EXTRA = 8


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
