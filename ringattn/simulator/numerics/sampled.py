"""Sampled query rows over the whole sequence: every message of their ranks is executed, rows of other ranks are not.

K/V of an owner are made when a message brings them, and are shared by the sampled ranks that wait for the same block.
Ranks merge in the order of the walk, not in the order of time. In fp64 that changes rounding only; `whole` keeps the
order of a real run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import InvalidInput, Unsupported
from ...kernels import get_kernel
from ...kernels.base import Kernel
from ...plan.plan import Plan
from ...plan.work import Work
from ...runtime.accumulators import KernelInputs, RowViews
from ...runtime.softmax import merge_
from ..timing.options import check_seed
from .faults import GRADIENT_FAULTS, Fault, with_fault
from .gradients import Backward, chosen_keys, expected_hashes, lost_gradients
from .ledger import AuditingKernel, PairLedger, expect
from .oracle import exact_gradients, exact_row
from .result import NumericsReport
from .source import K_TAG, Q_TAG, RAMP, RowSource
from .walk import Block, Calls, Walk, get_route, index_rows

#: The largest fp64 error that passes: 262,144 merges drift by less than 1e-12.
TOLERANCE = 1e-11


def chosen_rows(plan: Plan, number: int, ranks: int | None = None, seed: int = 0) -> list[int]:
    """`number` distinct query positions on at most `ranks` ranks (default: `number`), the first and the last position
    of the sequence among them."""
    check_seed(seed)
    random = np.random.default_rng(seed)
    number = min(number, plan.tokens)
    homes = {plan.layout.owner(0), plan.layout.owner(plan.tokens - 1)} if plan.tokens else set()
    most = min(number if ranks is None else max(ranks, 1), min(plan.ranks, plan.tokens))
    rows = {0, plan.tokens - 1} if number > 1 and most >= len(homes) else {0} if number else set()
    homes = {plan.layout.owner(row) for row in rows}
    while len(rows) < number:
        row = int(random.integers(plan.tokens))
        home = plan.layout.owner(row)
        if home not in homes and len(homes) >= most:
            shard = plan.layout.positions(sorted(homes)[int(random.integers(len(homes)))])
            row = int(shard[int(random.integers(len(shard)))])
            if all(plan.layout.rows(h) <= sum(plan.layout.owner(r) == h for r in rows) for h in homes):
                break  # these ranks have no row left
        rows.add(row)
        homes.add(plan.layout.owner(row))
    return sorted(rows)


@dataclass
class _Forward:
    """Merged partials of sampled rows: out [1, H, rows, Dv], lse [1, H, rows], fp64."""

    kernel: Kernel
    scale: float
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    inputs: KernelInputs

    def compute(self, block: Block, calls: Calls) -> None:
        """Merge the partials of a block."""
        for (work, _), rows in calls.items():
            place = index_rows(tuple(rows))
            some = Work(work.heads, work.kv, range(len(rows)), work.k)
            heads = slice(work.heads.start, work.heads.stop, work.heads.step)
            for call in self.kernel.split(some):
                index = index_rows(tuple(rows[call.q.start : call.q.stop : call.q.step]))
                mine, keys = RowViews(self.q[:, :, place]), RowViews(block.k, block.v)
                (x,), (y, z) = self.inputs.select(call, None, mine, keys)
                part, part_lse = self.kernel.forward(x, y, z, call, self.scale)
                total, lse = self.out[:, heads, index], self.lse[:, heads, index]
                merge_(total, lse, part, part_lse)
                if isinstance(index, torch.Tensor):  # else these are views
                    self.out[:, heads, index], self.lse[:, heads, index] = total, lse


def sample(
    plan: Plan,
    source: RowSource,
    *,
    rows: list[int],
    grads: bool = False,
    seed: int = 0,
    fault: Fault | None = None,
) -> NumericsReport:
    """The report of executing, for the query positions `rows`, every message of their ranks; `exact_row` checks the
    results.

    With `grads` a second pass computes dQ of these rows, and dK and dV of as many key rows that `seed` chooses, of a
    loss that depends on these rows only (see `gradients`). Memory grows with the number of ranks by the 24 bytes per
    rank that the expected ledger takes. Raises InvalidInput where the plan is not fp64, Unsupported where it uses
    Ulysses.
    """
    check_plan(plan)
    get_route(plan)
    if plan.dtype != "float64":
        raise InvalidInput(
            f"dtype {plan.dtype}: sampled rows are exact in fp64 only; make the plan with dtype='float64'"
        )
    if not rows or any(not 0 <= row < plan.tokens for row in rows) or len(set(rows)) != len(rows):
        raise InvalidInput(
            f"rows must be distinct query positions 0 .. {plan.tokens - 1}, at least one; got {rows[:8]}"
        )
    if fault is not None:
        fault.check(plan, backward=grads)
    begun = time.perf_counter()
    source.live = source.peak = 0
    true, plan = plan, plan if fault is None else with_fault(plan, fault)
    scale = plan.head_dim**-0.5
    order, homes = _homes(plan, rows)
    ledger = PairLedger(np.array(order), plan.heads)
    walk = Walk(plan, source, homes, fault)
    q = torch.cat([source.rows("q", range(row, row + 1)) for row in order], 2)
    inner = get_kernel("auto", q, q, q)
    back = PairLedger(np.array(order), plan.heads)
    audited = AuditingKernel(inner, source, plan.layout, ledger, back)
    out = torch.zeros(1, plan.heads, len(order), plan.value_dim, dtype=q.dtype, device="cpu")
    lse = torch.full(out.shape[:3], -torch.inf, dtype=q.dtype, device="cpu")
    sums = _Forward(audited, scale, q, out, lse, KernelInputs())
    walk.run(sums.compute)
    visits = sum(one.visits for one in walk.streams)
    gradients = _backward(true, plan, sums, walk, order, fault, seed) if grads else None
    wanted = PairLedger(np.array(order), plan.heads)
    expected = 0
    for rank, local in homes:
        met = [expect(true.pattern, true.layout, range(p, p + 1), true.heads, wanted)
               for p in true.layout.positions(rank)[list(local)].tolist()]  # fmt: skip
        expected += len(np.unique(np.concatenate(met)))
    error, lse_error = _errors(true, source, order, scale, out * plan.pattern.output_scale, lse)
    return NumericsReport(
        plan=true, mode="sample", ranks=len(homes), rows=len(order), visits=visits,
        visits_expected=expected, pairs=int(ledger.pairs.sum()), pairs_expected=int(wanted.pairs.sum()),
        wrong=ledger.wrong(wanted),
        wrong_gradients=None if gradients is None else gradients.wrong + back.wrong(wanted), error=error,
        lse_error=lse_error, gradient_error=None if gradients is None else gradients.error,
        keys=0 if gradients is None else gradients.keys,
        tolerance=TOLERANCE, seconds=time.perf_counter() - begun, calls=ledger.calls, live=source.peak,
        unsent=walk.unsent,
    )  # fmt: skip


@dataclass(frozen=True)
class _Gradients:
    """Result of a sampled backward: blocks of heads with wrong counts, the largest error, and how many key rows were
    compared."""

    wrong: int
    error: float
    keys: int


def _backward(
    true: Plan, plan: Plan, sums: _Forward, walk: Walk, order: list[int], fault: Fault | None, seed: int
) -> _Gradients:
    """The compared backward of the sampled rows, the positions `order`, after their forward `sums`."""
    source, kernel = walk.source, sums.kernel
    assert isinstance(kernel, AuditingKernel)
    again = Walk(plan, source, walk.homes, fault)
    lost = lost_gradients(again, fault) if fault is not None and fault.kind in GRADIENT_FAULTS else None
    keys = set(chosen_keys(true, order, seed))
    if lost is not None:
        keys |= set(chosen_keys(true, [order[row] for row in lost.rows], seed, true.layout.shard(lost.owner)))
    grad = torch.cat([source.rows("grad", range(row, row + 1)) for row in order], 2)
    state = Backward(
        plan, kernel, sums.scale, grad * plan.pattern.output_scale, sums.q, sums.out, sums.lse, sorted(keys),
        KernelInputs(), lost,
    )  # fmt: skip
    again.run(state.compute)
    wanted = expected_hashes(true.pattern, true.layout, order, true.heads, true.kv_heads)
    exact = exact_gradients(true.pattern, source, order, state.keys, sums.scale)
    worst = 0.0
    for x, y, tag in zip((state.dq[0], state.dk[0], state.dv[0]), exact, (Q_TAG, K_TAG, RAMP), strict=True):
        some = x.numpy().copy()
        some[..., tag] = y[..., tag] = 0  # holds a count
        worst = max(worst, gap(some, y))
    return _Gradients(int((state.hashes != wanted).sum()) + state.strays, worst, len(state.keys))


def check_plan(plan: Plan) -> None:
    """Raise Unsupported where the ranks of a plan exchange heads, or round what they send."""
    if plan.comm_dtype is not None:
        raise Unsupported(
            f"comm_dtype={plan.comm_dtype} would round the tags that tell positions; make the plan without it"
        )
    if plan.ulysses_size > 1:
        raise Unsupported(
            f"schedule {plan.schedule}: the numerics simulator does not execute the exchange of tokens for heads; "
            f"try the schedule between the groups, {plan.ring_plan(0)[0].schedule}, or virtual_attention"
        )


def _homes(plan: Plan, rows: list[int]) -> tuple[list[int], list[tuple[int, tuple[int, ...]]]]:
    """(rows in the order of their ranks, (rank, local indices of its rows) for each rank)."""
    by_rank: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        rank = plan.layout.owner(row)
        local = int(np.flatnonzero(plan.layout.positions(rank) == row)[0])
        by_rank.setdefault(rank, []).append((local, row))
    homes = [(rank, sorted(found)) for rank, found in sorted(by_rank.items())]
    order = [row for _, found in homes for _, row in found]
    return order, [(rank, tuple(local for local, _ in found)) for rank, found in homes]


def _errors(
    plan: Plan, source: RowSource, order: list[int], scale: float, out: torch.Tensor, lse: torch.Tensor
) -> tuple[float, float]:
    worst = [0.0, 0.0]
    for i, row in enumerate(order):
        truth = exact_row(plan.pattern, source, row, scale)
        for place, (found, exact) in enumerate(((out[0, :, i], truth.out), (lse[0, :, i], truth.lse))):
            worst[place] = max(worst[place], gap(found.numpy(), exact))
    return worst[0], worst[1]


def gap(found: np.ndarray, exact: np.ndarray) -> float:
    """Largest error over the largest entry of `exact`, or over 1 where that is smaller; infinite where an entry is
    NaN or infinite in only one of the arrays."""
    seen = np.isfinite(exact)
    if not np.array_equal(np.isfinite(found), seen):
        return float("inf")
    if not seen.any():
        return 0.0
    return float(np.abs(found[seen] - exact[seen]).max() / max(1.0, np.abs(exact[seen]).max()))
