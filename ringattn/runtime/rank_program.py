"""A rank's forward and backward, resolved from its plan before the first message: copies, messages and kernel calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..kernels.base import Kernel
from ..plan.plan import Plan
from ..plan.steps import Kind, Part, Step
from ..plan.work import Work
from .merge_plan import VisitPart, make_merge_plan
from .message_buffers import Recorder, tensor_specs
from .rank_run import Actions, Memory, Numbers
from .rank_state import RankState

if TYPE_CHECKING:
    from .head_exchange import ExchangeStep

#: Query rows times heads times batch of one call at most: bounds what a kernel allocates for the call.
BATCH_ROWS = 1 << 18


@dataclass(frozen=True)
class Visit:
    """The kernel calls of one visit. `block` are the tensors of `part` of the visited block, `copies` make them ready.

    A forward has `parts`. A backward has `works`, adds to `sums`, and reads lse and delta of visited queries from
    `rows`. With `is_new` its one call is the first of `sums` and writes all of them.
    """

    copies: Actions
    part: Part
    block: Numbers
    parts: tuple[VisitPart, ...] = ()
    works: tuple[Work, ...] = ()
    rows: Numbers = ()
    sums: Numbers = ()
    is_new: bool = False


@dataclass(frozen=True)
class RingStep:
    """What a rank does in one step of the ring: it posts, computes its visits, and waits."""

    posts: Actions
    visits: tuple[Visit, ...]
    waits: Actions


@dataclass(frozen=True)
class RankProgram:
    """One pass of one rank. Tensors that the run is given have numbers: `own` by kind, `kept`, and `sums` by kind.

    With the schedule ulysses `enter` and `leave` exchange tokens for heads inside a group of ranks, before and after
    the ring. Without it they are None. Ring steps are numbered from `first` on. `empty` are the local rows that see no
    key. `kept` are the tensors that the forward keeps for the backward to start from.
    """

    memory: Memory
    steps: tuple[RingStep, ...]
    own: dict[Kind, Numbers]
    sums: dict[Kind, Numbers]
    kept: Numbers
    rotates: str
    first: int
    empty: tuple[range, ...]
    enter: ExchangeStep | None
    leave: ExchangeStep | None


def forward_program(plan: Plan, rank: int, kernel: Kernel, device: torch.device, *, keep: bool) -> RankProgram:
    """The forward of `rank` with the calls that `kernel` makes. Cached by the plan."""
    return plan.cache.answer(
        (forward_program, rank, kernel.key, device, keep), lambda: _resolve_forward(plan, rank, kernel, device, keep)
    )


def backward_program(plan: Plan, rank: int, kernel: Kernel, device: torch.device) -> RankProgram:
    """The backward of `rank` with the calls that `kernel` makes. Cached by the plan."""
    return plan.cache.answer(
        (backward_program, rank, kernel.key, device), lambda: _resolve_backward(plan, rank, kernel, device)
    )


def exchanges_heads(plan: Plan) -> bool:
    """Whether the ranks of a plan exchange tokens for heads around the ring. Without a batch nothing is sent."""
    return plan.ulysses_size > 1 and plan.batch > 0


def batches(work: Work, count: int) -> Sequence[slice | None]:
    """The slices of a batch of `count`, one per kernel call; None is the whole batch.

    A work with repetitions takes one element of the batch per call. 5 for each sequence of a packed work bounds the
    sequences of a call by 52,428: CUDA grids have at most 65,535.
    """
    if count <= 1:
        return (None,)
    rows = max(len(work.q) * len(work.heads), 5 * len(work.sequences), work.copied_rows)
    size = max(1, BATCH_ROWS // rows) if work.repeat == 1 else 1
    if size >= count:
        return (None,)
    return [slice(first, first + size) for first in range(0, count, size)]


def _resolve_forward(plan: Plan, rank: int, kernel: Kernel, device: torch.device, keep: bool) -> RankProgram:
    ring_plan, owner = plan.ring_plan(rank)
    rank_plan = plan.for_rank(rank)
    merge_plan = make_merge_plan(ring_plan, owner, kernel)
    parts = iter(merge_plan.visits)

    def visit(state: RankState, block: Part) -> Visit:
        mine, numbers = next(parts), state.block(block)
        return Visit(state.recorder.collect(), block, numbers, parts=mine)

    kept = rank_plan.kept if keep else ()
    return _resolve(
        plan, rank, rank_plan.forward, ("kv",), kept, visit, device, ("qkv", "out"), merge_plan.empty, given=False
    )


def _resolve_backward(plan: Plan, rank: int, kernel: Kernel, device: torch.device) -> RankProgram:
    ring_plan, owner = plan.ring_plan(rank)
    rank_plan = plan.for_rank(rank)
    by_queries = ring_plan.rotates == "queries"
    works = iter(_backward_works(ring_plan, owner, kernel))

    def visit(state: RankState, block: Part) -> Visit | None:
        mine = next(works)
        if by_queries and not mine:
            return None
        numbers = state.block(block)
        rows = state.block(Part("row", block.owner, block.row_set)) if by_queries else ()
        part = Part("dq" if by_queries else "grad", block.owner, block.row_set)
        is_new = state.is_new(part) and len(mine) == 1 and _covers(mine[0], part, ring_plan)
        sums = state.sums(part, zero=not is_new)
        copies = state.recorder.collect()
        return Visit(copies, block, numbers, works=mine, rows=rows, sums=sums, is_new=is_new)

    own: tuple[Kind, ...] = ("q", "row") if by_queries else ("kv",)
    kept = () if by_queries else rank_plan.kept
    return _resolve(plan, rank, rank_plan.backward, own, kept, visit, device, ("dout", "dqkv"), (), given=True)


def _resolve(
    plan: Plan,
    rank: int,
    steps: tuple[Step, ...],
    own: tuple[Kind, ...],
    kept: tuple[Part, ...],
    visit: Callable[[RankState, Part], Visit | None],
    device: torch.device,
    exchanged: tuple[Kind, Kind],
    empty: tuple[range, ...],
    *,
    given: bool,
) -> RankProgram:
    """The program of these steps, with visits as `visit` writes them down. `exchanged`: what enters and leaves."""
    ring_plan, owner = plan.ring_plan(rank)
    with torch.inference_mode(False):  # index tensors outlive the inference mode of the caller
        recorder = Recorder(plan, _largest_message(plan, rank), device)
        enter = leave = None
        ring_steps = range(len(steps))
        if exchanges_heads(plan):
            from .head_exchange import HeadExchange  # a ring without Ulysses groups does not load it

            ring_steps = range(1, len(steps) - 1)
            enter = HeadExchange(recorder, plan, rank, steps, to_heads=True).record(exchanged[0])
        state = RankState(recorder, ring_plan, owner, steps, own, kept, given=given)
        written = []
        for index in ring_steps:
            state.start(index)
            posts = recorder.collect()
            visits = [visit(state, block) for block in steps[index].visits]
            written.append(RingStep(posts, tuple(x for x in visits if x is not None), state.finish(index)))
        if exchanges_heads(plan):
            leave = HeadExchange(recorder, plan, rank, steps, to_heads=False).record(exchanged[1])
    return RankProgram(
        recorder.memory,
        tuple(written),
        {part.kind: numbers for part, numbers in state.own.items()},
        {part.kind: numbers for part, numbers in state.own_sums.items()},
        tuple(number for part in kept for number in state.blocks[part]),
        ring_plan.rotates if given else "keys",
        ring_steps.start,
        empty,
        enter,
        leave,
    )


def _backward_works(plan: Plan, rank: int, kernel: Kernel) -> list[tuple[Work, ...]]:
    """The calls of every visit."""
    kernel = kernel.for_backward()
    demand = plan.query_demand if plan.rotates == "queries" else plan.demand
    blocks = [block for step in plan.for_rank(rank).backward for block in step.visits]
    return [tuple(kernel.calls_of(demand.joined_works(rank, block.owner, block.row_set))) for block in blocks]


def _covers(work: Work, part: Part, plan: Plan) -> bool:
    """Whether one call computes every row of a part of gradients."""
    (_, heads, rows, _), _ = tensor_specs(plan, part, as_sent=False)[0]
    of = (work.heads, (work.q,)) if part.kind == "dq" else (work.kv, work.k)
    covers = work.repeat == 1 and not work.gathered and of == (range(heads), (range(rows),))
    return covers and tuple(batches(work, plan.batch)) == (None,)


def _largest_message(plan: Plan, rank: int) -> int:
    """Bytes of the largest message of a rank in either pass, so that both passes use buffers of the same sizes."""

    def compute() -> int:
        rank_plan = plan.for_rank(rank)
        hops = [hop for step in (*rank_plan.forward, *rank_plan.backward) for hop in (*step.sends, *step.recvs)]
        sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
        sizes += [plan.part_bytes(part, as_sent=False) for hop in hops for part in hop.parts]
        return max(sizes, default=0)

    return plan.cache.answer((_largest_message, rank), compute)
