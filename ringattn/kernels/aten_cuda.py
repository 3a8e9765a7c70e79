"""A kernel for PyTorch's three CUDA attention ops: flash, cuDNN and memory-efficient.

Tests run this file on emulated ops, whose rules come from the source code of the ops and from runs on an H200 with
torch 2.11. On a machine with a GPU, `scripts/gpu` checks every choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import LaunchLimit, Unsupported
from ..plan.work import Work
from .base import Kernel, OpChoice, cut, expand_heads
from .cuda_device import HALF_DTYPES, OPS, CudaDevice, efficient_mask, efficient_reads, flash_reads, flash_window
from .packing import cumulative, pack
from .pad import align, crop_to, pad_to

#: Largest second or third dimension of a CUDA grid, where the ops put heads, or batch x heads.
GRID = 65_535
#: (cum_seq_q, cum_seq_k, max_q, max_k) of flash; the first two are None if the call is not packed.
Lengths = tuple[Tensor | None, Tensor | None, int, int]

_aten = torch.ops.aten


class AtenCuda(Kernel):
    """The CUDA kernel; it calls one of torch's three attention ops: the given choice, or the fastest one for each call.

    - Flash computes any band mask, split into calls that flash can express.
    - The memory-efficient op replaces flash where flash cannot run: for fp32, on devices of a compute capability below
      8.0, and after torch.backends.cuda.enable_flash_sdp(False).
    - cuDNN computes dense and causal calls in 16 bits if `CudaDevice` considers it correct and fast, unless
      `deterministic` or torch.use_deterministic_algorithms asks for determinism. cuDNN needs preparation for each new
      shape and stride, so flash computes calls whose shapes will not recur, such as those of documents and of blocks
      selected for one call. With the choice "cudnn", flash or the memory-efficient op (`band_op`) computes the calls
      that cuDNN cannot.
    - If torch.nn.attention.activate_flash_attention_impl has replaced FlashAttention 2 by "FA3" or "FA4", that computes
      the calls of flash, and those of cuDNN.

    Head dims up to 256. Short calls that are computed together, such as documents, dilated branches and rows of blocks,
    are combined into one flash call with cumulative lengths ("varlen"), see `packing`; with the choice "cudnn" they
    stay separate calls.

    `check` reads once what the device and torch's switches allow; the backward uses the same.
    """

    choices: ClassVar[tuple[str, ...]] = OPS
    max_head_dim = 256

    def __init__(self, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> None:
        self.name = f"aten_cuda:{choice}" if choice else "aten_cuda"
        self.choice, self.dtype, self.deterministic = choice, dtype, deterministic

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> AtenCuda:
        return cls(choice, dtype, deterministic=deterministic)

    @classmethod
    def missing(cls) -> str | None:
        return (
            None if torch.cuda.is_available() else "torch.cuda.is_available() is False: no CUDA device or a CPU build"
        )

    @cached_property
    def device(self) -> CudaDevice:
        """The device of the tensors; before `check`, the current device."""
        return CudaDevice.read()

    @cached_property
    def band_op(self) -> str:
        """Which op computes the calls that cuDNN does not: "flash" or "efficient"."""
        if self.choice in ("flash", "efficient"):
            return self.choice
        half = self.dtype in HALF_DTYPES
        return "efficient" if not half or self.device.refuses("flash", self.dtype, 8) else "flash"

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.device.type != "cuda":
            raise Unsupported(f"kernel {self.name} needs tensors on a cuda device, got {q.device}; try kernel=auto")
        if q.dtype == torch.float64:
            raise Unsupported(f"kernel {self.name} does not compute float64 on CUDA; try kernel=reference")
        if max(q.shape[:2]) > GRID:
            raise LaunchLimit(
                f"a batch of {q.shape[0]:,} with {q.shape[1]:,} heads: CUDA grids have at most {GRID:,} of each; split "
                "the tensors"
            )
        self.use(CudaDevice.read(q.device), max(q.shape[-1], v.shape[-1]))

    def use(self, device: CudaDevice, width: int) -> None:
        """Choose the ops for head dim `width` on `device`. Raises Unsupported if no op can compute it."""
        if width > 256:
            raise Unsupported(f"kernel {self.name} takes head dims up to 256, got {width}; try kernel=reference")
        self.device = device
        if self.choice == "cudnn" and self._asks_determinism():
            raise Unsupported("cuDNN's backward is not deterministic; try kernel=aten_cuda:flash")
        reasons = {op: device.refuses(op, self.dtype, width) for op in OPS}
        if self.choice is not None and reasons[self.choice]:
            raise Unsupported(f"kernel {self.name}: {reasons[self.choice]}; try kernel=aten_cuda or kernel=reference")
        able = [op for op in ("flash", "efficient") if reasons[op] is None]
        if self.choice in ("flash", "efficient"):
            able = [self.choice]
        if not able:
            told = "; ".join(f"{op}: {reasons[op]}" for op in ("flash", "efficient"))
            raise Unsupported(
                f"kernel {self.name}: no op of PyTorch computes windows here; {told}; try kernel=reference"
            )
        self.band_op = able[0]
        # Plans cache the calls of a kernel by its name, so kernels that cut or pack differently need different names.
        if self.band_op == "flash":
            self.max_head_dim = device.flash_head_dim
            if self.deterministic:
                self.name += " (deterministic)"
        elif self.choice != "efficient":
            self.name += " (efficient)"

    def split(self, work: Work) -> Iterator[Work]:
        for batch in work.repetitions(GRID // len(work.heads)):
            yield from cut(batch, flash_reads if self.band_op == "flash" else efficient_reads)

    def pack(self, calls: list[Work]) -> list[Work]:
        if self.band_op != "flash" or self.choice == "cudnn":
            return calls
        packed = pack(calls, repeats_keys=not self.deterministic)
        return [part for work in packed for part in work.repetitions(GRID // len(work.heads))]

    def op_of(self, call: Work, head_dim: int) -> str:
        if call.sequences:
            return "gathered varlen flash" if call.gathered else "varlen flash"
        if self.choice in ("flash", "efficient"):
            return self.choice
        return self.band_op if self._refuses_cudnn(call, head_dim) else "cudnn"

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        taken = super().explain(*works, head_dim=head_dim)
        calls = self.calls_of(works)
        packs = any(call.sequences for call in calls)
        reasons = {
            "cudnn": "it gets one sequence per call" if packs else self._refuses_cudnn(calls[0], head_dim),
            "flash": self.device.refuses("flash", self.dtype, head_dim) or "cudnn is faster here",
            "efficient": self.device.refuses("efficient", self.dtype, head_dim) or "it is slower in 16 bits",
        }
        if any(call.gathered for call in calls):
            reasons["FlexAttention"] = "it is compiled for each mask, see docs/measured.md"
        if self.choice in reasons:
            reasons |= {op: f"the call asks for kernel={self.name}" for op in OPS}
        used = " ".join(op for op, _ in taken.calls)
        return OpChoice(taken.calls, tuple((op, str(why)) for op, why in reasons.items() if op not in used))

    def _refuses_cudnn(self, call: Work, head_dim: int) -> str | None:
        """Why cuDNN does not compute a call; None if it does."""
        if self._asks_determinism():
            return "its backward is not deterministic"
        reason = self.device.refuses("cudnn", self.dtype, head_dim) or self.device.cudnn_refuses(call, head_dim)
        if reason or self.choice or self.band_op == "efficient":
            return reason
        if self.varies:
            return "it builds a plan for each shape, and these shapes will not recur"
        return self.device.cudnn_is_slower()

    def _asks_determinism(self) -> bool:
        """Whether this kernel, or torch as a whole (not just with warnings), must be deterministic."""
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return self.deterministic or (torch.are_deterministic_algorithms_enabled() and not warns)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        value_dim = v.shape[-1]
        width = self.device.padded(max(q.shape[-1], value_dim))
        q, k, v = (align(pad_to(x, width)) for x in (q, k, v))
        op, batch = self.op_of(work, width), len(q)
        if op.endswith("flash"):
            inputs = [_tokens(x, work) for x in (q, k, v)]
            out, lse = self.flash_forward(*inputs, lengths=_lengths(work, q), scale=scale, window=flash_window(work))
            out = _of_tokens(out, work, batch)
            lse = lse.unflatten(1, (batch, -1)).transpose(0, 1) if work.sequences else lse
        elif op == "cudnn":
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, not work.dense, False, scale=scale
            )
            lse = lse.reshape(lse.shape[:3])
        else:
            flip, mask_type, window = efficient_mask(work)
            k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
            out, lse, *_ = _aten._efficient_attention_forward(
                *(x.transpose(1, 2) for x in _flipped((q, k, v), flip)),
                *(None, None, None, None, None, 0.0, mask_type, True),
                scale=scale,
                window_size=window,
            )
            out, lse = _flipped((out.transpose(1, 2), lse[..., : len(work.q)]), flip)
        return crop_to(out, value_dim), lse.float()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim = q.shape[-1], v.shape[-1]
        width = self.device.padded(max(head_dim, value_dim))
        grad, q, k, v, out = (align(pad_to(x, width)) for x in (grad, q, k, v, out))
        rows, keys, lse = len(work.q), work.keys, lse.contiguous()
        op = self.op_of(work, width)
        seed = _no_seed(q)
        with _deterministic(self.deterministic):
            if op.endswith("flash"):
                grads = self.flash_backward(
                    *(_tokens(x, work) for x in (grad, q, k, v, out)),
                    lse.transpose(0, 1).flatten(1).contiguous() if work.sequences else lse,
                    lengths=_lengths(work, q),
                    scale=scale,
                    window=flash_window(work),
                )
                dq, dk, dv = (_of_tokens(x, work, len(q)) for x in grads)
            elif op == "cudnn":
                # torch caches cuDNN plans by keys without the strides of dO and out (cudnn/MHA.cpp): use one layout.
                grad, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out))
                dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
                    *(grad, q, k, v, out, lse.unsqueeze(-1), seed, seed),
                    *(None, None, None, rows, keys, 0.0, not work.dense),
                    scale=scale,
                )
            else:
                group = q.shape[1] // k.shape[1]
                k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
                flip, mask_type, window = efficient_mask(work)
                grad, q, k, v, out, lse = _flipped((grad, q, k, v, out, lse), flip)
                # The backward of torch 2.11 counts a window from the first row and key, unlike the forward (seen on an
                # H200). Extra rows in front, with weight 0, make the work square.
                front = 0 if window is None else keys - rows
                grad, q, out = (pad(x, (0, 0, front, 0)) for x in (grad, q, out))
                lse = pad(lse, (front, -(front + rows) % 32), value=torch.inf)
                grads = _aten._efficient_attention_backward(
                    *(x.transpose(1, 2) for x in (grad, q, k, v)),
                    # The op reads out as contiguous [B, N, H, D], regardless of its strides.
                    *(None, out.transpose(1, 2).contiguous(), None, None, front + rows, keys, lse),
                    *(0.0, seed, seed, mask_type, False),
                    scale=scale,
                    num_splits_key=1 if self.deterministic else None,
                    window_size=window,
                )
                dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
                dq, dk, dv = _flipped((dq[:, :, front:], dk, dv), flip)
                dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
        return crop_to(dq, head_dim), crop_to(dk, head_dim), crop_to(dv, value_dim)

    def flash_forward(
        self, *inputs: Tensor, lengths: Lengths, scale: float, window: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Call flash on (q, k, v); returns (out, lse).

        out is [B, n, H, D] and lse [B, H, n]; with `lengths`, out is [n, H, D] and lse [H, n].
        """
        out, lse, *_ = _aten._flash_attention_forward(
            *(*inputs, *lengths, 0.0, False, False),
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
        return out, lse

    def flash_backward(
        self, *tensors: Tensor, lengths: Lengths, scale: float, window: tuple[int, int]
    ) -> Sequence[Tensor]:
        """Call flash's backward on (dO, q, k, v, out, lse); returns (dq, dk, dv), shaped as in `flash_forward`."""
        seed = _no_seed(tensors[0])
        grads: Sequence[Tensor] = _aten._flash_attention_backward(
            *(*tensors, *lengths, 0.0, False, seed, seed),
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
        return grads[:3]


def _no_seed(x: Tensor) -> Tensor:
    """A placeholder for the seed of dropout, which is off: no op reads it."""
    return x.new_empty((), dtype=torch.int64)


def _tokens(x: Tensor, work: Work) -> Tensor:
    """x [B, H, n, D] in the layout of flash: [B, n, H, D], or [B * n, H, D] for a packed work."""
    return x.transpose(1, 2).flatten(0, 1) if work.sequences else x.transpose(1, 2)


def _of_tokens(x: Tensor, work: Work, batch: int) -> Tensor:
    """A result of flash converted to [B, H, n, D]."""
    return (x.unflatten(0, (batch, -1)) if work.sequences else x).transpose(1, 2)


def _lengths(work: Work, q: Tensor) -> Lengths:
    """The lengths for a flash call with q [B, H, n, D]."""
    return cumulative(work, len(q), q.device) if work.sequences else (None, None, len(work.q), work.keys)


def _flipped(tensors: Sequence[Tensor], flip: bool) -> Sequence[Tensor]:
    """The tensors [B, H, n, ...], with their rows in reverse order if `flip`."""
    return [x.flip(2) for x in tensors] if flip else tensors


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Context manager that turns on torch's deterministic mode if `wanted`, and restores the old mode afterwards."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False, warn_only=warn_only)
