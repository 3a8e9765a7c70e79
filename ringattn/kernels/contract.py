"""The contract between the ring and a kernel: a visit is one call, and the kernel owns everything inside it.

The ring owns buffers, messages, and the addition of sums that arrive. The kernel owns what happens inside a visit: how
it splits the pairs into calls, merges partial results, and zeroes sums that are new.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import Unsupported
from ..plan.steps import Part
from ..plan.visit import Visit
from ..plan.work import Work
from ..transport.base import Compute
from .memory import differentiable, wide_zeros

if TYPE_CHECKING:
    from .dropout import Dropout

#: The tensors of a block, such as (k, v), or of its sums, such as (dk, dv).
Tensors = tuple[Tensor, ...]
#: (out [B, H, n, Dv], lse [B, H, n]).
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Chosen:
    """The keys that queries attend to, among those that they see: `keys` [B, H, n, k], int32 or int64, -1 for none.

    They are numbers of blocks of `block` positions. In batch rows joined end to end, a row has `stride` positions.
    Each `group` of adjacent query heads has the same choices.
    """

    keys: Tensor
    group: int
    block: int = 1
    stride: int = 1 << 62

    @property
    def blocks(self) -> int:
        """The blocks of a batch row."""
        return -(-self.stride // self.block)


@dataclass(frozen=True)
class CallData:
    """What a kernel needs to know in one pass of an attention call, besides its blocks.

    scale: the factor of the logits.
    stays: the part that stays on this rank, of kind "q" if keys visit and "kv" if queries visit.
    heads: which of the call's query heads this rank computes.
    places: maps a part to its (heads [H], positions [1 or H, rows]), int64, on the call's device; for dropout.
    number: what travels with the rows of a pass-Q backward: "delta", or the "factor" of `pad.times_unit`.
    lse: whether the loss of any rank may depend on lse; equal on all ranks.
    sinks: [H] of this rank's query heads, to be merged into its output.
    prepared: what `VisitKernel.prepare` found for the whole pass.
    chosen: the keys to which this rank's queries attend; None: all that they see.
    """

    scale: float
    stays: Part
    heads: range
    places: Callable[[Part], tuple[Tensor, Tensor]]
    number: str = "delta"
    lse: bool = False
    sinks: Tensor | None = None
    prepared: Any = None
    chosen: Chosen | None = None


@dataclass(frozen=True)
class QueryRows:
    """What a backward knows of query rows: dO and q [B, H, n, D], lse [B, H, n] over all keys, and what delta needs.

    Rows that visit carry a `number` [B, H, n, 1], see `CallData.number`. Rows that stay have `out` and `grad_lse`
    (None: the loss does not depend on lse).
    """

    grad: Tensor
    q: Tensor
    lse: Tensor
    number: Tensor | None = None
    out: Tensor | None = None
    grad_lse: Tensor | None = None


class KernelPass(ABC):
    """A kernel in one pass of one rank: computes visits, and keeps what stays between them.

    In a pass, a forward or a backward, either keys visit or queries; all its visits are of one kind. Tensors have any
    strides; blocks and rows have the dtype of the inputs, sums are in fp32 (fp64 for fp64).
    """

    #: Whether ready visits of several virtual ranks on one device may be computed by one call of `launch`.
    together: bool = False
    #: Passes with equal keys may share a launch.
    key: object = None

    @abstractmethod
    def new_sums(self, out: Tensor | None) -> Any:
        """The sums of this rank's queries in a forward, as the kernel keeps them; the output is `out` if given."""

    @abstractmethod
    def finish(self, sums: Any) -> Pair:
        """(out, lse) of complete `new_sums`, with sinks; rows without a pair have 0 and -inf."""

    @abstractmethod
    def new_grads(self) -> Any:
        """The gradients of what stays in a backward, as the kernel keeps them: dq, or if queries visit (dk, dv)."""

    @abstractmethod
    def finish_grads(self, grads: Any) -> Tensors:
        """The gradients of what stays, in fp32 (fp64 for fp64)."""

    def new_travel(self, block: Tensors) -> Tensors:
        """The sums that travel with this rank's own block in a backward, before any visit."""
        return tuple(map(wide_zeros, differentiable(block)))

    def finish_travel(self, travel: Tensors) -> Tensors:
        """The gradients of this rank's own block, from complete `new_travel`, in fp32 (fp64 for fp64)."""
        return travel

    @abstractmethod
    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Any) -> None:
        """Attend q to a block, and merge the result into `sums`.

        These are of `new_sums` or, if queries visit, their (out, lse), which `visit.first` says to write, not to merge.
        """

    @abstractmethod
    def visit_backward(self, visit: Visit, rows: QueryRows, block: Tensors, stay: Any, travel: Tensors) -> None:
        """Differentiate a visit: add to `stay`, which `new_grads` made, and to `travel`, the visiting block's sums.

        With `visit.first`, `travel` is uninitialized: write it all, zeros where there is no pair.
        """

    def launch(self, requests: Sequence[Compute]) -> None:
        """Compute requests: one or, if `together`, those of several ranks whose passes have equal keys."""
        for request in requests:
            one: KernelPass = request.kernel
            (one.visit_backward if request.backward else one.visit_forward)(request.visit, *request.tensors)


