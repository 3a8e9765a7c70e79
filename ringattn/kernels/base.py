"""The interface of all kernels, and guards that make all kernels treat NaN and infinities alike.

lse is the natural log of the sum of exp(scaled logits), [B, H, rows], in fp32 (fp64 for fp64 inputs). Every query row
that a kernel receives sees a key.

NaN and infinities (bad numbers) act by rows, whatever the ranks, the tiling and the kernel. Forward: a bad row of q
makes its row of out and lse NaN; a bad row of k or v makes every row that sees this key NaN. Backward: such a row, and
a row with a bad cotangent, gets a NaN dq, and every key that the row sees gets NaN in dk and dv. A row that sees no key
has out 0 and lse -inf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch.nn.functional import pad

from ..plan.work import Work


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

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> Kernel:
        """The kernel for inputs of `dtype`. `choice` is one of `choices`, or None."""
        return cls()

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

    def explain(self, work: Work, head_dim: int = 128) -> OpChoice:
        """Which ops compute a work, and why the others do not."""
        calls = Counter(self.op_of(call, head_dim) for call in self.split(work))
        return OpChoice(self.name, tuple(calls.items()))

    @abstractmethod
    def split(self, work: Work) -> Iterator[Work]:
        """The calls that this kernel makes for a work. Together the calls hold every pair of the work once."""

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
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float, *, clean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel.forward`, in which a bad row of k or v reaches only the query rows that see the key.

    Libraries hide a key by the weight 0, and 0 * NaN is NaN. So bad key rows are zeroed before the call, and rows that
    see a bad key are set to NaN after the call. In a dense work every row sees every key, and the NaN that `marked`
    puts into v reaches every row without help. q must be finite, see `finite_rows`. `clean`: k and v are known to be
    finite.
    """
    if clean or work.dense:
        return kernel.forward(q, k, v, work, scale)
    k, v, bad_keys = _zero_bad_keys(k, v)
    out, lse = kernel.forward(q, k, v, work, scale)
    bad_rows = _rows_seeing(bad_keys, work.lo, work.hi, len(work.q))
    bad_rows = bad_rows.repeat_interleave(q.shape[1] // bad_keys.shape[1], 1)
    return out.masked_fill(bad_rows.unsqueeze(-1), torch.nan), lse.masked_fill(bad_rows, torch.nan)


def backward(
    kernel: Kernel,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    work: Work,
    scale: float,
    *,
    clean: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernel.backward`, in which a bad row reaches only the gradients of the keys that the row sees.

    A row that sees a bad key is bad itself, since its lse or out is bad. Bad rows enter the kernel with P = 0; the
    gradients that a bad row touches are set to NaN after the call.
    """
    if clean or work.dense:
        return kernel.backward(grad, q, k, v, out, lse, work, scale)
    k, v, _ = _zero_bad_keys(k, v)
    bad_rows = _bad_rows(grad, q, out, lse.unsqueeze(-1))
    bad_entries = bad_rows.unsqueeze(-1)
    grad, q, out = (x.masked_fill(bad_entries, 0) for x in (grad, q, out))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse.masked_fill(bad_rows, torch.inf), work, scale)
    # Row i sees key j iff -hi <= j - i <= -lo: the same band with rows and keys exchanged.
    lo, hi = (None if bound is None else -bound for bound in (work.hi, work.lo))
    bad_in_group = bad_rows.unflatten(1, (k.shape[1], -1)).any(2)
    bad_keys = _rows_seeing(bad_in_group, lo, hi, work.keys).unsqueeze(-1)
    return (
        dq.masked_fill(bad_entries, torch.nan),
        dk.masked_fill(bad_keys, torch.nan),
        dv.masked_fill(bad_keys, torch.nan),
    )


def finite_rows(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q with 0 for each bad number, bool [B, H, n] that flags its bad rows); (q, None) if q is known to be finite.

    Some libraries give 0 for rows whose logits are all NaN. So a kernel never receives a bad q, and the executor sets
    the flagged rows of the finished result to NaN.
    """
    if finite(q):
        return q, None
    good = q.isfinite()
    return q.masked_fill(~good, 0.0), ~good.all(-1)


def marked(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(k', v', clean) in which only v' marks bad key rows, by NaN; k' has 0 in these rows.

    `clean`: k and v are known to be finite, and returned unchanged. A weight times NaN is NaN, even for the weight 0. A
    bad logit would be less reliable: -inf hides its key, and for a call whose logits are all NaN some libraries give 0.
    """
    if finite(k, v):
        return k, v, True
    bad = _bad_rows(k, v).unsqueeze(-1)
    return k.masked_fill(bad, 0.0), v.masked_fill(bad, torch.nan), False


def finite(*tensors: torch.Tensor) -> bool:
    """True if all entries are known to be finite. False for tensors off the CPU: looking would wait for the device."""
    if any(x.device.type != "cpu" for x in tensors):
        return False
    return all(bool(x.sum(dtype=wide(x.dtype)).isfinite()) or bool(x.isfinite().all()) for x in tensors)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results of `dtype` are accumulated: fp64 for fp64, else fp32."""
    return dtype if dtype == torch.float64 else torch.float32


def positive(scale: float) -> tuple[float, float]:
    """(sign, factor) with factor > 0, such that q * sign with `factor` has the logits of q with `scale`.

    Libraries hide a key by the logit -inf before they scale: a scale of -1 would make the logit +inf.
    """
    if scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def _zero_bad_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v with bad key rows zeroed, and the flags of these rows [B, K, keys]."""
    bad = _bad_rows(k, v)
    return k.masked_fill(bad.unsqueeze(-1), 0), v.masked_fill(bad.unsqueeze(-1), 0), bad


def _bad_rows(*tensors: torch.Tensor) -> torch.Tensor:
    """Bool [B, heads, rows], True for a row with NaN or infinity in any of the tensors [B, heads, rows, ...]."""
    return torch.stack([~x.isfinite().all(-1) for x in tensors]).any(0)


def _rows_seeing(flagged: torch.Tensor, lo: int | None, hi: int | None, rows: int) -> torch.Tensor:
    """Bool [B, K, rows], True for a row i with lo <= i - j <= hi for a key j that `flagged` [B, K, keys] flags."""
    keys = flagged.shape[-1]
    flagged_before = pad(flagged.long().cumsum(-1), (1, 0))
    row = torch.arange(rows, device=flagged.device)
    first = torch.zeros_like(row) if hi is None else (row - hi).clamp(0, keys)
    stop = torch.full_like(row, keys) if lo is None else (row - lo + 1).clamp(0, keys)
    return flagged_before[..., stop] > flagged_before[..., first]
