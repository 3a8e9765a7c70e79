"""The interface of all kernels.

lse is the natural log of the sum of exp(scaled logits), [B, H, rows], in fp32 (fp64 for fp64 inputs). Every query row
that a kernel receives sees a key.

NaN and infinities behave as in torch's SDPA: every row that sees a key with a NaN is NaN, and other rows of the same
call may be NaN, too. A row that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from ..plan.work import Work

if TYPE_CHECKING:
    from .dropout import Dropout


#: Maximum query rows of a strip of a band.
STRIP_ROWS = 256
#: Squares below the diagonal of a triangle have a multiple of this many keys: ops are slower with other numbers.
SQUARE_KEYS = 32


@dataclass(frozen=True)
class OpChoice:
    """Which ops of a kernel compute some works, how many calls each op makes, and why other ops are not used."""

    calls: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        taken = ", ".join(op if count == 1 else f"{count} calls of {op}" for op, count in self.calls)
        return "; ".join([taken, *(f"not {op}: {reason}" for op, reason in self.left_out)])


class Kernel(ABC):
    """Base class of kernels, which compute attention of one `Work`: some query rows and keys, and a mask between them.

    Inputs are q [B, H, rows, D], k [B, K, keys, D] and v [B, K, keys, Dv] with any strides. B is the batch; for a work
    that repeats with a fixed stride, B counts the repetitions, in one batch element. A subclass in one file is a
    complete kernel. An installed package adds its own through an entry point of the group "ringattn.kernels".
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
    #: Dropout of attention weights; None: no dropout.
    dropout: Dropout | None = None
    #: For a call with dropout: streams int64 [B, H, rows, 1] and steps int64 [B, K, keys, 1] for `weight_factors`.
    numbers: tuple[Tensor, Tensor] | None = None

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> Kernel:
        """The kernel for inputs of `dtype`. `choice` is one of `choices`, or None."""
        return cls()

    @property
    def key(self) -> tuple[object, ...]:
        """A cache key: two kernels with equal keys split every work into the same calls."""
        return type(self), *self.asked

    def derive(self, **options: Any) -> Kernel:
        """A copy of this kernel with the given options."""
        kernel = copy(self)
        vars(kernel).update(options)
        return kernel

    def seeded(self, seed: int | None = None) -> Kernel:
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

    def op_of(self, call: Work, head_dim: int) -> str:
        """The name of the op that computes a call, which `split` has made."""
        return self.name

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        """Which ops compute these works, how many calls each makes, and why other ops are not used."""
        calls = Counter(self.op_of(call, head_dim) for call in self.calls_of(works))
        return OpChoice(tuple(calls.items()))

    @abstractmethod
    def split(self, work: Work) -> Iterator[Work]:
        """Split a work into the calls that this kernel makes; they contain every pair of the work exactly once."""

    def pack(self, calls: list[Work]) -> list[Work]:
        """Combine calls that can be made together; returns the same or fewer calls, with the same pairs."""
        return calls

    def for_backward(self) -> Kernel:
        """The kernel whose `split` is used in a backward: a different one if other calls are faster there."""
        return self

    def calls_of(self, works: Iterable[Work]) -> list[Work]:
        """All calls that this kernel makes for some works that are computed together."""
        return self.pack([call for work in works for call in self.split(work)])

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        """Compute one call: returns (out [B, H, rows, Dv], lse [B, H, rows]), with any strides.

        out has the dtype of q, or fp32 (fp64 for fp64). Results of the same rows are merged in fp32, so a kernel that
        returns fp32 for 16-bit inputs saves one rounding per call. lse is fp32 (fp64 for fp64).
        """

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of one call: (dq, dk, dv) in the shapes of q, k and v, in their dtype or in fp32.

        Any strides are allowed. The runtime sums the gradients of all calls in fp32 (fp64 for fp64) and rounds once at
        the end. It ignores columns beyond those of q, k and v.

        `grad` is dO [B, H, rows, Dv]. `out` and `lse` are the final results of the rows, over all keys that they see,
        so that P = exp(scale * q k^T - lse) and dS = P * (dO v^T - rowsum(dO * out)).
        """


@lru_cache(maxsize=32)
def band(rows: int, keys: int, lo: int | None, hi: int | None, device: torch.device) -> Tensor:
    """Bool [rows, keys], True where lo <= i - j <= hi for row i and key j; None is unbounded. Shared: do not write."""
    with torch.inference_mode(False):  # the cached mask outlives the inference mode of the caller
        distance = torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if lo is not None:
            visible &= distance >= lo
        if hi is not None:
            visible &= distance <= hi
        return visible


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are accumulated: fp64 for fp64, else fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def is_dense(x: object) -> TypeGuard[Tensor]:
    """Whether x is a tensor with strides: not sparse, not nested."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested


