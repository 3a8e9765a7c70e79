"""Stand-ins on CPU tensors for the attention ops that PyTorch ships for CUDA: their refusals, layouts and misreadings.

The numbers are computed in fp64 and rounded to the dtype of the inputs. Sources, as of PyTorch 2.13 and
FlashAttention 2:

- flash: csrc/flash_attn/flash_api.cpp. Last stride 1 and head dims up to 256 that are multiples of 8 are checked. A
  window
  bound below 0, or of at least as many keys as there are, becomes unbounded; beside a bounded side an unbounded side
  becomes
  a bound of as many keys as there are. The window is anchored at the last row and the last key.
- cuDNN: is_causal hides keys after the row's own place, counted from the first row and the first key. lse is [B, H,
  S, 1].
- memory-efficient: aten/src/ATen/native/transformers/cuda. Mask type 1 is causal from the first row and the first
  key. lse
  is padded to a multiple of 32 with +inf. The backward reads out with the strides of a contiguous [B, N, H, D].
- all: rows are read by loads of 16 bytes; a row that begins elsewhere is a misaligned address, which ends the context.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def check_readable(*tensors: Tensor) -> None:
    """Raise RuntimeError where an op would refuse a tensor [B, N, H, D], or read it at misaligned addresses."""
    for x in tensors:
        if x.stride(-1) != 1:
            raise RuntimeError("input tensor must have contiguous last dimension")
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]):
            raise RuntimeError("misaligned address")
        if x.shape[-1] % 8 or x.shape[-1] > 256:
            raise RuntimeError("head dim must be a multiple of 8, at most 256")


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64 of q [B, H, N, D] and k, v [B, K, M, D]; bias [.., N, M] is added to the logits."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.mT * scale + bias
    lse = logits.logsumexp(-1)
    return (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0) @ v, lse


def differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> list[Tensor]:
    """(dq, dk, dv) in fp64 with the given out and lse of the rows; dk and dv have as many heads as k."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    grad, q, out, lse = (x.double() for x in (grad, q, out, lse))
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    p = (q @ k.mT * scale + bias - lse.unsqueeze(-1)).exp()
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return [ds @ k, *((x.mT @ y).unflatten(1, (heads, group)).sum(2) for x, y in ((ds, q), (p, grad)))]


def hide(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill_(~visible, -torch.inf)


def places(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(keys)[None, :]


def flash_window(rows: int, keys: int, left: int, right: int) -> Tensor:
    """The bias of flash's window, read as flash reads it."""
    left, right = (-1 if bound >= keys else bound for bound in (left, right))
    if left < 0 <= right:
        left = keys
    elif right < 0 <= left:
        right = keys
    i, j = places(rows, keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        visible = (j >= i + keys - rows - left) & (j <= i + keys - rows + right)
    return hide(visible)


def top_left(rows: int, keys: int, causal: bool) -> Tensor:
    i, j = places(rows, keys)
    return hide(j <= i if causal else torch.ones(rows, keys, dtype=torch.bool))


class EmulatedOps:
    """In place of `torch.ops.aten`; `calls` counts the calls of each op."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _count(self, op: str) -> None:
        self.calls[op] = self.calls.get(op, 0) + 1

    def _flash_attention_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, **window: int) -> Any:
        self._count("flash")
        check_readable(q, k, v)
        assert rest == (None, None, q.shape[1], k.shape[1], 0.0, False, False)
        bias = flash_window(q.shape[1], k.shape[1], window["window_size_left"], window["window_size_right"])
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), bias, scale)
        return out.to(q.dtype).transpose(1, 2).contiguous(), lse.float(), None, None

    def _flash_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Any,
        scale: float,
        **window: int,
    ) -> Any:
        self._count("flash backward")
        check_readable(grad, q, k, v, out)
        assert lse.is_contiguous() and rest[:6] == (None, None, q.shape[1], k.shape[1], 0.0, False)
        bias = flash_window(q.shape[1], k.shape[1], window["window_size_left"], window["window_size_right"])
        grads = differentiate(*(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, bias, scale)
        return [x.to(q.dtype).transpose(1, 2) for x in grads]

    def _scaled_dot_product_cudnn_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: None,
        lse: bool,
        dropout: float,
        causal: bool,
        debug: bool,
        *,
        scale: float,
    ) -> Any:
        self._count("cudnn")
        check_readable(*(x.transpose(1, 2) for x in (q, k, v)))
        out, total = attend(q, k, v, top_left(q.shape[2], k.shape[2], causal), scale)
        return out.to(q.dtype), total.float().unsqueeze(-1)

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> Any:
        self._count("cudnn backward")
        check_readable(*(x.transpose(1, 2) for x in (grad, q, k, v, out)))
        bias = top_left(q.shape[2], k.shape[2], rest[-1])
        return [x.to(q.dtype) for x in differentiate(grad, q, k, v, out, lse.squeeze(-1), bias, scale)]

    def _efficient_attention_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
        self._count("efficient")
        check_readable(q, k, v)
        bias, mask_type = rest[0], rest[6]
        hidden = top_left(q.shape[1], k.shape[1], mask_type == 1)
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), hidden if bias is None else bias.double(), scale)
        lse = torch.nn.functional.pad(lse.float(), (0, -lse.shape[-1] % 32), value=torch.inf)
        return out.to(q.dtype).transpose(1, 2).contiguous(), lse

    def _efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, **_: Any
    ) -> Any:
        self._count("efficient backward")
        bias, out, lse, mask_type = rest[0], rest[1], rest[6], rest[10]
        check_readable(grad, q, k, v, out)
        _batch, rows, heads, width = out.shape
        # The kernel takes the strides of a contiguous tensor for granted.
        out = out.as_strided(out.shape, (rows * heads * width, heads * width, width, 1))
        hidden = top_left(rows, k.shape[1], mask_type == 1)
        grads = differentiate(
            *(x.transpose(1, 2) for x in (grad, q, k, v, out)),
            lse[..., :rows],
            hidden if bias is None else bias.double(),
            scale,
        )
        return [x.to(q.dtype).transpose(1, 2) for x in grads]
