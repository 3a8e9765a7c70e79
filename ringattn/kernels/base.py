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
    k, v, bad = clean_keys(k, v, work)
    out, lse = kernel.forward(q, k, v, work, scale)
    if bad is not None:
        hit = _sees(bad, work, len(work.q)).repeat_interleave(q.shape[1] // bad.shape[1], 1)
        out, lse = out.masked_fill(hit.unsqueeze(-1), torch.nan), lse.masked_fill(hit, torch.nan)
    return out, lse


def clean_keys(k: torch.Tensor, v: torch.Tensor, work: Work) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """k and v with non-finite rows zeroed and their flags [B, K, Nk]; as they are where no row is bad or hidden."""
    if work.dense:
        return k, v, None
    if k.device.type == "cpu" and torch.isfinite(k.sum() + v.sum()):
        return k, v, None  # no bad value: a NaN or infinity would show in the sum
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    if k.device.type == "cpu" and not bad.any():
        return k, v, None  # finite values whose sum overflowed
    return k.masked_fill(bad.unsqueeze(-1), 0), v.masked_fill(bad.unsqueeze(-1), 0), bad


def _sees(bad: torch.Tensor, work: Work, rows: int) -> torch.Tensor:
    """Whether row i sees a flagged key: bool [B, K, rows] from bad [B, K, Nk], by prefix sums."""
    keys = bad.shape[-1]
    before = torch.nn.functional.pad(bad.long().cumsum(-1), (1, 0))
    row = torch.arange(rows, device=bad.device)
    first = torch.zeros_like(row) if work.hi is None else (row - work.hi).clamp(0, keys)
    stop = torch.full_like(row, keys) if work.lo is None else (row - work.lo + 1).clamp(0, keys)
    return before[..., stop] > before[..., first]
