"""All ranks of a plan, or many, executed forward and backward in this process: cohorts in lockstep, groups in turns.

Ranks that send no messages to each other run in turns, as many at a time as the caller allows, so that what exists
grows with that and not with the sequence. Where only the forward is run, connected ranks may be cut into groups too: what
crosses the cut is a block of K/V, which the source makes again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import InvalidInput
from ..executor import Forward, Job, backward, forward
from ..kernels import get_kernel
from ..kernels.base import Kernel
from ..pattern import Pattern, Tile
from ..plan import Plan
from ..progress import told
from ..steps import Part
from .ledger import Book, Witness, expect, expected_counts
from .lockstep import Cohort, Lockstep, cohorts, connected
from .mutate import Mutation, tampered
from .oracle import DENSE, exact_ranks, exact_row, one_call
from .result import NumericsReport
from .sampled import TOLERANCE, check_plan, gap
from .source import K_TAG, Q_TAG, RAMP, Source

#: Ranks at a time, unless the caller says otherwise: more of them make longer batches than caches hold.
TOGETHER = 128
#: Groups of ranks whose gradients are compared with a dense oracle, at most.
DENSE_GROUPS = 4

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Outcome:
    """What ranks of one cohort computed: out [ranks, H, n, Dv], lse [ranks, H, n] and (dq, dk, dv), or none."""

    ranks: tuple[int, ...]
    out: torch.Tensor
    lse: torch.Tensor
    grads: Tensors


@dataclass(frozen=True)
class Group:
    """Ranks that run together, by cohorts."""

    cohorts: tuple[Cohort, ...]

    @property
    def ranks(self) -> int:
        return sum(len(cohort.ranks) for cohort in self.cohorts)


def make_groups(plan: Plan, ranks: Sequence[int], *, backward: bool, together: int = TOGETHER) -> list[Group]:
    """Ranks in groups of about `together`, each in cohorts. Raises InvalidInput where gradients would cross a border."""
    check_plan(plan)
    found: list[list[int]] = [[]]
    for part in connected(plan, ranks, backward=backward):
        if backward:
            _check_closed(plan, part)
        pieces = [part] if backward else [part[i : i + together] for i in range(0, len(part), together)]
        for piece in pieces:
            if found[-1] and len(found[-1]) + len(piece) > together:
                found.append([])
            found[-1] += piece
    return [Group(tuple(cohorts(plan, sorted(group), backward=backward))) for group in found if group]


def _check_closed(plan: Plan, ranks: Sequence[int]) -> None:
    inside = set(ranks)
    for rank in ranks:
        mine = plan.for_rank(rank)
        for step in (*mine.forward, *mine.backward):
            for hop in (*step.sends, *step.recvs):
                if hop.peer not in inside:
                    raise InvalidInput(
                        f"rank {rank} exchanges gradients with rank {hop.peer}, which is not to be executed; execute "
                        "all ranks, whole segments of a dilated pattern, or leave out backward=True"
                    )


def execute(
    group: Group, source: Source, kernel: Callable[[], Kernel], scale: float, *, grads: bool,
    mutation: Mutation | None = None,
) -> tuple[list[Outcome], int]:  # fmt: skip
    """Run a group of ranks forward and, where asked, backward from the cotangent of the source. Also returns the number
    of messages that the source answered."""
    plan, layout = group.cohorts[0].whole, group.cohorts[0].whole.layout

    def answer(part: Part) -> Tensors:
        return source.block(layout, part.owner, part.cut)

    def tamper(rank: int, parts: Sequence[Part], views: Sequence[Tensors]) -> None:
        assert mutation is not None
        for part, tensors in zip(parts, views, strict=True):
            if part.kind in ("grad", "dq") and mutation.fault == "lost" and part.owner == mutation.owner:
                for x in tensors:
                    x.zero_()
            if part.kind != "kv":
                continue
            homes = mutation.delivered(rank, part.owner, plan.ranks)
            for i, home in enumerate(homes):
                if home != part.owner:
                    tensors[i].copy_(source.block(layout, home, part.cut)[i][0])

    harm = None if mutation is None else tamper
    harmed = None if mutation is None else mutation.rank
    inputs = [
        (
            source.stacked("q", layout, c.ranks),
            source.stacked("k", layout, c.ranks),
            source.stacked("v", layout, c.ranks),
        )
        for c in group.cohorts
    ]
    jobs = [Job(c.plan, c.first, kernel(), scale) for c in group.cohorts]
    ring = Lockstep(group.cohorts, answer, tamper=harm, harmed=harmed)
    results: list[Forward] = ring.run(
        [forward(j, q, k, v, keep=grads) for j, (q, k, v) in zip(jobs, inputs, strict=True)]
    )
    factor = plan.pattern.output_scale
    given: Sequence[Tensors] = [()] * len(jobs)
    if grads:
        back = Lockstep(group.cohorts, answer, backward=True, tamper=harm, harmed=harmed)
        cotangents = [source.stacked("grad", layout, c.ranks) * factor for c in group.cohorts]
        programs = [
            backward(j, g, None, q, k, v, r)
            for j, g, (q, k, v), r in zip(jobs, cotangents, inputs, results, strict=True)
        ]
        given = back.run(programs)
    outs = [r.out if factor == 1.0 else r.out * factor for r in results]
    return [
        Outcome(c.ranks, out, r.lse, g) for c, out, r, g in zip(group.cohorts, outs, results, given, strict=True)
    ], ring.answered


@dataclass
class _Compared:
    """What was compared so far."""

    plan: Plan
    source: Source
    scale: float
    plain: Kernel
    rows: int = 0
    visits: int = 0
    wrong: int = 0
    wrong_gradients: int = 0
    pairs: int = 0
    pairs_expected: int = 0
    calls: int = 0
    answered: int = 0
    error: float = 0.0
    lse_error: float = 0.0
    gradient_error: float | None = None
    single: float = 0.0
    dense: int = 0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def rows_of(self, outcome: Outcome) -> None:
        """One random row of every rank against `exact_row`."""
        out, lse = outcome.out.double().numpy(), outcome.lse.double().numpy()
        for i, rank in enumerate(outcome.ranks):
            n = out.shape[2]
            if not n:
                continue
            local = int(self.random.integers(n))
            position = int(self.plan.layout.positions(rank)[local])
            truth = exact_row(self.plan.pattern, self.source, position, self.scale)
            self.error = max(self.error, gap(out[i, :, local], truth.out))
            self.lse_error = max(self.lse_error, gap(lse[i, :, local], truth.lse))
            self.rows += 1
            if self.source.dtype != torch.float64:
                one = one_call(self.plain, self.plan.pattern, self.source, position, self.scale)
                self.single = self.single if one is None else max(self.single, gap(one.double().numpy(), truth.out))

    def ledger_of(self, book: Book, ranks: Sequence[int]) -> None:
        """The ledger of all rows of some ranks."""
        wanted = Book(book.positions, self.plan.heads)
        for rank in ranks:
            met = [np.empty(0, dtype=np.int64)]
            for r in self.plan.layout.shard(rank):
                met.append(expect(self.plan.pattern, self.plan.layout, r, self.plan.heads, wanted))
            self.visits += len(np.unique(np.concatenate(met)))
        self.wrong += book.wrong(wanted)
        self.pairs += int(book.pairs.sum())
        self.pairs_expected += int(wanted.pairs.sum())
        self.calls += book.calls

    def counts_of(self, outcome: Outcome) -> None:
        """The counts that the gradients of all rows of some ranks carried home."""
        dq, dk, dv = outcome.grads
        for i, rank in enumerate(outcome.ranks):
            queries, keys = _expected(self.plan, rank)
            found = [(dq[i, ..., Q_TAG], queries), (dk[i, ..., K_TAG], keys), (dv[i, ..., RAMP], keys)]
            for x, wanted in found:
                self.wrong_gradients += int((x.double().numpy() != wanted).sum())

    def gradients_of(self, outcomes: Sequence[Outcome]) -> None:
        """Gradients of ranks that see each other only, where a dense mask of their rows is small enough."""
        home = {rank: (o, i) for o in outcomes for i, rank in enumerate(o.ranks)}
        for ranks in connected(self.plan, sorted(home), backward=True):
            if self.dense >= DENSE_GROUPS or sum(map(self.plan.layout.rows, ranks)) > DENSE:
                return
            self.dense += 1
            _, out, grads = exact_ranks(self.plan.pattern, self.source, self.plan.layout, ranks, self.scale)
            o, i = zip(*(home[rank] for rank in ranks), strict=True)
            whole = torch.cat([a.out[b] for a, b in zip(o, i, strict=True)], 1)
            self.error = max(self.error, gap(whole.double().numpy(), out[0].numpy()))
            for place, (tag, exact) in enumerate(zip((Q_TAG, K_TAG, RAMP), grads, strict=True)):
                found = torch.cat([a.grads[place][b] for a, b in zip(o, i, strict=True)], 1)
                some = [x.double().clone() for x in (found, exact[0])]
                for x in some:
                    x[..., tag] = 0  # holds a count
                worst = gap(some[0].numpy(), some[1].numpy())
                self.gradient_error = max(self.gradient_error or 0.0, worst)


def _expected(plan: Plan, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The counts of the query rows [H, n] and of the key rows [K, n] of a rank, in local order."""
    heads, everything = range(plan.heads), range(plan.tokens)
    group = plan.heads // plan.kv_heads
    queries, keys = [], []
    for r in plan.layout.shard(rank):
        queries.append(expected_counts(_tiles(plan.pattern, r, everything, heads), r, plan.heads, keys=False))
        of_heads = expected_counts(_tiles(plan.pattern, everything, r, heads), r, plan.heads, keys=True)
        keys.append(of_heads.reshape(plan.kv_heads, group, -1).sum(1))
    return np.concatenate(queries, 1), np.concatenate(keys, 1)


