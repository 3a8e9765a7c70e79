"""The three attention ops that PyTorch ships for CUDA: flash, cuDNN and memory-efficient.

Written from the sources of the ops, and not yet run on a GPU. On a machine with a GPU tests/kernels/test_kernels.py
checks every choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from ..errors import LaunchLimit, Unsupported
from ..plan.work import Work
from .base import Kernel, band
from .pad import crop_to, pad_to

#: Query rows per masked call of the memory-efficient op.
BAND_ROWS = 128
#: Largest second or third dimension of a CUDA grid, where the ops put heads, or batch times heads.
GRID = 65_535

_aten = torch.ops.aten
_HALF_DTYPES = (torch.float16, torch.bfloat16)


class AtenCuda(Kernel):
    """One of the three ops, or, without a choice, for each call the fastest op that computes the call.

    cuDNN computes dense and causal calls only; with the choice "cudnn" flash computes the other bands.

    Without a choice fp32 goes to the memory-efficient op. A 16-bit call goes to cuDNN if the device has compute
    capability 9.0 or above, the call is dense, or causal with as many rows as keys, q and k have equally many heads,
    the head dim is at most 128, there are two keys or more, and `deterministic` is off. All other 16-bit calls go to
    flash, whose window can be any band. Head dims up to 256.
    """

    choices = ("flash", "cudnn", "efficient")
    max_head_dim = 256

    def __init__(self, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> None:
        self.name = f"aten_cuda:{choice}" if choice else "aten_cuda"
        if choice is None and dtype not in _HALF_DTYPES:
            choice = "efficient"
        self.choice, self.deterministic = choice, deterministic

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> AtenCuda:
        return cls(choice, dtype, deterministic=deterministic)

    @classmethod
    def missing(cls) -> str | None:
        return (
            None if torch.cuda.is_available() else "torch.cuda.is_available() is False: no CUDA device or a CPU build"
        )

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if q.device.type != "cuda":
            raise Unsupported(f"kernel {self.name} needs tensors on a cuda device, got {q.device}; try kernel=auto")
        if q.dtype == torch.float64:
            raise Unsupported(f"kernel {self.name} does not compute float64 on CUDA; try kernel=reference")
        if self.choice in ("flash", "cudnn") and q.dtype not in _HALF_DTYPES:
            raise Unsupported(f"kernel {self.name} computes float16 and bfloat16, got {q.dtype}; try kernel=aten_cuda")
        if self.choice == "cudnn" and self.deterministic:
            raise Unsupported("cuDNN's backward is not deterministic; try kernel=aten_cuda:flash")
        if max(q.shape[:2]) > GRID:
            raise LaunchLimit(
                f"a batch of {q.shape[0]:,} with {q.shape[1]:,} heads: CUDA grids have at most {GRID:,} of each; split "
                "the tensors"
            )
        if max(q.shape[-1], v.shape[-1]) > self.max_head_dim:
            raise Unsupported(f"kernel {self.name} takes head dims up to 256, got {q.shape[-1]}; try kernel=reference")

    def split(self, work: Work) -> Iterator[Work]:
        for batch in work.batches(GRID // len(work.heads)):
            if batch.dense or (self.choice in ("cudnn", "efficient") and _is_causal(batch)):
                yield batch
                continue
            if self.choice != "efficient":
                yield from _flash_calls(batch)
                continue
            rows, keys = len(batch.q), batch.keys
            for first in range(0, rows, BAND_ROWS):
                last = min(first + BAND_ROWS, rows)
                start = 0 if batch.hi is None else max(0, first - batch.hi)
                stop = keys if batch.lo is None else min(keys, last - batch.lo)
                yield batch.narrow((first, last), (start, stop))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        value_dim = v.shape[-1]
        width = -(-max(q.shape[-1], value_dim) // 8) * 8
        q, k, v = (_ready(pad_to(x, width)) for x in (q, k, v))
        op = self._choose_op(q, k, work)
        if op == "flash":
            left, right = _window(work)
            out, lse, *_ = _aten._flash_attention_forward(
                *(x.transpose(1, 2) for x in (q, k, v)),
                *(None, None, len(work.q), work.keys, 0.0, False, False),
                scale=scale,
                window_size_left=left,
                window_size_right=right,
            )
            out = out.transpose(1, 2)
        elif op == "cudnn":
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, not work.dense, False, scale=scale
            )
            lse = lse.reshape(lse.shape[:3])
        else:
            k, v = _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1])
            mask_type, bias = _mask_of(work, q)
            out, lse, *_ = _aten._efficient_attention_forward(
                *(x.transpose(1, 2) for x in (q, k, v)),
                *(bias, None, None, None, None, 0.0, mask_type, True),
                scale=scale,
            )
            out, lse = out.transpose(1, 2), lse[..., : len(work.q)]
        return crop_to(out, value_dim), lse.float()

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
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        width = -(-max(head_dim, value_dim) // 8) * 8
        grad, q, k, v, out = (_ready(pad_to(x, width)) for x in (grad, q, k, v, out))
        rows, keys, lse = len(work.q), work.keys, lse.contiguous()
        op = self._choose_op(q, k, work)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
        with _deterministic(self.deterministic):
            if op == "flash":
                left, right = _window(work)
                grads = _aten._flash_attention_backward(
                    *(x.transpose(1, 2) for x in (grad, q, k, v, out)),
                    *(lse, None, None, rows, keys, 0.0, False, seed, seed),
                    scale=scale,
                    window_size_left=left,
                    window_size_right=right,
                )
                dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
            elif op == "cudnn":
                dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
                    *(grad, q, k, v, out, lse.unsqueeze(-1), seed, seed),
                    *(None, None, None, rows, keys, 0.0, not work.dense),
                    scale=scale,
                )
            else:
                group = q.shape[1] // k.shape[1]
                k, v = _expand_heads(k, q.shape[1]), _expand_heads(v, q.shape[1])
                mask_type, bias = _mask_of(work, q)
                lse = torch.nn.functional.pad(lse, (0, -rows % 32), value=torch.inf)
                grads = _aten._efficient_attention_backward(
                    *(x.transpose(1, 2) for x in (grad, q, k, v)),
                    # The op reads out as contiguous [B, N, H, D], whatever its strides.
                    *(bias, out.transpose(1, 2).contiguous(), None, None, rows, keys, lse),
                    *(0.0, seed, seed, mask_type, False),
                    scale=scale,
                    num_splits_key=1 if self.deterministic else None,
                )
                dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
                dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return crop_to(dq, head_dim), crop_to(dk, head_dim), crop_to(dv, value_dim)

    def _choose_op(self, q: torch.Tensor, k: torch.Tensor, work: Work) -> str:
        """The op that computes a call: "flash", "cudnn" or "efficient"."""
        if self.choice == "cudnn" and not (work.dense or _is_causal(work)):
            return "flash"
        if self.choice is not None:
            return self.choice
        needs_no_window = work.dense or (_is_causal(work) and len(work.q) == work.keys)
        fits = needs_no_window and q.shape[1] == k.shape[1] and q.shape[-1] <= 128 and work.keys > 1
        fast = torch.cuda.get_device_capability(q.device) >= (9, 0) and not self.deterministic
        return "cudnn" if fits and fast else "flash"


def _is_causal(work: Work) -> bool:
    """Whether row i sees key j iff j <= i, counted from the first row and the first key."""
    return work.lo == 0 and work.hi is None


def _ready(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of x, as the ops can read it: last stride 1, and every row begins at a multiple of 16 bytes."""
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])
    return x if x.stride(-1) == 1 and aligned else x.clone(memory_format=torch.contiguous_format)


