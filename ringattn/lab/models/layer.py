"""Seconds of matrix products, memory traffic and collectives: of a layer without attention, and of a whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from ...text import size
from .config import ModelConfig
from .parallel import SHARDS, Parallel, Software

#: Rows and columns of the result that one thread block of a matrix product computes.
TILE = 128
#: Bytes that casting an element to 8 bits moves: one read, and two writes in two layouts.
CAST = 4
#: What a product whose scales differ by block reaches of the rate of one with a scale for each tensor [assumed].
BLOCKWISE = 0.85
#: Seconds to start a collective, part of `latency`; the rest of `latency` is per hop (NCCL, src/graph/tuning.cc: a
#: ring starts in 6.6 us, a hop of the Simple protocol takes 3.4 us over NVLink and 14 us over a network).
START = 6.6e-6
#: Seconds to start an all-reduce that a node's switch adds (NCCL, the same file).
SWITCH_START = 2.5e-5
#: What a collective takes from concurrent computing: a share of the multiprocessors (16 to 24 channels of NCCL, of
#: H100's 132), and memory traffic per byte of its ring (written by the neighbour, read, written to its destination).
CHANNELS, COPIES = 20 / 132, 3
#: The share of memory that the driver, NCCL's buffers and fragments take [assumed].
RESERVED = 0.05


def memory_bandwidth(machine: Machine) -> float:
    """The memory bandwidth that kernels reach, in bytes/s.

    It is the one in the machine's kernel rates, or else twice the rate of merging, which reaches half of the bandwidth.
    Raises InvalidInput if the machine has neither.
    """
    if machine.kernel_rates is not None:
        return machine.kernel_rates.memory
    if machine.merge is None:
        raise InvalidInput(
            "machine: the time of norms and optimiser is bound by memory; give its rate as machine.merge=1e12 "
            "(bytes/s read and written), or a preset such as h100_nvlink_ib"
        )
    return 2 * machine.merge


def collective_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Seconds of an all-gather of `size` bytes in total over `ranks` ranks, which are `stride` apart.

    A ring moves size x (ranks - 1) / ranks bytes over its slowest link (Thakur, Rabenseifner and Gropp, "Optimization
    of Collective Communication Operations in MPICH", 2005), in ranks - 1 hops. A reduce-scatter takes as long, an
    all-reduce twice as long. Between nodes a ring uses the network cards of all its ranks on a node at once, as NCCL's
    rings do; if a node has only one card, all rings of the node share it.
    """
    if ranks == 1 or not size:
        return 0.0
    node, inside = machine.ranks_per_node, count_inside(machine, ranks, stride)
    near = ranks * stride <= node
    latency, bandwidth = machine.rates(near)
    if not near:
        bandwidth *= inside / node if machine.shared_nic else inside
        bandwidth = min(bandwidth, machine.rates(True)[1]) if inside > 1 else bandwidth
    nodes = ceil(ranks / inside)
    hops = sum(
        count * max(machine.rates(way)[0] - START, 0.0) for way, count in ((True, ranks - nodes), (False, nodes - 1))
    )
    return min(latency, START) + hops + size * (ranks - 1) / ranks / bandwidth


def switch_seconds(machine: Machine, size: float, ranks: int) -> float:
    """Seconds of an all-reduce of `size` bytes over neighbouring ranks, added by a node's switch; inf without one.

    Each rank sends its bytes to the switch while it receives sums (NCCL's NVLS), so they pass a link once, not twice.
    """
    if machine.in_switch is None or ranks > machine.ranks_per_node:
        return inf
    return SWITCH_START + size * (ranks - 1) / ranks / (machine.in_switch * machine.rates(True)[1])


