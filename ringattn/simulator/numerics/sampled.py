"""Sampled query rows over the whole sequence: every message of their ranks is executed, rows of other ranks are not.

K/V of an owner are made when a message brings them, and are shared by the sampled ranks that wait for the same block.
Ranks merge in the order of the walk, not in the order of time. In fp64 that changes rounding only; `whole` keeps the
order of a real run.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from ...errors import InvalidInput, Unsupported
from ...kernels import get_kernel
from ...plan.plan import Plan
from ...runtime.accumulators import KernelInputs, RowViews
from ...runtime.softmax import merge_
from ..timing.options import check_seed
from .faults import GRADIENT_FAULTS, Fault, with_fault
from .gradients import Backward, choose_keys, expected_hashes, lost_rows
from .ledger import AuditingKernel, PairLedger, expect
from .oracle import ExactQueries, exact_keys, exact_rows
from .result import NumericsReport
from .source import K_TAG, Q_TAG, RAMP, RowSource
from .walk import Block, Calls, Walk, get_route, split_calls

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


def sample(
    plan: Plan,
    source: RowSource,
    *,
    rows: list[int],
    grads: bool = False,
    seed: int = 0,
    fault: Fault | None = None,
) -> NumericsReport:
    """The report of executing, for the query positions `rows`, every message of their ranks; the oracle checks the
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
    order, homes = _homes(plan, rows)
    report = NumericsReport(true, "sample", ranks=len(homes), tolerance=TOLERANCE, rows=len(order))
    ledger, back, wanted = (PairLedger(np.array(order), plan.heads) for _ in range(3))
    for rank, local in homes:
        met = [expect(true.pattern, true.layout, range(p, p + 1), true.heads, wanted)
               for p in true.layout.positions(rank)[list(local)].tolist()]  # fmt: skip
        report.visits_expected += len(np.unique(np.concatenate(met)))
    places = [range(row, row + 1) for row in order]
    q = torch.cat([source.rows("q", place) for place in places], 2)
    kernel = AuditingKernel(get_kernel("auto", q, q, q), source, plan.layout, ledger, back)
    scale, factor = plan.head_dim**-0.5, plan.pattern.output_scale
    out = torch.zeros(1, plan.heads, len(order), plan.value_dim, dtype=q.dtype, device="cpu")
    lse = torch.full(out.shape[:3], -torch.inf, dtype=q.dtype, device="cpu")
    inputs = KernelInputs()

    def merge(block: Block, calls: Calls) -> None:
        for call, index in split_calls(kernel, calls):
            (x,), (y, z) = inputs.select(call, None, RowViews(q[:, :, index]), RowViews(block.k, block.v))
            heads = slice(call.heads.start, call.heads.stop, call.heads.step)
            total, total_lse = out[:, heads, index], lse[:, heads, index]
            merge_(total, total_lse, *kernel.forward(x, y, z, call, scale))
            if isinstance(index, torch.Tensor):  # else these are views
                out[:, heads, index], lse[:, heads, index] = total, total_lse

    walk = Walk(plan, source, homes, fault)
    walk.run(merge)
    report.visits, report.unsent = sum(one.visits for one in walk.streams), walk.unsent
    truth = exact_rows(true.pattern, source, places, scale)
    for i in range(len(order)):
        report.compare(out[0, :, i] * factor, lse[0, :, i], truth.out[:, i], truth.lse[:, i])
    if grads:
        again = Walk(plan, source, homes, fault)
        lost = lost_rows(again, fault) if fault is not None and fault.kind in GRADIENT_FAULTS else frozenset()
        keys = set(choose_keys(true, order, seed))
        if fault is not None:
            keys |= set(choose_keys(true, [order[row] for row in lost], seed, true.layout.shard(fault.owner)))
        grad = torch.cat([source.rows("grad", place) for place in places], 2)
        state = Backward(plan, kernel, scale, (grad * factor, q, out, lse), sorted(keys), fault, lost)
        again.run(state.compute)
        turn = np.argsort(order)
        delta = (grad[0] * truth.out).sum(-1)
        queries = ExactQueries(np.sort(order), *(x[:, turn] for x in (q[0], grad[0] * factor, truth.lse, delta)))
        dk, dv = exact_keys(true.pattern, source, [range(key, key + 1) for key in state.keys], scale, queries, places)
        for found, exact, tag in ((state.dq, truth.dq, Q_TAG), (state.dk, dk, K_TAG), (state.dv, dv, RAMP)):
            report.compare_gradient(found[0], exact, tag)
        hashes = expected_hashes(true.pattern, true.layout, order, true.heads, true.kv_heads)
        report.wrong_gradients = int((state.hashes != hashes).sum()) + state.strays + back.wrong(wanted)
        report.keys = len(keys)
    report.add_ledger(ledger, wanted)
    report.live, report.seconds = source.peak, time.perf_counter() - begun
    return report


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
