"""What `kernel="auto"` takes for CUDA tensors: the kernel of visits, and PyTorch's ops where they are faster.

The choice is made for a whole pass of a rank, when it is prepared, and depends on its visits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from ..errors import Unsupported
from ..plan.visit import Visit
from ..plan.work import Work, join_keys, join_repetitions
from .aten_cuda import AtenCuda
from .calls import Kernel
from .contract import CallData, KernelPass, OpChoice, Tensors
from .reference import Reference
from .visit import VisitTriton

#: Dense and causal calls with at least this many rows and keys are left to PyTorch's ops. Modelled, not measured.
LARGE = 2048


class Cuda(AtenCuda):
    """`VisitTriton` for masks, and `AtenCuda` for passes whose visits are single large calls, dense or causal.

    These are as fast with cuDNN or flash, whose matrix products are better. Where `VisitTriton` cannot run, or has
    failed its self-test on the device, AtenCuda computes all.
    """

    choices = ()
    features = VisitTriton.features
    #: Why kernel visit is not used; None if it is.
    refused: str | None = None

    @cached_property
    def visits(self) -> VisitTriton:
        return VisitTriton()

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        try:
            self.visits.check(q, k, v)
        except Unsupported as error:
            if self.softcap is not None or self.dropout is not None:
                raise
            self.refused = str(error)

    @property
    def key(self) -> tuple[object, ...]:
        return *super().key, self.refused is None, *self.visits.key

    def derive(self, **options: Any) -> Self:
        kernel = super().derive(**options)
        kernel.visits = self.visits.derive(**options)
        return kernel

    def chooses_visits(self, works: Sequence[Sequence[Work]]) -> bool:
        """Whether `visits` computes a pass with these works, by visit."""
        if self.refused is not None:
            return False
        if self.softcap is not None or self.dropout is not None:
            return True
        for visit in works:
            joined = join_repetitions(join_keys(visit))
            if len(joined) > 1:  # several calls, or one that is packed: many works are not packed to find that out
                return True
            calls = self.calls_of(joined)
            if len(calls) > 1 or any(not _is_large(call) for call in calls):
                return True
        return False

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        if self.chooses_visits([works]):
            why = f"the mask is not one dense or causal call of at least {LARGE:,} rows and keys"
            return OpChoice((("one launch of kernel visit", 1),), (("aten_cuda", why),))
        taken = super().explain(*works, head_dim=head_dim)
        why = self.refused or "one large dense or causal call is faster with PyTorch's ops"
        return OpChoice(taken.calls, (*taken.left_out, ("visit", why)))

    def single(self) -> Kernel:
        # PyTorch's ops have none of these options.
        if self.softcap is None and self.dropout is None:
            return self
        return Reference().derive(softcap=self.softcap, dropout=self.dropout, padded=self.padded, asked=self.asked)

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        if self.chooses_visits([visit.works for visit in visits]):
            tables, count = self.visits.prepare(visits, heads, kv_heads, rows, backward=backward)
            return tables, (True, count)
        tables, unseen = super().prepare(visits, heads, kv_heads, rows, backward=backward)
        return tables, (False, unseen)

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        chosen, prepared = call.prepared
        call = replace(call, prepared=prepared)
        return self.visits.begin(call, q, block) if chosen else super().begin(call, q, block)


def _is_large(call: Work) -> bool:
    alone = call.repeat == 1 and not call.sequences
    return alone and (call.dense or call.causal) and min(len(call.q), call.keys) >= LARGE
