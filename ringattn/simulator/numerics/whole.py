"""Executes all or many ranks of a plan in this process: batched ranks in lockstep, groups of ranks one after another.

Ranks that send no messages to each other run in groups of at most the size that the caller allows, so memory grows
with that size and not with the sequence. Without a backward, connected ranks can be split into groups, too: only
blocks of K/V cross group borders, and the source generates these again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ...errors import InvalidInput
from ...kernels import get_kernel
from ...kernels.base import Kernel
from ...layout.regular import Layout
from ...pattern.tile import merge_runs
from ...plan.plan import Plan
from ...runtime.passes import backward, forward
from ...runtime.ring import ForwardResult, Job
from ..progress import track
from .checkpoint import NOT_KEPT, Checkpoint
from .ledger import AuditingKernel, PairLedger, expect, expected_counts
from .lockstep import BatchedRanks, Lockstep, batch_ranks, connected
from .oracle import ExactQueries, exact_keys, exact_rows
from .result import NumericsReport
from .sampled import TOLERANCE, check_plan
from .source import K_TAG, Q_TAG, RAMP, Name, RowSource, placed

#: Default number of ranks that run together: larger batches do not fit into caches.
TOGETHER = 128
#: Query rows, and key rows, of each rank that are compared with an oracle.
COMPARED = 16

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    """Results of the ranks of one batch: out [ranks, H, n, Dv], lse [ranks, H, n], grads (dq, dk, dv) or ()."""

    ranks: tuple[int, ...]
    out: torch.Tensor
    lse: torch.Tensor
    grads: Tensors


#: Ranks that run together, grouped into batches.
RankGroup = tuple[BatchedRanks, ...]


def make_groups(plan: Plan, ranks: Sequence[int], *, backward: bool, together: int = TOGETHER) -> Iterator[RankGroup]:
    """Yield groups of about `together` ranks; the ranks of a group are split into batches that run together.

    Each group is planned only when it is needed, so memory does not grow with the number of ranks. Raises InvalidInput
    if gradients, or outputs of pass-Q, would have to go to ranks outside `ranks`.
    """
    check_plan(plan)
    closed = backward or plan.forward_rotates == "q"
    group: list[int] = []
    for part in connected(plan, ranks, backward=backward):
        for piece in [part] if closed else [part[i : i + together] for i in range(0, len(part), together)]:
            if group and len(group) + len(piece) > together:
                yield tuple(batch_ranks(plan, sorted(group), backward=backward))
                group = []
            group += piece
    if group:
        yield tuple(batch_ranks(plan, sorted(group), backward=backward))


def execute(
    group: RankGroup, source: RowSource, kernel: Callable[[], Kernel], scale: float, *, grads: bool
) -> tuple[list[Outcome], list[Lockstep]]:
    """Run the forward and, with `grads`, the backward of a group of ranks.

    Returns (outcome of each batch, the `Lockstep` of each pass). d loss / d out comes from `source`.
    """
    plan, answer = group[0].whole, partial(source.block, group[0].whole)
    q_layout = plan.layout_of("q")
    sides: tuple[tuple[Name, Layout], ...] = ("q", q_layout), ("k", plan.layout), ("v", plan.layout)
    inputs = [[source.stacked(name, layout, c.ranks) for name, layout in sides] for c in group]
    jobs = [Job(c.plan, c.first, kernel(), scale) for c in group]
    passes = [ring := Lockstep(group, answer)]
    results: list[ForwardResult] = ring.run(
        [forward(j, q, (k, v), save=grads) for j, (q, k, v) in zip(jobs, inputs, strict=True)]
    )
    factor = plan.pattern.output_scale
    given: Sequence[Tensors] = [()] * len(jobs)
    if grads:
        passes.append(back := Lockstep(group, answer, backward=True))
        cotangents = [source.stacked("grad", q_layout, c.ranks) * factor for c in group]
        each = zip(jobs, cotangents, inputs, results, strict=True)
        given = back.run([backward(j, g, None, q, (k, v), r) for j, g, (q, k, v), r in each])
    outs = [r.out if factor == 1.0 else r.out * factor for r in results]
    return [Outcome(c.ranks, out, r.lse, g) for c, out, r, g in zip(group, outs, results, given, strict=True)], passes


@dataclass
class _Compared:
    """Compares results with oracles and ledgers, and adds counts and errors to the report."""

    report: NumericsReport
    source: RowSource
    scale: float

    def __post_init__(self) -> None:
        self.plan, self.q_layout = self.report.plan, self.report.plan.layout_of("q")

    def begin(self, ranks: Sequence[int], grads: bool) -> None:
        """Record what a group of ranks should compute and send; its first rank determines which rows are compared."""
        self.random = np.random.default_rng(ranks[0])
        report, plan = self.report, self.plan
        steps = (step for rank in ranks for step in plan.for_rank(rank).forward)
        report.live = max(report.live, len(ranks))
        report.visits += sum(len({part.owner for part in step.visits}) for step in steps)
        for back in (False, True)[: 1 + grads]:
            report.planned_bytes += sum(plan.bytes_sent(rank, backward=back) for rank in ranks)
            report.planned_messages += sum(plan.messages(rank, backward=back) for rank in ranks)

    def results_of(self, outcomes: Sequence[Outcome]) -> None:
        """Compare the outputs of a group of ranks and, if there are any, its gradients."""
        for outcome in outcomes:
            self.rows_of(outcome)
            if outcome.grads:
                self.counts_of(outcome)
        if outcomes[0].grads:
            home = {rank: (o, i) for o in outcomes for i, rank in enumerate(o.ranks)}
            for ranks in connected(self.plan, sorted(home), backward=True):
                if any(map(self.plan.layout.rows, ranks)):
                    self._keys_of(ranks, [home[rank] for rank in ranks])

    def rows_of(self, outcome: Outcome) -> None:
        """Compare `COMPARED` rows of each rank with `exact_rows`: the output and, if computed, dq."""
        for i, rank in enumerate(outcome.ranks):
            local = self._chosen(outcome.out.shape[2])
            if not local:
                continue
            places = placed(self.q_layout, rank, [local])
            truth = exact_rows(self.plan.pattern, self.source, places, self.scale)
            mine = slice(local.start, local.stop, local.step)
            self.report.compare(outcome.out[i, :, mine], outcome.lse[i, :, mine], truth.out, truth.lse)
            if outcome.grads:
                self.report.compare_gradient(outcome.grads[0][i, :, mine], truth.dq, Q_TAG)
            self.report.rows += len(local)

    def _chosen(self, rows: int) -> range:
        """At most `COMPARED` evenly spaced local rows of a shard, from a random row on.

        The step is odd, so that a dilation by a power of two does not always hide the same rows.
        """
        step = max(1, rows // COMPARED)
        step -= 1 - step % 2
        count = min(rows, COMPARED)
        start = int(self.random.integers(rows - (count - 1) * step)) if count else 0
        return range(start, start + count * step, step) if count else range(0)

    def ledger_of(self, ledger: PairLedger, ranks: Sequence[int]) -> None:
        """Compare the recorded pairs of all rows of `ranks` with the expected ones."""
        wanted = PairLedger(ledger.positions, self.plan.heads)
        for rank in ranks:
            met = expect(self.plan.pattern, self.plan.layout, self.q_layout.shard(rank), self.plan.heads, wanted)
            self.report.visits_expected += len(met)
        self.report.add_ledger(ledger, wanted)

    def counts_of(self, outcome: Outcome) -> None:
        """Compare the counts in the gradients, which say how often rows were used, with the expected counts."""
        wrong = 0
        dq, dk, dv = outcome.grads
        for i, rank in enumerate(outcome.ranks):
            queries, keys = _expected(self.plan, rank)
            for x, wanted in ((dq[i, ..., Q_TAG], queries), (dk[i, ..., K_TAG], keys), (dv[i, ..., RAMP], keys)):
                wrong += int((x.double().numpy() != wanted).sum())
        self.report.wrong_gradients = (self.report.wrong_gradients or 0) + wrong

    def _keys_of(self, ranks: Sequence[int], mine: Sequence[tuple[Outcome, int]]) -> None:
        """Compare dk and dv of some key rows of connected ranks, and products of gradients over all their rows.

        `mine` has the outcome of each rank, and its index there.
        """
        layout, source = self.plan.layout, self.source
        positions = np.concatenate([self.q_layout.positions(rank) for rank in ranks])
        order = torch.from_numpy(np.argsort(positions))
        runs = [r for rank in ranks for r in self.q_layout.shard(rank)]
        q, grad = (source.join(name, runs)[0].double() for name in ("q", "grad"))
        out, lse = (
            torch.cat(parts, 1).double() for parts in ([o.out[i] for o, i in mine], [o.lse[i] for o, i in mine])
        )
        delta = (grad * out).sum(-1)  # `out` includes the pattern's output scale
        self._products([r for rank in ranks for r in layout.shard(rank)], mine, (q, grad, out, delta))
        grad *= self.plan.pattern.output_scale
        sorted_ = [x.index_select(1, order) for x in (q, grad, lse, delta)]
        known = ExactQueries(positions[order.numpy()], *sorted_)
        for rank, (o, i) in zip(ranks, mine, strict=True):
            local = self._chosen(layout.rows(rank))
            if not local:
                continue
            places = placed(layout, rank, [local])
            exact = exact_keys(self.plan.pattern, source, places, self.scale, known)
            for x, truth, tag in zip(o.grads[1:], exact, (K_TAG, RAMP), strict=True):
                self.report.compare_gradient(x[i, :, local.start : local.stop : local.step], truth, tag)
            self.report.keys += len(local)

    def _products(
        self, runs: Sequence[range], mine: Sequence[tuple[Outcome, int]], of_queries: Sequence[torch.Tensor]
    ) -> None:
        """Compare products over all rows that must be equal: v^T dv = out^T dO and k^T dk = dq^T q.

        With the weights P and the gradients dS of the logits, these are v^T P^T dO and k^T dS^T q. Each row of q, k and
        v has different values, so swapped rows or a single wrong row change the products. `runs` are the positions of
        the keys, `of_queries` are (q, dO, out, delta) of all query rows.
        """
        q, grad, out, delta = of_queries
        dq, dk, dv = (torch.cat([o.grads[place][i] for o, i in mine], 1).double() for place in range(3))
        k, v = (self.source.join(name, runs)[0].double() for name in ("k", "v"))
        dq[..., Q_TAG], dk[..., K_TAG], dv[..., RAMP] = 0, 0, 0  # these columns hold counts
        # A column of ones: dk sums to 0, because the gradients of the logits of each row do.
        k = k.index_fill(-1, torch.tensor(k.shape[-1] + Q_TAG, device="cpu"), 1.0)
        # In this column and in that of the positions, sums of dS k are differences of numbers as large as delta.
        rounded = dq.abs()
        rounded[..., [Q_TAG, K_TAG]] += self.scale * delta.abs()[..., None]
        for (a, b), (c, d), size in (((v, dv), (out, grad), out), ((k, dk), (dq, q), rounded)):
            pairs = (a, b), (c, d), (a**2, b**2), (size**2, d**2)
            found, wanted, *squares = ((x.mT @ y).unflatten(0, (self.plan.kv_heads, -1)).sum(1) for x, y in pairs)
            errors = (found - wanted).abs() / sum(squares).sqrt().clamp_min(1.0)
            worst = errors.nan_to_num(torch.inf).max().item()
            self.report.product_error = max(self.report.product_error or 0.0, worst)


def _expected(plan: Plan, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(expected counts of the query rows [H, n], of the key rows [K, n]) of a rank, in local order."""
    layout, q_layout, heads = plan.layout, plan.layout_of("q"), plan.heads
    found = []
    for mine, others, keys in ((q_layout, layout, False), (layout, q_layout, True)):
        runs = mine.shard(rank) or (range(0),)
        found.append(
            np.concatenate([expected_counts(plan.pattern, others.domain, r, heads, keys=keys) for r in runs], 1)
        )
    return found[0], found[1].reshape(plan.kv_heads, plan.heads // plan.kv_heads, -1).sum(1)


def whole(
    plan: Plan,
    source: RowSource,
    *,
    ranks: Sequence[int] | None = None,
    grads: bool = False,
    together: int = TOGETHER,
    checkpoint: Checkpoint = NOT_KEPT,
) -> NumericsReport:
    """Execute all rows of `ranks` (default: all ranks), check them, and return a report.

    A ledger checks the pairs of all rows. `COMPARED` query rows of each rank are compared with `exact_rows`. With
    `grads`, dq of these rows is also compared, dk and dv of as many key rows are compared with `exact_keys`, and over
    all rows products that must be equal, such as v^T dv and out^T dO. `checkpoint` keeps, for each finished group, its
    ranks, its number of pairs and a hash of its ledger. Raises InvalidInput or Unsupported.
    """
    if together < 1:
        raise InvalidInput(f"together={together} must be a number of ranks >= 1")
    begun = time.perf_counter()
    mine = range(plan.ranks) if ranks is None else sorted(set(ranks))
    scale = plan.head_dim**-0.5
    one = source.rows("q", range(1))
    plain = get_kernel("auto", one, one, one).single()
    # In fp32: the rounding of a sum over all keys.
    tolerance = TOLERANCE if plan.dtype == "float64" else torch.finfo(torch.float32).eps * (8 + plan.tokens**0.5)
    report = NumericsReport(plan, "all", ranks=len(mine), tolerance=tolerance)
    done, before, finished = _Compared(report, source, scale), 0.0, list[dict[str, Any]]()
    if checkpoint.state:
        report.restore(checkpoint.state["report"])
        before, finished = report.seconds, checkpoint.state["finished"]
    groups: Iterable[RankGroup] = make_groups(plan, mine, backward=grads, together=together)
    if ranks is not None:
        groups = [*groups]  # refused before anything is executed, if they need other ranks
    for number, group in enumerate(track(groups, -(-len(mine) // together), "groups of ranks")):
        members = [rank for batched in group for rank in batched.ranks]
        if number < len(finished):
            continue
        done.begin(members, grads)
        ledger = PairLedger(np.concatenate([done.q_layout.positions(rank) for rank in members]), plan.heads)

        def audited(ledger: PairLedger = ledger) -> Kernel:
            return AuditingKernel(plain, source, plan.layout, ledger, plan.forward_rotates == "q")

        outcomes, passes = execute(group, source, audited, scale, grads=grads)
        report.answered += passes[0].answered
        report.sent_bytes += sum(each.sent_bytes for each in passes)
        report.sent_messages += sum(each.sent_messages for each in passes)
        done.ledger_of(ledger, members)
        done.results_of(outcomes)
        report.seconds = before + time.perf_counter() - begun
        runs = [(run[0], run[-1]) for run in merge_runs(range(rank, rank + 1) for rank in members)]
        finished.append({"ranks": runs, "pairs": int(ledger.pairs.sum()), "ledger": ledger.digest()})
        if checkpoint.due:
            checkpoint.write({"report": report.counts(), "finished": finished})
    checkpoint.write({"report": report.counts(), "finished": finished})
    assert ranks is not None or report.pairs_expected == plan.pairs(), "each pair is expected once"
    return report
