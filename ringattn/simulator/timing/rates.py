"""Seconds of the pairs, merges and messages of a plan on a machine, shared by all solvers; slow ranks and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.kernel_times import BACKWARD
from ...machine.machine import Machine
from .kernel_seconds import expand_seconds, pair_seconds, visit_seconds
from .solvers.recurrence import Stall

if TYPE_CHECKING:
    from ...plan.plan import Plan

#: Factors on the times of ranks: one per rank, or a mapping by rank, with factor 1 for all others.
Factors = Mapping[int, float] | Sequence[float] | np.ndarray
#: How often a merge moves the bytes of a visit's partial (out, lse): it reads the partial, and reads and writes the
#: accumulator.
MERGE_PASSES = 3
#: Up to this many ranks, measured kernel times and host times are computed visit by visit.
FEW_RANKS = 64


@dataclass(frozen=True)
class Faults:
    """How a simulated machine deviates from normal: slow (or fast) ranks, slow links, and single delays (stalls)."""

    #: Factor on the visits and merges of each rank, float64 [ranks]; None: 1.
    slow: np.ndarray | None = None
    #: Factor on the messages that each rank sends, float64 [ranks]; None: 1.
    slow_links: np.ndarray | None = None
    stalls: tuple[Stall, ...] = field(default=())

    def __bool__(self) -> bool:
        """True if there is any fault."""
        return self.slow is not None or self.slow_links is not None or bool(self.stalls)

    def at(self, ranks: np.ndarray) -> Faults:
        """The slowdown factors of `ranks`, in the shape of `ranks`; stalls are left out."""
        slow, slow_links = (None if factors is None else factors[ranks] for factors in (self.slow, self.slow_links))
        return Faults(slow, slow_links)


def parse_factors(name: str, factors: Factors | None, ranks: int) -> np.ndarray | None:
    """Convert slowdown factors to float64 [ranks]; None if all are 1.

    `factors` is a dict by rank, or has one factor per rank. `name` is the argument's name in messages. Raises
    InvalidInput for an invalid rank or factor.
    """
    if factors is None:
        return None
    if isinstance(factors, Mapping):
        for rank in factors:
            if rank not in range(ranks):
                raise InvalidInput(f"{name}: rank {rank!r} is not one of 0 .. {ranks - 1}; try {{0: 1.5}}")
        factors = [factors.get(rank, 1.0) for rank in range(ranks)]
    try:
        by_rank = np.asarray(factors, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{name}: a factor is not a number ({error}); try {{0: 1.5}}") from error
    if by_rank.shape != (ranks,):
        raise InvalidInput(f"{name}: expected a factor for each of {ranks:,} ranks, or by rank such as {{0: 1.5}}")
    if not (np.isfinite(by_rank) & (by_rank > 0)).all():
        raise InvalidInput(f"{name}: factors must be finite and > 0; 1.5 means 50 % slower")
    return None if (by_rank == 1.0).all() else by_rank


def own_bytes(plan: Plan) -> int:
    """The bytes of one rank's q, k, v and output, in a layout with equal shards."""
    rows = -(-plan.q_tokens // plan.ranks) * plan.heads + -(-plan.tokens // plan.ranks) * plan.kv_heads
    return plan.batch * rows * (plan.head_dim + plan.value_dim) * ITEM_BYTES[plan.dtype]


@dataclass(frozen=True)
class Rates:
    """How long computing, merging and sending take in one pass of a plan on a machine."""

    plan: Plan
    machine: Machine
    backward: bool

    @property
    def pair(self) -> float:
        """Seconds of the kernel per (query, key, head, branch) pair, for the whole batch."""
        return pair_seconds(self.plan, self.machine, self.backward)

    @property
    def one_by_one(self) -> bool:
        """Whether each block is timed by its own tiles (on few ranks); otherwise every pair takes the mean time."""
        return self.machine.kernel is not None and self.plan.ranks <= FEW_RANKS

    def visits(self, ring_plan: Plan, visits: Sequence[tuple[int, int]]) -> float:
        """Seconds of the kernel for `visits`: (rank of the queries, rank of the keys) in `ring_plan` for each block."""
        per_pair = self.pair  # raises for tiles far larger than the measured ones
        if self.machine.kernel is None or not self.one_by_one:
            return per_pair * sum(ring_plan.demand.pairs(*visit) for visit in visits)
        flops = 2 * (self.plan.head_dim + self.plan.value_dim) * (BACKWARD if self.backward else 1.0)
        each = (visit_seconds(ring_plan, self.machine.kernel, flops, self.backward, *visit) for visit in visits)
        expanding = (expand_seconds(ring_plan, self.machine, self.backward, *visit) for visit in visits)
        return self.plan.batch * sum(each) + sum(expanding)

    @property
    def cores(self) -> int | None:
        """The number of cores that the ranks of a node share; None if every rank has its own."""
        cores, node = self.machine.cores, min(self.machine.ranks_per_node, self.plan.ranks)
        return None if cores is None or cores >= node else cores

    @property
    def call(self) -> float:
        """Seconds that a call takes besides computing and messages; ranks that share cores spend them in turn.

        Unless the machine defers the comparison of ranks, they include the comparison before the first message:
        ceil(log2 P) rounds, the k-th with the rank 2^k ahead.
        """
        node = min(self.machine.ranks_per_node, self.plan.ranks)
        call, deferred = self._of_direction("call"), self.machine.deferred
        seconds = call or 0.0
        if deferred is False or (deferred is None and call is not None and self.machine.host is None):
            # For a rank at the end of its node, every round is with another node.
            latency, _ = self.machine.rates(node == self.plan.ranks)
            seconds += (self.plan.ranks - 1).bit_length() * latency
        if sweep := self._of_direction("sweep"):
            seconds += own_bytes(self.plan) / sweep
        return seconds * node / (self.cores or node)

    def _of_direction(self, name: str) -> float | None:
        """The machine number `name`; in a backward, the number for backwards if there is one."""
        value: float | None = getattr(self.machine, f"{name}_backward") if self.backward else None
        return getattr(self.machine, name) if value is None else value

    @property
    def passes_q(self) -> bool:
        """Whether queries travel in this pass (pass-Q), rather than keys and values."""
        return (self.plan.rotates if self.backward else self.plan.forward_rotates) == "q"

    @property
    def gamma(self) -> float:
        """How much messages slow down computing: a block takes longer by `gamma` times its longest message's seconds.

        0 if not modelled; 1 if ranks share cores, as another rank computes on the core that copies a message.
        """
        gamma = self.machine.gamma or 0.0
        return 1.0 if gamma and self.cores is not None else gamma

    @property
    def one_gather(self) -> bool:
        """True if the plan gathers all keys in one collective call and then makes one kernel call."""
        return self.machine.one_gather and self.plan.schedule == "allgather"

    def gather_factors(self, near: bool, messages: int, node: int) -> tuple[float, float]:
        """(factor on latency, factor on bytes) for each of `messages` that a rank posts at once, in an all-gather.

        `near` means messages within a node. In a collective call, latency counts only once. Every byte enters a node
        once, over the cards of its `node` ranks, and is then passed from rank to rank through the node. Both factors
        are 1 for messages outside a collective call.
        """
        if not self.one_gather:
            return 1.0, 1.0
        return 1 / messages, (self.plan.ranks - 1) / (node - 1) if near else 1 / node

    def crowd(self, source: Any, target: Any, group: int = 1) -> Any:
        """How many messages share a link, see `Machine.crowd`: among the plan's ranks, or within a Ulysses group.

        Always 1 if all keys are gathered in one collective call.
        """
        machine, size = self.machine, self.plan.ulysses_size
        if self.one_gather:
            return 1
        if size > 1 and source // size == target // size:
            return machine.crowd(source % size, target % size, size)
        return machine.crowd(source, target, self.plan.ranks, group)

    def merge(self, rows: int) -> float:
        """Seconds to merge a block's results into out and lse of `rows` (query row, head), or to add dQ, dK and dV.

        The accumulators are fp32, or fp64 for fp64 inputs. 0 if the machine has no merge rate, or if one call has all
        gathered keys. In a backward, a block is assumed to have as many keys as query rows.
        """
        if self.machine.merge is None or self.one_gather:
            return 0.0
        plan = self.plan.ring_plan(0)[0]
        width: float = plan.value_dim + 1
        if self.backward:
            width = plan.head_dim + sum(heads * width for heads, width, _ in plan.tensors("grad")) / plan.heads
        size = plan.batch * rows * width * max(ITEM_BYTES[plan.dtype], 4)
        return MERGE_PASSES * size / self.machine.merge

    def merged_rows(self, ring_plan: Plan, queries: int, keys: int) -> int:
        """How many (query row, head) results a rank merges when it computes with one block.

        `queries` is the rank of the queries, `keys` that of the keys. In a backward, gradients are added instead. With
        `one_by_one`, each work of a forward counts: rows in several works, such as the branches of a dilated mask, are
        merged once per work, and even the first result costs a copy into place.
        """
        own = queries == keys
        if self.machine.merge is None:
            return 0
        if self.one_by_one and not self.backward:
            works = ring_plan.demand.joined_works(queries, keys)
            single = own and len(works) == 1
            return 0 if single else sum(len(work.q) * len(work.heads) * work.repeat for work in works)
        needed = (range(keys, keys + 1),)
        return ring_plan.query_demand.count_needed(needed, queries) if self.merges(own) else 0

    def merges(self, own: bool | np.ndarray) -> np.ndarray:
        """Whether results from a rank's own block (`own`), or from another's, need a merge: bool in the shape of `own`.

        A rank's own block comes first in a forward, so there is no partial result to merge with. Two simplifications:
        rows that see no key of their rank's own block count as merged with their first block, although they are copied;
        and rows in several kernel calls on one block count as merged once.
        """
        return np.logical_or(self.backward, np.logical_not(own))

    def near(self, sign: int, ranks: np.ndarray) -> np.ndarray:
        """Whether each rank r and rank r + sign are on one node: bool [ranks], or a scalar array if all are alike."""
        per_node, world = self.machine.ranks_per_node, self.plan.ranks
        if per_node == 1 or per_node >= world:
            return np.asarray(per_node >= world)
        return np.asarray(ranks // per_node == (ranks + sign) % world // per_node)

    def message(self, size: np.ndarray | float, near: np.ndarray, crowd: Any = 1) -> np.ndarray:
        """Seconds that messages of `size` bytes take; `near` is True for messages within a node.

        Within a node, `crowd` messages share a link; between nodes, neighbours share none.
        """
        latency, bandwidth = (
            np.where(near, within, between)
            for within, between in zip(self.machine.rates(True), self.machine.rates(False), strict=True)
        )
        seconds: np.ndarray = latency + size * np.where(near, crowd, 1) / bandwidth
        return seconds
