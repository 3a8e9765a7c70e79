"""Ulysses: a group of ranks exchanges tokens for heads around a ring, which turns between the groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.contract import Tensors
from ..kernels.memory import differentiable
from ..kernels.pad import EXTRA, HIDDEN, hidden_column
from ..transport.base import Program
from .ring import Backward, BeginRun, Forward, ForwardResult, Job

#: Tensors that a forward saves in addition to those of the ring and the block: q, out and lse of this rank's heads.
SAVED_BY_EXCHANGE = 3


def forward(
    inner: Forward, job: Job, begin: BeginRun, q: Tensor, block: Tensors, out: Tensor | None, *, save: bool
) -> Program[ForwardResult]:
    """The forward `inner` for this rank's heads, in all rows of its group; all heads of its own rows are returned."""
    run = begin()
    enter, leave = run.program.enter, run.program.leave
    assert enter is not None and leave is not None
    q, *own = yield from enter.perform(run, (q, *block), "forward step 0, exchange of q, k and v")
    found = yield from inner(job, lambda: run, q, tuple(own), None)
    label = f"forward step {leave.index}, exchange of the output"
    lse, all_heads = yield from leave.perform(run, (found.lse.unsqueeze(-1), found.out), label)
    saved = (*found.saved, q, *own, found.out, found.lse) if save else ()
    return ForwardResult(all_heads if out is None else out.copy_(all_heads), lse.squeeze(-1), saved)


def backward(
    inner: Backward, job: Job, begin: BeginRun, grad: Tensor, grad_lse: Tensor | None, result: ForwardResult
) -> Program[Tensors]:
    """The backward `inner` for this rank's heads; gradients of all heads of its own rows are returned."""
    run = begin()
    enter, leave = run.program.enter, run.program.leave
    assert enter is not None and leave is not None
    *saved, out, lse = result.saved
    own = len(job.plan.tensors("kv"))
    saved, q, block = saved[: -1 - own], saved[-1 - own], tuple(saved[-own:])
    if job.kernel.padded:  # rows that see padded keys only; in a ring the caller has hidden them
        lse = lse.masked_fill(lse < -EXTRA * job.scale * hidden_column(job.scale, q.dtype) ** 2 / 2, HIDDEN)
    # The plan always includes the bytes of a gradient of lse, even if there is none.
    column = torch.zeros_like(result.lse) if grad_lse is None else grad_lse.to(result.lse.dtype)
    label = "backward step 0, exchange of the output's gradient"
    column, grad = yield from enter.perform(run, (column.unsqueeze(-1), grad), label)
    grad_lse = None if grad_lse is None else column.squeeze(-1)
    result = ForwardResult(out, lse, tuple(saved))
    gradients = yield from inner(replace(job, cast_grads=False), lambda: run, grad, grad_lse, q, block, result)
    label = f"backward step {leave.index}, exchange of dq, dk and dv"
    count = 1 + len(differentiable(block))
    dq, *of_keys = yield from leave.perform(run, gradients[:count], label)
    heads = [heads for heads, *_ in job.plan.tensors("grad")]
    return job.cast((dq, *map(_sum_copies, of_keys, heads), *gradients[count:]), q, *block)


def _sum_copies(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of `heads` key/value heads, summed from the gradients [B, copies, n, D] of each head's copies."""
    return gradient if gradient.size(1) == heads else gradient.unflatten(1, (heads, -1)).sum(2)
