"""The attention ops that PyTorch ships for CUDA: flash, cuDNN and memory-efficient, behind one choice.

Written from the ops' sources; not yet run on a GPU. tests/kernels/test_kernels.py checks every choice where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import LaunchLimit, Unsupported
from ..plan.work import Work
from .base import Kernel, band
from .pad import pad_to, unpadded

CHOICES = ("flash", "cudnn", "efficient")
#: Query rows per masked call of the memory-efficient op.
BAND_ROWS = 128
#: Largest second or third dimension of a CUDA grid; the ops put heads, or batch times heads, there.
GRID = 65_535

_aten = torch.ops.aten
_SIXTEEN = (torch.float16, torch.bfloat16)


def missing() -> str | None:
    """Why no CUDA kernel can run here, or None."""
    return None if torch.cuda.is_available() else "torch.cuda.is_available() is False: no CUDA device or a CPU build"


class AtenCuda(Kernel):
    """One of the three ops, or for each call the fastest that computes it.

    Left to choose: fp32 is memory-efficient; 16-bit dense and square causal calls are cuDNN from compute
    capability 9.0 on (unless deterministic), all else is flash, whose window is any band.
    """

    def __init__(self, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> None:
        self.name = f"aten_cuda:{choice}" if choice else "aten_cuda"
        if choice is None and dtype not in _SIXTEEN:
            choice = "efficient"
        self.choice, self.deterministic = choice, deterministic

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if q.device.type != "cuda":
            raise Unsupported(f"kernel {self.name} needs tensors on a cuda device, got {q.device}; try kernel=auto")
        if q.dtype == torch.float64:
            raise Unsupported(f"kernel {self.name} does not compute float64 on CUDA; try kernel=reference")
        if self.choice in ("flash", "cudnn") and q.dtype not in _SIXTEEN:
            raise Unsupported(f"kernel {self.name} computes float16 and bfloat16, got {q.dtype}; try kernel=aten_cuda")
        if self.choice == "cudnn" and self.deterministic:
            raise Unsupported("cuDNN's backward is not deterministic; try kernel=aten_cuda:flash")
        if max(q.shape[:2]) > GRID:
            raise LaunchLimit(
                f"a batch of {q.shape[0]:,} with {q.shape[1]:,} heads: CUDA grids have at most {GRID:,} of either; "
                "split the tensors"
            )
        if max(q.shape[-1], v.shape[-1]) > 256:
            raise Unsupported(f"kernel {self.name} takes head dims up to 256, got {q.shape[-1]}; try kernel=reference")

    def split(self, work: Work) -> Iterator[Work]:
        for few in work.batches(GRID // len(work.heads)):
            if self.choice in (None, "flash") or few.dense or _corner(few):
                yield few
                continue
            rows, keys = len(few.q), few.keys
            for first in range(0, rows, BAND_ROWS):
                last = min(first + BAND_ROWS, rows)
                start = 0 if few.hi is None else max(0, first - few.hi)
                stop = keys if few.lo is None else min(keys, last - few.lo)
                yield few.narrow((first, last), (start, stop))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
        x, y, z = (pad_to(t, width) for t in (q, k, v))
        op = self._op(x, y, work)
        if op == "flash":
            left, right = _window(work)
            out, lse, *_ = _aten._flash_attention_forward(
                *(t.transpose(1, 2) for t in (x, y, z)), None, None, len(work.q), work.keys, 0.0, False, False,
                scale=scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
            out = out.transpose(1, 2)
        elif op == "cudnn":
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
                x, y, z, None, True, 0.0, not work.dense, False, scale=scale
            )
            lse = lse.reshape(lse.shape[:3])
        else:
            y, z = _expand(y, x.shape[1]), _expand(z, x.shape[1])
            kind, bias = _masking(work, x)
            out, lse, *_ = _aten._efficient_attention_forward(
                *(t.transpose(1, 2) for t in (x, y, z)), bias, None, None, None, None, 0.0, kind, True, scale=scale
            )
            out, lse = out.transpose(1, 2), lse[..., : len(work.q)]
        return unpadded(out, v.shape[-1]), lse.float()

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
        width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
        g, x, y, z, o = (pad_to(t, width) for t in (grad, q, k, v, out))
        rows, keys, lse = len(work.q), work.keys, lse.contiguous()
        op = self._op(x, y, work)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of no dropout
        with _deterministic(self.deterministic):
            if op == "flash":
                left, right = _window(work)
                grads = _aten._flash_attention_backward(
                    *(t.transpose(1, 2) for t in (g, x, y, z, o)), lse, None, None, rows, keys, 0.0, False, zero, zero,
                    scale=scale, window_size_left=left, window_size_right=right,
                )  # fmt: skip
                dq, dk, dv = (t.transpose(1, 2) for t in grads[:3])
            elif op == "cudnn":
                dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
                    g, x, y, z, o, lse.unsqueeze(-1), zero, zero, None, None, None, rows, keys, 0.0, not work.dense,
                    scale=scale,
                )  # fmt: skip
            else:
                group = x.shape[1] // y.shape[1]
                y, z = _expand(y, x.shape[1]), _expand(z, x.shape[1])
                kind, bias = _masking(work, x)
                lse = torch.nn.functional.pad(lse, (0, -rows % 32), value=torch.inf)
                grads = _aten._efficient_attention_backward(
                    *(t.transpose(1, 2) for t in (g, x, y, z)), bias, o.transpose(1, 2), None, None, rows, keys, lse,
                    0.0, zero, zero, kind, False, scale=scale, num_splits_key=1 if self.deterministic else None,
                )  # fmt: skip
                dq, dk, dv = (t.transpose(1, 2) for t in grads[:3])
                dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
        return unpadded(dq, q.shape[-1]), unpadded(dk, q.shape[-1]), unpadded(dv, v.shape[-1])

    def _op(self, q: torch.Tensor, k: torch.Tensor, work: Work) -> str:
        if self.choice is not None:
            return self.choice
        square = work.dense or (_corner(work) and len(work.q) == work.keys)
        plain = square and q.shape[1] == k.shape[1] and q.shape[-1] <= 128 and work.keys > 1
        fast = torch.cuda.get_device_capability(q.device) >= (9, 0) and not self.deterministic
        return "cudnn" if plain and fast else "flash"


def _corner(work: Work) -> bool:
    """A triangle whose corner is the first row and the first key."""
    return work.lo == 0 and work.hi is None


def _window(work: Work) -> tuple[int, int]:
    """The flash op's window, anchored at the last row and key, -1 is unbounded: i + Lk - Lq - left <= j."""
    shift = work.keys - len(work.q)
    left = -1 if work.hi is None else work.hi + shift
    right = -1 if work.lo is None else -work.lo - shift
    return left, right


def _masking(work: Work, q: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """(custom_mask_type, bias) of the memory-efficient op; its type 1 is causal from the first row and key."""
    if work.dense:
        return 0, None
    if _corner(work):
        return 1, None
    rows, keys = len(work.q), work.keys
    bias = torch.zeros(rows, -(-keys // 8) * 8, dtype=q.dtype, device=q.device)[:, :keys]  # rows aligned for the op
    bias.masked_fill_(~band(rows, keys, work.lo, work.hi, q.device), -torch.inf)
    return 0, bias.expand(q.shape[0], q.shape[1], rows, keys)


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