def _tiles(pattern: Pattern, q: range, k: range, heads: range) -> Iterator[Tile]:
    for tile in pattern.tiles(q, k, heads):
        yield from tile.refine()


def whole(
    plan: Plan,
    source: Source,
    *,
    ranks: Sequence[int] | None = None,
    grads: bool = False,
    kernel: str = "auto",
    scale: float | None = None,
    together: int = TOGETHER,
    mutation: Mutation | None = None,
    watch: Callable[[Outcome], None] | None = None,
) -> NumericsReport:
    """Execute `ranks` (default: all) from end to end, with a ledger of all their rows, and compare a row of each with
    `exact_row` and, with `grads`, the gradients of some with a dense oracle.

    `watch` is shown the results of every cohort. Raises InvalidInput or Unsupported.
    """
    if mutation is not None:
        mutation.check(plan, backward=grads)
    if together < 1:
        raise InvalidInput(f"together={together} must be a number of ranks >= 1")
    begun = time.perf_counter()
    true, plan = plan, plan if mutation is None else tampered(plan, mutation)
    mine = range(plan.ranks) if ranks is None else sorted(set(ranks))
    factor = plan.head_dim**-0.5 if scale is None else scale
    one = source.rows("q", range(min(1, plan.tokens)))
    plain = get_kernel(kernel, one, one, one)
    done = _Compared(true, source, factor, plain)
    groups = make_groups(plan, mine, backward=grads, together=together)
    for group in told(groups, len(groups), "groups of ranks"):
        members = [rank for cohort in group.cohorts for rank in cohort.ranks]
        book = Book(np.concatenate([plan.layout.positions(rank) for rank in members]), plan.heads)

        def witness(book: Book = book) -> Kernel:
            return Witness(plain, source, plan.layout, book)

        outcomes, answered = execute(group, source, witness, factor, grads=grads, mutation=mutation)
        done.answered += answered
        done.ledger_of(book, members)
        for outcome in outcomes:
            done.rows_of(outcome)
            if grads:
                done.counts_of(outcome)
            if watch is not None:
                watch(outcome)
        if grads:
            done.gradients_of(outcomes)
    exact = plan.dtype == "float64"
    return NumericsReport(
        plan=true, mode="all", ranks=len(mine), rows=done.rows, visits=_planned(plan, mine),
        visits_expected=done.visits, pairs=done.pairs, pairs_expected=done.pairs_expected, wrong=done.wrong,
        wrong_gradients=done.wrong_gradients if grads else None, error=done.error, lse_error=done.lse_error,
        gradient_error=done.gradient_error, tolerance=TOLERANCE if exact else 2 * done.single + 1e-6,
        seconds=time.perf_counter() - begun, calls=done.calls, live=max((g.ranks for g in groups), default=0),
        answered=done.answered,
    )  # fmt: skip


def _planned(plan: Plan, ranks: Sequence[int]) -> int:
    """Blocks that ranks visit in the forward of their plans."""
    steps = (step for rank in ranks for step in plan.for_rank(rank).forward)
    return sum(len({part.owner for part in step.visits}) for step in steps)
