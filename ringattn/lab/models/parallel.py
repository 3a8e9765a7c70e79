"""How a model is spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ...errors import InvalidInput
from ...machine.machine import Machine
from ...text import did_you_mean
from .config import ModelConfig

#: What a layer keeps for its backward: all; its input, the output of attention and those of every other product, as
#: torchtitan's "selective op"; its input and the output of attention; its input alone.
CHECKPOINTING = ("none", "selective", "attention", "full")
#: What the ranks of dp x cp hold in shards instead of whole: ZeRO 0, 1, 2 and 3.
SHARDS = ("none", "optimizer", "gradients", "weights")


def check_counts(**counts: object) -> None:
    """Raise InvalidInput where one is no whole number >= 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{name}={value!r} must be a whole number >= 1; try {name}=1")


@dataclass(frozen=True)
class Software:
    """What a framework does with a layer. The defaults are those of this library with torch.compile."""

    #: Whether the products of layers but those of attention are in 8 bits, with casts; the output matrix never is.
    fp8: bool = False
    #: Whether norms, rotary positions, gates and the loss are fused; if not, each step of them is a kernel.
    compiled: bool = True
    #: Whether computing a layer again leaves out its last product, which no backward reads (PyTorch from 2.1 on).
    stops_early: bool = True
    #: Rows whose logits exist at once: `chunk` of train.linear_cross_entropy; None: all.
    loss_rows: int | None = 512
    #: Whether a rank of tensor parallelism computes the loss of its columns of the logits; if not, of all.
    splits_loss: bool = True
    #: Times that a rank of tensor parallelism gathers or reduces the activations in a forward, and again in a backward:
    #: around attention and around the MLP (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    #: Models", 2022). 7 where q, k, v, gate and up gather their input one by one.
    exchanges: int = 4
    #: Whether products hide them (asynchronous tensor parallelism).
    hides_exchanges: bool = False
    #: Bytes of a parameter: weight, gradient, and state of the optimizer with the fp32 weight (Rajbhandari et al.,
    #: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020; there with gradients in 16 bits,
    #: here in fp32, in which FSDP reduces them).
    states: tuple[int, int, int] = (2, 4, 12)


@dataclass(frozen=True)
class Parallel:
    """Numbers of GPUs by kind of parallelism, and choices. Raises InvalidInput for values out of range.

    Ranks are numbered tp first, then cp, then dp, so that the ranks of a tensor-parallel group are neighbours.
    """

    #: Ranks that share a sequence, replicas of these, and ranks that share each matrix.
    cp: int = 1
    dp: int = 1
    tp: int = 1
    #: Neighbours of dp x cp that share the experts of a layer, each expert cut by tp.
    ep: int = 1
    layout: str = "zigzag"
    schedule: str = "auto"
    checkpointing: str = "full"
    shard: str = "weights"
    #: Sequences of each dp group in a step.
    rows: int = 1
    software: Software = Software()

    def __post_init__(self) -> None:
        check_counts(cp=self.cp, dp=self.dp, tp=self.tp, ep=self.ep, rows=self.rows)
        for name, options in (("checkpointing", CHECKPOINTING), ("shard", SHARDS)):
            value = getattr(self, name)
            if value not in options:
                raise InvalidInput(
                    f"{name}={value!r}: {did_you_mean(value, options)}expected one of {', '.join(options)}"
                )

    @property
    def group(self) -> int:
        """Ranks that share weights, gradients and optimizer states, as `shard` says."""
        return self.cp * self.dp

    @property
    def gpus(self) -> int:
        """All GPUs of the job."""
        return self.group * self.tp

    def check(self, model: ModelConfig, machine: Machine, tokens: int) -> None:
        """Raise InvalidInput where the model, the nodes or the tokens cannot be shared like this."""
        node = machine.ranks_per_node
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < self.cp:
            raise InvalidInput(
                f"tokens={tokens!r} must be a whole number of at least cp={self.cp}; try tokens={max(65536, self.cp)}"
            )
        if model.heads % self.tp or (model.kv_heads % self.tp and self.tp % model.kv_heads) or model.mlp % self.tp:
            raise InvalidInput(
                f"tp={self.tp} does not divide the {model.heads} heads, {model.kv_heads} key/value heads and "
                f"{model.mlp} MLP columns of {model.name}; try a power of two up to {model.kv_heads}"
            )
        if self.software.fp8 and machine.matmul_fp8 is None:
            raise InvalidInput(
                f"fp8=true: {machine.preset or 'this machine'} has no rate of products in 8 bits; leave fp8 out, or "
                "give machine.matmul_fp8="
            )
        if model.experts == 1 < self.ep:
            raise InvalidInput(f"ep={self.ep}: {model.name} has no experts; leave ep out")
        if (most := gcd(model.experts, self.group)) % self.ep:
            raise InvalidInput(
                f"ep={self.ep} does not divide the {model.experts} experts of {model.name} and the cp x dp = "
                f"{self.group} ranks that share them; try ep={most}"
            )
        if node > 1 and self.gpus > node and node % self.tp and self.tp % node:
            raise InvalidInput(
                f"tp={self.tp} does not fit nodes of {node} GPUs, as its groups would lie across nodes unevenly; try a "
                f"divisor of {node}"
            )
