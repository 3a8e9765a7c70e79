"""Seconds and bytes of one layer beside attention, and of the output matrix, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...machine.machine import Machine
from .config import ModelConfig
from .hardware import collective_seconds, matmul_seconds, memory_bandwidth
from .parallel import Parallel

#: Times that a rank of tensor parallelism gathers or reduces the activations in a forward, and again in a backward:
#: around attention and around the MLP (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
#: Models", 2022, with sequence parallelism).
TP_EXCHANGES = 4
#: The part of the memory that the driver, NCCL's buffers and fragments take [assumed].
RESERVED = 0.05


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
        rows = self.rows if rows is None else rows
        return matmul_seconds(self.machine, rows, columns, inner, self.item, count, stored)

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
