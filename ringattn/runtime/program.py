"""A rank's forward and backward, resolved from its plan before the first message: copies, messages and visits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..cache import cached
from ..kernels.contract import KernelPass, VisitKernel
from ..plan.plan import Plan
from ..plan.row_sets import ALL_ROWS
from ..plan.steps import Kind, Part
from ..plan.visit import Visit
from ..plan.work import Work
from ..transport.base import Compute, Program, Tags, Wait
from .buffers import SUM_OF, RankState, Recorder
from .tensors import Actions, Memory, NumberedPost, Numbers, PassTensors

if TYPE_CHECKING:
    from ..plan.leaves import LeafVisit
    from .head_exchange import ExchangeStep

#: (kinds of a rank's own blocks, kinds of the sums for its own rows), by what rotates and whether in a backward.
OWN: dict[tuple[str, bool], tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    ("kv", False): (("kv",), ()),
    ("q", False): (("query",), ("part",)),
    ("kv", True): (("kv",), ("grad",)),
    ("q", True): (("q", "row"), ("dq",)),
}


@dataclass(frozen=True)
class NumberedVisit:
    """A visit with the numbers of its tensors, and the copies that prepare them.

    `block` are the visiting tensors. `sums` travel with them; the forward of pass-KV has none. In the backward of
    pass-Q, `rows` are lse and delta of the visiting queries. `label` names the visit in traces.
    """

    visit: Visit
    copies: Actions
    block: Numbers
    rows: Numbers
    sums: Numbers
    label: str


@dataclass(frozen=True)
class RingStep:
    """What a rank does in one step of the ring: it posts messages, computes visits, and waits for messages.

    `waits` are for the messages that are due, and add the sums that arrived to those computed here.
    """

    posts: Actions
    visits: tuple[NumberedVisit, ...]
    waits: Actions
    label: str


@dataclass(frozen=True)
class RankProgram:
    """Everything that one rank does in one pass, with tensors given by number.

    The caller provides the tensors numbered in `own` (by kind), `saved` and `sums` (by kind). With schedule ulysses,
    `enter` and `leave` exchange tokens for heads inside a group of ranks, before and after the ring; otherwise they are
    None. `prepared` is what the kernel found for the whole pass. `saved` are blocks that stay between the passes: a
    forward leaves them in its run, and the caller gives them to the backward. `rotates` says whether keys ("kv") or
    queries ("q") visit what `stays`. `heads` are the query heads of the call that this rank computes: all, or its share
    in a Ulysses group.
    """

    memory: Memory
    steps: tuple[RingStep, ...]
    own: dict[Kind, Numbers]
    sums: dict[Kind, Numbers]
    saved: Numbers
    rotates: str
    stays: Part
    heads: range
    prepared: Any
    enter: ExchangeStep | None
    leave: ExchangeStep | None

    def __repr__(self) -> str:
        """One line; `Plan.listing` prints the steps."""
        posts = sum(isinstance(action, NumberedPost) for step in self.steps for action in step.posts)
        visits = sum(len(step.visits) for step in self.steps)
        return f"<RankProgram: {self.rotates} travels, {len(self.steps)} steps, {posts} posts, {visits} visits>"


class RingRun(PassTensors):
    """One execution of a program: its tensors by number, and its steps."""

    def __init__(self, program: RankProgram, device: torch.device, tags: Tags) -> None:
        super().__init__(program.memory, device, tags)
        self.program, self.steps = program, program.steps

    def compute(
        self, step: RingStep, kernel: KernelPass, tensors: Callable[[NumberedVisit], tuple[Any, ...]], backward: bool
    ) -> Program[None]:
        """Compute the step's visits; `tensors` gives what `visit_forward` or `visit_backward` takes after the visit."""
        for one in step.visits:
            if one.copies:
                yield from self.perform(one.copies)
            yield Compute(kernel, one.visit, tensors(one), backward, one.label)

    def arrive(self, step: RingStep) -> Program[None]:
        """Wait for all messages that the step has posted, due or not."""
        return self.perform(tuple(Wait(post.ticket) for post in step.posts if isinstance(post, NumberedPost)))

    def take_in(self, step: RingStep) -> Program[None]:
        """The part of the waits that is left once messages have arrived: add the sums that arrived."""
        return self.perform(tuple(action for action in step.waits if not isinstance(action, Wait)))


def forward_program(plan: Plan, rank: int, kernel: VisitKernel, device: torch.device, *, save: bool) -> RankProgram:
    """The forward of `rank`, with the tables of `kernel`. Cached by the plan."""
    return plan.cache.answer(
        (forward_program, rank, kernel.key, device, save), lambda: _resolve(plan, rank, kernel, device, save=save)
    )


