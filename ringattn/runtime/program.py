"""A rank's forward and backward, resolved from its plan before the first message: copies, messages and kernel calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..cache import cached
from ..kernels.base import Kernel
from ..plan.plan import Plan
from ..plan.steps import Kind, Part
from ..plan.work import Work
from .accumulators import VisitPart, make_merge_plan
from .buffers import SUM_OF, RankState, Recorder, tensor_specs
from .tensors import Actions, Memory, Numbers

if TYPE_CHECKING:
    from .head_exchange import ExchangeStep

#: The most query rows times heads times batch of one call, which bounds what a kernel allocates.
BATCH_ROWS = 1 << 18
#: (kinds of a rank's own blocks, kinds of the sums for its own rows), by what rotates and whether in a backward.
OWN: dict[tuple[str, bool], tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    ("kv", False): (("kv",), ()),
    ("q", False): (("query",), ("part",)),
    ("kv", True): (("kv",), ("grad",)),
    ("q", True): (("q", "row"), ("dq",)),
}


@dataclass(frozen=True)
class Visit:
    """The kernel calls with which a rank computes one block, with the numbers of the tensors that they use.

    `block` are the tensors of `part` of the block; `copies` prepare them. The forward of pass-KV uses `parts`. Any
    other pass uses `works` and adds to `sums`; a backward reads lse and delta of the queries from `rows`. With
    `is_new`, the only call is the first to write `sums`, and writes all of them.
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
    """What a rank does in one step of the ring: it posts messages, computes with blocks, and waits for messages."""

    posts: Actions
    visits: tuple[Visit, ...]
    waits: Actions


@dataclass(frozen=True)
class RankProgram:
    """Everything that one rank does in one pass, with tensors given by number.

    The caller provides the tensors numbered in `own` (by kind), `saved` and `sums` (by kind). With schedule ulysses,
    `enter` and `leave` exchange tokens for heads inside a group of ranks, before and after the ring; otherwise they are
    None. Ring steps are numbered from `first` on. `empty` are the local rows that see no key. `saved` are the tensors
    that the forward keeps for the backward.
    """

    memory: Memory
    steps: tuple[RingStep, ...]
    own: dict[Kind, Numbers]
    sums: dict[Kind, Numbers]
    saved: Numbers
    rotates: str
    first: int
    empty: tuple[range, ...]
    enter: ExchangeStep | None
    leave: ExchangeStep | None


def forward_program(plan: Plan, rank: int, kernel: Kernel, device: torch.device, *, save: bool) -> RankProgram:
    """The forward of `rank`, with the kernel calls of `kernel`. Cached by the plan."""
    return plan.cache.answer(
        (forward_program, rank, kernel.key, device, save), lambda: _resolve(plan, rank, kernel, device, save=save)
    )


def backward_program(plan: Plan, rank: int, kernel: Kernel, device: torch.device) -> RankProgram:
    """The backward of `rank`, with the kernel calls of `kernel`. Cached by the plan."""
    key = backward_program, rank, kernel.key, device
    return plan.cache.answer(key, lambda: _resolve(plan, rank, kernel, device, save=True, backward=True))


def exchanges_heads(plan: Plan) -> bool:
    """Whether the ranks of a plan exchange tokens for heads before and after the ring; False for an empty batch."""
    return plan.ulysses_size > 1 and plan.batch > 0