@dataclass(frozen=True)
class OpChoice:
    """Which ops of a kernel compute some works, how many calls each op makes, and why other ops are not used."""

    calls: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        taken = ", ".join(op if count == 1 else f"{count} calls of {op}" for op, count in self.calls)
        return "; ".join([taken, *(f"not {op}: {reason}" for op, reason in self.left_out)])


class VisitKernel(ABC):
    """Base class of kernels whose unit is a visit; `base.Kernel` is for libraries that compute one work a call.

    An installed package adds its own through an entry point of the group "ringattn.kernels".
    """

    #: The name for `kernel=`; a choice follows after a colon.
    name: str
    #: Variants that `kernel="name:choice"` may ask for.
    choices: ClassVar[tuple[str, ...]] = ()
    #: The largest head dim of q, k and v that the kernel computes; None: any.
    max_head_dim: int | None = None
    #: The options below that the kernel supports, by name. A call that asks for another option is refused.
    features: ClassVar[tuple[str, ...]] = ()
    #: The (choice, deterministic) with which the kernel was made.
    asked: tuple[str | None, bool] = (None, False)
    #: The softcap of the logits; None: no softcap.
    softcap: float | None = None
    #: Whether the first columns of q and k hide padded keys, see `pad.hide_keys`: a softcap must not cap their part.
    padded: bool = False
    #: Whether shapes of works are unlikely to recur, see `Pattern.varies`.
    varies: bool = False
    #: Whether to subtract a rank's first key from all keys, see `centre.Centre`.
    centred: bool = True
    #: Dropout of attention weights; None: no dropout.
    dropout: Dropout | None = None

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> VisitKernel:
        """The kernel for inputs of `dtype`. `choice` is one of `choices`, or None."""
        return cls()

    @property
    def key(self) -> tuple[object, ...]:
        """A cache key: two kernels with equal keys prepare the same tables."""
        return type(self), *self.asked

    def derive(self, **options: Any) -> Self:
        """A copy of this kernel with the given options."""
        kernel = copy(self)
        vars(kernel).update(options)
        return kernel

    def seeded(self, seed: int | None = None) -> Self:
        """A copy of this kernel whose dropout has a seed: `seed`, or as `Dropout.seeded` chooses it if that is None.

        A kernel without dropout is returned unchanged.
        """
        return self if self.dropout is None else self.derive(dropout=self.dropout.seeded(seed))

    @classmethod
    def missing(cls) -> str | None:
        """Why this kernel cannot run on this machine; None if it can."""
        return None

    @abstractmethod
    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise Unsupported if this kernel cannot compute these tensors.

        Called once for tensors with equal shapes, strides, dtypes, devices and `requires_grad` under equal switches of
        torch: the result must not depend on anything else.
        """

    @abstractmethod
    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        """Which ops compute these works, how many calls each makes, and why other ops are not used."""

    def prepare(
        self, visits: Sequence[Visit], heads: int, kv_heads: int, rows: int, *, backward: bool
    ) -> tuple[Sequence[Any], Any]:
        """(a table for each visit, `CallData.prepared`). Called once for all visits of a pass, without tensors.

        `heads` and `kv_heads` are those of the rank's queries and of its block; `rows` are the rows that stay, which
        are keys if queries visit. The result is part of the program, which the plan caches by rank, device and `key`.
        """
        return [None] * len(visits), None

    def single(self) -> Any:
        """The `base.Kernel` for single calls with these options, such as steps of a cache. Raises Unsupported."""
        raise Unsupported(f"kernel {self.name} computes no steps of a cache; try kernel=auto")

    @abstractmethod
    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        """The kernel in one pass; q and block are this rank's own."""


class WrappingKernel(VisitKernel):
    """Base class of kernels that compute visits with another kernel."""

    def __init__(self, inner: VisitKernel) -> None:
        self.inner = inner

    @property
    def key(self) -> tuple[object, ...]:
        return type(self), *self.inner.key

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.inner.check(q, k, v)

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        return self.inner.explain(*works, head_dim=head_dim)
