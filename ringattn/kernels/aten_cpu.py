"""A kernel that calls PyTorch's flash attention op for CPUs on strided views."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import Unsupported
from ..plan.work import Work, join_repetitions
from .base import STRIP_ROWS, Kernel, band, cut_strips, expand_heads, halve
from .pad import crop_to, pad_to

#: A banded work of at most this many pairs is one masked call: splitting would cost more time than it saves.
SMALL = 256 * 256
#: Maximum rows of a triangle that is one call, in which the op computes all pairs; in bf16 small calls take longer.
TRIANGLE_ROWS, BF16_TRIANGLE_ROWS = 128, 2048
#: Query rows x heads per call, which bounds the memory of a call and still occupies many threads. The same bound on
#: keys x heads limits how many repetitions are one call, because a backward allocates their gradients.
CALL_ROWS = 1 << 14
#: With fewer keys, the op returns out 0 and lse 0 for a row whose logits are all NaN (fp64: with fewer than half).
LANES = 16
#: (share, least) of `cut_strips`, measured at widths of 64 to 1,024. A backward adds to dK and dV in each strip.
FORWARD, BACKWARD = (8, 32), (2, 64)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def bf16_is_fast(*, backward: bool) -> bool:
    """Whether this CPU computes a forward, or a backward, faster in bf16 than in fp32.

    A matrix unit (AMX) speeds up both. Without one, a forward takes as long in bf16 as in fp32, while a backward with
    bf16 products (AVX512_BF16) takes 0.6 of the time (measured on an EPYC, 2,048 and 4,096 tokens).
    """
    return torch.cpu._is_amx_tile_supported() or (backward and torch.cpu._is_avx512_bf16_supported())


class AtenCpu(Kernel):
    """The CPU kernel: calls `aten::_scaled_dot_product_flash_attention_for_cpu` in fp64 and fp32.

    Inputs in 16 bits are computed in fp32; bf16 inputs are computed in bf16 if `bf16_is_fast`. On CPUs, native fp16
    matrix products are hundreds of times slower than fp32 ones. In fp32, the error after many calls is no larger than
    that of one rounding; in bf16, out, dq, dk and dv of every call are rounded to bf16, and then summed over calls in
    fp32. The errors of (out, dk) against fp64 (root mean square, 4,096 causal tokens on 4 ranks) are (2.3e-3, 3.8e-3)
    in bf16, (1.6e-3, 1.8e-3) in fp32, and (2.1e-3, 6.5e-3) for one call of torch in bf16. The op supports key/value
    heads that several query heads share. If the head dim of v differs from that of q, columns of zeros are added, which
    changes no number.
    """

    #: `strip_keys`: the bound on keys x heads of strips. A forward allocates nothing for keys, except in 16 bits.
    name, strips, strip_keys = "aten_cpu", FORWARD, 4 * CALL_ROWS
    features = ("reproducible", "chosen")
    #: Maximum rows of a triangle that is one call.
    triangle_rows = TRIANGLE_ROWS
    dtype = torch.float32

    @classmethod
    def create(cls, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> Kernel:
        return cls().derive(dtype=dtype, triangle_rows=_triangle_rows(dtype, backward=False))

    def for_backward(self) -> Kernel:
        rows = _triangle_rows(self.dtype, backward=True)
        return self.derive(strips=BACKWARD, strip_keys=CALL_ROWS, triangle_rows=rows)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if q.device.type != "cpu":
            raise Unsupported(f"kernel aten_cpu needs tensors on the cpu, got {q.device}; try kernel=auto")

    def split(self, work: Work) -> Iterator[Work]:
        rows, keys = len(work.q), work.keys
        max_repeat = CALL_ROWS // (max(rows, keys) * len(work.heads))
        if work.dense and rows * len(work.heads) > CALL_ROWS:
            step = max(CALL_ROWS // len(work.heads), STRIP_ROWS)
            for single in work.repetitions():
                for first in range(0, rows, step):
                    yield single.narrow((first, min(first + step, rows)), (0, keys))
        elif work.dense or rows * keys <= SMALL or (work.causal and rows <= self.triangle_rows):
            yield from work.repetitions(max_repeat)
        elif work.hi is None:
            # First the keys that every row sees, then the triangle, then the rows that see all keys.
            assert work.lo is not None and work.lo <= 0, "the first row of a work sees its first key"
            shared, corner = -work.lo, min(rows, keys + work.lo)
            if shared:
                yield from self.split(work.narrow((0, rows), (0, shared)))
            triangle = work.narrow((0, corner), (shared, keys))
            parts = [part for single in triangle.repetitions() for part in halve(single, self.triangle_rows)]
            for part in join_repetitions(sorted(parts, key=lambda part: part.dense)):
                yield from self.split(part)
            if corner < rows:
                yield from self.split(work.narrow((corner, rows), (shared, keys)))
        else:
            for single in work.repetitions():
                for x in join_repetitions(cut_strips(single, *self.strips)):
                    yield from x.repetitions(min(CALL_ROWS // len(x.q), self.strip_keys // x.keys) // len(x.heads))

    def op_of(self, call: Work, head_dim: int) -> str:
        kind = "dense" if call.dense else "causal" if call.causal else "masked"
        return f"{kind} flash for CPUs"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        padded = _ready(max(q.shape[-1], v.shape[-1]), q, k, v, backward=False)
        causal, mask = self._mask_of(work, padded[0].dtype)
        out, lse = _forward(*padded, 0.0, causal, attn_mask=mask, scale=scale)
        if work.keys < LANES and int(lse.count_nonzero()) < lse.numel():
            bad_q, bad_k = (0 * x.abs().amax(dims) for x, dims in ((padded[0], -1), (padded[1], (-2, -1))))
            lse += bad_q + expand_heads(bad_k, q.shape[1]).unsqueeze(-1)
            out.masked_fill_(lse.isnan().unsqueeze(-1), torch.nan)
        return out if out.shape[-1] == v.shape[-1] else crop_to(out, v.shape[-1]), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        padded = _ready(max(q.shape[-1], v.shape[-1]), grad, q, k, v, out, backward=True)
        causal, mask = self._mask_of(work, padded[1].dtype)
        dq, dk, dv = _backward(*padded, lse, 0.0, causal, attn_mask=mask, scale=scale)
        if q.shape[-1] == v.shape[-1]:
            return dq, dk, dv
        return crop_to(dq, q.shape[-1]), crop_to(dk, q.shape[-1]), crop_to(dv, v.shape[-1])

    def _mask_of(self, work: Work, dtype: torch.dtype) -> tuple[bool, Tensor | None]:
        """(is_causal, additive mask) of a call. The op's causal mask starts at the first row and the first key."""
        if self.hidden is not None:
            added = torch.zeros(self.hidden.shape, dtype=dtype, device="cpu")
            return False, added.masked_fill_(self.hidden, -torch.inf).unsqueeze(0)
        if work.dense:
            return False, None
        if work.causal:
            return True, None
        return False, _mask(len(work.q), work.keys, work.lo, work.hi, dtype)


def _triangle_rows(dtype: torch.dtype, *, backward: bool) -> int:
    fast = dtype == torch.bfloat16 and bf16_is_fast(backward=backward)
    return BF16_TRIANGLE_ROWS if fast else TRIANGLE_ROWS


def _ready(width: int, *tensors: Tensor, backward: bool) -> list[Tensor]:
    """The tensors with `width` columns, in a dtype that the op computes fast.

    The last stride is 1: with other strides the op silently reads wrong numbers.
    """
    ready = []
    for x in tensors:
        if x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not bf16_is_fast(backward=backward)):
            x = x.to(torch.float32, memory_format=torch.contiguous_format)
        elif x.stride(-1) != 1:
            x = x.contiguous()
        ready.append(x if x.shape[-1] == width else pad_to(x, width))
    return ready


@lru_cache(maxsize=32)
def _mask(rows: int, keys: int, lo: int | None, hi: int | None, dtype: torch.dtype) -> Tensor:
    """The band as an additive mask [rows, keys], 0 or -inf."""
    with torch.inference_mode(False):  # the cached mask outlives the inference mode of the caller
        hidden = ~band(rows, keys, lo, hi, torch.device("cpu"))
        return torch.zeros(rows, keys, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf)
