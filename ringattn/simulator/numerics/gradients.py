"""Gradients of sampled query rows: exact dQ of these rows, and their share of dK and dV of every block.

The loss depends on the sampled rows alone: the cotangent of every other row is 0, so that dK and dV of a key row are
exact sums over the sampled rows that see the key. dK and dV of chosen key rows are kept. For every other key row, the
count that its gradient carries (see `ledger`) goes into a hash of its block, which is compared with the expected
hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import InvalidInput
from ...layout.regular import Layout
from ...pattern import Pattern
from ...plan.plan import Plan
from ...plan.row_sets import RowSet
from ...runtime.accumulators import KernelInputs, RowViews
from .faults import GRADIENT_FAULTS, Fault
from .ledger import AuditingKernel, coefficients, entry, moments, seen_pieces, weights
from .source import K_TAG
from .walk import Block, Calls, Walk, split_calls


@dataclass
class Backward:
    """The backward of sampled rows. `by_row` are grad, q, out and lse, [1, H, rows, ...], fp64."""

    plan: Plan
    kernel: AuditingKernel
    scale: float
    by_row: tuple[torch.Tensor, ...]
    #: Key positions whose dK and dV are kept, distinct.
    keys: Sequence[int]
    #: What the rows `lost` add to the gradients of the block of a fault's owner is multiplied by the fault's factor.
    fault: Fault | None = None
    lost: frozenset[int] = frozenset()
    #: Kernel calls whose keys do not belong to one owner, plus counts that are not integers.
    strays: int = 0

    def __post_init__(self) -> None:
        plan, q = self.plan, self.by_row[1]
        self.inputs, self.dq = KernelInputs(), torch.zeros_like(q)
        self.dk = q.new_zeros(1, plan.kv_heads, len(self.keys), plan.head_dim)
        self.dv = q.new_zeros(1, plan.kv_heads, len(self.keys), plan.value_dim)
        #: Hashes of the counts that dK carries: uint64 [key/value heads, owners].
        self.hashes = np.zeros((plan.kv_heads, plan.ranks), dtype=np.uint64)
        self.homes = [plan.layout.owner(key) for key in self.keys]

    def compute(self, block: Block, calls: Calls) -> None:
        """Add the gradients of all visits to a block."""
        if self.fault is None or block.owner != self.fault.owner:
            return self._differentiate(block, calls, 1.0)
        for harmed, factor in ((False, 1.0), (True, GRADIENT_FAULTS.get(self.fault.kind, 1.0))):
            some = {call: [row for row in rows if (row in self.lost) == harmed] for call, rows in calls.items()}
            self._differentiate(block, some, factor)

    def _differentiate(self, block: Block, calls: Calls, factor: float) -> None:
        """Add the gradients of visits; the gradients of keys are multiplied by `factor`."""
        for call, index in split_calls(self.kernel, calls):
            mine = RowViews(*(x[:, :, index] for x in self.by_row))
            (grad, q, out, lse), (k, v) = self.inputs.select(call, None, mine, RowViews(block.k, block.v))
            dq, dk, dv = self.kernel.backward(grad, q, k, v, out, lse, call, self.scale)
            self.dq[:, call.heads.start : call.heads.stop : call.heads.step, index] += dq
            self._gather(block, call.kv, self.kernel.keys(k, v), factor * dk, factor * dv)

    def _gather(self, block: Block, kv: range, places: np.ndarray, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Record gradients of keys: places [1, heads, keys], dk and dv [1, heads, keys, ...]."""
        found = dk[0, ..., K_TAG].numpy()
        counts = found.astype(np.int64)
        self.strays += int((counts != found).sum())
        layout = self.plan.layout
        for i, at in enumerate(kv):
            head, place = (block.row_set.heads[at] if isinstance(block.row_set, RowSet) else at), places[0, i]
            if not 0 <= place[0] < layout.tokens:
                self.strays += 1
                continue
            owner, wide = layout.owner(int(place[0])), place.astype(np.uint64)
            count = counts[i].astype(np.uint64)
            with np.errstate(over="ignore"):
                sums = (x.sum(dtype=np.uint64) for x in (count, count * wide, count * wide * wide))
                self.hashes[head, owner] += entry(coefficients(np.array(owner)), *sums)
            for number, key in enumerate(self.keys):
                if self.homes[number] == owner:
                    for row in np.flatnonzero(place == key).tolist():
                        self.dk[0, head, number] += dk[0, i, row]
                        self.dv[0, head, number] += dv[0, i, row]


def expected_hashes(pattern: Pattern, layout: Layout, rows: Iterable[int], heads: int, kv_heads: int) -> np.ndarray:
    """The hashes that `Backward` must reach, in closed form: each row's weight times the moments of the keys that it
    sees."""
    found, group = np.zeros((kv_heads, layout.ranks), dtype=np.uint64), heads // kv_heads
    for row in rows:
        weight = weights(np.array([row])).astype(np.uint64)
        for tile in pattern.tiles(range(row, row + 1), range(layout.tokens), range(heads)):
            for owner, first, count, step in seen_pieces(tile, layout):
                with np.errstate(over="ignore"):
                    hashes = weight * entry(coefficients(owner), *moments(first, count, step))[0]
                    for head in tile.heads:
                        np.add.at(found[head // group], owner, hashes)
    return found


def choose_keys(plan: Plan, rows: Sequence[int], seed: int, among: Sequence[range] | None = None) -> list[int]:
    """Distinct random key positions, for each row a key that some head of the row sees; only keys in `among` where
    given."""
    random, found = np.random.default_rng(seed + 1), set()
    for row in rows:
        seen = [
            part.k
            for k in among or [range(plan.tokens)]
            for tile in plan.pattern.tiles(range(row, row + 1), k, range(plan.heads))
            for part in tile.refine()
        ]
        if seen:
            keys = seen[int(random.integers(len(seen)))]
            found.add(int(keys[int(random.integers(len(keys)))]))
    return sorted(found)


def lost_rows(walk: Walk, fault: Fault) -> frozenset[int]:
    """The sampled rows whose gradients for the fault's owner pass, or arrive at, the rank of the fault. Raises
    InvalidInput where there are none."""
    plan, rank, owner = walk.plan, fault.rank, fault.owner
    ranks = {home for home, _ in walk.homes}
    behind = ranks
    if rank != owner:
        edges = (edge for arc in walk.route.arcs(rank) for edge in arc if edge.owner == owner)
        behind = {home for edge in edges for run in walk.route.served(edge) for home in ranks & set(run)}
    gone = {home for home in behind - {rank} if plan.demand.visits(home, owner)}
    if not gone:
        raise InvalidInput(
            f"no gradients of sampled rows for the block of rank {owner} pass rank {rank}: nothing to lose; try "
            "fault_rank = fault_owner = a rank whose keys some other sampled row sees"
        )
    homes = [home for home, local in walk.homes for _ in local]
    return frozenset(row for row, home in enumerate(homes) if home in gone)
