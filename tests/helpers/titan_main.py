"""examples/torchtitan/train_ring.py on CPU ranks: `titan_main.py MODEL OUT options...` trains a tiny model.

OUT gets [loss, gradient norm] of each step. torchtitan knows no CPUs; what it misses there is below.
"""
# ruff: noqa: E402 (torchtitan reads the device and the command line when it is imported)

from __future__ import annotations

import json
import os
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

CLASSES, EOS = 101, 0
model, out = sys.argv[1:3]
base, attention = model.split(":")
sys.argv[1:] = [*sys.argv[3:], "--model.name", base, "--model.flavor", "tiny"]
torch.set_num_threads(1)
torch._utils._get_available_device_type = lambda: "cpu"  # else torchtitan takes CUDA
MEMORY: dict[str, Any] = {  # of a monitor of device memory
    "get_device_name": lambda device=None: "cpu",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 34),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
}
for name, function in MEMORY.items():
    setattr(torch.cpu, name, function)
histc = torch.histc
torch.histc = lambda x, **options: histc(x.float(), **options).to(x.dtype)  # integers, which a router counts

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torchtitan"))
import torchtitan.train as titan
import train_ring
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

titan.dist_utils.set_pg_timeouts = lambda **_: None  # a barrier with the number of a device


def dense(
    self: Any, q: Any, k: Any, v: Any, *, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    return_lse: bool = False, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """flex_attention, which has no backward on CPUs, for one process."""
    rows = torch.arange(q.shape[2])
    b = torch.arange(len(q))[:, None, None]
    seen = block_mask.mask_mod(b, b * 0, rows[:, None], rows).expand(len(q), len(rows), len(rows))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen[:, None], -torch.inf)
    result = scores.softmax(-1) @ v
    return (result, scores.logsumexp(-1)) if return_lse else result


if os.environ["WORLD_SIZE"] == "1":
    FlexAttentionWrapper.forward = dense
MOE = {"num_experts": 4, "num_shared_experts": 0, "score_func": "softmax", "route_norm": True, "gate_bias": True}
SMALL: dict[str, dict[str, Any]] = {
    "llama3": {"multiple_of": 16},
    "qwen3": {"head_dim": 8, "hidden_dim": 48, "enable_weight_tying": False},
    "gpt_oss": {
        "head_dim": 8, "moe_inter_dim": 48, "sliding_window_size": 7, "attn_mask_type": "block_causal",
        "moe_args": MoEArgs(**MOE, score_before_experts=False, top_k=2, use_grouped_mm=False, load_balance_coeff=None),
    },
}  # fmt: skip
sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": CLASSES, **SMALL[base]}
if attention == "documents" and base != "gpt_oss":
    sizes |= {"attn_type": "flex", "attn_mask_type": "block_causal"}


class Loader:
    """Random tokens with documents of other borders in each row; the data do not depend on the ranks."""

    def __init__(self, *, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> None:
        self.shape = job_config.training.local_batch_size, job_config.training.seq_len + 1
        self.ranks, self.rank = dp_world_size, dp_rank

    def __iter__(self) -> Any:
        batch, tokens = self.shape
        for step in range(10**6):
            rows = torch.randint(CLASSES, (batch * self.ranks, tokens), generator=torch.Generator().manual_seed(step))
            rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(step)) < 0.1] = EOS
            mine = rows[batch * self.rank : batch * (self.rank + 1)]
            yield {"input": mine[:, :-1].contiguous()}, mine[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}


spec = get_train_spec(base)
register_train_spec(
    base,
    replace(
        spec,
        model_cls=lambda sizes: spec.model_cls(sizes).float(),  # layers of GPT-OSS are made in bf16
        model_args={"tiny": replace(spec.model_args["debugmodel"], **sizes)},
        build_tokenizer_fn=lambda config: SimpleNamespace(eos_id=EOS),
        build_dataloader_fn=Loader,
        build_validator_fn=None,
    ),
)
found: list[tuple[float, float]] = []


class Trainer(train_ring.RingTrainer):
    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        (model,) = self.model_parts
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
        for name, parameter in model.named_parameters():  # torch's own depend on the number of ranks
            name = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
            x = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            x = 1 + x / 10 if "norm" in name else x / 2 if x.ndim == 1 else x * x.shape[-1] ** -0.5
            if isinstance(parameter, DTensor):
                x = distribute_tensor(x, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.detach().copy_(x)
        self.metrics_processor.log = lambda step, mean, most, norm, **_: found.append((float(mean), float(norm)))


titan.main(Trainer)
if os.environ["RANK"] == "0":
    Path(out).write_text(json.dumps(found))
