"""One interface over the attention kernels, and the conventions that every kernel is brought to.

lse is the natural log, fp32 (fp64 for fp64 inputs), [B, H, N], and every row handed to a kernel sees a key.

Bad numbers, NaN and infinities alike, go by rows, whatever the ranks, the tiling and the kernel: a bad row of q makes that
row of out and lse NaN, a bad row of k or v makes NaN each row that sees it. In the backward such a row, or a bad row of
the cotangent, makes NaN its own dq and the dk and dv of all keys that it sees. A row that sees no key stays 0 and -inf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import torch

from ..plan.work import Work


class Kernel(ABC):
    """Attention of one work: q [B, H, Nq, D], k [B, K, Nk, D], v [B, K, Nk, Dv], strided views welcome.

    B is the batch, or the repetitions of the work for one element of the batch.
    """

    name: str

    @abstractmethod
    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise Unsupported where these tensors cannot be computed by this kernel."""

    @abstractmethod
    def split(self, work: Work) -> Iterator[Work]:
        """The work as the calls that this kernel makes of it; together they hold the same pairs."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [B, H, Nq, Dv], lse [B, H, Nq]) of one call."""

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
        """(dq, dk, dv) of one call, given the *global* out and lse of its query rows: dS = P * (dP - delta)."""


@lru_cache(maxsize=32)
def band(rows: int, keys: int, lo: int | None, hi: int | None, device: torch.device) -> torch.Tensor:
    """Bool [rows, keys], true where row i attends key j: lo <= i - j <= hi. Shared: do not write to it."""
    with torch.inference_mode(False):  # it outlives the caller's inference mode
        distance = torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if lo is not None:
            seen &= distance >= lo
        if hi is not None:
            seen &= distance <= hi
        return seen


def forward(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float, *, clean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel.forward`, where a bad row of k or v reaches only the rows that see it. q is finite, see `finite_rows`.

    Libraries hide a key by a zero weight, and 0 * NaN is NaN; so bad key rows are zeroed first and the rows
    that see one are set to NaN after. Without a band every row sees every key, and the NaN of `marked` values reaches
    all of them by itself. `clean` says that k and v are known to be finite.
    """
    if clean or work.dense:
        return kernel.forward(q, k, v, work, scale)
    k, v, bad = _clean_keys(k, v)
    out, lse = kernel.forward(q, k, v, work, scale)
    hit = _sees(bad, work.lo, work.hi, len(work.q)).repeat_interleave(q.shape[1] // bad.shape[1], 1)
    return out.masked_fill(hit.unsqueeze(-1), torch.nan), lse.masked_fill(hit, torch.nan)


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
    """`kernel.backward`, where a bad row reaches only the gradients of the keys that it sees.

    A row that sees a bad key is bad itself: its lse or out is. Bad rows are taken out (P = 0), their traces set after.
    """
    if clean or work.dense:
        return kernel.backward(grad, q, k, v, out, lse, work, scale)
    k, v, _ = _clean_keys(k, v)
    bad = _bad_rows(grad, q, out, lse.unsqueeze(-1))
    wide = bad.unsqueeze(-1)
    grad, q, out = (x.masked_fill(wide, 0) for x in (grad, q, out))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse.masked_fill(bad, torch.inf), work, scale)
    # Key j is seen by row i iff -hi <= j - i <= -lo.
    lo, hi = (None if bound is None else -bound for bound in (work.hi, work.lo))
    group = bad.unflatten(1, (k.shape[1], -1)).any(2)
    hit = _sees(group, lo, hi, work.keys).unsqueeze(-1)
    return dq.masked_fill(wide, torch.nan), dk.masked_fill(hit, torch.nan), dv.masked_fill(hit, torch.nan)


def finite_rows(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q with 0 for each bad number, flags [B, H, n] of its bad rows), or (q, None) where all are known to be finite.

    Libraries give 0 for some rows whose logits are all NaN, so that no kernel gets to see a bad q: the rows are set to
    NaN when they are finished.
    """
    if finite(q):
        return q, None
    good = q.isfinite()
    return q.masked_fill(~good, 0.0), ~good.all(-1)


def marked(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(k, v, True) where both are known to be finite; else k with 0 and v with NaN in each bad row of either, and False.

    A weight times NaN is NaN even where the weight is 0. A bad logit is less reliable: -inf hides its key, and where all
    logits of a call are NaN some libraries give 0.
    """
    if finite(k, v):
        return k, v, True
    bad = _bad_rows(k, v).unsqueeze(-1)
    return k.masked_fill(bad, 0.0), v.masked_fill(bad, torch.nan), False


def finite(*tensors: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite, where that is known: a CUDA device is not waited for, and gives False."""
    if any(x.device.type != "cpu" for x in tensors):
        return False
    return all(bool(x.sum(dtype=wide(x.dtype)).isfinite()) or bool(x.isfinite().all()) for x in tensors)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial results are gathered."""
    return dtype if dtype == torch.float64 else torch.float32


def positive(scale: float) -> tuple[float, float]:
    """(sign, scale > 0) with the same logits for q * sign: libraries scale after they hide, and -1 * -inf attends what
    is hidden."""
    if scale > 0:
        return 1.0, scale
    return (-1.0, -scale) if scale < 0 else (0.0, 1.0)


def _clean_keys(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v with non-finite rows zeroed, and their flags [B, K, Nk]."""
    bad = _bad_rows(k, v)
    return k.masked_fill(bad.unsqueeze(-1), 0), v.masked_fill(bad.unsqueeze(-1), 0), bad


def _bad_rows(*tensors: torch.Tensor) -> torch.Tensor:
    """Flags [B, heads, rows] of rows with a NaN or infinity in any tensor [B, heads, rows, ...]."""
    return torch.stack([~x.isfinite().all(-1) for x in tensors]).any(0)


def _sees(bad: torch.Tensor, lo: int | None, hi: int | None, rows: int) -> torch.Tensor:
    """Whether row i sees a flagged key j, lo <= i - j <= hi: bool [B, K, rows] from bad [B, K, Nk], by prefix sums."""
    keys = bad.shape[-1]
    before = torch.nn.functional.pad(bad.long().cumsum(-1), (1, 0))
    row = torch.arange(rows, device=bad.device)
    first = torch.zeros_like(row) if hi is None else (row - hi).clamp(0, keys)
    stop = torch.full_like(row, keys) if lo is None else (row - lo + 1).clamp(0, keys)
    return before[..., stop] > before[..., first]
