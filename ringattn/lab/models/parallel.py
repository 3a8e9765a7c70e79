"""How a model is spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from ...text import did_you_mean
from .config import ModelConfig
from .packing import Lognormal, draw

#: What a layer saves for its backward: everything; its input and the outputs of attention and of every second
#: product, as torchtitan's "selective op"; its input and the output of attention; only its input. "offload": its input,
#: in the memory of the host. "host": as are gradients and the optimizer's states, and the MLP computes one tile of rows
#: after another (ALST, arXiv:2506.13996). "heads": the same, and a rank computes attention for one of its key/value
#: heads after another, each from its projections to its output (headwise chunks: UPipe, arXiv:2602.21196).
CHECKPOINTING = ("none", "selective", "attention", "full", "offload", "host", "heads")
#: What the dp x cp ranks hold in shards: ZeRO 0, 1, 2 and 3.
SHARDS = ("none", "optimizer", "gradients", "weights")


@dataclass(frozen=True)
class Software:
    """How a framework runs a layer. The defaults are those of this library with torch.compile."""

    #: Dtype of the activations, and of the weights that compute with them.
    dtype: str = "bfloat16"
    #: Whether a layer's products run in 8 bits, with casts, attention excepted; the output matrix never does.
    fp8: bool = False
    #: Whether each block of 128 weights or inputs has its own scale in 8 bits, or else each tensor.
    fp8_blocks: bool = False
    #: Whether keys and values are kept in 8 bits for the tokens to come.
    fp8_cache: bool = False
    #: Rank of the adapters beside each matrix of frozen weights (LoRA); None: all weights are trained.
    lora: int | None = None
    #: Whether norms, rotary positions, gates and the loss are fused; if not, each of their steps is a kernel.
    compiled: bool = True
    #: Whether recomputing a layer skips its last product, which no backward reads (PyTorch from 2.1 on).
    stops_early: bool = True
    #: Rows whose logits exist at once: `chunk` of train.linear_cross_entropy; None: all.
    loss_rows: int | None = 512
    #: Whether each tensor-parallel rank computes the loss of its own columns of the logits; if not, of all columns.
    splits_loss: bool = True
    #: How often a tensor-parallel rank gathers or reduces the activations in a forward, and again in a backward: around
    #: attention and around the MLP (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    #: Models", 2022). 7 where q, k, v, gate and up gather their input one by one.
    exchanges: int = 4
    #: Whether products hide these exchanges (asynchronous tensor parallelism).
    hides_exchanges: bool = False
    #: Bytes per parameter: weight, gradient, and optimizer state with the fp32 weight (Rajbhandari et al., "ZeRO:
    #: Memory Optimizations Toward Training Trillion Parameter Models", 2020; gradients have 16 bits there, and here
    #: fp32, in which FSDP reduces them).
    states: tuple[int, int, int] = (2, 4, 12)

    def __post_init__(self) -> None:
        if self.lora is not None and self.lora < 1:
            raise InvalidInput(f"lora={self.lora}: the rank must be at least 1; try lora=16")


#: torchtitan with FSDP: fp32 shards, from which it gathers bf16, and a loss over all logits.
TORCHTITAN = Software(states=(4, 4, 8), loss_rows=None)


@dataclass(frozen=True)
class Parallel:
    """How many GPUs each kind of parallelism takes, and its options. Raises InvalidInput for values out of range.

    Ranks are numbered tp first, then cp, then dp, so that the ranks of a tensor-parallel group are neighbours.
    """

    #: Ranks that share a sequence; replicas of these ranks; ranks that share each matrix.
    cp: int = 1
    dp: int = 1
    tp: int = 1
    #: Neighbouring ranks of dp x cp that share a layer's experts, where tp shards each expert.
    ep: int = 1
    layout: str = "zigzag"
    schedule: str = "auto"
    checkpointing: str = "full"
    shard: str = "weights"
    #: Sequences per dp group in a step.
    rows: int = 1
    software: Software = Software()
    #: Stages of a pipeline (1F1B), each of cp x dp x tp GPUs.
    pp: int = 1
    #: Micro-batches per dp group and step; None: one per sequence, or one in all without stages.
    micro_batches: int | None = None
    #: Parts of the layers that each stage holds.
    interleaved: int = 1
    #: Tokens of each document that is packed in a sequence, or their distribution; (): one document.
    documents: tuple[int, ...] | Lognormal = ()

    def __post_init__(self) -> None:
        for name in ("cp", "dp", "tp", "ep", "rows", "pp", "micro_batches", "interleaved"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and (name, value) != ("micro_batches", None):
                raise InvalidInput(f"{name}={value!r} must be a whole number >= 1; try {name}=1")
        for name, options in (("checkpointing", CHECKPOINTING), ("shard", SHARDS)):
            value = getattr(self, name)
            if value not in options:
                raise InvalidInput(
                    f"{name}={value!r}: {did_you_mean(value, options)}expected one of {', '.join(options)}"
                )

    @property
    def group(self) -> int:
        """The number of ranks (cp x dp) that shard weights, gradients or optimizer states, as `shard` says."""
        return self.cp * self.dp

    @property
    def stage(self) -> int:
        """GPUs of a stage."""
        return self.group * self.tp

    @property
    def gpus(self) -> int:
        """All GPUs of the job."""
        return self.pp * self.stage

    @property
    def name(self) -> str:
        """The ranks of each kind as text, without the numbers that are 1."""
        numbers = {name: getattr(self, name) for name in ("cp", "dp", "tp", "pp", "ep")}
        return " ".join(f"{name}={number}" for name, number in numbers.items() if number > 1) or "one GPU"

    @property
    def recomputes_all(self) -> bool:
        """Whether a backward computes attention again."""
        return self.checkpointing == "full" or self.uses_host

    @property
    def uses_host(self) -> bool:
        """Whether inputs of layers are in the memory of the host."""
        return self.checkpointing == "offload" or self.trains_on_host

    @property
    def trains_on_host(self) -> bool:
        """Whether gradients and the optimizer's states are in the memory of the host, too."""
        return self.checkpointing in ("host", "heads")

    def pieces(self, model: ModelConfig) -> int:
        """In how many pieces a rank computes the attention of a layer: each of one key/value head, or all at once."""
        return max(model.kv_heads // self.tp, 1) if self.checkpointing == "heads" else 1

    def lengths(self, tokens: int, sequence: int = 0) -> tuple[int, ...]:
        """Tokens of each document in a sequence of `tokens`, all packed alike unless drawn; (): one document."""
        return draw(self.documents, tokens, sequence) if isinstance(self.documents, Lognormal) else self.documents

    @property
    def count(self) -> int:
        """The number of micro-batches in a step of one dp group."""
        return self.micro_batches or (self.rows if self.pp > 1 else 1)

    def check(self, model: ModelConfig, machine: Machine, tokens: int) -> None:
        """Raise InvalidInput where the model, the nodes, the tokens or the sequences cannot be split this way."""
        node = machine.ranks_per_node
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < self.cp:
            raise InvalidInput(
                f"tokens={tokens!r} must be a whole number of at least cp={self.cp}; try tokens={max(65536, self.cp)}"
            )
        recurrent = 0 if model.recurrence is None else model.recurrence.heads
        whole = (model.heads, model.mlp, recurrent)
        if any(count % self.tp for count in whole) or (model.kv_heads % self.tp and self.tp % model.kv_heads):
            raise InvalidInput(
                f"tp={self.tp} does not divide the {model.heads} heads, {model.kv_heads} key/value heads and "
                f"{model.mlp} MLP columns of {model.name}{f', {recurrent} recurrent heads' if recurrent else ''}; try "
                f"a power of two up to {model.kv_heads}"
            )
        dtype = self.software.dtype
        if dtype not in ITEM_BYTES or ITEM_BYTES[dtype] != ITEM_BYTES[machine.flops_dtype or dtype]:
            raise InvalidInput(
                f"dtype={dtype}: this machine's rates are for {machine.flops_dtype}; try "
                f"dtype={machine.flops_dtype}, or a machine with flops= and without flops_dtype"
            )
        self._check_support(model, machine)
        if self.documents and (given := sum(self.lengths(tokens))) != tokens:
            raise InvalidInput(
                f"documents: their {given:,} tokens do not fill a sequence of {tokens:,}; give the rest as one more "
                f"document, or tokens={given}"
            )
        if model.experts == 1 < self.ep:
            raise InvalidInput(f"ep={self.ep}: {model.name} has no experts; leave ep out")
        if (most := gcd(model.experts - model.shared, self.group)) % self.ep:
            raise InvalidInput(
                f"ep={self.ep} does not divide the {model.experts} experts of {model.name} and the cp x dp = "
                f"{self.group} ranks that share them; try ep={most}"
            )
        if node > 1 and self.stage > node and node % self.tp and self.tp % node:
            raise InvalidInput(f"tp={self.tp} splits nodes of {node} GPUs unevenly; try a divisor of {node}")
        if self.pp * self.interleaved > model.layers:
            raise InvalidInput(
                f"pp={self.pp} interleaved={self.interleaved}: {model.name} has {model.layers} layers, and each part "
                "of a stage needs one; give fewer stages or parts"
            )
        if self.rows % (self.micro_batches or 1):
            raise InvalidInput(
                f"micro_batches={self.micro_batches} must divide the batch={self.rows} sequences of a dp group; try "
                f"batch={self.micro_batches}"
            )
        if self.interleaved > 1 and self.count % self.pp:
            raise InvalidInput(
                f"interleaved={self.interleaved} needs a multiple of pp={self.pp} micro-batches, but there are "
                f"{self.count}; try batch={self.pp}"
            )

    def _check_support(self, model: ModelConfig, machine: Machine) -> None:
        """Raise InvalidInput where the machine lacks a rate, or the model has no heads to take one by one."""
        if model.latent is not None and self.checkpointing == "heads":
            raise InvalidInput(f"checkpointing=heads: all heads of {model.name} share latents; try checkpointing=host")
        if self.software.fp8 and machine.matmul_fp8 is None:
            raise InvalidInput(
                f"fp8=true: {machine.preset or 'this machine'} has no rate for 8-bit products; leave fp8 out, or "
                "give machine.matmul_fp8="
            )
        if self.uses_host and machine.host_bandwidth is None:
            raise InvalidInput(
                f"checkpointing={self.checkpointing}: {machine.preset or 'this machine'} has no rate to the host's "
                "memory; give machine.host_bandwidth="
            )


@lru_cache(maxsize=64)
def busiest_stage(model: ModelConfig, tokens: int, stages: int) -> ModelConfig:
    """A model with only the layers of the pipeline stage that takes longest; cached, as a search asks many times.

    It has the largest number of layers, those with the most work, and either the embedding or the output matrix. Its
    weights are stored in the dtype of training, not in that of the published model.
    """
    layers, work = ceil(model.layers / stages), model.work(tokens)
    starts = range(0, model.layers - layers + 1, layers)
    start = max(starts, key=lambda one: sum(work[one : one + layers]))
    stage = model.part(start, start + layers)
    return replace(stage, mlp_item=None, attention_item=None, tied=model.tied or stages > 1)
