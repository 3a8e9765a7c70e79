"""The flash attention op that PyTorch ships for CPUs, on strided views."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from ..errors import Unsupported
from ..plan.work import Work, join_repetitions
from .base import Kernel, band
from .pad import pad_to, unpadded

#: A banded work of at most this many pairs is one masked call: a split would cost more than it saves.
SMALL = 256 * 256
#: Query rows times heads per call: bounds what a call allocates, and leaves work for many threads. Repetitions are
#: batched up to as many keys times heads, for the gradients that a backward allocates.
DENSE_ROWS = 1 << 14
#: Least and most query rows of a strip of a band that is bounded above. Low strips compute fewer hidden pairs, high
#: ones make better matrix products; an eighth of the band's width, measured, is near the best of both.
STRIP_ROWS = (64, 256)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class AtenCpu(Kernel):
    """`aten::_scaled_dot_product_flash_attention_for_cpu` in fp64 and fp32; 16-bit inputs are computed in fp32.

    Native fp16 matrix products are hundreds of times slower on CPUs, and bf16 is no faster than fp32 where
    there is no matrix unit for it; and fp32 partials keep the error of many hops at that of one rounding.
    Grouped-query heads are native; a value head dim other than that of q and k is padded, which changes no number.
    """

    name = "aten_cpu"

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if q.device.type != "cpu":
            raise Unsupported(f"kernel aten_cpu needs tensors on the cpu, got {q.device}; try kernel=auto")

    def split(self, work: Work) -> Iterator[Work]:
        rows, keys = len(work.q), work.keys
        most = DENSE_ROWS // (max(rows, keys) * len(work.heads))
        if work.dense and rows * len(work.heads) > DENSE_ROWS:
            step = max(DENSE_ROWS // len(work.heads), STRIP_ROWS[1])
            for single in work.singles():
                for first in range(0, rows, step):
                    yield single.narrow((first, min(first + step, rows)), (0, keys))
        elif work.dense or rows * keys <= SMALL:
            yield from work.batches(most)
        elif work.hi is None:
            # Keys that every row sees, then a triangle whose corner is its first row and key: the op's own causal.
            assert work.lo is not None and work.lo <= 0, "the first row of a work sees its first key"
            wide = -work.lo
            if wide:
                yield from self.split(work.narrow((0, rows), (0, wide)))
            yield from work.narrow((0, rows), (wide, keys)).batches(most)
        else:
            for single in work.singles():
                for part in join_repetitions(_strips(single)):
                    yield from part.batches(DENSE_ROWS // (part.keys * len(part.heads)))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(q.shape[-1], v.shape[-1])
        tensors = [pad_to(_ready(x), width) for x in (q, k, v)]
        causal, mask = _masking(work, tensors[0].dtype)
        out, lse = _forward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
        return unpadded(out, v.shape[-1]), lse

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
        width = max(q.shape[-1], v.shape[-1])
        tensors = [pad_to(_ready(x), width) for x in (grad, q, k, v, out)]
        causal, mask = _masking(work, tensors[1].dtype)
        dq, dk, dv = _backward(*tensors, lse, 0.0, causal, attn_mask=mask, scale=scale)
        return unpadded(dq, q.shape[-1]), unpadded(dk, q.shape[-1]), unpadded(dv, v.shape[-1])


def _strips(work: Work) -> Iterator[Work]:
    """A band that is bounded above, cut into strips of rows, each with the keys that it sees."""
    assert work.hi is not None
    rows, keys = len(work.q), work.keys
    least, most = STRIP_ROWS
    width = keys if work.lo is None else work.hi - work.lo + 1
    height = min(max(-(-width // (8 * least)) * least, least), most)
    for first in range(0, rows, height):
        last = min(first + height, rows)
        stop = keys if work.lo is None else min(keys, last - work.lo)
        yield work.narrow((first, last), (max(0, first - work.hi), stop))


def _ready(x: torch.Tensor) -> torch.Tensor:
    """The op reads garbage, silently, where the last stride is not 1."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    return x if x.stride(-1) == 1 else x.contiguous()


def _masking(work: Work, dtype: torch.dtype) -> tuple[bool, torch.Tensor | None]:
    """(is_causal, additive mask) of a call. The op's causal is anchored at the first row and the first key."""
    if work.dense:
        return False, None
    if work.hi is None and work.lo == 0:
        return True, None
    return False, _mask(len(work.q), work.keys, work.lo, work.hi, dtype)


@lru_cache(maxsize=32)
def _mask(rows: int, keys: int, lo: int | None, hi: int | None, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):  # it outlives the caller's inference mode
        hidden = ~band(rows, keys, lo, hi, torch.device("cpu"))
        return torch.zeros(rows, keys, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf)
