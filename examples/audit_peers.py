"""Other libraries as targets of `ringattn audit`: in this folder, `ringattn audit audit_peers:torch_ring`.

Each function needs the library that its first line names. docs/audit.md has what was found.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

Tensor = torch.Tensor


def ring_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """ring-flash-attention (zhuzilin): its ring of contiguous shards; on CPUs over a stand-in for its CUDA kernel."""
    from ringattn.lab.bench.suites.peers import import_ring_flash_attn

    window_size = (-1, -1) if window is None else (window, 0)
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": scale, "group": group}
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return import_ring_flash_attn().ring_flash_attn_func(*rows, **options).transpose(1, 2)


def ring_attention_pytorch(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int | None = None
) -> Tensor:
    """ring-attention-pytorch (lucidrains): its ring with a bucket for each rank; it rounds windows to whole buckets."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    options: dict[str, Any] = {"causal": causal, "bucket_size": q.shape[2], "ring_size": dist.get_world_size(group)}
    if window is not None:
        options["max_lookback_seq_len"] = window + 1
    return ring_flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), ring_reduce_col=True, **options).transpose(1, 2)


def yunchang(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> Tensor:
    """USP (yunchang): its Ulysses; on CPUs around PyTorch's attention in place of flash-attn."""
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    attention = UlyssesAttention(group, attn_type=AttnType.FA if q.is_cuda else AttnType.TORCH_FLASH)
    if not q.is_cuda:
        attention.attn_fn = _attend_rows
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return attention(*rows, causal=causal, softmax_scale=scale).transpose(1, 2)


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """One device's attention of [B, N, H, D]."""
    given: Any = {"enable_gqa": True, "is_causal": options["causal"], "scale": options["softmax_scale"]}
    return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **given).transpose(1, 2)


def torch_context(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, scale: float | None = None,
    dropout: float = 0.0, balanced: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's `context_parallel`, on contiguous shards; needs CUDA, as its operators have no sharding for CPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = balanced
    mesh = init_device_mesh(q.device.type, (dist.get_world_size(group),))
    shown = torch.empty(2 * mesh.size(), device=q.device)  # it cuts at least one buffer; our shards are cut already
    with context_parallel(mesh, buffers=[shown], buffer_seq_dims=[0]):
        return torch.nn.functional.scaled_dot_product_attention(  # the context replaces this function
            q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )


class _Template(torch.autograd.Function):
    """The private functions below `context_parallel`, with PyTorch's kernel for CPUs."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any, causal: bool, scale: float | None) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = ring._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = group, causal, scale, ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, causal, scale, ring = ctx.options
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        options: Any = {"is_causal": causal, "dropout_p": 0.0, "scale": scale}
        found = ring._templated_ring_attention_backward(
            group, 2, kernel, grad.contiguous(), "grad_out", *ctx.saved_tensors, **options
        )
        return *found[:3], None, None, None


def torch_ring(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, scale: float | None = None,
    balanced: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's ring on CPUs, by the private template below `context_parallel`."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = balanced
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))  # as the caller of the template does
    return _Template.apply(*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), group, causal, scale)


def accelerate(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> Tensor:
    """PyTorch's context parallelism with the load balancing that accelerate's `cp_size` leaves on: zigzag shards."""
    attend = torch_context if q.is_cuda else torch_ring
    return attend(q, k, v, group=group, causal=causal, scale=scale, balanced=True)


def transformer_engine(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int | None = None,
    scale: float | None = None, dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """TransformerEngine's context parallelism by point-to-point messages, zigzag shards; needs CUDA."""
    from transformer_engine.pytorch import DotProductAttention

    module: Any = DotProductAttention(
        q.shape[1], q.shape[3], num_gqa_groups=k.shape[1], qkv_format="bshd", softmax_scale=scale,
        attn_mask_type="causal" if causal else "no_mask", attention_dropout=dropout,
        window_size=(-1, 0 if causal else -1) if window is None else (window, 0),
    ).to(q.device)  # fmt: skip
    module.set_context_parallel_group(group, dist.get_process_group_ranks(group), torch.cuda.Stream(), "p2p")
    out = module(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    return out.unflatten(2, (q.shape[1], v.shape[3])).transpose(1, 2)


for of_zigzag in (accelerate, transformer_engine):
    of_zigzag.layout = "zigzag"  # type: ignore[attr-defined]
for of_16_bits in (ring_flash_attn, transformer_engine):  # their kernels take no others
    of_16_bits.dtype = "bfloat16"  # type: ignore[attr-defined]
