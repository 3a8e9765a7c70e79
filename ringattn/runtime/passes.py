"""The forward and the backward of a rank: the ring or pass-Q, alone or between the exchanges of Ulysses."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..kernels.contract import Tensors
from ..plan.plan import Plan
from ..transport.base import PLAN_TAGS, Program, Tags
from . import ring
from .program import RankProgram, RingRun, backward_program, exchanges_heads, forward_program
from .ring import Backward, Forward, ForwardResult, Job


def forward(
    job: Job, q: Tensor, block: Tensors, *, save: bool, out: Tensor | None = None, tags: Tags = PLAN_TAGS
) -> Program[ForwardResult]:
    """A program that computes attention of the local queries q [B, H, n, D] to the keys of all ranks.

    `block` are the local keys and values (k, v) [B, K, n, D | Dv], or what they are expanded from. `save` keeps what
    the backward starts from. The output is written to `out` if given. `tags` maps the plan's tags to those of the
    messages.
    """
    program = forward_program(job.plan, job.rank, job.kernel, q.device, save=save)
    inner, _ = _ring_of(program)
    begin = partial(RingRun, program, q.device, tags)
    if program.enter is None:
        return inner(job, begin, q, block, out)
    from . import ulysses  # few schedules have groups

    return ulysses.forward(inner, job, begin, q, block, out, save=save)


def backward(
    job: Job,
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    block: Tensors,
    result: ForwardResult,
    *,
    tags: Tags = PLAN_TAGS,
) -> Program[Tensors]:
    """A program that computes (dq, dk, dv) of the local shard, see `ring.backward`, from `grad` = d loss / d out.

    `grad_lse` is d loss / d lse, or None. Each block is differentiated with the *global* out and lse of the query rows,
    so no partial results need to be saved. All sums are in fp32 (fp64 for fp64 inputs).
    """
    program = backward_program(job.plan, job.rank, job.kernel, q.device)
    _, inner = _ring_of(program)
    begin = partial(RingRun, program, q.device, tags)
    if program.enter is None:
        return inner(job, begin, grad, grad_lse, q, block, result)
    from . import ulysses

    return ulysses.backward(inner, job, begin, grad, grad_lse, result)


def count_saved(plan: Plan, rank: int) -> int:
    """The number of tensors that the forward of a rank saves for its backward."""
    block = len(plan.tensors("kv"))
    saved = block * len(plan.for_rank(rank).saved)
    if not exchanges_heads(plan):
        return saved
    from .ulysses import SAVED_BY_EXCHANGE

    return saved + block + SAVED_BY_EXCHANGE


def _ring_of(program: RankProgram) -> tuple[Forward, Backward]:
    """The passes in which what the program names travels."""
    if program.rotates == "kv":
        return ring.forward, ring.backward
    from . import pass_q

    return pass_q.forward, pass_q.backward
