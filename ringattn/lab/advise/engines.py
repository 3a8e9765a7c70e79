"""The commands of vLLM and SGLang that serve a candidate, by the names of their releases on PyPI."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...machine.machine import Machine
from ..models.config import ModelConfig
from ..models.parallel import Parallel
from .torchtitan import IN_HOST


@dataclass(frozen=True)
class Engine:
    """A server of models: how it starts, its options that others name differently, and its context parallelism."""

    name: str
    start: str
    #: The options for the longest sequence, and for the sequences at once.
    length: str
    users: str
    #: What keys and values in 8 bits are called, and products in 8 bits with a scale for each tensor, and each block.
    cache: str
    tensors: str
    blocks: str
    #: What it splits over ranks of one sequence.
    splits: str


ENGINES = (
    Engine(
        name="vLLM 0.33.0",  # built on 2026-11-01
        start="vllm serve $MODEL",
        length="max-model-len",
        users="max-num-seqs",
        cache="fp8",
        tensors="fp8_per_tensor",
        blocks="fp8_per_block",
        splits="prompts only for models with latents (--prefill-context-parallel-size), and the keys of a decode over "
        "the ranks of tp (--decode-context-parallel-size), for latents or where tp exceeds the key/value heads",
    ),
    Engine(
        name="SGLang 0.5.23",  # built on 2026-10-30
        start="sglang serve --model-path $MODEL",
        length="context-length",
        users="max-running-requests",
        cache="fp8_e4m3",
        tensors="fp8",
        blocks="",
        splits="prompts (--enable-prefill-cp --attn-cp-size) and the keys of a decode (--dcp-size) over the ranks of "
        "tp, for some models",
    ),
)


def count_hosts(machine: Machine, parallel: Parallel) -> int:
    """The number of hosts that the ranks of a candidate are on."""
    return ceil(parallel.gpus / IN_HOST.get(machine.preset, machine.ranks_per_node))


def command(engine: Engine, model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel) -> tuple[str, str]:
    """(command for a host, "") that serves `tokens` and a token after them without cp, or ("", why there is none)."""
    software, hosts, quantized = parallel.software, count_hosts(machine, parallel), ""
    if parallel.dp % hosts:
        return "", f"no command, as dp={parallel.dp} groups of tp={parallel.tp} do not fill {hosts} hosts evenly"
    if software.fp8 and model.attention_item is None:  # else stored so
        quantized = engine.blocks if software.fp8_blocks else engine.tensors
        if not quantized or model.mlp_item is not None:
            return "", "no command, as it has no option for such products in 8 bits"
    options = {
        "tensor-parallel-size": parallel.tp,
        "data-parallel-size": parallel.dp // hosts,
        engine.length: tokens + 1,
        engine.users: parallel.rows,
        "dtype": software.dtype,
        "kv-cache-dtype": engine.cache if software.fp8_cache else "auto",
        **({"quantization": quantized} if quantized else {}),
    }
    return " ".join([engine.start, *(f"--{name} {value}" for name, value in options.items())]), ""
