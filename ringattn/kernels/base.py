"""One interface over the attention kernels, and the conventions that every kernel is brought to.

lse is the natural log, fp32 (fp64 for fp64 inputs), [B, H, N], and every row handed to a kernel sees a key.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from ..demand import Work


class Kernel(ABC):
    """Attention of one work: q [B, H, Nq, D], k [B, K, Nk, D], v [B, K, Nk, Dv], strided views welcome."""

    name: str

    @abstractmethod
    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raise Unsupported where these tensors cannot be computed by this kernel."""

    def split(self, work: Work) -> Iterator[Work]:
        """The work as the calls that this kernel makes of it; together they hold the same pairs."""
        yield work

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


def narrow(work: Work, q: tuple[int, int], k: tuple[int, int]) -> Work:
    """The part of a work in rows q[0] .. q[1]-1 and keys k[0] .. k[1]-1, indices into its own rows."""
    shift = q[0] - k[0]
    rows, keys = q[1] - q[0], k[1] - k[0]
    lo = None if work.lo is None or work.lo - shift <= 1 - keys else work.lo - shift
    hi = None if work.hi is None or work.hi - shift >= rows - 1 else work.hi - shift
    return replace(work, q=work.q[q[0] : q[1]], k=work.k[k[0] : k[1]], lo=lo, hi=hi)


@lru_cache(maxsize=32)
def band(rows: int, keys: int, lo: int | None, hi: int | None, device: torch.device) -> torch.Tensor:
    """Bool [rows, keys], true where row i attends key j: lo <= i - j <= hi. Shared: do not write to it."""
    distance = torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if lo is not None:
        seen &= distance >= lo
    if hi is not None:
        seen &= distance <= hi
    return seen


def forward(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel.forward`, where a NaN or infinity in a key row reaches only the rows that see it.

    Libraries hide a key by a zero weight, and 0 * NaN is NaN; so bad key rows are zeroed first and the rows
    that see one are set to NaN after.
    """
    k, v, bad = _clean_keys(k, v, work)
    out, lse = kernel.forward(q, k, v, work, scale)
    if bad is not None:
        hit = _sees(bad, work.lo, work.hi, len(work.q)).repeat_interleave(q.shape[1] // bad.shape[1], 1)
        out, lse = out.masked_fill(hit.unsqueeze(-1), torch.nan), lse.masked_fill(hit, torch.nan)
    return out, lse


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernel.backward`, where a bad row reaches only the gradients of the keys that it sees.

    A row that sees a bad key is bad itself: its lse or out is. Bad rows are taken out (P = 0), their traces set after.
    """
    k, v, _ = _clean_keys(k, v, work)
    bad = _bad_rows(work, grad, q, out, lse.unsqueeze(-1))
    if bad is None:
        return kernel.backward(grad, q, k, v, out, lse, work, scale)
    wide = bad.unsqueeze(-1)
    grad, q, out = (x.masked_fill(wide, 0) for x in (grad, q, out))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse.masked_fill(bad, torch.inf), work, scale)
    # Key j is seen by row i iff -hi <= j - i <= -lo.
    lo, hi = (None if bound is None else -bound for bound in (work.hi, work.lo))
    group = bad.unflatten(1, (k.shape[1], -1)).any(2)
    hit = _sees(group, lo, hi, len(work.k)).unsqueeze(-1)
    return dq.masked_fill(wide, torch.nan), dk.masked_fill(hit, torch.nan), dv.masked_fill(hit, torch.nan)


def _clean_keys(k: torch.Tensor, v: torch.Tensor, work: Work) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """k and v with non-finite rows zeroed and their flags [B, K, Nk]; as they are where no row is bad or hidden."""
    bad = _bad_rows(work, k, v)
    if bad is None:
        return k, v, None
    return k.masked_fill(bad.unsqueeze(-1), 0), v.masked_fill(bad.unsqueeze(-1), 0), bad


def _bad_rows(work: Work, *tensors: torch.Tensor) -> torch.Tensor | None:
    """Flags [B, heads, rows] of rows with a NaN or infinity in any tensor [B, heads, rows, ...].

    None where nothing is hidden, so that nothing can leak, or on a CPU where no row is bad; a CUDA device is
    not waited for.
    """
    if work.dense:
        return None
    cpu = tensors[0].device.type == "cpu"
    if cpu and torch.stack([x.sum().double() for x in tensors]).isfinite().all():
        return None  # a NaN or infinity would show in a sum
    bad = torch.stack([~x.isfinite().all(-1) for x in tensors]).any(0)
    return None if cpu and not bad.any() else bad  # no bad row: a sum overflowed


def _sees(bad: torch.Tensor, lo: int | None, hi: int | None, rows: int) -> torch.Tensor:
    """Whether row i sees a flagged key j, lo <= i - j <= hi: bool [B, K, rows] from bad [B, K, Nk], by prefix sums."""
    keys = bad.shape[-1]
    before = torch.nn.functional.pad(bad.long().cumsum(-1), (1, 0))
    row = torch.arange(rows, device=bad.device)
    first = torch.zeros_like(row) if hi is None else (row - hi).clamp(0, keys)
    stop = torch.full_like(row, keys) if lo is None else (row - lo + 1).clamp(0, keys)
    return before[..., stop] > before[..., first]
