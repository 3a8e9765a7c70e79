"""The kernel of visits as one that computes one work a call, for leaves, see `kernels.leaves`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..plan.steps import Part
from ..plan.visit import Visit
from ..plan.work import Work, lower
from .calls import Kernel
from .contract import CallData, KernelPass, Pair, QueryRows, Tensors
from .memory import empty, empty_rows
from .visit import WIDEST, VisitTriton


class VisitCalls(Kernel):
    """Computes each call as a visit of its own, with sums that begin and end in it.

    Tiles of rows begin with the leaf, and one program owns each, so that bits depend on nothing but the leaf.
    """

    max_head_dim = WIDEST  # the gradient of lse takes columns

    def __init__(self, inner: VisitTriton) -> None:
        self.inner, self.name, self.padded, self.dropout = inner, inner.name, inner.padded, inner.dropout

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.inner.check(q, k, v)

    def split(self, work: Work) -> Iterator[Work]:
        yield work

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> Pair:
        visit, one = self._begin(q, (k, v), work, scale, backward=False)
        sums = one.new_sums(empty_rows((*q.shape[:3], v.shape[3]), torch.float32, q.device))
        one.visit_forward(visit, q, (k, v), sums)
        return one.finish(sums)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        visit, one = self._begin(q, (k, v), work, scale, backward=True)
        of_queries, of_keys = one.new_grads(), tuple(empty(x.shape, torch.float32, x.device) for x in (k, v))
        one.visit_backward(visit, QueryRows(grad, q, lse, out=out), (k, v), of_queries, of_keys)
        return one.finish_grads(of_queries)[0], of_keys[0], of_keys[1]

    def _begin(
        self, q: Tensor, block: Tensors, work: Work, scale: float, *, backward: bool
    ) -> tuple[Visit, KernelPass]:
        """(the visit of a call, whose table is kept with the work, the kernel in it)."""
        # Keys are not centred: the first of a call is one of any leaf.
        kernel = self.inner.derive(centred=False, numbers=self.numbers, dropout=self.dropout)
        if (kernel.key, backward) not in work.memo:
            works = [work] if self.hidden is None else [*lower(self.tiles, len(work.heads) // len(work.kv))]
            visit = Visit(Part("kv", 0), works, (len(work.kv), work.keys), first=True)
            (table,), prepared = kernel.prepare([visit], len(work.heads), len(work.kv), len(work.q), backward=backward)
            work.memo[kernel.key, backward] = replace(visit, table=table), prepared
        visit, prepared = work.memo[kernel.key, backward]
        call = CallData(scale, Part("q", 0), work.heads, lambda part: (q, q), prepared=prepared)
        return visit, kernel.begin(call, q, block)
