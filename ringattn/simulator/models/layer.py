"""Seconds of products, of memory traffic and of collectives; of a layer beside attention, and of a whole model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, log2

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from .config import ModelConfig
from .parallel import Parallel

#: Rows and columns of the tile of the result that one thread block of a matrix product computes.
TILE = 128
#: Times that a rank of tensor parallelism gathers or reduces the activations in a forward, and again in a backward:
#: around attention and around the MLP (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
#: Models", 2022, with sequence parallelism).
TP_EXCHANGES = 4
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
    of Collective Communication Operations in MPICH", 2005), after log2(ranks) latencies. A reduce-scatter takes as
    long, an all-reduce twice as long. Between nodes the ring uses the cards of all its ranks of a node at once, as
    NCCL's rings do; all other rings of the node share one card where there is only one.
    """
    if ranks == 1:
        return 0.0
    node = machine.ranks_per_node
    inside = max(min(ranks, node // stride), 1) if stride < node else 1
    near = ranks * stride <= node
    latency, bandwidth = machine.rates(near)
    if not near:
        bandwidth *= inside / node if machine.shared_nic else inside
        bandwidth = min(bandwidth, machine.rates(True)[1]) if inside > 1 else bandwidth
    return latency * ceil(log2(ranks)) + size * (ranks - 1) / ranks / bandwidth


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
        self, columns: float, inner: float, rows: float | None = None, count: float = 1, stored: float | None = None
    ) -> float:
        """Seconds of `count` products [rows, inner] x [inner, columns] at once; `stored`: bytes of a weight in memory.

        The longer of computing, 2 rows columns inner / (rate x fill), and of moving both operands and the result
        through memory. `fill` = n / (n + slots / 4) for n tiles of the result, as for the thread blocks of attention.
        """
        machine, rows = self.machine, self.rows if rows is None else rows
        tiles = count * ceil(rows / TILE) * ceil(columns / TILE)
        idle = 0.0 if machine.kernel_rates is None else machine.kernel_rates.slots / 4
        rate = machine.matmul or machine.flops
        computing = 2.0 * count * rows * columns * inner / rate * (1 + idle / max(tiles, 1))
        moved = count * (self.item * (rows * inner + rows * columns) + (stored or self.item) * inner * columns)
        return max(computing, moved / memory_bandwidth(machine))

    @cached_property
    def projections(self) -> float:
        """Seconds of the projections to q, k, v and from the output of attention."""
        model = self.model
        columns, stored = (self.heads + 2 * self.kv_heads) * model.head_dim, model.attention_item
        out = self._matmul(model.hidden, self.heads * model.head_dim, stored=stored)
        return self._matmul(columns, model.hidden, stored=stored) + out

    @cached_property
    def mlp(self) -> float:
        """Seconds of the matrix products of the MLP, or of the router and of experts with equal numbers of tokens."""
        model = self.model
        columns = model.mlp / self.parallel.tp
        chosen = self.rows * model.experts_per_token
        used = min(model.experts, chosen)
        rows = chosen / used
        stored = model.mlp_item
        wide = self._matmul((2 if model.gated else 1) * columns, model.hidden, rows, used, stored)
        router = self._matmul(model.experts, model.hidden) if model.experts > 1 else 0.0
        return wide + self._matmul(model.hidden, columns, rows, used, stored) + router

    @cached_property
    def norms(self) -> float:
        """Seconds of norms, residuals, rotary positions, activation and routing, each read and written once.

        Elements of a token: 2 norms (4 h), 2 residuals (6 h), rotary positions 2 (H + K) D, the activation of m
        columns (3 m with a gate, else 2 m); with e experts of a token also 4 e h to send tokens there and back.
        """
        model, tp = self.model, self.parallel.tp
        moved = 10 * model.hidden / tp + 2 * (self.heads + self.kv_heads) * model.head_dim
        moved += model.experts_per_token * (3 if model.gated else 2) * model.mlp / tp
        if model.experts > 1:
            moved += 4 * model.experts_per_token * model.hidden / tp
        return self.rows * moved * self.item / memory_bandwidth(self.machine)

    @cached_property
    def exchanges(self) -> float:
        """Seconds of tensor parallelism: gathers and reductions of the activations, which nothing hides."""
        size = self.rows * self.model.hidden * self.item
        return TP_EXCHANGES * collective_seconds(self.machine, size, self.parallel.tp, 1)

    def products(self, layers: int) -> dict[str, float]:
        """Seconds of the parts of so many forwards that compute beside attention."""
        return {"projections": layers * self.projections, "mlp": layers * self.mlp, "norms": layers * self.norms}

    @property
    def seconds(self) -> float:
        """Seconds of a layer's forward beside attention."""
        return self.projections + self.mlp + self.norms + self.exchanges

    def logits(self, rows: float | None = None) -> float:
        """Seconds of the product with the output matrix, for all rows or for `rows`."""
        return self._matmul(self.model.vocab / self.parallel.tp, self.model.hidden, rows)

    @property
    def input_bytes(self) -> int:
        """Bytes of the input of a layer: all that checkpointing="full" keeps of it."""
        return self.rows * self.model.hidden * self.item // self.parallel.tp

    @property
    def attention_bytes(self) -> int:
        """Bytes of the output and lse of attention, which checkpointing="attention" keeps, too."""
        return self.rows * self.heads * (self.model.head_dim * self.item + 4)

    @property
    def activation_bytes(self) -> int:
        """Bytes of what the backward of a layer reads where nothing is computed again.

        Inputs and results of two norms (4 h), q, k, v, output and lse of attention, and of the MLP its columns: both
        halves and their product with a gate. With experts, the e rows of a token at their input and output (2 e h).
        After Korthikanti et al. (2022), without masks of dropout and without scores.
        """
        model, tp = self.model, self.parallel.tp
        chosen = model.experts_per_token
        elements = 4 * model.hidden + chosen * (3 if model.gated else 2) * model.mlp
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
    #: Factors on the seconds of attention between which 90 % of measured passes lie; None: not known.
    band: tuple[float, float] | None = None

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
