"""`training_step`: modelled seconds, memory, cost and energy of one step of training a model on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from ...text import duration
from ..timing.costs import HOPELESS, JOULES_PER_KWH, SECONDS_PER_HOUR, expected_seconds, young_daly
from .attention import LayerAttention, attention_of_layers, describe_layers, error_band
from .config import ModelConfig
from .layer import RESERVED, LayerCosts, ModelEstimate, check_dtype, collective_seconds, memory_bandwidth
from .parallel import SHARDS, Parallel

#: Bytes per parameter of mixed precision with Adam, beside weights in the dtype of the activations: gradients in fp32,
#: and in fp32 a copy of the weights and two moments (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
#: Trillion Parameter Models", 2020; there with gradients in 16 bits, here in fp32, in which FSDP reduces them).
GRADIENT, OPTIMIZER = 4, 12
#: Rows whose logits exist at once: `chunk` of train.linear_cross_entropy.
LOSS_ROWS = 512
#: Bytes that Adam moves per parameter, beside writing the weight: the gradient read, its fp32 state read and written.
ADAM_TRAFFIC = GRADIENT + 2 * OPTIMIZER
#: Products of the chunked loss: logits, logits again in the backward, and both gradients.
LOSS_PRODUCTS = 4
#: Times that fp32 logits are read or written: twice in the forward, four times in the backward.
LOGIT_TRAFFIC = 6
#: Parts of a step that are attention, whose error band is known.
ATTENTION_PARTS = ("attention forward", "attention backward", "attention again")
#: How far published steps lie from this model, in words; `simulate experiment=published` computes the numbers.
PUBLISHED_STEPS = (
    "Of 67 published steps of training in bf16, which set nothing here, half reach within 14.5 % of this model's "
    "tokens/s and 90 % within 28.7 %; the model is 14.5 % too fast in the mean"
)
#: (number of layers, attention of such a layer), of a model's layers: `attention_of_layers`, or a bound on it.
Attend = Callable[[ModelConfig, Machine, int, Parallel, str], list[tuple[int, LayerAttention]]]


@dataclass(frozen=True, kw_only=True)
class StepEstimate(ModelEstimate):
    """One step of training: seconds, bytes of one GPU, and what follows. All modelled, but for the counted FLOPs."""

    #: FLOPs of the model without recomputation: 6 per active parameter and token, 12 D per visible pair and head.
    flops: float
    #: Bytes that each GPU writes for a checkpoint.
    checkpoint_bytes: float

    @property
    def seconds_band(self) -> tuple[float, float] | None:
        """Seconds at both ends of the band of attention, all else as modelled; None: no band is known."""
        if self.band is None:
            return None
        attention = sum(self.parts[name] for name in ATTENTION_PARTS)
        low, high = (self.seconds + (end - 1) * attention for end in self.band)
        return low, high

    @property
    def tflops(self) -> float:
        """TFLOP/s of the model on each GPU, without recomputation."""
        return self.flops / self.seconds / self.gpus / 1e12

    @property
    def mfu(self) -> float | None:
        """The part of the peak that the model's FLOPs reach; None where the machine has no peak."""
        return None if self.machine.peak is None else self.tflops * 1e12 / self.machine.peak

    def cost_per_billion_tokens(self, price_per_gpu_hour: float) -> float:
        """The price of 1e9 tokens, in the currency of the price, without failures."""
        return 1e9 / self.tokens_per_second * price_per_gpu_hour / SECONDS_PER_HOUR

    def energy_per_billion_tokens(self, watts: float) -> float:
        """kWh of 1e9 tokens where each GPU draws `watts`, without failures."""
        return 1e9 / self.tokens_per_second * watts / JOULES_PER_KWH

    def effective_seconds(self, mtbf_hours: float, checkpoint_seconds: float, restart_seconds: float) -> float:
        """Expected seconds of a step in a long job with failures and checkpoints.

        `mtbf_hours` is of one GPU with its share of the host. Checkpoints follow each other as Young and Daly advise,
        and an interval takes what Daly (2006), equation 13, says (`timing.costs`). Raises InvalidInput for times that
        are not allowed, and where failures come long before a checkpoint or a restart ends.
        """
        for name, value in (("mtbf_hours", mtbf_hours), ("checkpoint_seconds", checkpoint_seconds)):
            if not value > 0:
                raise InvalidInput(f"{name}={value!r} must be a number > 0; give what the storage and the job take")
        mean = mtbf_hours * SECONDS_PER_HOUR / self.gpus
        interval = young_daly(checkpoint_seconds, mean)
        if max(interval + checkpoint_seconds, restart_seconds) > HOPELESS * mean:
            raise InvalidInput(
                f"{self.gpus:,} GPUs fail every {duration(mean)}, long before a checkpoint of "
                f"{duration(checkpoint_seconds)} or a restart of {duration(restart_seconds)} ends; try fewer GPUs"
            )
        two = expected_seconds(2 * interval, interval, checkpoint_seconds, restart_seconds, mean)
        one = expected_seconds(interval, interval, checkpoint_seconds, restart_seconds, mean)
        return self.seconds * (two - one) / interval