def count_inside(machine: Machine, ranks: int, stride: int) -> int:
    """How many of `ranks` ranks are on the same node, if they are `stride` apart."""
    return max(min(ranks, machine.ranks_per_node // stride), 1)


def all_to_all_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Seconds of an all-to-all: each of `ranks` ranks, `stride` apart, sends an equal part of `size` bytes to each.

    Traffic within and between nodes overlaps. Between nodes, each rank has its own network card or, if the node has
    only one, a share of it.
    """
    node, inside = machine.ranks_per_node, count_inside(machine, ranks, stride)
    near = machine.parts_in_turn(inside, stride)
    far = (ranks - inside) * (node if machine.shared_nic else 1)
    ways = ((near, *machine.rates(True)), (far, machine.latency, machine.bandwidth))
    return max(latency + parts * size / ranks / rate if parts else 0.0 for parts, latency, rate in ways)


def slowdown_seconds(machine: Machine, seconds: float, size: float) -> float:
    """By how many seconds a collective of `size` bytes and `seconds` seconds slows down the computing beside it."""
    return CHANNELS * seconds + COPIES * size / memory_bandwidth(machine)


def message_seconds(machine: Machine, size: float, stride: int, ranks: int) -> float:
    """Seconds for each of `ranks` ranks, `stride` apart, to send `size` bytes to the next; 0 for a single rank.

    Between nodes, all ranks of a node send at the same time; if the node has only one network card, they share it.
    """
    if ranks == 1:
        return 0.0
    near = ranks * stride <= machine.ranks_per_node
    latency, bandwidth = machine.rates(near)
    return latency + size * (1 if near or not machine.shared_nic else min(stride, machine.ranks_per_node)) / bandwidth


@dataclass(frozen=True)
class LayerCosts:
    """The predicted costs of one layer's forward, for `rows` tokens on one rank.

    The matrix products of a backward take twice as long. Tensor parallelism (tp) shards the matrices of q, k, v and the
    MLP by columns, and the output matrix of attention and the last matrix of the MLP by rows. Norms and residuals are
    sharded by tokens.
    """

    model: ModelConfig
    machine: Machine
    parallel: Parallel
    rows: int
    training: bool = True

    @cached_property
    def item(self) -> int:
        """Bytes per element of an activation."""
        return ITEM_BYTES[self.software.dtype]

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of one rank; with fewer heads than ranks, ranks hold copies of a head."""
        return max(self.model.kv_heads // self.parallel.tp, 1)

    @cached_property
    def heads(self) -> int:
        """Query heads of one rank."""
        return self.model.heads // self.parallel.tp

    def _matmul(
        self,
        columns: float,
        inner: float,
        rows: float | None = None,
        count: float = 1,
        stored: float | None = None,
        layer: bool = True,
    ) -> float:
        """Seconds of `count` concurrent products [rows, inner] x [inner, columns]; `stored`: bytes per weight in
        memory.

        The sum of computing, 2 rows columns inner / (rate x fill), and of moving both operands and the result through
        memory, as the first and the last tiles do not hide that. `fill` = n / (n + slots / 4) for n tiles of the
        result, as for the thread blocks of attention. Products of a layer may be in 8 bits.
        """
        machine, rows = self.machine, self.rows if rows is None else rows
        fp8 = layer and self.software.fp8
        tiles = count * ceil(rows / TILE) * ceil(columns / TILE)
        idle = 0.0 if machine.kernel_rates is None else machine.kernel_rates.slots / 4
        rate = (machine.matmul_fp8 if fp8 else machine.matmul) or machine.flops
        rate *= BLOCKWISE if fp8 and self.software.fp8_blocks else 1.0
        item = 1 if fp8 else self.item
        computing = 2.0 * count * rows * columns * inner / rate * (1 + idle / max(tiles, 1))
        moved = count * (item * rows * inner + self.item * rows * columns + (stored or item) * inner * columns)
        return computing + moved / memory_bandwidth(machine)

    @property
    def software(self) -> Software:
        """How the framework runs a layer."""
        return self.parallel.software

    @cached_property
    def projections(self) -> float:
        """Seconds of the matrix products before and after attention: q, k, v and output; the mean if layers differ.

        Without those that expand latents, see `expand`. tp splits neither the products that make latents nor an
        indexer.
        """
        model, tp, stored = self.model, self.parallel.tp, self.model.attention_item
        queries = self.heads * model.head_dim
        if model.latent is not None:
            inputs = model.latent.inputs(model.hidden, model.heads * model.head_dim)
            attention = sum(
                self._matmul(wide / (tp if cut else 1), inner, stored=stored) for wide, inner, cut in inputs
            )
        else:
            columns = queries * (1 + model.gates_output) + 2 * self.kv_heads * model.head_dim
            attention = self._matmul(columns, model.hidden, stored=stored)
        attention += self._matmul(model.hidden, self.heads * model.value_dim, stored=stored)
        one = model.recurrence
        if one is None:
            return attention * self._share("a")
        out = self._matmul(model.hidden, one.output / tp, stored=stored)
        recurrent = self._matmul(one.projected / tp, model.hidden, stored=stored) + out
        return attention * self._share("a") + recurrent * self._share("r")

    def _share(self, part: str) -> float:
        """The share of layers with a part, see `ModelConfig.having`."""
        return self.model.having[part] / self.model.layers

    @property
    def _halves(self) -> float:
        """Half of the norms of a layer: 1, as mixers and MLP have one each; less on average where a layer has one."""
        return (self._share("ar") + self._share("m")) / 2

    def expand(self, rows: float) -> float:
        """Seconds in which `rows` latents are expanded to keys and values; 0 without latents.

        In absorbed form, as many products take `rows` queries into the space of latents, and their results out of it.
        """
        model = self.model
        rank = 0 if model.latent is None else model.latent.rank
        return self._matmul(self.heads * model.expanded, rank, rows, stored=model.attention_item) if rank else 0.0

    def _experts(self, columns: float, inner: float) -> float:
        """Seconds of a product of the MLP, or of the rank's experts, each with an equal share of the tokens."""
        chosen = self.rows * self.model.experts_per_token
        used = min(self.model.experts // self.parallel.ep, chosen)
        return self._matmul(columns, inner, chosen / used, used, self.model.mlp_item)

    @cached_property
    def down(self) -> float:
        """Seconds of the last matrix product of the MLP."""
        return self._experts(self.model.hidden, self.model.mlp / self.parallel.tp)

    @cached_property
    def mlp(self) -> float:
        """Seconds of the matrix products of the MLP; with experts, of the router and the chosen experts.

        The mean over layers with and without experts.
        """
        model = self.model
        router = self._matmul(model.experts, model.hidden, layer=False) if model.experts > 1 else 0.0
        parts, tp = 2 if model.gated else 1, self.parallel.tp
        experts = self._experts(parts * model.mlp / tp, model.hidden) + self.down + router
        if not model.dense:
            return experts * self._share("m")
        sizes = ((parts * model.dense_mlp / tp, model.hidden), (model.hidden, model.dense_mlp / tp))
        dense = sum(self._matmul(wide, inner, stored=model.mlp_item) for wide, inner in sizes)
        return (experts * model.expert_layers + dense * model.dense) / model.layers

    @cached_property
    def norms(self) -> float:
        """Seconds of all operations of a layer that are limited by memory, not by computing.

        They are norms, residuals, rotary positions, the activation function, casts and routing; each reads and writes
        its data once. h is the hidden size, m the columns of the activation. Bytes per token, if activations take 2
        bytes: 2 norms 4 h each (36 h if unfused, which computes in fp32); 2 residuals 6 h each; rotary positions 4 (H +
        K) D (unfused 20); the activation 6 m with a gate (unfused 10 m), 4 m without. With e experts per token also 8 e
        h to sort rows by rank and back and, with several experts on a rank, as many to sort by expert what arrives;
        with 8-bit products also `CAST` for each input in training, while serving casts in the kernels before (vLLM,
        TensorRT-LLM). Models without a gate use a library's norm, which is one kernel.
        """
        model, tp = self.model, self.parallel.tp
        eager = model.gated and not self.software.compiled
        columns = model.experts_per_token * model.mlp / tp * self._share("m")
        moved = (84 if eager else 20) * model.hidden / tp * self._halves
        moved += (20 if eager else 4) * (self.heads + self.kv_heads) * model.head_dim * self._share("a")
        moved += columns * ((10 if eager else 6) if model.gated else 4)
        if model.experts > 1:
            sorts = 1 if self.parallel.ep in (1, model.experts - model.shared) else 2
            moved += sorts * 8 * model.experts_per_token * model.hidden / tp
        if self.software.fp8 and self.training:
            rows = 1 if model.experts == 1 else model.experts_per_token  # each expert casts the rows that it gets
            inputs = model.hidden * (self._share("ar") + rows * self._share("m"))
            moved += CAST * (inputs + self.heads * model.head_dim + columns)
        return self.rows * moved * self.item / 2 / memory_bandwidth(self.machine)

    @cached_property
    def exchanges(self) -> float:
        """Seconds of communication in tensor parallelism: gathers and reductions of activations, and copies of results.

        If matrix products overlap them, only the time by which these get slower counts. Where nothing is trained, each
        pair may be one all-reduce by the node's switch, without copies.
        """
        tp = self.parallel.tp
        if tp == 1:
            return 0.0
        size = self.rows * self.model.hidden * self.item
        once = collective_seconds(self.machine, size, tp, 1) + 2 * size / memory_bandwidth(self.machine)
        if not self.training:
            once = min(once, switch_seconds(self.machine, size, tp) / 2)
        times = self.software.exchanges * self._halves
        seconds = times * once
        if not self.software.hides_exchanges:
            return seconds
        slowed = slowdown_seconds(self.machine, seconds, times * size)
        return max(slowed, seconds - self.projections - self.mlp)

    @cached_property
    def dispatch(self) -> float:
        """Seconds to send tokens to their chosen experts on other ranks of the ep group, and the results back."""
        size = self.rows * self.model.experts_per_token * self.model.hidden * self.item
        return 2 * all_to_all_seconds(self.machine, size, self.parallel.ep, self.parallel.tp)

    @cached_property
    def again(self) -> float:
        """Seconds that a backward takes to compute the layer's forward again, without attention (checkpointing)."""
        kind = self.parallel.checkpointing
        if kind == "none":
            return 0.0
        products = self.projections + self.mlp
        last = self.down if self.software.stops_early else 0.0
        if kind == "selective":
            return products / 2 + self.norms
        return products - last + self.norms + self.exchanges

    def products(self, layers: float, norms: float | None = None) -> dict[str, float]:
        """Seconds of computing in the forwards of `layers` layers, without attention: projections, mlp and norms."""
        norms = layers if norms is None else norms
        return {"projections": layers * self.projections, "mlp": layers * self.mlp, "norms": norms * self.norms}

    @property
    def trained(self) -> float:
        """The trained share of parameters: 1, or with LoRA that of the adapters."""
        rank = self.software.lora
        return 1.0 if rank is None else self.model.adapters(rank) / self.model.parameters

    @property
    def back(self) -> int:
        """How many forwards the products of a backward take: frozen weights have no gradient."""
        return 2 if self.software.lora is None else 1

    @property
    def adapting(self) -> float:
        """Seconds that a layer's adapters take in a forward, bound by reading inputs, and adding to outputs."""
        if self.software.lora is None:
            return 0.0
        moved = self.model.layered(lambda count, used, inputs, outputs: used * (inputs + 2 * outputs))
        moved *= self.rows * self.item / self.model.layers / self.parallel.tp
        return moved / memory_bandwidth(self.machine)

    @property
    def seconds(self) -> float:
        """Seconds of a layer's forward without attention."""
        return self.projections + self.mlp + self.norms + self.exchanges + self.adapting

    @property
    def backward(self) -> float:
        """Seconds of a layer's backward without attention, and without computing its forward again."""
        return self.back * (self.seconds - self.exchanges) + self.exchanges

    @property
    def classes(self) -> float:
        """The number of vocabulary entries for which one rank computes logits and loss."""
        return self.model.vocab / (self.parallel.tp if self.software.splits_loss else 1)

    def logits(self, rows: float | None = None) -> float:
        """Seconds of the product with the output matrix, for all rows or for `rows`."""
        return self._matmul(self.model.vocab / self.parallel.tp, self.model.hidden, rows, layer=False)

    @property
    def input_bytes(self) -> int:
        """The bytes of a layer's input; checkpointing="full" saves nothing else."""
        return self.rows * self.model.hidden * self.item // self.parallel.tp

    @property
    def kept_bytes(self) -> int:
        """The bytes that a layer saves for its backward, by the kind of checkpointing; of layers that differ, the mean.

        "attention" also saves the outputs of attention and recurrence. torchtitan's "selective op" saves these, the
        outputs of the products of q, v, gate and the last one, and what the ranks of an ep group exchange.
        """
        return self._mean(self._kept)

    @property
    def activation_bytes(self) -> int:
        """The bytes of activations that a layer's backward reads if nothing is computed again; the mean over layers."""
        return self._mean(self._activations)

    @property
    def again_bytes(self) -> int:
        """The most bytes that a layer takes, beyond those it saves on average, while its forward is computed again."""
        none = self.parallel.checkpointing == "none"
        return 0 if none else max(map(self._activations, {*self.model.kinds})) - self.kept_bytes

    def _mean(self, count: Callable[[str], int]) -> int:
        return sum(count(kind) * layers for kind, layers in Counter(self.model.kinds).items()) // self.model.layers

    def _outputs(self, kind: str) -> int:
        """The bytes of attention's output and lse, and of the output of a recurrence."""
        model, one = self.model, self.model.recurrence
        found = self.rows * self.heads * (model.value_dim * self.item + 4) if "a" in kind else 0
        return found + (self.rows * one.output * self.item // self.parallel.tp if "r" in kind and one else 0)

    def _kept(self, kind: str) -> int:
        """The bytes that a layer of this kind saves."""
        model, saves, tp = self.model, self.parallel.checkpointing, self.parallel.tp
        if saves == "none":
            return self._activations(kind)
        kept = self.input_bytes + (0 if self.parallel.recomputes_all else self._outputs(kind))
        if saves == "selective":
            columns = model.hidden // tp
            if "a" in kind:
                columns += self.heads * model.head_dim + self.kv_heads * model.value_dim
            if "m" in kind:
                columns += model.experts_per_token * model.mlp // tp
                columns += 2 * model.experts_per_token * model.hidden if self.parallel.ep > 1 else 0
            kept += self.rows * columns * self.item
        return kept

    def _activations(self, kind: str) -> int:
        """The bytes of activations that the backward of a layer of this kind reads.

        They are the inputs of two norms (2 h); q, k, v, output and lse of attention; the projected input and the output
        of a recurrence; and the MLP's columns, both halves with a gate. If not compiled, also the results of the norms
        (2 h) and of the activation function (m), which a compiler computes again. With tp, the gathered inputs of
        products, which torch's autograd keeps: h each, of all ranks. With experts, the e rows per token at
        their input and output (2 e h). After Korthikanti et al. (2022), without dropout masks and scores. With
        inputs on the host the MLP computes one tile at a time, with as many rows as the hidden size. Latents count as
        the keys and values that are made of them.
        """
        model, tp, more = self.model, self.parallel.tp, 0 if self.software.compiled else 1
        chosen, one = model.experts_per_token, model.recurrence
        columns = chosen * ((2 if model.gated else 1) + more) * model.mlp if "m" in kind else 0
        columns += 2 * chosen * model.hidden if model.experts > 1 and "m" in kind else 0
        tile = min(self.rows, model.hidden) if self.parallel.trains_on_host else self.rows
        rest = (2 + 2 * more) * model.hidden * (1 if len(kind) > 1 else 0.5) // tp
        inputs = self.heads * model.head_dim + self.kv_heads * (model.head_dim + model.value_dim)
        rest += inputs // self.parallel.pieces(model) if "a" in kind else 0
        rest += one.projected // tp if "r" in kind and one is not None else 0
        # Gathers before attention and before the MLP, without a reduction after each; a rank's own rows are no copies.
        gathers, copies = self.software.exchanges - 2, model.hidden - model.hidden // tp
        rest += -(-gathers // 2) * copies if kind != "m" else 0
        tiled = columns // tp + (gathers // 2 * copies if "m" in kind else 0)
        return (self.rows * int(rest) + tile * tiled) * self.item + self._outputs(kind)

    def held(self, shard: str) -> float:
        """The number of parameters of which a rank holds the weights, the gradients or the optimizer states.

        `shard` names which of the three. If they are sharded over data-parallel ranks, it is the rank's shard;
        otherwise, all parameters that tp and ep leave it. Only trained ones have gradients and states.
        """
        share = 1.0 if shard == "weights" else self.trained
        if SHARDS.index(self.parallel.shard) >= SHARDS.index(shard):
            return share * self.model.parameters / self.parallel.tp / self.parallel.group
        return share * self.cut(self.model.parameters, self.model.layers)

    def cut(self, parameters: float, layers: int = 1) -> float:
        """The number of parameters that a rank holds, if tp and ep split `parameters` of the model.

        `layers` is the number of whole layers among these parameters: ep splits only their experts.
        """
        elsewhere = layers * self.model.routed * (1 - 1 / self.parallel.ep)
        return (parameters - elsewhere) / self.parallel.tp

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that a rank holds."""
        return ceil(self.software.states[1] * self.held("gradients"))


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """A step of training, a prefill, or a decoded token: seconds, and bytes of one GPU. All modelled."""

    #: Seconds that each part adds; they sum to `seconds`.
    parts: dict[str, float]
    #: Bytes of one GPU by category.
    memory: dict[str, int]
    parallel: Parallel
    #: Tokens of all sequences that the GPUs process in these seconds.
    tokens: int
    machine: Machine = field(repr=False)
    #: The plan of attention, as text; "" in a decode on one rank.
    plan: str

    @property
    def gpus(self) -> int:
        """All GPUs of the job."""
        return self.parallel.gpus

    @property
    def bytes(self) -> int:
        """Bytes that one GPU needs in all."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """Seconds of a step without failures, of a prefill up to its first token, or of a decoded token."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def lacks(self) -> str:
        """How much more than the memory of a GPU it needs, and what takes most of it, as text."""
        has, most = self.machine.memory or 0, max(self.memory, key=lambda name: self.memory[name])
        more = f"{size(self.bytes - has)} more than the {size(has)} there are"
        return f"{more}, most of it {most}, {size(self.memory[most])}"

    @property
    def fits(self) -> bool | None:
        """Whether the memory of a GPU is enough; None: the machine does not say how much it has."""
        return None if self.machine.memory is None else self.bytes <= self.machine.memory