def batches(work: Work, count: int) -> Sequence[slice | None]:
    """The slices of a batch of `count` elements that `work` computes one after another; None is the whole batch.

    A call has at most BATCH_ROWS rows. A work with repetitions takes one element of the batch per call. In a packed
    work each sequence counts as at least 5 rows, so that a call (BATCH_ROWS = 262,144) has at most 52,428 sequences; a
    CUDA grid has at most 65,535.
    """
    if count <= 1:
        return (None,)
    rows = max(len(work.q) * len(work.heads), 5 * len(work.sequences), work.copied_rows)
    size = max(1, BATCH_ROWS // rows) if work.repeat == 1 else 1
    if size >= count:
        return (None,)
    return [slice(first, first + size) for first in range(0, count, size)]


def _resolve(
    plan: Plan, rank: int, kernel: Kernel, device: torch.device, *, save: bool, backward: bool = False
) -> RankProgram:
    """The forward, or the backward, of `rank`."""
    ring_plan, owner = plan.ring_plan(rank)
    rank_plan = plan.for_rank(rank)
    steps = rank_plan.backward if backward else rank_plan.forward
    rotates = ring_plan.rotates if backward else ring_plan.forward_rotates
    saved = rank_plan.saved if save and rotates == "kv" else ()
    is_output = not backward and rotates == "kv"  # the visits write the output of this rank
    merges, empty = make_merge_plan(ring_plan, owner, kernel) if is_output else ((), ())
    parts_of_visits = iter(merges)
    demand = ring_plan.query_demand if rotates == "q" else ring_plan.demand
    calls_of = (kernel.for_backward() if backward else kernel).calls_of
    with torch.inference_mode(False):  # index tensors outlive the caller's inference mode
        recorder = Recorder(plan, _largest_message(plan, rank), device)
        enter = leave = None
        ring_steps = range(len(steps))
        if exchanges_heads(plan):
            from .head_exchange import HeadExchange  # a ring without Ulysses groups does not load it

            ring_steps = range(1, len(steps) - 1)
            enter = HeadExchange(recorder, plan, rank, steps, to_heads=True).record("dout" if backward else "qkv")
        own, sums = OWN[rotates, backward]
        state = RankState(recorder, ring_plan, owner, steps, own, saved, sums=sums, given=backward)
        written = []
        for index in ring_steps:
            state.start(index)
            posts, visits = recorder.collect(), []
            for block in steps[index].visits:
                if is_output:
                    numbers = state.block(block)
                    visits.append(Visit(recorder.collect(), block, numbers, parts=next(parts_of_visits)))
                    continue
                works = tuple(calls_of(demand.joined_works(owner, block.owner, block.row_set)))
                if works or rotates == "kv":
                    visits.append(_summing_visit(state, ring_plan, block, works))
            written.append(RingStep(posts, tuple(visits), state.finish(index)))
        if exchanges_heads(plan):
            leave = HeadExchange(recorder, plan, rank, steps, to_heads=False).record("dqkv" if backward else "out")
    return RankProgram(
        recorder.memory,
        tuple(written),
        {part.kind: numbers for part, numbers in state.own.items()},
        {part.kind: numbers for part, numbers in state.own_sums.items()},
        tuple(number for part in saved for number in state.blocks[part]),
        rotates,
        ring_steps.start,
        empty,
        enter,
        leave,
    )


def _summing_visit(state: RankState, plan: Plan, block: Part, works: tuple[Work, ...]) -> Visit:
    """Record the visit that makes these calls and adds to sums."""
    numbers = state.block(block)
    rows = state.block(Part("row", block.owner, block.row_set)) if block.kind == "q" else ()
    part = Part(SUM_OF.get(block.kind, "grad"), block.owner, block.row_set)
    is_new = state.is_new(part) and len(works) == 1 and _covers(works[0], part, plan)
    sums = state.sums(part, zero=not is_new)
    return Visit(state.recorder.collect(), block, numbers, works=works, rows=rows, sums=sums, is_new=is_new)


def _covers(work: Work, part: Part, plan: Plan) -> bool:
    """Whether this call alone computes every row of a part of gradients."""
    (_, heads, rows, _), _ = tensor_specs(plan, part, as_sent=False)[0]
    of = (work.kv, work.k) if part.kind == "grad" else (work.heads, (work.q,))
    covers = work.repeat == 1 and not work.gathered and of == (range(heads), (range(rows),))
    return covers and tuple(batches(work, plan.batch)) == (None,)


@cached
def _largest_message(plan: Plan, rank: int) -> int:
    """Bytes of the largest message of a rank in either pass, so that both passes use buffers of the same sizes."""
    rank_plan = plan.for_rank(rank)
    hops = [hop for step in (*rank_plan.forward, *rank_plan.backward) for hop in (*step.sends, *step.recvs)]
    sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
    sizes += [plan.part_bytes(part, as_sent=False) for hop in hops for part in hop.parts]
    return max(sizes, default=0)