def backward_program(plan: Plan, rank: int, kernel: VisitKernel, device: torch.device) -> RankProgram:
    """The backward of `rank`, with the tables of `kernel`. Cached by the plan."""
    key = backward_program, rank, kernel.key, device
    return plan.cache.answer(key, lambda: _resolve(plan, rank, kernel, device, save=True, backward=True))


def exchanges_heads(plan: Plan) -> bool:
    """Whether the ranks of a plan exchange tokens for heads before and after the ring; False for an empty batch."""
    return plan.ulysses_size > 1 and plan.batch > 0


def _resolve(
    plan: Plan, rank: int, kernel: VisitKernel, device: torch.device, *, save: bool, backward: bool = False
) -> RankProgram:
    """The forward, or the backward, of `rank`: record its steps, then let the kernel prepare all visits."""
    ring_plan, owner = plan.ring_plan(rank)
    rank_plan = plan.for_rank(rank)
    steps = rank_plan.backward if backward else rank_plan.forward
    rotates = ring_plan.rotates if backward else ring_plan.forward_rotates
    saved = rank_plan.saved if save and rotates == "kv" else ()
    demand = ring_plan.query_demand if rotates == "q" else ring_plan.demand
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
        recorded: list[RingStep] = []
        for index in ring_steps:
            label = f"{'backward' if backward else 'forward'} step {index}"
            state.start(index)
            posts, visits = recorder.collect(), []
            for part in steps[index].visits:
                leaves = None if plan.reproducible is None else ring_plan.leaves.visit(owner, part)
                works = demand.works(owner, part.owner, part.row_set) if leaves is None else ()
                if works or rotates == "kv":  # a rank also passes on queries that see none of its keys
                    visits.append(_record_visit(state, part, works, leaves, label, backward=backward))
            recorded.append(RingStep(posts, tuple(visits), state.finish(index), label))
        if exchanges_heads(plan):
            leave = HeadExchange(recorder, plan, rank, steps, to_heads=False).record("dqkv" if backward else "out")
        stays = Part("q" if rotates == "kv" else "kv", owner)
        heads, kv_heads = ring_plan.heads, ring_plan.part_heads("kv")
        rows = ring_plan.layout_of(stays.kind).rows(owner)
        found = [one.visit for step in recorded for one in step.visits]
        tables, prepared = kernel.prepare(found, heads, kv_heads, rows, backward=backward)
    first = rank % plan.ulysses_size * ring_plan.heads
    with_tables = iter([replace(visit, table=table) for visit, table in zip(found, tables, strict=True)])
    return RankProgram(
        recorder.memory,
        tuple(replace(x, visits=tuple(replace(s, visit=next(with_tables)) for s in x.visits)) for x in recorded),
        {part.kind: numbers for part, numbers in state.own.items()},
        {part.kind: numbers for part, numbers in state.own_sums.items()},
        tuple(number for part in saved for number in state.blocks[part]),
        rotates,
        stays,
        range(first, first + ring_plan.heads),
        prepared,
        enter,
        leave,
    )


def _record_visit(
    state: RankState, part: Part, works: Sequence[Work], leaves: LeafVisit | None, label: str, *, backward: bool
) -> NumberedVisit:
    """Record a visit. Sums that are new stay uninitialized: `Visit.first` tells the kernel to begin them."""
    rows: Numbers = ()
    sums: Numbers = ()
    block = state.block(part)
    _, heads, count, *_ = state.recorder.shape(block[0])
    visit = Visit(part, works, (heads, count), leaves=leaves)
    if part.kind == "q":
        rows = state.block(Part("row", part.owner, part.row_set))
    if backward or visit.keys_stay:
        row_set = part.row_set if leaves is None else leaves.nodes or ALL_ROWS
        total = Part(SUM_OF.get(part.kind, "grad"), part.owner, row_set)
        visit = replace(visit, first=state.is_new(total))
        sums = state.sums(total, zero=False)
    return NumberedVisit(visit, state.recorder.collect(), block, rows, sums, f"{label}, block of rank {part.owner}")


@cached
def _largest_message(plan: Plan, rank: int) -> int:
    """Bytes of a rank's largest message or part, so that both passes use buffers of the same sizes."""
    rank_plan = plan.for_rank(rank)
    hops = [hop for step in (*rank_plan.forward, *rank_plan.backward) for hop in (*step.sends, *step.recvs)]
    sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
    sizes += [plan.part_bytes(part, as_sent=False) for hop in hops for part in hop.parts]
    return max(sizes, default=0)