def _flash_calls(work: Work) -> Iterator[Work]:
    """The calls that compute the work, each with a band that flash reads correctly: the work, or two or three runs.

    Each run of rows is bounded by `lo` alone, by `hi` alone, by both or by neither, and has only the keys that its rows
    see. Its window is then anchored at the last row and the last key, with bounds that the op does not change.
    """
    rows, keys = len(work.q), work.keys
    if _reads_band(work):
        yield work
        return
    # Rows from `unbounded` on are not bounded by `lo`; rows from `bounded` on are bounded by `hi`.
    unbounded = 0 if work.lo is None else min(max(keys + work.lo, 0), rows)
    bounded = rows if work.hi is None else min(max(work.hi, 0), rows)
    cuts = sorted({0, unbounded, bounded, rows})
    for first, last in pairwise(cuts):
        start = first - work.hi if work.hi is not None and first >= bounded else 0
        stop = last - work.lo if work.lo is not None and last <= unbounded else keys
        part = work.narrow((first, last), (max(start, 0), min(stop, keys)))
        assert part.dense or _reads_band(part), "flash reads the window of every run of rows correctly"
        yield part


def _reads_band(work: Work) -> bool:
    """Whether flash hides the pairs that the band of a work hides, and no others.

    FlashAttention 2 reads a bound below 0, or of as many keys as there are, as unbounded. Beside a bounded side it
    reads an unbounded side as a bound of as many keys as there are (flash_api.cpp; flash-attention issue 895).
    """
    rows, keys = len(work.q), work.keys
    left, right = _bounds(work)
    read_left = left if left is not None and 0 <= left < keys else None
    read_right = right if right is not None and 0 <= right < keys else None
    if read_left is None and read_right is not None:
        read_left = keys
    elif read_right is None and read_left is not None:
        read_right = keys
    return _same_bound(read_left, left, keys - 1) and _same_bound(read_right, right, rows - 1)


def _same_bound(read: int | None, needed: int | None, nothing_hidden: int) -> bool:
    """Whether two bounds of a window hide the same keys; a bound of at least `nothing_hidden` hides no key."""
    hides_nothing = [bound is None or bound >= nothing_hidden for bound in (read, needed)]
    return all(hides_nothing) or (not any(hides_nothing) and read == needed)


def _bounds(work: Work) -> tuple[int | None, int | None]:
    """(left, right) of the band as a window that is anchored at the last row and the last key; None is unbounded.

    Row i sees key j iff i + keys - rows - left <= j <= i + keys - rows + right.
    """
    shift = work.keys - len(work.q)
    return None if work.hi is None else work.hi + shift, None if work.lo is None else -work.lo - shift


def _window(work: Work) -> tuple[int, int]:
    """(window_size_left, window_size_right) of the flash op, in which -1 is unbounded."""
    left, right = (-1 if bound is None else bound for bound in _bounds(work))
    return left, right


def _mask_of(work: Work, q: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """(custom_mask_type, bias) of the memory-efficient op; type 1 is causal from the first row and the first key."""
    if work.dense:
        return 0, None
    if _is_causal(work):
        return 1, None
    rows, keys = len(work.q), work.keys
    bias = torch.zeros(rows, -(-keys // 8) * 8, dtype=q.dtype, device=q.device)[:, :keys]  # the op needs aligned rows
    bias.masked_fill_(~band(rows, keys, work.lo, work.hi, q.device), -torch.inf)
    return 0, bias.expand(q.shape[0], q.shape[1], rows, keys)


def _expand_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """x [B, K, n, D] with each key/value head repeated for its query heads: [B, H, n, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """torch's deterministic mode, for the ops that read it: on if wanted; else, and afterwards, as the caller has
    it."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warn_only)