def kind_of(x: object) -> str:
    """A description of x, which is not a dense tensor, for an error message."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "a nested tensor; try padding" if x.is_nested else f"a {x.layout} tensor; try to_dense()"


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype; x itself, without calling torch, if it already has the dtype."""
    return x if x.dtype == dtype else x.to(dtype=dtype)  # torch parses a keyword argument in half the time


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """x [B, K, n, D] with each key/value head repeated for its query heads: [B, H, n, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def positive(scale: float) -> tuple[float, float]:
    """Split the scale of the logits into (sign, factor), with factor > 0 and sign * factor = scale.

    Multiply q by `sign`, and let the kernel scale by `factor`. Kernels need a positive scale, because libraries hide a
    key with the logit -inf before they multiply by the scale: a scale of -1 would turn it into +inf. For scale 0, sign
    is 0.
    """
    if scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def cut(work: Work, reads: Callable[[Work], bool]) -> Iterator[Work]:
    """Split a work by rows into at most three calls whose masks the kernel can express, as `reads` decides.

    If `reads(work)` is True, the work is the only call. Otherwise the rows of a call are bounded by `lo` alone, by `hi`
    alone, by both or by neither, and the call has only keys that these rows see: if `lo` applies, its last key is the
    last one that its last row sees; if `hi` applies, its first key is the first one that its first row sees.
    """
    if reads(work):
        yield work
        return
    rows, keys = len(work.q), work.keys
    # Rows from `unbounded` on are not bounded by `lo`; rows from `bounded` on are bounded by `hi`.
    unbounded = 0 if work.lo is None else min(max(keys + work.lo, 0), rows)
    bounded = rows if work.hi is None else min(max(work.hi, 0), rows)
    for first, last in pairwise(sorted({0, unbounded, bounded, rows})):
        part = work.narrow_rows(first, last)
        assert reads(part), "the op must read the band of every run of rows correctly"
        yield part


def halve(triangle: Work, least: int) -> Iterator[Work]:
    """Split a causal triangle into squares, and triangles of at most `least` rows.

    `least` is at least SQUARE_KEYS, so that no half of a triangle is empty. Within a triangle, ops also compute some
    hidden pairs (the flash op for CPUs up to 512 per row); smaller triangles have fewer of them.
    """
    rows = len(triangle.q)
    if rows <= least:
        yield triangle
        return
    half = -(-rows // (2 * SQUARE_KEYS)) * SQUARE_KEYS
    yield from halve(triangle.narrow((0, half), (0, half)), least)
    yield from halve(triangle.narrow((half, rows), (half, rows)), least)
    yield triangle.narrow((half, rows), (0, half))


def cut_strips(work: Work, share: int, least: int) -> Iterator[Work]:
    """Split a band with an upper bound into strips of adjacent rows, each with the keys that its rows see.

    A strip has 1 / `share` of the width of the band as rows, rounded up to a multiple of `least`, at most STRIP_ROWS.
    Strips of few rows compute fewer hidden pairs; strips of many rows make faster matrix products.
    """
    assert work.hi is not None
    rows, width = len(work.q), work.keys if work.lo is None else work.hi - work.lo + 1
    height = min(max(-(-width // (share * least)), 1) * least, STRIP_ROWS)
    for first in range(0, rows, height):
        yield work.narrow_rows(first, min(first + height, rows))


def is_causal(work: Work) -> bool:
    """Whether row i sees key j iff j <= i, counted from the first row and the first key."""
    return work.lo == 0 and work.hi is None
