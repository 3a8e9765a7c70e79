"""Stand-ins on CPU tensors for the attention ops that PyTorch ships for CUDA: their refusals, layouts and misreadings.

The numbers are computed in fp64 and rounded to the dtype of the inputs. Sources, as of PyTorch 2.13 with FlashAttention
2; the comments name them by the words in brackets:

- [flash_api] csrc/flash_attn/flash_api.cpp of FlashAttention 2, mha_fwd, mha_bwd, mha_varlen_fwd
- [sdp_utils] aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, what torch's own dispatch asks of each op
- [MHA] aten/src/ATen/native/cudnn/MHA.cpp, the cuDNN op
- [attention.cu] aten/src/ATen/native/transformers/cuda/attention.cu and attention_backward.cu, the memory-efficient op
- [kernel_forward] [kernel_backward] ...cuda/mem_eff_attention/kernel_forward.h and kernel_backward.h, its kernels
- [issue N] of pytorch/pytorch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ringattn.kernels import aten_cuda, cuda_device
from ringattn.kernels.aten_cuda import AtenCuda
from ringattn.kernels.cuda_device import WHOLE_TILES_CUDNN, CudaDevice

Tensor = torch.Tensor
HALF = (torch.float16, torch.bfloat16)
#: An H100 with a recent cuDNN.
HOPPER = CudaDevice((9, 0), WHOLE_TILES_CUDNN)


def check_readable(*tensors: Tensor) -> None:
    """Raise RuntimeError where an op would refuse a tensor [..., H, D], or read it at misaligned addresses."""
    for x in tensors:
        # [flash_api] "Input tensor must have contiguous last dimension"; [sdp_utils]
        # check_last_dim_stride_equals_1_dense, which all three ops ask.
        if x.stride(-1) != 1:
            raise RuntimeError("input tensor must have contiguous last dimension")
        # Rows are read by loads of 16 bytes ([flash_api] kernels; [kernel_forward] CHECK_ALIGNED_PTR and strideM,
        # strideH). Elsewhere flash and cuDNN end the context with "misaligned address".
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]):
            raise RuntimeError("misaligned address")
        # [flash_api] "head_size % 8 == 0", "at most 256"; [sdp_utils] check_cudnn_tensor_shapes and
        # minimum_gemm_alignment.
        if x.shape[-1] % 8 or x.shape[-1] > 256:
            raise RuntimeError("head dim must be a multiple of 8, at most 256")
        # [flash_api] "batch size must be positive"; [sdp_utils] check_nonzero_sequence_lengths_dense.
        if 0 in x.shape:
            raise RuntimeError("empty tensor")


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64 of q [B, H, N, D] and k, v [B, K, M, D]; bias [.., N, M] is added to the logits."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.mT * scale + bias
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp()
    return weights.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0) @ v, lse


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


def distances(rows: int, keys: int) -> Tensor:
    """i - j for row i and key j."""
    return torch.arange(rows)[:, None] - torch.arange(keys)[None, :]


def flash_window(rows: int, keys: int, left: int, right: int, most_keys: int | None = None) -> Tensor:
    """The bias of flash's window, read as flash reads it."""
    # [flash_api] "if (window_size_left >= seqlen_k) { window_size_left = -1; }", the same of the right bound, and
    # set_params_fprop "if (window_size_left < 0 && window_size_right >= 0) { window_size_left = seqlen_k; }" and
    # its mirror, where seqlen_q would be right (flash-attention issue 895). Of packed calls it is max_seqlen_k.
    limit = keys if most_keys is None else most_keys
    left, right = (-1 if bound >= limit else bound for bound in (left, right))
    if left < 0 <= right:
        left = limit
    elif right < 0 <= left:
        right = limit
    # csrc/flash_attn/src/mask.h: both bounds are counted from i + seqlen_k - seqlen_q.
    distance = distances(rows, keys) + keys - rows
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0 or right >= 0:
        visible = (distance <= left) & (distance >= -right)
    return hide(visible)


