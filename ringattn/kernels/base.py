"""The interface of all kernels, and guards that make all kernels treat NaN and infinities alike.

lse is the natural log of the sum of exp(scaled logits), [B, H, rows], in fp32 (fp64 for fp64 inputs). Every query row
that a kernel receives sees a key.

NaN and infinities (bad numbers) act by rows, whatever the ranks, the tiling and the kernel. Forward: a bad row of q
makes its row of out and lse NaN; a bad row of k or v makes every row that sees this key NaN. Backward: such a row, and
a row with a bad cotangent, gets a NaN dq, and every key that the row sees gets NaN in dk and dv. A row that sees no key
has out 0 and lse -inf.

Every owner marks its bad rows once per call, before they travel: key rows by NaN in v, query rows by NaN in lse. In a
dense call NaN reaches all rows by itself. A call with a band gets its inputs without the marks, and marks one column of
its result; the marks of the finished result are spread over its columns. Nothing here waits for a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..plan.work import Work

if TYPE_CHECKING:
    from .dropout import Dropout


@dataclass(frozen=True)
class OpChoice:
    """Which ops compute a work, with the number of calls of each, and why the others of the kernel do not."""

    kernel: str
    calls: tuple[tuple[str, int], ...]
    left_out: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        taken = ", ".join(op if count == 1 else f"{count} calls of {op}" for op, count in self.calls)
        return "; ".join([taken, *(f"not {op}: {reason}" for op, reason in self.left_out)])


class Kernel(ABC):
    """Attention of one work: q [B, H, rows, D], k [B, K, keys, D], v [B, K, keys, Dv]; any strides.

    B is the batch; for a repeated work B counts the repetitions of one batch element. A subclass in one file is a
    complete kernel. An installed package offers its subclass by an entry point of the group "ringattn.kernels".
    """

    #: What `kernel=` names, with the choice after a colon.
    name: str
    #: Variants that `kernel="name:choice"` may ask for.
    choices: ClassVar[tuple[str, ...]] = ()
    #: The largest head dim of q, k and v that the kernel computes; None: any.
    max_head_dim: int | None = None
    #: Which of the options below the kernel computes, by name. A call that asks for another option is refused.
    features: ClassVar[tuple[str, ...]] = ()
    #: The softcap of the logits; None: no softcap.
    softcap: float | None = None
    #: Whether the first columns of q and k hide padded keys, see `pad.hide_keys`: a softcap does not cap their share.
    padded: bool = False
    #: Which weights are dropped; None: none.
    dropout: Dropout | None = None
    #: Of a call with dropout: streams int64 [B, H, rows, 1] and steps int64 [B, K, keys, 1] of `weight_factors`.
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> Kernel:
        """The kernel for inputs of `dtype`. `choice` is one of `choices`, or None."""
        return cls()

    def derive(self, **options: Any) -> Kernel:
        """This kernel with other options."""
        kernel = copy(self)
        vars(kernel).update(options)
        return kernel

    def seeded(self, seed: int | None = None) -> Kernel:
        """This kernel, with a seed where it has dropout: `seed`, or else `Dropout.seeded`."""
        return self if self.dropout is None else self.derive(dropout=self.dropout.seeded(seed))

    @classmethod
    def missing(cls) -> str | None:
        """Why this kernel cannot run on this machine; None if it can."""
        return None

    @abstractmethod
    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise Unsupported if this kernel cannot compute these tensors."""

    def op_of(self, call: Work, head_dim: int) -> str:
        """The op that computes a call of `split`."""
        return self.name

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        """Which ops compute the works of a visit, and why the others do not."""
        calls = Counter(self.op_of(call, head_dim) for call in self.calls_of(works))
        return OpChoice(self.name, tuple(calls.items()))

    @abstractmethod
    def split(self, work: Work) -> Iterator[Work]:
        """The calls that this kernel makes for a work. Together the calls hold every pair of the work once."""

    def pack(self, calls: list[Work]) -> list[Work]:
        """The calls of `split` for the works of one visit, or fewer calls that hold the same pairs."""
        return calls

    def for_backward(self) -> Kernel:
        """The kernel whose `split` serves a backward; another one where other calls are faster there."""
        return self

    def calls_of(self, works: Iterable[Work]) -> list[Work]:
        """The calls that this kernel makes for the works of one visit."""
        return self.pack([call for work in works for call in self.split(work)])

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, H, rows, Dv], lse [B, H, rows]) of one call. out has the dtype of q, or fp32."""

    @abstractmethod
    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: Work,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of one call, in the shapes of q, k and v.

        `grad` is dO [B, H, rows, Dv]. `out` and `lse` are those of the query rows over all their keys, so that
        P = exp(scale * q k^T - lse) and dS = P * (dO v^T - rowsum(dO * out)).
        """