def training_step(
    model: ModelConfig,
    machine: Machine,
    tokens: int,
    parallel: Parallel,
    dtype: str = "bfloat16",
    attend: Attend = attention_of_layers,
) -> StepEstimate:
    """The modelled step of training `model` on sequences of `tokens` tokens.

    Attention is simulated by its plan, one layer for each distinct window, or told by `attend`: neither seconds nor
    bytes of the step fall where those of attention rise. docs/models_cost.md has the formulas of all else. Weights have
    the dtype of the activations, however they are published. Raises InvalidInput where the sizes do not fit each other,
    and what plans and simulations raise.
    """
    parallel.check(model, machine, tokens)
    check_dtype(machine, dtype)
    layers = attend(model, machine, tokens, parallel, dtype)
    if model.mlp_item is not None or model.attention_item is not None:
        model = replace(model, mlp_item=None, attention_item=None)
    costs = LayerCosts(model, machine, parallel, parallel.rows * ceil(tokens / parallel.cp), ITEM_BYTES[dtype])
    sequences = parallel.rows * parallel.dp
    pairs = sum(count * one.pairs for count, one in layers)
    flops = sequences * (6.0 * model.active_parameters * tokens + 12.0 * model.head_dim * model.heads * pairs)
    return StepEstimate(
        gpus=parallel.gpus,
        tokens=sequences * tokens,
        parts=_parts(costs, layers),
        memory=_memory(costs, layers),
        machine=machine,
        flops=flops,
        plan=describe_layers(layers),
        band=error_band(machine, parallel, tokens),
        checkpoint_bytes=OPTIMIZER * model.parameters / parallel.gpus,
    )


def _parts(costs: LayerCosts, layers: list[tuple[int, LayerAttention]]) -> dict[str, float]:
    """The seconds that each part adds to a step."""
    model, machine, parallel = costs.model, costs.machine, costs.parallel
    again = parallel.checkpointing
    shards = parallel.cp * parallel.dp if parallel.shard != "none" else 1
    logits = LOGIT_TRAFFIC * 4 * costs.rows * model.vocab / parallel.tp / memory_bandwidth(machine)
    forward = sum(count * one.forward for count, one in layers)
    parts = {
        "attention forward": forward,
        "attention backward": sum(count * one.backward for count, one in layers),
        "attention again": forward if again == "full" else 0.0,
        **costs.products(3 * model.layers),
        "all else again": 0.0 if again == "none" else model.layers * costs.seconds,
        "loss": LOSS_PRODUCTS * costs.logits() + logits,
        "optimiser": (ADAM_TRAFFIC + costs.item) * model.parameters / parallel.tp / shards / memory_bandwidth(machine),
        "tp": 2 * model.layers * costs.exchanges,
    }
    return {**parts, "fsdp": _exposed(costs, layers, parts["loss"])}


def _exposed(costs: LayerCosts, layers: list[tuple[int, LayerAttention]], loss: float) -> float:
    """Seconds in which the collectives of weights and gradients are not hidden behind computing, layer by layer.

    ZeRO 3 gathers the weights of a layer in its forward and backward, and reduces its gradients in the backward; ZeRO 1
    and 2 gather once, and without shards gradients are reduced and gathered (Rajbhandari et al. 2020, section 7). The
    first gather and the last reduction have nothing to hide behind.
    """
    model, machine, parallel = costs.model, costs.machine, costs.parallel
    level, group = SHARDS.index(parallel.shard), parallel.cp * parallel.dp

    def collectives(parameters: float) -> tuple[float, float]:
        local = parameters / parallel.tp
        gather = collective_seconds(machine, costs.item * local, group, parallel.tp)
        reduce = collective_seconds(machine, GRADIENT * local, group, parallel.tp)
        return gather if level else 0.0, (gather if level == 3 else 0.0) + (reduce if level else 2 * reduce)

    forward, backward = collectives(model.layer)
    ends = forward + backward - (forward if level == 3 else 0.0)
    exposed = 0.0
    for count, one in layers:
        again = {"none": 0.0, "attention": costs.seconds, "full": costs.seconds + one.forward}[parallel.checkpointing]
        behind = one.backward + 2 * costs.seconds - costs.exchanges + again
        exposed += count * (max(forward - one.forward - costs.seconds, 0.0) + max(backward - behind, 0.0))
    outer = sum(collectives(model.parameters - model.layers * model.layer))
    return ends + exposed * (1 - 1 / model.layers) + max(outer - loss, 0.0)


def _memory(costs: LayerCosts, layers: list[tuple[int, LayerAttention]]) -> dict[str, int]:
    """Bytes by category at the peak of a step."""
    model, machine, parallel = costs.model, costs.machine, costs.parallel
    level = SHARDS.index(parallel.shard)
    shards = parallel.dp * parallel.cp
    local, layer = model.parameters / parallel.tp, model.layer / parallel.tp
    largest = max(layer, model.table / parallel.tp)
    kept = {
        "full": costs.input_bytes,
        "attention": costs.input_bytes + costs.attention_bytes,
        "none": costs.activation_bytes,
    }[parallel.checkpointing]
    again = 0 if parallel.checkpointing == "none" else costs.activation_bytes
    return {
        "weights": ceil(costs.item * local / (shards if level >= 3 else 1)),
        "gradients": ceil(GRADIENT * local / (shards if level >= 2 else 1)),
        "optimizer": ceil(OPTIMIZER * local / (shards if level >= 1 else 1)),
        # The layer that computes and the layer that is gathered meanwhile; the gradients of one before they are shared.
        "gathered weights and gradients": (
            ceil((2 * costs.item if level >= 3 else 0) * largest + (GRADIENT if level >= 2 else 0) * largest)
            if shards > 1
            else 0
        ),
        "activations": model.layers * kept + again,
        "attention buffers": max(one.buffers for _, one in layers),
        "logits": 2 * 4 * min(LOSS_ROWS, costs.rows) * ceil(model.vocab / parallel.tp),
        "reserved": int(RESERVED * (machine.memory or 0)),
    }
