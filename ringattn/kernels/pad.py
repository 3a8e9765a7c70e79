"""Extra columns of the head dim, which leave all other numbers unchanged.

They serve head dims that no library supports, the gradient of lse, padded keys, and a backward that gets delta instead
of out.
"""

from __future__ import annotations

from math import frexp

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InvalidInput, Unsupported
from .memory import as_dtype, is_dense, kind_of, wide

#: Columns added for the gradient of lse, and for padded keys. Libraries want multiples of 8.
EXTRA = 8
#: Minus the logit of a padded key. It is smaller if the columns that make it would overflow their dtype: in fp16 the
#: logit is -EXTRA * 32768^2 * scale, -1.1e9 for a head dim of 64. Kernels keep logits in fp32.
HIDDEN = 1e30
#: The smallest magnitude of a padded key's logit. Rows with lse below minus half of it count as seeing only padding.
LEAST = 1e6
#: A delta above this multiple of the largest |dO| of its row must come from the gradient of lse.
DOMINANT = 1024.0


def pad_to(x: Tensor, width: int) -> Tensor:
    """x padded with zero columns to `width` columns; x itself if it has that many."""
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def crop_to(x: Tensor, width: int) -> Tensor:
    """A view of the first `width` columns; x itself if it has no more."""
    return x if x.shape[-1] == width else x[..., :width]


def align(x: Tensor) -> Tensor:
    """x or a copy of it that CUDA kernels can read: last stride 1, and every row starts at a multiple of 16 bytes."""
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def with_column(x: Tensor, column: Tensor | float) -> Tensor:
    """A copy of x [..., n, D] with EXTRA more columns: first `column` [..., n] (or a number), then zeros.

    It is used to get the gradient of a loss that depends on out and lse from a kernel that takes no gradient of lse:
    with v' = [v, 1] and dO' = [dO, dlse], the backward computes dP' = dO v^T + dlse, with the same delta. The gradient
    is exact.
    """
    wider = pad(x, (0, EXTRA))
    wider[..., x.shape[-1]] = column
    return wider


def delta(grad: Tensor, out: Tensor, grad_lse: Tensor | None) -> Tensor:
    """rowsum(dO * out) - dlse, [..., n, 1] in fp32 or fp64: all that a backward needs to know of out and dlse."""
    dtype = wide(grad.dtype)
    # Contiguous, so that the order of summation does not depend on the strides.
    row_sum = (as_dtype(grad, dtype) * as_dtype(out, dtype)).contiguous().sum(-1, keepdim=True)
    return row_sum if grad_lse is None else row_sum - grad_lse.to(dtype).unsqueeze(-1)


def with_delta(grad: Tensor, delta: Tensor, *, wider: bool) -> tuple[Tensor, Tensor]:
    """Return (dO', out') with rowsum(dO' * out') = delta, for kernels that take out and compute delta from it.

    grad is dO [..., n, D], delta [..., n, 1]. Each row of out' is a multiple of that of dO'. Set `wider` if delta
    includes the gradient of lse: where dO is tiny or zero, no out' of this form could represent delta. dO' and out'
    then have EXTRA more columns, and the first of these in dO' holds the size of delta in such rows. With v' = [v, 0]
    the extra columns change no other number. A NaN or infinite delta affects only its own row of out'.
    """
    if wider:
        size = delta.abs()
        peak = grad.abs().amax(-1, keepdim=True).to(delta.dtype)
        grad = with_column(grad, size.where(size > DOMINANT * peak, 0.0).squeeze(-1).to(grad.dtype))
    return grad, times_unit(grad, delta_factor(grad, delta))


def delta_factor(grad: Tensor, delta: Tensor) -> Tensor:
    """The factor [..., n, 1] for `times_unit`, so that its result out' has rowsum(dO * out') = delta."""
    unit, peak = _unit(grad)
    return delta / peak / unit.square().sum(-1, keepdim=True).clamp_min_(0.5)


def times_unit(grad: Tensor, factor: Tensor) -> Tensor:
    """The rows of dO, scaled to a maximum of 1 and multiplied by `factor`: dO / max |dO| * factor, in dO's dtype."""
    return as_dtype(_unit(grad)[0].mul_(factor), grad.dtype)


def _unit(grad: Tensor) -> tuple[Tensor, Tensor]:
    """(dO / peak, peak = max |dO|) of each row, in fp32 or fp64. Squares of dO / peak neither overflow nor vanish."""
    x = as_dtype(grad, wide(grad.dtype))
    peak = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
    return x / peak, peak


def check_padding(mask: Tensor | None, k: Tensor) -> None:
    """Raise InvalidInput unless `mask` is None, or bool [B, n] on the device of the keys k [B, K, n, D]."""
    if mask is None:
        return
    shape = (k.shape[0], k.shape[2])
    if not is_dense(mask) or mask.dtype != torch.bool:
        kind = mask.dtype if is_dense(mask) else kind_of(mask)
        raise InvalidInput(f"key_padding_mask must be a bool tensor, True where a key is padding, got {kind}")
    if tuple(mask.shape) != shape:
        raise InvalidInput(
            f"key_padding_mask must be [batch, tokens] = {shape}, the keys of this call, got {tuple(mask.shape)}; "
            "in a sharded call pass the rows of the local shard"
        )
    if mask.device != k.device:
        raise InvalidInput(f"key_padding_mask is on {mask.device}, the keys are on {k.device}; move the mask there")


def hidden_column(scale: float, dtype: torch.dtype) -> float:
    """The number c > 0 that `hide_keys` writes to its extra columns to hide padded keys.

    c is chosen so that the logit of a hidden key, about -|scale| * EXTRA * c * c, has the size HIDDEN, or as near to it
    as the dtype allows. Raises Unsupported if no finite c hides a key at this scale and dtype.
    """
    factor = EXTRA * abs(scale)
    column = min((HIDDEN / factor) ** 0.5 if factor else float("inf"), torch.finfo(dtype).max)
    # A power of two is never rounded: by way of bf16, the 65504 of fp16 would become infinite.
    column = 2.0 ** (frexp(column)[1] - 1)
    if not LEAST <= factor * column * column < float("inf"):
        raise Unsupported(
            f"key_padding_mask does not work with scale={scale} in {dtype}: the number that hides a key overflows; try "
            "a scale near 1 / sqrt(head_dim)"
        )
    return column


def hide_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, column: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q', k', v') whose attention equals that of q, k and v without the keys where `mask` [B, n] is True.

    q' = [c, c ..., q] and k' = [x, x ..., k] have EXTRA more columns each, where c = `column` has the sign of the
    scale, and x is -|c| for hidden keys, else 0. The weight of a hidden key is then exactly 0. The rows of hidden keys
    in k and v are set to zero, so that a NaN in padding does not spread.
    """
    return pad(q, (EXTRA, 0), value=column), *hide_rows(k, v, mask[:, None, :, None], column)


def hide_rows(k: Tensor, v: Tensor, flags: Tensor, column: float) -> tuple[Tensor, Tensor]:
    """(k', v') of `hide_keys`; `flags` is bool [B, 1, n, 1]."""
    wide_k = pad(k.masked_fill(flags, 0), (EXTRA, 0))
    wide_k[..., :EXTRA].masked_fill_(flags, -abs(column))
    return wide_k, v.masked_fill(flags, 0)