@lru_cache(maxsize=32)
def band(rows: int, keys: int, lo: int | None, hi: int | None, device: torch.device) -> torch.Tensor:
    """Bool [rows, keys], True where lo <= i - j <= hi for row i and key j; None is unbounded. Shared: do not write."""
    with torch.inference_mode(False):  # the cached mask outlives the inference mode of the caller
        distance = torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if lo is not None:
            visible &= distance >= lo
        if hi is not None:
            visible &= distance <= hi
        return visible


def forward(
    kernel: Kernel, q: torch.Tensor, keys: Sequence[torch.Tensor], work: Work, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel.forward` with the k, v of `keys`. With the third tensor of `hide_bad_keys`, column 0 of out is NaN in the
    rows that see a bad key.

    q must be finite, see `finite_rows`. In a dense work every row sees every key, and the NaN that `mark_bad_keys` puts
    into v reaches every row without help.
    """
    k, v, *bad_keys = keys
    out, lse = kernel.forward(q, k, v, work, scale)
    for bad in bad_keys:
        bad_rows = _seeing(bad.squeeze(-1), work)
        out[..., 0].unflatten(1, (k.shape[1], -1)).masked_fill_(bad_rows.unsqueeze(2), torch.nan)
    return out, lse


def backward(
    kernel: Kernel, rows: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], work: Work, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernel.backward` with the dO, q, out, lse of `rows` and the k, v of `keys`. With the fifth tensor of
    `hide_bad_rows`, column 0 of dv is NaN for the keys that a bad row sees.

    A row that sees a bad key is bad itself, since its lse is NaN.
    """
    grad, q, out, lse, *bad_rows = rows
    k, v, *_ = keys
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse, work, scale)
    for bad in bad_rows:
        bad_keys = _seeing(bad.unflatten(1, (k.shape[1], -1)).any(2), work, by_key=True)
        dv[..., 0].masked_fill_(bad_keys, torch.nan)
    return dq, dk, dv


def finite_rows(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q with 0 in its bad rows, bool [B, H, n] that flags these rows); (q, None) if q is known to be finite.

    Some libraries give 0 for rows whose logits are all NaN. So a kernel never receives a bad q, and the executor sets
    the flagged rows of the finished result to NaN.
    """
    if finite(q):
        return q, None
    bad = _bad_rows(q)
    return q.masked_fill(bad.unsqueeze(-1), 0.0), bad


def mark_bad_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(k', v') in which only v' marks bad key rows, by NaN; k' has 0 in these rows. Unchanged if known to be finite.

    A weight times NaN is NaN, even for the weight 0. A bad logit would be less reliable: -inf hides its key, and for a
    call whose logits are all NaN some libraries give 0.
    """
    if finite(k, v):
        return k, v
    bad = _bad_rows(k, v).unsqueeze(-1)
    return k.masked_fill(bad, 0.0), v.masked_fill(bad, torch.nan)


def hide_bad_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(k, v with 0 in marked rows, bool [B, K, n, 1] that flags these rows) for calls with a band; (k, v) if no row is
    known to be marked. k and v come from `mark_bad_keys`.

    Libraries hide a key by the weight 0, and 0 * NaN is NaN. Reads one column of v, and writes v once.
    """
    bad = v[..., :1].isnan()
    return (k, v) if none(bad) else (k, v.masked_fill(bad, 0.0), bad)


def mark_bad_rows(lse: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(lse', *tensors') in which only lse' [B, H, n] marks bad query rows, by NaN; the tensors [B, H, n, ...] have 0 in
    these rows. Unchanged if known to be finite. A row that sees no key, with lse -inf, is not marked.
    """
    if finite(*tensors) and (finite(lse) or finite(lse.masked_fill(lse.isneginf(), 0.0))):
        return lse, *tensors
    bad = _bad_rows(lse.unsqueeze(-1), *tensors) & ~lse.isneginf()
    return lse.masked_fill(bad, torch.nan), *(x.masked_fill(bad.unsqueeze(-1), 0.0) for x in tensors)


def hide_bad_rows(
    grad: torch.Tensor, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(dO, q, out, lse with +inf in marked rows, bool [B, H, n] that flags these rows) for calls with a band; the four
    tensors if known to be finite. The tensors come from `mark_bad_rows`. With lse +inf a row has P = 0.
    """
    bad = lse.isnan()
    return (grad, q, out, lse) if none(bad) else (grad, q, out, lse.masked_fill(bad, torch.inf), bad)


def hide_keyless(lse: torch.Tensor) -> torch.Tensor:
    """lse with +inf for -inf, so that the rows that see no key have P = 0."""
    return lse.nan_to_num(torch.nan, torch.inf, torch.inf)


def spread_marks(marks: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Set to NaN, in place, the rows that `marks` [B, heads, n] flags in tensors [B, heads, n] or [B, heads, n, D]."""
    if not none(marks):
        for x in tensors:
            x.masked_fill_(marks.unsqueeze(-1) if x.ndim > marks.ndim else marks, torch.nan)


def finite(*tensors: torch.Tensor) -> bool:
    """True if all entries are known to be finite. False for tensors off the CPU: looking would wait for the device."""
    for x in tensors:
        if x.device.type != "cpu" or not (isfinite(float(x.sum(dtype=wide(x.dtype)))) or bool(x.isfinite().all())):
            return False
    return True


def none(flags: torch.Tensor) -> bool:
    """True if no flag is known to be set. False for flags off the CPU: looking would wait for the device."""
    return flags.device.type == "cpu" and not bool(flags.any())


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are accumulated: fp64 for fp64, else fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in this dtype; x itself, without a call of torch, where it has the dtype."""
    return x if x.dtype == dtype else x.to(dtype=dtype)  # by name: torch parses it in half the time


def positive(scale: float) -> tuple[float, float]:
    """(sign, factor) with factor > 0, such that q * sign with `factor` has the logits of q with `scale`.

    Libraries hide a key by the logit -inf before they scale: a scale of -1 would make the logit +inf.
    """
    if scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def _bad_rows(*tensors: torch.Tensor) -> torch.Tensor:
    """Bool [B, heads, rows], True for a row with NaN or infinity in any of the tensors [B, heads, rows, ...]."""
    # The largest magnitude of a row reads the tensor once and is NaN if any entry is.
    peaks = [torch.linalg.vector_norm(x, torch.inf, -1) for x in tensors]
    return ~(reduce(torch.maximum, peaks) < torch.inf)


def _seeing(flagged: torch.Tensor, work: Work, *, by_key: bool = False) -> torch.Tensor:
    """Bool [B, K, rows or 1], True for a row that sees a key that `flagged` [B, K, keys] flags.

    `by_key`: bool [B, K, keys or 1], True for a key that a flagged row sees.
    """
    if work.sequences:
        from .packing import visible_runs  # only what packs loads it

        first, stop = visible_runs(work, flagged.device, by_key=by_key)
        count = torch.nn.functional.pad(flagged.cumsum(-1, dtype=torch.int32), (1, 0))
        return count.index_select(-1, stop) > count.index_select(-1, first)
    if not by_key:
        return _rows_seeing(flagged, work.lo, work.hi, len(work.q))
    # Row i sees key j iff -hi <= j - i <= -lo: the same band with rows and keys exchanged.
    lo, hi = (None if bound is None else -bound for bound in (work.hi, work.lo))
    return _rows_seeing(flagged, lo, hi, work.keys)


def _rows_seeing(flagged: torch.Tensor, lo: int | None, hi: int | None, rows: int) -> torch.Tensor:
    """Bool [B, K, rows or 1], True for a row i with lo <= i - j <= hi for a key j that `flagged` [B, K, keys] flags."""
    count = flagged.cumsum(-1, dtype=torch.int32)
    until_last = count[..., -1:] if lo is None else _shifted(count, -lo, rows)
    return until_last > (0 if hi is None else _shifted(count, -hi - 1, rows))


def _shifted(count: torch.Tensor, shift: int, rows: int) -> torch.Tensor:
    """[B, K, rows] with count [B, K, keys] at i + shift for row i: 0 before the first key, the total from the last key
    on."""
    inside = count[..., max(shift, 0) : max(shift + rows, 0)]
    before = min(max(-shift, 0), rows)
    after = rows - before - inside.shape[-1]
    if not before and not after:
        return inside
    first, last = (x.expand(*count.shape[:2], n) for x, n in ((count.new_zeros(1), before), (count[..., -1:], after)))
    return torch.cat([first, inside, last], -1)