def packed_sequences(
    q: Tensor, k: Tensor, lengths: tuple[Tensor, Tensor, int, int], window: dict[str, int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, keys, bias) of every sequence of a packed call with q [total, H, D]."""
    cum_q, cum_k, max_q, max_k = lengths
    # [flash_api] mha_varlen_fwd: "cu_seqlens_q must have dtype int32", CHECK_DEVICE, CHECK_CONTIGUOUS, CHECK_SHAPE of
    # both with batch_size + 1, "batch size must be positive"; max_seqlen_q and max_seqlen_k are ints of the host.
    for x in (cum_q, cum_k):
        if x.dtype != torch.int32 or x.device != q.device or not x.is_contiguous() or x.dim() != 1:
            raise RuntimeError("cu_seqlens must be contiguous, on the device, and have dtype int32")
    if q.dim() != 3 or k.dim() != 3 or cum_q.shape != cum_k.shape or len(cum_q) < 2:
        raise RuntimeError("q, k and v must be [total, H, D], and cu_seqlens [sequences + 1]")
    assert type(max_q) is type(max_k) is int
    # csrc/flash_attn/src/flash_fwd_launch_template.h: the grid is (blocks of max_seqlen_q, sequences, heads).
    if len(cum_q) > 65_536:
        raise RuntimeError("invalid configuration argument: more than 65,535 sequences")
    # Nothing checks the numbers: rows beyond max_q are not computed, and keys beyond the last length are read.
    rows, keys = (x.diff().tolist() for x in (cum_q, cum_k))
    assert (cum_q[0], cum_q[-1], cum_k[0], cum_k[-1]) == (0, len(q), 0, len(k)) and min(*rows, *keys) > 0
    assert max(rows) <= max_q and max(keys) <= max_k
    for row, key, n, m in zip(cum_q.tolist(), cum_k.tolist(), rows, keys, strict=False):
        bias = flash_window(n, m, window["window_size_left"], window["window_size_right"], max_k)
        yield slice(row, row + n), slice(key, key + m), bias


def top_left(rows: int, keys: int, causal: bool) -> Tensor:
    # [MHA] set_causal_mask: cuDNN's causal mask begins at the first row and the first key.
    return hide(distances(rows, keys) >= 0 if causal else torch.ones(rows, keys, dtype=torch.bool))


def efficient_mask(rows: int, keys: int, mask_type: int, window: int | None) -> Tensor:
    """The bias of a mask type and window of the memory-efficient op."""
    # [kernel_forward] check_supported: "window_size > 0" asks for mask type 1 or 2.
    if window is not None and (window <= 0 or mask_type not in (1, 2)):
        raise RuntimeError("custom_mask_type not supported")
    # [kernel_forward] advance_to_block: type 2 adds num_keys - num_queries to the diagonal, type 1 does not. Hidden
    # are columns > row + diagonal, and columns <= row + diagonal - window_size. All kernels that PyTorch builds
    # have kSupportsBias, which guards rows whose first blocks are hidden (kernels/cutlassF.h).
    distance = distances(rows, keys) + (keys - rows if mask_type == 2 else 0)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if mask_type:
        visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return hide(visible)


class EmulatedOps:
    """In place of `torch.ops.aten`; `calls` counts the calls of each op.

    `device` decides what is refused. `any_dtype` lets flash and cuDNN take fp32, in which errors of masks and layouts
    show that 16 bits would hide.
    """

    def __init__(self, device: CudaDevice = HOPPER, *, any_dtype: bool = False) -> None:
        self.device, self.any_dtype = device, any_dtype
        self.calls = Counter[str]()
        #: How many calls had cumulative lengths.
        self.packed = 0
        #: The strides of dO and out by the key of cuDNN's cache of backward plans.
        self.plans: dict[object, tuple[object, object]] = {}

    def _begin(self, op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Count a call, and refuse what the op refuses of its device and tensors. q [B, H, N, D] or any other order."""
        self.calls[op] += 1
        assert q.shape[-1] == k.shape[-1], "q and k have the same head dim"
        efficient = op.startswith("efficient")
        # [sdp_utils] check_tensor_dtype and check_dtypes_low_precision; bf16 needs sm80 for the efficient op, too.
        if q.dtype not in HALF and not efficient and not self.any_dtype:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        # [flash_api] "FlashAttention only supports Ampere GPUs or newer"; [sdp_utils] check_cudnn_hardware_support.
        if self.device.capability < (8, 0) and (not efficient or q.dtype == torch.bfloat16):
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")

    def _flash_attention_forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, **window: int) -> Any:
        self._begin("flash", q, k, v)
        check_readable(q, k, v)
        assert rest[4:] == (0.0, False, False)
        self.packed += rest[0] is not None
        # [flash_api] out is empty_like(q) in [B, N, H, D], lse is [B, H, N] in fp32, of packed calls [H, total].
        lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, keys, bias in self._sequences(q, k, rest[:4], window):
            one = (x[run].transpose(0, 1)[None] for x, run in ((q, rows), (k, keys), (v, keys)))
            part, part_lse = attend(*one, bias, scale)
            out[rows] = part[0].transpose(0, 1).to(q.dtype)
            lse.mT[rows] = part_lse[0].mT.float()
        return out, lse, None, None

    def _sequences(
        self, q: Tensor, k: Tensor, lengths: Any, window: dict[str, int]
    ) -> Iterator[tuple[Any, Any, Tensor]]:
        """(rows, keys, bias) of every sequence of a call; without lengths the elements of the batch."""
        if lengths[0] is not None:
            yield from packed_sequences(q, k, lengths, window)
            return
        assert lengths == (None, None, q.shape[1], k.shape[1])
        bias = flash_window(q.shape[1], k.shape[1], window["window_size_left"], window["window_size_right"])
        yield from ((element, element, bias) for element in range(len(q)))

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
        self._begin("flash backward", q, k, v)
        check_readable(grad, q, k, v, out)
        # [sdp_utils] check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120.
        if 192 < q.shape[-1] <= 224 and ((8, 6) <= self.device.capability <= (8, 9) or self.device.capability[0] == 12):
            raise RuntimeError("Flash attention currently doesn't support training with head_dim in (192, 224] here")
        # [flash_api] the kernel reads lse as [B, H, N], of packed calls as [H, total], in fp32 without strides.
        assert lse.is_contiguous() and lse.dtype == torch.float32 and rest[4:6] == (0.0, False)
        assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
        # [flash_api] dq, dk and dv are empty_like: what no sequence holds stays arbitrary.
        results = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for rows, keys, bias in self._sequences(q, k, rest[:4], window):
            runs = (rows, rows, keys, keys, rows)
            one = (x[run].transpose(0, 1)[None] for x, run in zip((grad, q, k, v, out), runs, strict=True))
            parts = differentiate(*one, lse.mT[rows].mT[None], bias, scale)
            for x, run, part in zip(results, (rows, keys, keys), parts, strict=True):
                x[run] = part[0].transpose(0, 1).to(x.dtype)
        return results

    def _check_cudnn(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """What cuDNN refuses, or computes wrongly, of q [B, H, N, D], k and v."""
        # [sdp_utils] check_cudnn_tensor_shapes: 256 only on 9.0, and no backward of so many on 10.0.
        if max(q.shape[-1], v.shape[-1]) > 128:
            raise RuntimeError("head_dim should be no more than 128")
        # [sdp_utils] "cudnn SDPA does not support key/value sequence length 1"; one query row: cudnn-frontend 1072.
        if min(q.shape[2], k.shape[2]) == 1:
            raise RuntimeError("cuDNN does not support sequence length 1")
        # [issue 193893] silently wrong on sm_100 with fewer than 8 key/value heads.
        if self.device.capability[0] == 10 and k.shape[1] < 8:
            raise RuntimeError("cuDNN is silently wrong with few key/value heads on sm_100")
        # [issue 196678] NaN in dq for a last tile of 64 keys, mended in cuDNN 9.26.
        if k.shape[2] % 128 and (self.device.cudnn or 0) < WHOLE_TILES_CUDNN:
            raise RuntimeError("NaN in the gradients of a partial tile of keys")

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
        self._begin("cudnn", q, k, v)
        check_readable(*(x.transpose(1, 2) for x in (q, k, v)))
        self._check_cudnn(q, k, v)
        out, total = attend(q, k, v, top_left(q.shape[2], k.shape[2], causal), scale)
        # [MHA] alloc_with_matching_layout: out has the layout of q; softmaxstats are [B, H, S, 1] in fp32.
        return torch.empty_like(q).copy_(out), total.float().unsqueeze(-1)

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
    ) -> Any:
        self._begin("cudnn backward", q, k, v)
        check_readable(*(x.transpose(1, 2) for x in (grad, q, k, v, out)))
        self._check_cudnn(q, k, v)
        assert lse.is_contiguous() and lse.dtype == torch.float32 and lse.shape == (*q.shape[:3], 1)
        # [MHA] MHAParams, the key of the cache: dtype, sizes and strides of q, k and v, is_causal, and no strides of
        # dO, out and lse. A second layout under a key is read with the strides of the first. Dimensions of size 1
        # have no stride, as in same_strides.
        key = (q.dtype, rest[-1], *((x.shape, x.stride()) for x in (q, k, v)))
        strides = tuple(tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1) for x in (grad, out))
        if self.plans.setdefault(key, strides) != strides:
            raise RuntimeError(f"a plan of cuDNN for {self.plans[key]} reads dO and out of {strides}")
        bias = top_left(q.shape[2], k.shape[2], rest[-1])
        return [x.to(q.dtype) for x in differentiate(grad, q, k, v, out, lse.squeeze(-1), bias, scale)]

    def _efficient_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float, window_size: int | None = None
    ) -> Any:
        self._begin("efficient", q, k, v)
        check_readable(q, k, v)
        # [attention.cu] "query.size(2) == key.size(2)": as many heads of keys as of queries.
        assert q.shape[2] == k.shape[2] == v.shape[2] and rest[:6] == (None, None, None, None, None, 0.0)
        hidden = efficient_mask(q.shape[1], k.shape[1], rest[6], window_size)
        out, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), hidden, scale)
        # [kernel_forward] kAlignLSE: lse is padded to a multiple of 32 rows with inf.
        lse = torch.nn.functional.pad(lse.float(), (0, -lse.shape[-1] % 32), value=torch.inf)
        return out.to(q.dtype).transpose(1, 2).contiguous(), lse

    def _efficient_attention_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Any,
        scale: float,
        num_splits_key: int | None = None,
        window_size: int | None = None,
    ) -> Any:
        self._begin("efficient backward", q, k, v)
        bias, out, lse, mask_type = rest[0], rest[1], rest[6], rest[10]
        check_readable(grad, q, k, v, out)
        assert q.shape[2] == k.shape[2] == v.shape[2] and bias is None and rest[4:6] == (q.shape[1], k.shape[1])
        # [kernel_backward] lse_strideH "should be a multiple of kAlignLSE"; rows beyond the last are read, and inf.
        assert lse.shape[-1] % 32 == 0 and lse.dtype == torch.float32 and (lse[..., q.shape[1] :] == torch.inf).all()
        _batch, rows, heads, width = out.shape
        # [kernel_backward] o_strideM() is head_dim_value * num_heads: the strides of a contiguous out are taken for
        # granted.
        out = out.as_strided(out.shape, (rows * heads * width, heads * width, width, 1))
        # torch 2.11 on an H200: the backward counts a window from the first row and key, whatever the mask type.
        hidden = efficient_mask(rows, k.shape[1], mask_type, None)
        hidden += 0 if window_size is None else hide(distances(rows, k.shape[1]) < window_size)
        grads = differentiate(*(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse[..., :rows], hidden, scale)
        return [x.to(q.dtype).transpose(1, 2) for x in grads]


def emulate(
    patch: pytest.MonkeyPatch, device: CudaDevice = HOPPER, *, any_dtype: bool = False, cudnn_rows: int = 2
) -> EmulatedOps:
    """Emulated ops in place of torch's, `device` in place of a GPU, and CPU tensors taken for CUDA tensors.

    `any_dtype`: the kernels that a name chooses treat fp32 as a 16-bit dtype. `cudnn_rows`: the least rows and keys of
    a call of cuDNN, which are few here so that small calls test it.
    """
    ops = EmulatedOps(device, any_dtype=any_dtype)

    def check(self: AtenCuda, q: Tensor, k: Tensor, v: Tensor) -> None:
        if any_dtype and self.choice in ("flash", "cudnn") and self.dtype == torch.float32:
            self.dtype = torch.float16
        self.use(device, max(q.shape[-1], v.shape[-1]))

    patch.setattr(aten_cuda, "_aten", ops)
    patch.setattr(CudaDevice, "read", classmethod(lambda cls, place=None: device))
    patch.setattr(AtenCuda, "check", check)
    patch.setattr(cuda_device, "CUDNN_ROWS", cudnn_rows)
    return ops
