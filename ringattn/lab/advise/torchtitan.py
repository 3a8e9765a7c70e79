"""What torchtitan makes of a candidate: its step, and the command that starts it, by the names of its release."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ...machine.machine import Machine
from ..models.config import ModelConfig
from ..models.parallel import TORCHTITAN, Parallel

#: The release whose configurations and options these are, of 2026-09-03, as on PyPI. It does not read TOML files; its
#: main branch has since taken the options away, so that every configuration is a function there.
RELEASE = "0.3.0"
#: Parts in which its loss computes logits.
CHUNKS = 8
#: The module and the function of the configuration of a model.
CONFIGS = {
    **{name: ("llama3", name) for name in ("llama3_8b", "llama3_70b", "llama3_405b")},
    **{name: ("gpt_oss", name) for name in ("gpt_oss_20b", "gpt_oss_120b")},
    "deepseek_v2_lite": ("deepseek_v3", "deepseek_v3_16b"),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3_671b"),
}
#: Configurations whose products are in 8 bits.
IN_FP8 = ("llama3_405b",)
#: GPUs of a host, for machines whose nodes are racks of several hosts.
IN_HOST = {"gb200_nvl72": 4}
#: Modules whose attention, by calls for packed documents, refuses context parallelism.
VARLEN = ("gpt_oss",)


def why_not(model: ModelConfig, parallel: Parallel) -> str:
    """Why torchtitan cannot train a model this way, as the beginning of a sentence; "" if it can."""
    if model.name not in CONFIGS:
        return f"torchtitan {RELEASE} has no configuration of {model.name}"
    if parallel.cp > 1 and CONFIGS[model.name][0] in VARLEN:
        return f"torchtitan {RELEASE} refuses context parallelism of {model.name}"
    return ""


def as_torchtitan(model: ModelConfig, tokens: int, parallel: Parallel) -> Parallel:
    """The same parallelism as torchtitan would run it.

    torchtitan gathers all keys before the attention. Its checkpointing can neither save only the output of attention
    nor offload activations to the host: both become "full", which computes each layer to its end again.
    """
    rows = parallel.rows // parallel.count * ceil(tokens / parallel.cp)
    fp8, dtype = CONFIGS[model.name][1] in IN_FP8, parallel.software.dtype
    return replace(
        parallel,
        schedule="allgather" if parallel.cp > 1 else parallel.schedule,
        checkpointing={"attention": "full", "host": "full"}.get(parallel.checkpointing, parallel.checkpointing),
        software=replace(TORCHTITAN, dtype=dtype, fp8=fp8, stops_early=False, loss_rows=ceil(rows / CHUNKS)),
    )


def command(model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel) -> str:
    """The command that trains a model this way; on several nodes, $HOST names the first one.

    Experts are split over ep x tp ranks, as torchtitan splits them over the ranks of tp, too.
    """
    node = min(IN_HOST.get(machine.preset, machine.ranks_per_node), parallel.gpus)
    same = as_torchtitan(model, tokens, parallel)
    nodes, (module, config) = parallel.gpus // node, CONFIGS[model.name]
    replicated = parallel.shard == "none"
    schedule = "Interleaved1F1B" if parallel.interleaved > 1 else "1F1B"
    options: dict[str, object] = {
        "module": module,
        "config": config,
        "training.seq_len": tokens,
        "training.local_batch_size": parallel.rows,
        "parallelism.data_parallel_replicate_degree": parallel.dp if replicated else 1,
        "parallelism.data_parallel_shard_degree": 1 if replicated else parallel.dp,
        "parallelism.fsdp_reshard_after_forward": "always" if parallel.shard == "weights" else "never",
        "parallelism.context_parallel_degree": parallel.cp,
        "parallelism.tensor_parallel_degree": parallel.tp,
        "parallelism.pipeline_parallel_degree": parallel.pp,
        "parallelism.expert_parallel_degree": parallel.ep * parallel.tp if model.experts > 1 else 1,
    }
    if parallel.cp > 1:
        options["parallelism.context_parallel_load_balancer"] = "ptrr"
    if parallel.pp > 1:
        options |= {"parallelism.pipeline_parallel_schedule": schedule}
    if parallel.interleaved > 1:
        layers = ceil(model.layers / (parallel.pp * parallel.interleaved))
        options["parallelism.pipeline_parallel_layers_per_stage"] = layers
        options |= {f"parallelism.pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    flags = [f"--{name} {value}" for name, value in options.items()] + ["--compile.enable"]
    if parallel.pp > 1 or (parallel.ep * parallel.tp > 1 and model.experts > 1):
        flags.append("--training.disable_cuda_graphs")
    meeting = " --rdzv_backend c10d --rdzv_endpoint $HOST:29500" if nodes > 1 else ""
    return (
        f"torchrun --nnodes {nodes} --nproc_per_node {node}{meeting} -m torchtitan.train {' '.join(flags)} "
        f"activation-checkpoint:{same.checkpointing}"
    )
