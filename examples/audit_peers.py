"""Other libraries as targets of `ringattn audit`: in this folder, `ringattn audit audit_peers:torch_ring`.

Each function needs the library that its first line names. docs/audit.md has what was found: the table that
`python audit_peers.py FOLDER` prints, which keeps the record of each library in the folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
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

    if window is not None and not q.is_cuda:  # the stand-in's windows have no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
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


def deepspeed_ulysses(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> Tensor:
    """DeepSpeed's Ulysses: its DistributedAttention, around PyTorch's attention; its own exchange of heads."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():  # without its all-reduce for CPUs, which it would compile
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist.get_backend(), verbose=False)
    attention: Any = DistributedAttention(_attend_rows, group, 2, 1)  # exchanges heads and rows of [B, N, H, D]
    rows = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return attention(*rows, 0, causal=causal, softmax_scale=scale).transpose(1, 2)


def torchtitan(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int | None = None,
    documents: tuple[int, ...] = (), scale: float | None = None,
) -> Tensor:  # fmt: skip
    """torchtitan's FlexAttention with all ranks' keys; on CPUs PyTorch's attention in place of the compiled kernel."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.distributed.context_parallel import apply_cp_to_forward
    from torchtitan.models.common.attention import FlexAttention

    first, tokens = dist.get_rank(group) * q.shape[2], dist.get_world_size(group) * q.shape[2]
    number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents or (), dtype=torch.int64))

    def see(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        row = row + first
        seen = (row >= key) if causal else (row >= 0) & (key >= 0)
        seen = seen if window is None else seen & (row - key <= window)
        return seen & (number.to(q.device)[row] == number.to(q.device)[key]) if documents else seen

    if not q.is_cuda:
        FlexAttention._compiled_flex_attn = staticmethod(_attend_masked)
    module: Any = FlexAttention(FlexAttention.Config())
    apply_cp_to_forward([module], DeviceMesh.from_group(group, q.device.type))
    masks = create_block_mask(see, None, None, q.shape[2], tokens, device=q.device.type)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return module(*rows, attention_masks=masks, scale=scale, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, **_: Any) -> tuple[Tensor, None]:
    """What FlexAttention's kernel computes."""
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, keys)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True), None


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


def torch_balanced(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, scale: float | None = None
) -> Tensor:
    """PyTorch's context parallelism with its load balancing, which accelerate leaves on: zigzag shards."""
    attend = torch_context if q.is_cuda else torch_ring
    return attend(q, k, v, group=group, causal=causal, scale=scale, balanced=True)


def accelerate(model: Any, batch: dict[str, Tensor], *, group: Any) -> Tensor:
    """Hugging Face's accelerate with `cp_size`, which shards parameters by FSDP2; a model of transformers.

    `ringattn audit audit_peers:accelerate model=LlamaForCausalLM`; needs CUDA, as it calls `context_parallel`.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig

    accelerator: Any = Accelerator(
        cpu=not torch.cuda.is_available(),
        parallelism_config=ParallelismConfig(cp_size=dist.get_world_size(group)),
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap"),
    )
    model, ids = accelerator.prepare(model), batch["input_ids"]
    places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
    with accelerator.maybe_context_parallel(buffers=[ids, places], buffer_seq_dims=[1, 1]):
        return model(input_ids=ids, position_ids=places, use_cache=False).logits


def ringattn_fsdp(model: Any, batch: dict[str, Tensor], *, group: Any) -> Tensor:
    """This library beside FSDP2: `ringattn audit audit_peers:ringattn_fsdp model=LlamaForCausalLM`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from ringattn.integrations.transformers import parallelize, shard_batch

    if not hasattr(model, "_get_fsdp_state"):  # a second call has it sharded
        model, mesh = parallelize(model, group, layout="contiguous"), DeviceMesh.from_group(group, model.device.type)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
    return model(**shard_batch(batch, group, layout="contiguous", shift=False), use_cache=False).logits


def convolve(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool, taps: tuple[float, ...]) -> Tensor:
    """This library's causal convolution, whose halos travel between ranks; the audit's q and k play no part."""
    from ringattn import causal_conv1d

    weight = torch.tensor(taps[::-1]).to(v).expand(v.shape[3], -1)
    rows = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    flat = rows.flatten(0, 1).mT  # a sequence for each head
    return causal_conv1d(flat, weight, layout="contiguous", group=group)[0].mT.reshape(rows.shape)


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


def _place(tokens: int, rank: int, ranks: int) -> Any:
    """The rows of a rank in this library's contiguous layout."""
    from ringattn import make_layout

    return make_layout("contiguous", tokens=tokens, ranks=ranks).positions(rank)


ringattn_fsdp.layout = convolve.layout = _place  # type: ignore[attr-defined]
for of_zigzag in (torch_balanced, accelerate, transformer_engine):
    of_zigzag.layout = "zigzag"  # type: ignore[attr-defined]
for of_16_bits in (ring_flash_attn, transformer_engine):  # their kernels take no others
    of_16_bits.dtype = "bfloat16"  # type: ignore[attr-defined]

#: Libraries in the table of docs/audit.md: by function, the distribution.
TABLE = {
    "ringattn": "ringattn", "ring_flash_attn": "ring-flash-attn", "ring_attention_pytorch": "ring-attention-pytorch",
    "torch_ring": "torch", "torch_balanced": "torch", "yunchang": "yunchang", "deepspeed_ulysses": "deepspeed",
    "torchtitan": "torchtitan",
}  # fmt: skip


def write_table(folder: str) -> None:
    """Audit each library, unless its record is in the folder, and print the table of docs/audit.md."""
    columns = {}
    for name, distribution in TABLE.items():
        path, target = Path(folder, f"{name}.json"), name if name == "ringattn" else f"audit_peers:{name}"
        if not path.exists():
            command = ["ringattn", "audit", target, "ranks=2", f"output.path={path}"]
            subprocess.run(command, check=False, stdout=sys.stderr)  # status 1 if anything is wrong
        features = json.loads(path.read_text())["features"]
        columns[f"{name} {version(distribution)}"] = {one["feature"]: one["verdict"] for one in features}
    print("| feature |", *(f"{head} |" for head in columns))
    print("|---|", *("---|" for _ in columns), sep="")
    for feature in columns[next(iter(columns))]:
        cells = [column.get(feature, {"verdict": "not tried"}) for column in columns.values()]
        told = (f"wrong ({one['tensor']})" if one["verdict"] == "wrong" else one["verdict"] for one in cells)
        print(f"| {feature} |", *(f"{one} |" for one in told))


if __name__ == "__main__":
    write_table(sys.argv[1])
