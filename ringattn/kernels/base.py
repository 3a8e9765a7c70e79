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
    """Which ops of a kernel compute a work, with the number of calls of each, and why the kernel's other ops do not."""

    calls: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        taken = ", ".join(op if count == 1 else f"{count} calls of {op}" for op, count in self.calls)
        return "; ".join([taken, *(f"not {op}: {reason}" for op, reason in self.left_out)])


class Kernel(ABC):
    """Attention of one work: q [B, H, rows, D], k [B, K, keys, D], v [B, K, keys, Dv]; any strides.

    B is the batch; for a repeated work B counts the repetitions of one batch element. A subclass in one file is a
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
        """A key that is equal for kernels that split a work into the same calls."""
        return type(self), *self.asked

    def derive(self, **options: Any) -> Kernel:
        """A copy of this kernel with the given options."""
        kernel = copy(self)
        vars(kernel).update(options)
        return kernel

    def seeded(self, seed: int | None = None) -> Kernel:
        """This kernel; if it has dropout, with its seed set to `seed`, or by `Dropout.seeded` if that is None."""
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
        """The op that computes a call of `split`."""
        return self.name

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        """Which ops compute the works of a visit, and why other ops do not."""
        calls = Counter(self.op_of(call, head_dim) for call in self.calls_of(works))
        return OpChoice(tuple(calls.items()))

    @abstractmethod
    def split(self, work: Work) -> Iterator[Work]:
        """The calls that this kernel makes for a work. Together they contain every pair of the work exactly once."""

    def pack(self, calls: list[Work]) -> list[Work]:
        """The given calls of one visit, or fewer calls with the same pairs."""
        return calls

    def for_backward(self) -> Kernel:
        """The kernel whose `split` is used in a backward; differs from `self` if other calls are faster there."""
        return self

    def calls_of(self, works: Iterable[Work]) -> list[Work]:
        """The calls that this kernel makes for the works of one visit."""
        return self.pack([call for work in works for call in self.split(work)])

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, H, rows, Dv], lse [B, H, rows]) of one call, with any strides.

        out has the dtype of q, or fp32 (fp64 for fp64). Partials of the same rows are merged in fp32, so returning fp32
        for 16-bit inputs saves a rounding per call. lse is fp32 (fp64 for fp64).
        """

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of one call, in the shapes of q, k and v, with any strides, and in their dtype or in fp32.

        The runtime adds them to sums in fp32 (fp64 for fp64), which are rounded once, after the last call. It ignores
        columns beyond those of q, k and v.

        `grad` is dO [B, H, rows, Dv]. `out` and `lse` of the query rows cover all their keys, so that
        P = exp(scale * q k^T - lse) and dS = P * (dO v^T - rowsum(dO * out)).
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
    """(sign, factor) with factor > 0 such that q * sign scaled by `factor` has the same logits as q scaled by `scale`.

    Libraries hide a key with the logit -inf before they scale: a scale of -1 would turn it into +inf.
    """
    if scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def cut(work: Work, reads: Callable[[Work], bool]) -> Iterator[Work]:
    """The calls that compute a work, with bands that `reads` accepts: the work, or two or three runs of its rows.

    Each run is bounded by `lo` alone, by `hi` alone, by both or by neither, and has only the keys that its rows see: if
    `lo` binds, the last key is the last one that the last row sees; if `hi` binds, the first key is the first one that
    the first row sees.
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
    """The calls that compute a triangle: squares, and triangles of at most `least` rows.

    `least` is at least SQUARE_KEYS, so that no half of a triangle is empty. The purpose: within a triangle, ops also
    compute some hidden pairs (the flash op for CPUs up to 512 per row), fewer in smaller ones.
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
    """A band with an upper bound, cut into strips of rows, each with the keys that its rows see.

    A strip has (1 / `share` of the width of the band) rows, rounded up to a multiple of `least`, at most STRIP_ROWS.
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
