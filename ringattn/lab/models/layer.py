"""Seconds of products, of memory traffic and of collectives; of a layer beside attention, and of a whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from .config import ModelConfig
from .parallel import SHARDS, Parallel, Software

#: Rows and columns of the tile of the result that one thread block of a matrix product computes.
TILE = 128
#: The part of what is needed that an allocator holds beside it, in fragments [assumed].
FRAGMENTS = 0.08
#: Bytes of an element that casting to 8 bits moves: read, and written in two layouts.
CAST = 4
#: Seconds of the start of a collective within `latency`; the rest of it is of each hop (NCCL, src/graph/tuning.cc: a
#: ring starts in 6.6 us, a hop of the Simple protocol takes 3.4 us over NVLink and 14 us over a network).
START = 6.6e-6
#: What a collective takes from computing meanwhile: part of the multiprocessors (16 to 24 channels of NCCL, of H100's
#: 132), and bytes of memory for each byte of its ring (written by the neighbour, read, and written to its place).
CHANNELS, COPIES = 20 / 132, 3
#: The part of the memory that the driver, NCCL's buffers and fragments take [assumed].
RESERVED = 0.05


def check_dtype(machine: Machine, dtype: str) -> None:
    """Raise InvalidInput where the machine's rates are not those of `dtype`."""
    if dtype not in ITEM_BYTES or ITEM_BYTES[dtype] != ITEM_BYTES[machine.flops_dtype or dtype]:
        raise InvalidInput(
            f"dtype={dtype}: the rates of this machine are those of {machine.flops_dtype}; try "
            f"dtype={machine.flops_dtype}, or a machine with flops= and without flops_dtype"
        )


def memory_bandwidth(machine: Machine) -> float:
    """Bytes/s that kernels read and write: what the kernel rates say, else twice the rate of merging, which is a half.

    Raises InvalidInput where the machine has neither.
    """
    if machine.kernel_rates is not None:
        return machine.kernel_rates.memory
    if machine.merge is None:
        raise InvalidInput(
            "machine: the time of norms and optimiser needs the rate of the memory, for which merge= (bytes/s read and "
            "written) stands; give machine.merge=1e12, or a preset such as h100_nvlink_ib"
        )
    return 2 * machine.merge


