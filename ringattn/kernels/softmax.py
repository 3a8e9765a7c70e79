"""The merge of partial softmaxes. The formula is only here and in the Triton kernel of `kernels.fused`.

`join_` has it once more, by ops whose bits do not depend on the place of a number in a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import MergeSpace, as_dtype, wide
from .merges import fused_kernels
from .pad import HIDDEN, delta


def add_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place; both are [B, H, n, D] with any strides; `part` may have a narrower dtype."""
    fused = fused_kernels(total.device)
    fused.add_(total, part) if fused else total.add_(part)


def begin_sums(out: Tensor, lse: Tensor) -> None:
    """Set (out, lse) in place to the values of rows that have seen no key: 0 and -inf."""
    out.zero_()
    lse.fill_(-torch.inf)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, *, space: MergeSpace | None = None) -> None:
    """Merge a partial result (part, part_lse) over other keys into (out, lse), in place.

    out [B, H, n, D] and lse [B, H, n] are fp32 or fp64 with any strides. lse may be wider than out; part may have a
    narrower dtype. lse is the natural log of the sum of exp(logits). Where lse is -inf, for a row that saw no key, out
    must be finite; where lse is NaN, out must be NaN. With s = sigmoid(part_lse - lse): out <- out + s * (part - out),
    and lse <- log(exp(lse) + exp(part_lse)). `space` holds temporary tensors, and can be reused for merges of the same
    dtypes. Source: the online softmax of Milakov and Gimelshein (2018), in a form that cannot overflow.
    """
    if fused := fused_kernels(out.device):
        return fused.merge_(out, lse, part, part_lse)
    widened, difference, gate, column = (space or MergeSpace()).fit(lse, part_lse, out.dtype)
    if part_lse.dtype != lse.dtype:
        part_lse = widened.copy_(part_lse)  # widen once: every op with two dtypes would widen it again
    # Clamp to the lowest finite number: if both saw no key, -inf + inf would be NaN.
    torch.clamp_min(lse, torch.finfo(lse.dtype).min, out=difference)
    gate.copy_(torch.sub(part_lse, difference, out=difference).sigmoid_())
    out.lerp_(as_dtype(part, out.dtype), column)
    torch.logaddexp(lse, part_lse, out=lse)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The (out, lse) of two partial results over different keys, as new tensors; shapes as in `merge_`.

    Differentiable in all four arguments. Rows that are empty in both stay 0 and -inf, and their gradients are finite.
    """
    empty = (lse == -torch.inf) & (part_lse == -torch.inf)
    lse, part_lse = lse.masked_fill(empty, 0.0), part_lse.masked_fill(empty, 0.0)  # -inf minus -inf is NaN
    gate = torch.sigmoid(part_lse - lse).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, part, gate), torch.logaddexp(lse, part_lse).masked_fill(empty, -torch.inf)


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """`merge` by exp, log, and basic arithmetic alone, with no gradient, into `out`; lse are fp64.

    On CPUs torch computes sigmoid, logaddexp and lerp by other instructions in vectors than in the rest of a tensor or
    with strides, so that bits of the usual merge depend on the place of a row. Those of these ops do not.
    """
    most = torch.maximum(lse, part_lse).clamp_min_(torch.finfo(lse.dtype).min)  # -inf minus -inf is NaN
    one, other = (lse - most).exp_(), (part_lse - most).exp_()
    total = one + other
    first, second = (as_dtype(x / total.clamp_min(1.0), out.dtype).unsqueeze(-1) for x in (one, other))
    return out.mul_(first).add_(part * second), most + total.log()


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`merge_sinks_` by `join_`, which may change `out`; lse is fp64."""
    sink = _logits(sinks, lse).expand_as(lse)
    return join_(as_dtype(out, wide(out.dtype)), lse, out.new_zeros((), dtype=wide(out.dtype)), sink)


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge an extra key per head, of logit `sinks` [H] and value 0, into (out, lse) in place; shapes as in `merge_`.

    out may be narrower than fp32. With this (out, lse), the ring's backward gives the right gradients of q, k and v.
    """
    sink = _logits(sinks, lse)
    share = (lse.clamp_min(torch.finfo(lse.dtype).min) - sink).sigmoid_()  # -inf - -inf would be NaN
    out.mul_(as_dtype(share, wide(out.dtype)).unsqueeze(-1))
    torch.logaddexp(lse, sink, out=lse)


def sinks_gradient(sinks: Tensor, grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """d loss / d sinks [H], from the (out, lse) after `merge_sinks_` and their gradients; `grad_lse` may be None."""
    weight = (_logits(sinks, lse) - lse.clamp_min(torch.finfo(lse.dtype).min)).exp_()
    parts = weight * delta(grad, out, grad_lse).squeeze(-1)
    # Contiguous, so that the order of summation does not depend on the strides.
    return -parts.contiguous().sum((0, 2)).to(sinks.dtype)


def _logits(sinks: Tensor, lse: Tensor) -> Tensor:
    """The sinks [H, 1] in the dtype of lse, with inf replaced by a finite number: inf - inf would be NaN."""
    return sinks.to(lse.dtype).clamp_max(HIDDEN).unsqueeze(-1)
