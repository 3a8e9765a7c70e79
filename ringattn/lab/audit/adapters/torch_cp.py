"""PyTorch's context parallelism (torch.distributed.tensor.experimental), contiguous.

On CUDA by `context_parallel`; on CPUs by the private template below it, as its operators have no sharding for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.nn import functional

CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Template(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any, causal: bool, scale: float | None) -> torch.Tensor:
        out, lse, *_ = ring._templated_ring_attention(group, 2, CPU_FORWARD, q, k, v, is_causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = group, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, causal, scale = ctx.options
        found = ring._templated_ring_attention_backward(
            group, 2, CPU_BACKWARD, grads[0].contiguous(), "grad_out", q, k, v, out, lse, is_causal=causal,
            dropout_p=0.0, scale=scale,
        )  # fmt: skip
        return *found[:3], None, None, None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    balanced: bool = False,
) -> torch.Tensor:
    """PyTorch's context-parallel attention on contiguous shards, or on zigzag shards if `balanced`."""
    ranks = torch.distributed.get_world_size(group)
    ring._cp_options.enable_load_balance = balanced
    if q.device.type == "cpu":
        if dropout:
            raise NotImplementedError("PyTorch's context-parallel attention has no dropout")
        # As scaled_dot_product_attention does before the template.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return _Template.apply(q, k, v, group, causal, scale)
    mesh = init_device_mesh(q.device.type, (ranks,))
    shown = torch.empty(2 * ranks, device=q.device)  # the context cuts at least one buffer; our shards are cut already
    with context_parallel(mesh, buffers=[shown], buffer_seq_dims=[0]):
        return functional.scaled_dot_product_attention(  # the context replaces this function
            q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
        )