def collective_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Seconds in which each of `ranks` ranks, `stride` apart, gathers `size` bytes of which it has its share.

    A ring moves size x (ranks - 1) / ranks bytes over its slowest link (Thakur, Rabenseifner and Gropp, "Optimization
    of Collective Communication Operations in MPICH", 2005), in ranks - 1 hops. A reduce-scatter takes as long, an
    all-reduce twice as long. Between nodes the ring uses the cards of all its ranks of a node at once, as NCCL's rings
    do; all other rings of the node share one card where there is only one.
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


def count_inside(machine: Machine, ranks: int, stride: int) -> int:
    """Those of `ranks` ranks, `stride` apart, that lie on one node."""
    return max(min(ranks, machine.ranks_per_node // stride), 1)


def all_to_all_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Seconds in which each of `ranks` ranks, `stride` apart, sends an equal part of `size` bytes to each of them.

    Parts within a node and between nodes travel at once; between nodes each rank has its card, or a share of the one.
    """
    node, inside = machine.ranks_per_node, count_inside(machine, ranks, stride)
    near = machine.parts_in_turn(inside, stride)
    far = (ranks - inside) * (node if machine.shared_nic else 1)
    ways = ((near, *machine.rates(True)), (far, machine.latency, machine.bandwidth))
    return max(latency + parts * size / ranks / rate if parts else 0.0 for parts, latency, rate in ways)


def slowdown_seconds(machine: Machine, seconds: float, size: float) -> float:
    """Seconds by which a collective of `seconds` and `size` bytes slows down what computes meanwhile."""
    return CHANNELS * seconds + COPIES * size / memory_bandwidth(machine)


def message_seconds(machine: Machine, size: float, stride: int, ranks: int) -> float:
    """Seconds in which each of `ranks` ranks, `stride` apart, sends `size` bytes to the next one; 0 for one rank.

    Between nodes all ranks of a node send at once, over one card where there is only one.
    """
    if ranks == 1:
        return 0.0
    near = ranks * stride <= machine.ranks_per_node
    latency, bandwidth = machine.rates(near)
    return latency + size * (1 if near or not machine.shared_nic else min(stride, machine.ranks_per_node)) / bandwidth


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the forward of a layer with `rows` tokens on one rank; a backward takes twice the matrix products.

    Matrices are cut by tp: q, k, v and the MLP by columns, the output of attention and the MLP's last matrix by rows.
    Norms and residuals are cut by tokens.
    """

    model: ModelConfig
    machine: Machine
    parallel: Parallel
    rows: int
    #: Bytes of an activation.
    item: int

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of one rank: repeated where there are fewer than ranks."""
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
        """Seconds of `count` products [rows, inner] x [inner, columns] at once; `stored`: bytes of a weight in memory.

        Computing, 2 rows columns inner / (rate x fill), and moving both operands and the result through memory, which
        the first and the last tiles do not hide. `fill` = n / (n + slots / 4) for n tiles of the result, as for the
        thread blocks of attention. Products of a layer may be in 8 bits.
        """
        machine, rows = self.machine, self.rows if rows is None else rows
        fp8 = layer and self.software.fp8
        tiles = count * ceil(rows / TILE) * ceil(columns / TILE)
        idle = 0.0 if machine.kernel_rates is None else machine.kernel_rates.slots / 4
        rate = (machine.matmul_fp8 if fp8 else machine.matmul) or machine.flops
        item = 1 if fp8 else self.item
        computing = 2.0 * count * rows * columns * inner / rate * (1 + idle / max(tiles, 1))
        moved = count * (item * rows * inner + self.item * rows * columns + (stored or item) * inner * columns)
        return computing + moved / memory_bandwidth(machine)

    @property
    def software(self) -> Software:
        """What the framework does."""
        return self.parallel.software

    @cached_property
    def projections(self) -> float:
        """Seconds of the projections to q, k, v and from the output of attention."""
        model = self.model
        columns, stored = (self.heads + 2 * self.kv_heads) * model.head_dim, model.attention_item
        out = self._matmul(model.hidden, self.heads * model.head_dim, stored=stored)
        return self._matmul(columns, model.hidden, stored=stored) + out

    def _experts(self, columns: float, inner: float) -> float:
        """Seconds of a product of the MLP, or of the rank's experts, of which each gets equally many tokens."""
        chosen = self.rows * self.model.experts_per_token
        used = min(self.model.experts // self.parallel.ep, chosen)
        return self._matmul(columns, inner, chosen / used, used, self.model.mlp_item)

    @cached_property
    def down(self) -> float:
        """Seconds of the last product of the MLP."""
        return self._experts(self.model.hidden, self.model.mlp / self.parallel.tp)

    @cached_property
    def mlp(self) -> float:
        """Seconds of the matrix products of the MLP, or of the router and of experts."""
        model = self.model
        router = self._matmul(model.experts, model.hidden, layer=False) if model.experts > 1 else 0.0
        columns = (2 if model.gated else 1) * model.mlp / self.parallel.tp
        return self._experts(columns, model.hidden) + self.down + router

    @cached_property
    def norms(self) -> float:
        """Seconds of norms, residuals, rotary positions, activation, casts and routing, each read and written once.

        Bytes of a token, of 2-byte activations: 2 norms (4 h each; by steps in fp32 36 h), 2 residuals (6 h each),
        rotary positions 4 (H + K) D (by steps 20), the activation of m columns (6 m with a gate, by steps 10 m; else
        4 m); with e experts of a token also 8 e h to send tokens there and back; with 8 bits CAST of each input of a
        product. Models without a gate have the norm of a library, which is one kernel.
        """
        model, tp = self.model, self.parallel.tp
        eager = model.gated and not self.software.compiled
        columns = model.experts_per_token * model.mlp / tp
        moved = (84 if eager else 20) * model.hidden / tp
        moved += (20 if eager else 4) * (self.heads + self.kv_heads) * model.head_dim
        moved += columns * ((10 if eager else 6) if model.gated else 4)
        if model.experts > 1:
            moved += 8 * model.experts_per_token * model.hidden / tp
        if self.software.fp8:
            moved += CAST * (2 * model.hidden + self.heads * model.head_dim + columns)
        return self.rows * moved * self.item / 2 / memory_bandwidth(self.machine)

    @cached_property
    def exchanges(self) -> float:
        """Seconds of tensor parallelism: gathers and reductions of the activations, and a copy of each.

        Hidden behind products they slow those down.
        """
        tp = self.parallel.tp
        if tp == 1:
            return 0.0
        size = self.rows * self.model.hidden * self.item
        once = collective_seconds(self.machine, size, tp, 1) + 2 * size / memory_bandwidth(self.machine)
        seconds = self.software.exchanges * once
        if not self.software.hides_exchanges:
            return seconds
        slowed = slowdown_seconds(self.machine, seconds, self.software.exchanges * size)
        return max(slowed, seconds - self.projections - self.mlp)

    @cached_property
    def dispatch(self) -> float:
        """Seconds in which ranks of ep send the rows of their tokens to the chosen experts, and the results back."""
        size = self.rows * self.model.experts_per_token * self.model.hidden * self.item
        return 2 * all_to_all_seconds(self.machine, size, self.parallel.ep, self.parallel.tp)

    @cached_property
    def again(self) -> float:
        """Seconds in which a backward computes a layer's forward again, beside attention."""
        kind = self.parallel.checkpointing
        if kind == "none":
            return 0.0
        products = self.projections + self.mlp
        last = self.down if self.software.stops_early else 0.0
        if kind == "selective":
            return products / 2 + self.norms
        return products - last + self.norms + self.exchanges

    def products(self, layers: int) -> dict[str, float]:
        """Seconds of the parts of so many forwards that compute beside attention."""
        return {"projections": layers * self.projections, "mlp": layers * self.mlp, "norms": layers * self.norms}

    @property
    def seconds(self) -> float:
        """Seconds of a layer's forward beside attention."""
        return self.projections + self.mlp + self.norms + self.exchanges

    @property
    def classes(self) -> float:
        """Columns of the logits of which a rank computes the loss."""
        return self.model.vocab / (self.parallel.tp if self.software.splits_loss else 1)

    def logits(self, rows: float | None = None) -> float:
        """Seconds of the product with the output matrix, for all rows or for `rows`."""
        return self._matmul(self.model.vocab / self.parallel.tp, self.model.hidden, rows, layer=False)

    @property
    def input_bytes(self) -> int:
        """Bytes of the input of a layer: all that checkpointing="full" keeps of it."""
        return self.rows * self.model.hidden * self.item // self.parallel.tp

    @property
    def attention_bytes(self) -> int:
        """Bytes of the output and lse of attention, which checkpointing="attention" keeps, too."""
        return self.rows * self.heads * (self.model.head_dim * self.item + 4)

    @property
    def kept_bytes(self) -> int:
        """Bytes that checkpointing keeps of a layer. torchtitan's "selective op" keeps the outputs of attention, of
        q, v, gate and the last product, and of messages between experts."""
        model, kind = self.model, self.parallel.checkpointing
        if kind == "none":
            return self.activation_bytes
        kept = self.input_bytes + (self.attention_bytes if kind != "full" else 0)
        if kind == "selective":
            columns = model.hidden // self.parallel.tp + (self.heads + self.kv_heads) * model.head_dim
            columns += model.experts_per_token * model.mlp // self.parallel.tp
            columns += 2 * model.experts_per_token * model.hidden if self.parallel.ep > 1 else 0
            kept += self.rows * columns * self.item
        return kept

    def held(self, shard: str) -> float:
        """Parameters of which a rank holds the state that `shard` cuts: its shard, or all of its part by tp and ep."""
        if SHARDS.index(self.parallel.shard) >= SHARDS.index(shard):
            return self.model.parameters / self.parallel.tp / self.parallel.group
        return self.cut(self.model.parameters, self.model.layers)

    def cut(self, parameters: float, layers: int = 1) -> float:
        """The part by tp and ep of the parameters of so many layers, or of a model with them."""
        elsewhere = layers * self.model.experts * self.model.expert * (1 - 1 / self.parallel.ep)
        return (parameters - elsewhere) / self.parallel.tp

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that a rank keeps."""
        return ceil(self.software.states[1] * self.held("gradients"))

    @property
    def again_bytes(self) -> int:
        """Bytes beside those of a layer that is computed again."""
        return self.activation_bytes - self.kept_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes of what the backward of a layer reads where nothing is computed again.

        Inputs of two norms (2 h), q, k, v, output and lse of attention, and of the MLP its columns: both halves with a
        gate. Not compiled, also the results of the norms (2 h) and of the activation (m), which a compiler computes
        again. With experts, the e rows of a token at their input and output (2 e h). After Korthikanti et al. (2022),
        without masks of dropout and without scores.
        """
        model, tp, more = self.model, self.parallel.tp, 0 if self.software.compiled else 1
        chosen = model.experts_per_token
        elements = (2 + 2 * more) * model.hidden + chosen * ((2 if model.gated else 1) + more) * model.mlp
        elements += 2 * chosen * model.hidden if model.experts > 1 else 0
        qkv = (self.heads + 2 * self.kv_heads) * model.head_dim
        return self.rows * (elements // tp + qkv) * self.item + self.attention_bytes


@dataclass(frozen=True, kw_only=True)
class ModelEstimate:
    """A step of training, a prefill, or a decoded token: seconds, and bytes of one GPU. All modelled."""

    #: Seconds that each part adds; they sum to `seconds`.
    parts: dict[str, float]
    #: Bytes of one GPU by category.
    memory: dict[str, int]
    gpus: int
    #: Tokens that the GPUs process in these seconds, of all sequences.
    tokens: int
    machine: Machine = field(repr=False)
    #: What was planned for attention, in words; "" in a decode.
    plan: str = ""
    #: Bytes that the steps of a loss hold where memory is not scarce.
    copies: int = 0

    @property
    def needed(self) -> int:
        """Bytes of one GPU without which nothing runs: all but what the driver, NCCL and an allocator hold."""
        return sum(count for name, count in self.memory.items() if name != "reserved")

    @property
    def reserved(self) -> int:
        """Bytes that an allocator shows as reserved where memory is not scarce: with copies of logits and fragments."""
        return int((1 + FRAGMENTS) * self.needed) + self.copies

    @property
    def seconds(self) -> float:
        """Seconds of a step without failures, to the first token of a prefill, or of a decoded token."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def fits(self) -> bool | None:
        """Whether the memory of a GPU is enough; None: the machine does not say how much it has."""
        return None if self.machine.memory is None else sum(self.memory.values()) <= self.machine.memory
