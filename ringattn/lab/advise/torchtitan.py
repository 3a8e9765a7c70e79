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
#: Configurations whose products are in 8 bits, and those of a model that has others: with blocks of 32, on Blackwell.
IN_FP8 = {"llama3_405b": "llama3_405b", "deepseek_v3": "deepseek_v3_671b_float8"}
IN_BLOCKS = {"llama3_8b": "llama3_8b_mxfp8"}
#: GPUs of a host, for machines whose nodes are racks of several hosts.
IN_HOST = {"gb200_nvl72": 4, "gb300_nvl72": 4}
#: Modules whose attention, by calls for packed documents, refuses context parallelism.
VARLEN = ("gpt_oss",)


def configuration(model: ModelConfig, machine: Machine, parallel: Parallel) -> tuple[str, str]:
    """(module, function) of torchtitan's configuration; of why there is none, ("", the beginning of a sentence)."""
    name, software = model.name, parallel.software
    if name not in CONFIGS:
        return "", f"torchtitan {RELEASE} has no configuration of {name}"
    module, config = CONFIGS[name]
    if parallel.cp > 1 and module in VARLEN:
        return "", f"torchtitan {RELEASE} refuses context parallelism of {name}"
    if software.lora is not None:
        return "", f"torchtitan {RELEASE} has adapters only in configurations of your own"
    if software.fp8:
        blackwell = machine.preset.startswith(("b200", "b300", "gb200", "gb300"))
        config = IN_FP8.get(name) or (IN_BLOCKS.get(name, "") if blackwell else "")
    elif name == IN_FP8.get(name):  # its only configuration
        config = ""
    if not config:
        return "", f"torchtitan {RELEASE} has no configuration of {name} in this precision"
    return module, config


def attends(model: ModelConfig) -> str:
    """What its configuration of this model computes attention by."""
    return "calls for packed documents" if CONFIGS[model.name][0] in VARLEN else "FlexAttention"


def as_torchtitan(tokens: int, parallel: Parallel) -> Parallel:
    """The same parallelism as torchtitan would run it.

    torchtitan gathers all keys before the attention. Its checkpointing can neither save only the output of attention
    nor offload activations to the host: these become "full", which computes each layer to its end again.
    """
    rows, asked = parallel.rows // parallel.count * ceil(tokens / parallel.cp), parallel.software
    same = {name: getattr(asked, name) for name in ("dtype", "fp8", "fp8_blocks", "hides_exchanges")}
    software = replace(TORCHTITAN, **same, stops_early=False, loss_rows=ceil(rows / CHUNKS))
    return replace(
        parallel,
        schedule="allgather" if parallel.cp > 1 else parallel.schedule,
        checkpointing=parallel.checkpointing if parallel.checkpointing in ("none", "selective") else "full",
        software=software,
    )


def command(model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel) -> str:
    """The command that trains a model this way; on several nodes, $HOST names the first one.

    Experts are split over ep x tp ranks, as torchtitan splits them over the ranks of tp, too.
    """
    node = min(IN_HOST.get(machine.preset, machine.ranks_per_node), parallel.gpus)
    nodes, same = parallel.gpus // node, as_torchtitan(tokens, parallel)
    module, config = configuration(model, machine, parallel)
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
    if parallel.software.hides_exchanges and parallel.tp > 1:
        flags.append("--compile.enable_async_tensor_parallel")
    meeting = " --rdzv_backend c10d --rdzv_endpoint $HOST:29500" if nodes > 1 else ""
    return (
        f"torchrun --nnodes {nodes} --nproc_per_node {node}{meeting} -m torchtitan.train {' '.join(flags)} "
        f"activation-checkpoint:{same.checkpointing}"
    )
