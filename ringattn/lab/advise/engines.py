"""The commands of vLLM and SGLang that serve a candidate, by the names of their releases on PyPI."""

from __future__ import annotations

from dataclasses import dataclass

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


def starts(machine: Machine, parallel: Parallel) -> bool:
    """Whether servers without cp, each on one host, are this spread: of a dp group, or of all that share experts."""
    groups, host = _groups(parallel), IN_HOST.get(machine.preset, machine.ranks_per_node)
    return parallel.cp == 1 and parallel.ep in (1, groups) and groups * parallel.tp <= host


def _groups(parallel: Parallel) -> int:
    """The number of dp groups in a server."""
    return parallel.dp if parallel.ep > 1 else 1


def command(engine: Engine, model: ModelConfig, tokens: int, parallel: Parallel) -> str:
    """The command of a server for `tokens` and a token after them; "" if it has no option for the weights in 8 bits."""
    software, groups, quantized = parallel.software, _groups(parallel), ""
    if software.fp8 and model.attention_item is None:  # else stored so
        quantized = engine.blocks if software.fp8_blocks else engine.tensors
        if not quantized or model.mlp_item is not None:
            return ""
    rows, degrees = parallel.rows, f"--tensor-parallel-size {parallel.tp}"
    if groups > 1 and engine.name.startswith("vLLM"):
        degrees += f" --data-parallel-size {groups} --enable-expert-parallel"
    elif groups > 1:  # whose groups are within tp, and share its limit of sequences
        rows, gpus = rows * groups, groups * parallel.tp
        degrees = f"--tensor-parallel-size {gpus} --attention-data-parallel-size {groups} --expert-parallel-size {gpus}"
    cache = engine.cache if software.fp8_cache else "auto"
    options = (
        f"--{engine.length} {tokens + 1} --{engine.users} {rows} --dtype {software.dtype} --kv-cache-dtype {cache}"
    )
    return f"{engine.start} {degrees} {options}{f' --quantization {quantized}' if quantized else ''}"
