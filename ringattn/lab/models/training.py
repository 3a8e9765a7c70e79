"""`training_step`: modelled seconds, memory, cost and energy of one step of training a model on a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from ...errors import InvalidInput
from ...machine.bands import STEPS_LIBRARIES, STEPS_MACHINES, STEPS_TOKENS, step_band
from ...machine.machine import Machine
from ...simulator.timing.costs import HOPELESS, SECONDS_PER_HOUR, expected_seconds, young_daly
from ...text import duration, plural
from .attention import LayerAttention, attention_flops, attention_of_layers, describe_layers, recurrence_of_layers
from .config import ModelConfig
from .layer import (
    CAST,
    RESERVED,
    LayerCosts,
    ModelEstimate,
    collective_seconds,
    memory_bandwidth,
    message_seconds,
    slowdown_seconds,
)
from .packing import Lognormal, draw
from .parallel import SHARDS, Parallel, busiest_stage
from .recurrence import LayerRecurrence

#: Bytes of a gradient while it is reduced: fp32, as FSDP does.
GRADIENT = 4
#: Bytes per parameter in a checkpoint: its fp32 weight and two moments.
CHECKPOINT = 12
#: Bytes that Adam moves per parameter: reads the gradient, reads and writes fp32 state, writes the new weight.
ADAM_TRAFFIC = GRADIENT + 2 * 12 + 2
#: Bytes per parameter that each micro-batch moves besides the product that makes its gradient. ADDING: reads the
#: fp32 sum of gradients, and writes 4 bytes instead of 2; COPYING, with ZeRO 3: copies two gathers from the buffer
#: of the collective.
ADDING, COPYING = GRADIENT + 2, 8
#: Bytes per logit: moved by a fused loss, moved by an unfused one in fp32, held at once, and held by fp32 copies.
FUSED_LOSS, LOSS_BY_STEPS, LOGIT, LOGIT_COPIES = 24, 40, 4, 8
#: Memory that an allocator loses to fragments, as a fraction of the memory in use [assumed].
FRAGMENTS = 0.08
#: Parts of a step that are attention; their error band is known.
ATTENTION_PARTS = ("attention forward", "attention backward", "attention again")
#: Parts of a step that do not repeat per layer.
BESIDE_LAYERS = ("loss", "optimiser", "fsdp")
#: (layers, seconds forward, seconds backward) of the attention, recurrence or both of layers.
Mixer = tuple[int, float, float]
#: (seconds, bytes) of collectives.
Collectives = tuple[float, float]
#: (number of layers, attention of one of them) for a model's layers: `attention_of_layers`, or a bound on it.
Attend = Callable[[ModelConfig, Machine, int, Parallel], list[tuple[int, LayerAttention]]]


@dataclass(frozen=True, kw_only=True)
class StepEstimate(ModelEstimate):
    """The predicted seconds and bytes per GPU of one training step, with figures derived from them.

    FLOPs are counted; everything else is predicted.
    """

    #: FLOPs of the model without recomputation: 6 per active parameter (4 if frozen) and token, 6 (D + Dv) per visible
    #: pair and head.
    flops: float
    #: Bytes that the loss takes for copies of logits while memory is plentiful.
    copies: int
    #: Bytes that each GPU writes for a checkpoint.
    checkpoint_bytes: float
    #: What the step has that no published step has, in words.
    outside: tuple[str, ...]
    #: Bytes per GPU in the memory of its host.
    host_bytes: int
    #: Attention of the busiest cp rank, and of the slowest dp group, over the mean, where documents make them unequal.
    imbalance: tuple[float, float]

    @property
    def needed(self) -> int:
        """The bytes that one GPU needs, not counting the driver, NCCL and what the allocator reserves in addition."""
        return self.bytes - self.memory["reserved"]

    @property
    def reserved(self) -> int:
        """The bytes that an allocator reserves if there is room, including copies of the logits and fragmentation."""
        return int((1 + FRAGMENTS) * self.needed) + self.copies

    @property
    def seconds_band(self) -> tuple[float, float] | None:
        """The (low, high) seconds of the step, from the errors of this model for published steps, see `step_band`.

        None if the machine is not a preset.
        """
        low, high = step_band(self.outside)
        return (low * self.seconds, high * self.seconds) if self.machine.preset else None

    @property
    def packed(self) -> str:
        """The documents of the first sequence, as text; "" without documents."""
        lengths = self.parallel.lengths(self.tokens // self.parallel.rows // self.parallel.dp)
        each = f"of {min(lengths):,} to {max(lengths):,} tokens" if lengths else ""
        return f"{plural(len(lengths), 'document')} {each} in a sequence" if lengths else ""

    @property
    def unequal(self) -> str:
        """How unequal packed documents make cp ranks and dp groups, as text; "" where there are none."""
        parallel, words = self.parallel, list[str]()
        if parallel.documents and parallel.cp > 1:
            words.append(f"{self.imbalance[0]:.2f} times the mean on the busiest of {parallel.cp} cp ranks")
        if isinstance(parallel.documents, Lognormal) and parallel.dp > 1:
            words.append(f"{self.imbalance[1]:.2f} times the mean in the slowest of {parallel.dp} dp groups")
        return f"attention takes {', '.join(words)}" if words else ""

    @property
    def tflops(self) -> float:
        """The model's TFLOP/s per GPU, not counting recomputation."""
        return self.flops / self.seconds / self.gpus / 1e12

    @property
    def mfu(self) -> float | None:
        """The fraction of the peak that the model's FLOPs reach; None if the machine has no peak."""
        return None if self.machine.peak is None else self.tflops * 1e12 / self.machine.peak

    @property
    def gpu_hours(self) -> float:
        """GPU hours to train on 1e9 tokens, without failures.

        Multiplied by a price they give the cost, by kilowatts the energy in kWh.
        """
        return 1e9 / self.tokens_per_second / SECONDS_PER_HOUR

    @property
    def effective_seconds(self) -> float | None:
        """Expected seconds of a step in a long job, including failures and checkpoints; None if the machine has none.

        Checkpoints are spaced as Young and Daly advise; the time of an interval is equation 13 of Daly (2006)
        (`timing.costs`). Raises InvalidInput if failures are so frequent that a checkpoint or a restart hardly ever
        ends.
        """
        mtbf, rate, restart = self.machine.mtbf, self.machine.checkpoint, self.machine.restart
        if mtbf is None or rate is None or restart is None:
            return None
        mean, checkpoint = mtbf / self.gpus, self.checkpoint_bytes / rate
        interval = young_daly(checkpoint, mean)
        if max(interval + checkpoint, restart) > HOPELESS * mean:
            raise InvalidInput(
                f"{self.gpus:,} GPUs fail every {duration(mean)}, long before a checkpoint of {duration(checkpoint)} "
                f"or a restart of {duration(restart)} ends; try fewer GPUs"
            )
        one, two = (expected_seconds(n * interval, interval, checkpoint, restart, mean) for n in (1, 2))
        return self.seconds * (two - one) / interval


