"""The merge of partial softmaxes: the only place in the package with this formula."""

from __future__ import annotations

import torch


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge the partial (part, part_lse) into (out, lse), in place.

    out [..., n, D] and lse [..., n] are fp32 or fp64, and lse may be wider than out; part may have a narrower dtype.
    lse is the natural log of the sum of exp(logits). lse is -inf for a row that saw no key, and out must then be
    finite. With s = sigmoid(part_lse - lse): out <- out + s * (part - out), and lse <- log(exp(lse) + exp(part_lse)).
    Source: the online softmax of Milakov and Gimelshein (2018), in a form that cannot overflow.
    """
    gate = torch.sigmoid(part_lse - lse)
    gate.masked_fill_(part_lse == -torch.inf, 0.0)  # if both saw no key, sigmoid(-inf + inf) is NaN
    out.lerp_(part.to(out.dtype), gate.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of two partials, as new tensors that are differentiable in all four; shapes as in `merge_`.

    Rows that are empty in both partials stay 0 and -inf, and their gradients are finite.
    """
    empty = (lse == -torch.inf) & (part_lse == -torch.inf)
    lse, part_lse = lse.masked_fill(empty, 0.0), part_lse.masked_fill(empty, 0.0)  # -inf minus -inf is NaN
    gate = torch.sigmoid(part_lse - lse).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, part, gate), torch.logaddexp(lse, part_lse).masked_fill(empty, -torch.inf)