def training_step(
    model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel, attend: Attend = attention_of_layers
) -> StepEstimate:
    """Predict a step of training `model` on sequences of `tokens` tokens, parallelized as `parallel` says.

    The cost of attention comes from `attend`; by default, its plan is simulated, for one layer of each distinct window.
    If attention takes more time or memory, the step never takes less. docs/cluster.md has the other formulas.
    Weights have the dtype of the activations, whatever their published dtype is. Raises InvalidInput if the sizes do
    not fit each other, and the errors of planning and simulating.
    """
    parallel.check(model, machine, tokens)
    count, sequences = parallel.count, parallel.rows * parallel.dp
    micro = replace(parallel, rows=parallel.rows // count)
    stage = busiest_stage(model, tokens, parallel.pp)
    slowest, uneven, pairs = _groups(model, tokens, parallel.documents, parallel.rows, parallel.dp)
    layers = [(count, one.scaled(slowest)) for count, one in attend(stage, machine, tokens, micro)]
    costs = LayerCosts(stage, machine, micro, micro.rows * ceil(tokens / parallel.cp))
    layers = [(count, one.queued(costs.seconds, costs.backward, costs.again)) for count, one in layers]
    recurrent = recurrence_of_layers(stage, machine, tokens, micro)
    one = model.recurrence
    states = 0.0 if one is None else 3.0 * sequences * tokens * model.having["r"] * one.flops(summary=False)
    memory = _memory(costs, layers)
    copies = LOGIT_COPIES // LOGIT * memory["logits"]
    # On the first stage at once (Narayanan et al. 2021).
    pp, parts = parallel.pp, parallel.interleaved
    in_flight = min(count, pp + (pp - 1) / parts if parts > 1 else pp)
    if count > 1:
        kept = ceil((1 if parallel.uses_host else in_flight) * (memory["activations"] - costs.again_bytes))
        memory |= {"activations": kept + costs.again_bytes, "gradients": costs.gradient_bytes}
    return StepEstimate(
        parallel=parallel,
        tokens=sequences * tokens,
        parts=_pipelined(costs, _parts(costs, layers, recurrent), count, model.layers % parallel.pp > 0),
        memory=memory,
        copies=copies,
        machine=machine,
        flops=sequences * 2.0 * (1 + costs.back) * model.active_parameters * tokens + pairs + states,
        plan=describe_layers(layers, recurrent),
        checkpoint_bytes=CHECKPOINT * costs.trained * model.parameters / parallel.gpus,
        outside=_outside(model, machine, tokens, parallel),
        host_bytes=_host_bytes(costs, in_flight) if parallel.uses_host else 0,
        imbalance=(max((one.imbalance for _, one in layers), default=1.0), uneven),
    )


@lru_cache(maxsize=1024)
def _groups(
    model: ModelConfig, tokens: int, documents: tuple[int, ...] | Lognormal, rows: int, dp: int
) -> tuple[float, float, float]:
    """Attention of the dp group with the most work, over that of `rows` times the first sequence, and over the mean.

    Also the FLOPs of all groups. Sequences differ where their documents are drawn.
    """
    if not isinstance(documents, Lognormal):
        return 1.0, 1.0, rows * dp * attention_flops(model, tokens, documents)
    flops = [attention_flops(model, tokens, draw(documents, tokens, number)) for number in range(rows * dp)]
    groups = [sum(flops[number::dp]) for number in range(dp)]
    return max(groups) / rows / flops[0], max(groups) * dp / sum(groups), sum(groups)


def _host_bytes(costs: LayerCosts, in_flight: float) -> int:
    """Bytes per GPU in the memory of its host: inputs of layers, and with "host" gradients and optimizer states."""
    _, gradient, optimizer = costs.software.states
    states = ceil((gradient + optimizer) * costs.held("optimizer")) if costs.parallel.trains_on_host else 0
    return states + ceil(in_flight * costs.model.layers * costs.kept_bytes)


def _outside(model: ModelConfig, machine: Machine, tokens: int, parallel: Parallel) -> tuple[str, ...]:
    rates = machine.kernel_rates
    found = {
        "activations on the host": parallel.uses_host,
        "experts": model.experts > 1,
        "recurrent layers": model.recurrence is not None,
        "LoRA": parallel.software.lora is not None,
        "packed documents": bool(parallel.documents),
        f"{tokens:,} tokens": tokens > STEPS_TOKENS,
        f"GPUs of {machine.preset or 'this machine'}": machine.preset not in STEPS_MACHINES,
        f"attention by {rates.library if rates else 'flops'}": rates is None or rates.library not in STEPS_LIBRARIES,
    }
    return tuple(words for words, is_so in found.items() if is_so)


def _pipelined(costs: LayerCosts, one: dict[str, float], count: int, left_over: bool) -> dict[str, float]:
    """Seconds of each part of a step of `count` micro-batches; `one` has those of one in the busiest stage.

    All stages take as long as the one with the most layers and keys. Where layers are left over, the stage with the
    output matrix has one layer fewer, so only the time of its loss beyond one layer counts. Filling and draining the
    pipeline costs as much as stages - 1 further micro-batches, divided by the interleaved parts (Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 2.2). Messages
    between stages add only what exceeds the computing that they overlap with.
    """
    parallel = costs.parallel
    if left_over:
        layer = sum(seconds for name, seconds in one.items() if name not in BESIDE_LAYERS) / costs.model.layers
        one["loss"] = max(one["loss"] - layer, 0.0)
    # ZeRO 3 gathers and reduces for each micro-batch; otherwise the gradients of all are summed first.
    once = ("optimiser",) if parallel.shard == "weights" else ("optimiser", "fsdp")
    repeated = sum(seconds for name, seconds in one.items() if name not in once)
    sent = message_seconds(costs.machine, costs.input_bytes, parallel.stage, parallel.pp)
    return {
        **{name: seconds if name in once else count * seconds for name, seconds in one.items()},
        "pp": count * max(2 * parallel.interleaved * sent - repeated, 0.0),
        "bubble": (parallel.pp - 1) / parallel.interleaved * repeated,
    }


def _parts(
    costs: LayerCosts, layers: list[tuple[int, LayerAttention]], recurrent: tuple[int, LayerRecurrence]
) -> dict[str, float]:
    """The seconds that each part adds to a step."""
    model, machine, parallel, software = costs.model, costs.machine, costs.parallel, costs.software
    memory = memory_bandwidth(machine)
    forward = sum(count * one.forward for count, one in layers)
    # A chunked loss computes its logits twice. Of a frozen matrix, the gradient is not computed.
    products = (1 if software.loss_rows is None else 2) + costs.back
    moved = (FUSED_LOSS if software.compiled else LOSS_BY_STEPS) * costs.rows * costs.classes
    copied = costs.trained * ADDING + (COPYING if parallel.shard == "weights" and parallel.group > 1 else 0)
    whole = costs.cut(model.parameters, model.layers)
    parts = {
        "attention forward": forward,
        "attention backward": sum(count * one.backward for count, one in layers),
        "attention again": sum(count * one.again for count, one in layers) if parallel.recomputes_all else 0.0,
        "recurrence": recurrent[0] * (recurrent[1].forward + recurrent[1].backward),
        "recurrence again": recurrent[0] * recurrent[1].forward if parallel.recomputes_all else 0.0,
        **costs.products((1 + costs.back) * model.layers, 3 * model.layers),
        "adapters": 3 * model.layers * costs.adapting,
        "all else again": model.layers * costs.again,
        "loss": products * costs.logits() + moved / memory,
        "gradients": copied * whole / memory,
        "optimiser": (ADAM_TRAFFIC * costs.held("optimizer") + CAST * software.fp8 * costs.trained * whole) / memory,
        "tp": 2 * model.layers * costs.exchanges,
        "ep": (2 if parallel.checkpointing in ("none", "selective") else 3) * model.having["m"] * costs.dispatch,
        "host": 0.0,
    }
    mixers = _mixers(model, layers, recurrent)
    if parallel.uses_host and machine.host_bandwidth:
        parts["host"] = _copies(costs, mixers, machine.host_bandwidth)
        if parallel.trains_on_host:  # where Adam moves its bytes at the rate of copies [assumed]
            moved = GRADIENT + costs.item + ADAM_TRAFFIC
            parts["optimiser"] = moved * costs.held("optimizer") / machine.host_bandwidth
    return {**parts, "fsdp": _exposed(costs, mixers, parts["loss"])}


def _mixers(
    model: ModelConfig, layers: list[tuple[int, LayerAttention]], recurrent: tuple[int, LayerRecurrence]
) -> list[Mixer]:
    """The attention, recurrence or both of each kind of layer; no seconds where a layer has neither."""
    count, one = recurrent
    both = sum("ar" in kind for kind in model.kinds)  # if any, all that attend
    found = [(n, x.forward + one.forward * (both > 0), x.backward + one.backward * (both > 0)) for n, x in layers]
    return [*found, (count - both, one.forward, one.backward), (model.layers - model.having["ar"], 0.0, 0.0)]


def _copies(costs: LayerCosts, mixers: list[Mixer], rate: float) -> float:
    """Seconds of copies of layers' inputs that computing does not hide.

    A layer's input goes to the host while the next layer computes, and comes back while another one does.
    """
    copy = costs.input_bytes / rate
    return sum(
        count * (max(copy - forward - costs.seconds, 0.0) + max(copy - backward - costs.backward, 0.0))
        for count, forward, backward in mixers
    )


def _exposed(costs: LayerCosts, mixers: list[Mixer], loss: float) -> float:
    """Seconds that collectives of weights and gradients add: what computing does not hide, layer by layer, and what
    hidden ones slow computing down by.

    ZeRO 3 gathers the weights of a layer in its forward and backward, and reduces its gradients in the backward; ZeRO 1
    and 2 gather once, and without sharding gradients are reduced and gathered (Rajbhandari et al. 2020, section 7). The
    first gather and the last reduction have nothing to hide behind.
    """
    model, machine, parallel = costs.model, costs.machine, costs.parallel
    level, group, tp, ep = SHARDS.index(parallel.shard), parallel.group, parallel.tp, parallel.ep
    experts = model.routed if ep > 1 else 0

    def collectives(parameters: float, experts: float = 0.0) -> tuple[Collectives, Collectives]:
        """(seconds, bytes) of collectives in a forward and in a backward, for these parameters and experts."""
        shares = ((parameters / tp, group, tp), (experts / tp / ep, group // ep, tp * ep))
        gather, reduce = (
            sum(collective_seconds(machine, item * count, *ranks) for count, *ranks in shares)
            for item in (costs.item, GRADIENT * costs.trained)
        )
        moved = sum(count for count, ranks, _ in shares if ranks > 1)
        again, times = int(level == 3), 1 if level else 2
        kept = times * GRADIENT * costs.trained
        backward = again * gather + times * reduce, (again * costs.item + kept) * moved
        return (gather, costs.item * moved) if level else (0.0, 0.0), backward

    def added(collective: Collectives, behind: float) -> float:
        seconds, size = collective
        return max(seconds - behind, slowdown_seconds(machine, seconds, size)) if group > 1 else 0.0

    forward, backward = collectives(model.layer - experts, experts)
    ends = forward[0] + backward[0] - (forward[0] if level == 3 else 0.0)
    exposed = 0.0
    for count, mixing, back in mixers:
        again = costs.again + (mixing if parallel.recomputes_all else 0.0)
        behind = back + costs.backward + again
        exposed += count * (added(forward, mixing + costs.seconds) + added(backward, behind))
    outer = collectives(model.parameters - model.layers * model.layer)
    return ends + exposed * (1 - 1 / model.layers) + added((outer[0][0] + outer[1][0], outer[0][1] + outer[1][1]), loss)


def _memory(costs: LayerCosts, layers: list[tuple[int, LayerAttention]]) -> dict[str, int]:
    """Bytes by category at the peak of a step."""
    model, machine, parallel = costs.model, costs.machine, costs.parallel
    level, layer, on_host = SHARDS.index(parallel.shard), costs.cut(model.layer), parallel.trains_on_host
    largest = max(layer, model.table / parallel.tp)
    weight, _, optimizer = costs.software.states
    # Of inputs on the host, the layer that computes has its own, and another one's is on its way.
    activations = (2 if parallel.uses_host else model.layers) * costs.kept_bytes
    return {
        "weights": ceil(weight * costs.held("weights")),
        # Gradients of one micro-batch take the place of activations, layer by layer.
        "gradients": ceil(GRADIENT * layer) if on_host else max(costs.gradient_bytes - activations, 0),
        "optimizer": 0 if on_host else ceil(optimizer * costs.held("optimizer")),
        # Weights of the layer that computes and of the one gathered meanwhile; one's gradients before they are sharded.
        "gathered weights and gradients": (
            ceil(costs.item * (layer + largest) * (level >= 3) + GRADIENT * costs.trained * largest * (level >= 2))
            if parallel.group > 1
            else 0
        ),
        "activations": activations + costs.again_bytes,
        "attention buffers": max((one.buffers for _, one in layers), default=0),
        "logits": LOGIT * min(costs.software.loss_rows or costs.rows, costs.rows) * ceil(costs.classes),
        "reserved": int(RESERVED * (machine.memory or 0)),
    }
