"""Masks as patterns and in the form that cuDNN, flash and compiled FlexAttention of PyTorch accept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...errors import Unsupported
from ...pattern import BlockSparse, Causal, Dilated, Documents, Full, Pattern, Window
from ...text import first_line

LIBRARIES = ("cuDNN", "flash", "FlexAttention")
#: Exceptions that mean that a library cannot compute a call here: the library, a backend or memory is missing.
CANNOT_RUN: tuple[type[Exception], ...] = (ImportError, TypeError, RuntimeError, Unsupported)

Tensor = torch.Tensor
#: Computes the output from q, k and v; all are [1, H, N, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def say_what_lacks(error: Exception) -> str:
    """Why a library cannot compute a call, on one line."""
    return f"cannot run: {type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True)
class Mask:
    """A pattern, and the same mask in the forms that other libraries take.

    `window` and `cu_seqlens` are for flash, `keep(numbers)` is for FlexAttention.
    """

    pattern: Pattern
    window: tuple[int, int] | None = None
    cu_seqlens: tuple[int, ...] = ()
    keep: Callable[[Any], Callable[..., Any]] | None = None
    numbers: np.ndarray | None = None


def list_masks(tokens: int, window: int, block: int, segment: int, rate: int) -> dict[str, Mask]:
    """Masks by name: dense, causal, a window, documents, one dilated branch, and random blocks of density 1/8."""
    cuts = tuple(tokens * i * i // 64 for i in range(9))  # eight documents of 1/64 to 15/64 of the tokens
    document = np.repeat(np.arange(8), np.diff(cuts))
    table = np.random.default_rng(0).random((tokens // block,) * 2) < 0.125
    np.fill_diagonal(table, True)

    def in_branch(h: Any, x: Any) -> Any:
        return x % segment % rate == h % rate

    return {
        "dense": Mask(Full(), (-1, -1)),
        "causal": Mask(Causal(), (-1, 0), keep=lambda _: lambda b, h, q, k: q >= k),
        "window": Mask(
            Causal() & Window(window), (window, 0), keep=lambda _: lambda b, h, q, k: (q >= k) & (q - k <= window)
        ),
        "documents": Mask(
            Causal() & Documents(cu_seqlens=list(cuts)),
            (-1, 0),
            cuts,
            lambda number: lambda b, h, q, k: (q >= k) & (number[q] == number[k]),
            document,
        ),
        "dilated": Mask(
            Dilated((segment,), (rate,)),
            keep=lambda _: lambda b, h, q, k: (q // segment == k // segment) & in_branch(h, q) & in_branch(h, k),
        ),
        "block_sparse": Mask(
            BlockSparse(block, table), keep=lambda kept: lambda b, h, q, k: kept[q // block, k // block], numbers=table
        ),
    }


def make_call(library: str, mask: Mask, tokens: int, heads: int, device: str) -> Attend:
    """A function that runs a library's attention with this mask.

    If the library does not support the mask, raises one of `CANNOT_RUN`, now or when the function is called.
    """
    if library == "FlexAttention":
        from torch._functorch import config
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        config.donated_buffer = False  # the timed backward reuses its graph
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        different = heads if isinstance(mask.pattern, Dilated) else None  # otherwise all heads share one mask
        numbers = None if mask.numbers is None else torch.from_numpy(mask.numbers).to(device)
        blocks = mask.keep and create_block_mask(mask.keep(numbers), None, different, tokens, tokens, device=device)
        return lambda q, k, v: compiled(q, k, v, block_mask=blocks)
    if isinstance(mask.pattern, Full | Causal):
        causal = isinstance(mask.pattern, Causal)
        backend = SDPBackend.CUDNN_ATTENTION if library == "cuDNN" else SDPBackend.FLASH_ATTENTION

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attend
    if library == "cuDNN" or mask.window is None:
        raise Unsupported(f"PyTorch's {library} does not support this mask")
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.tensor(mask.cu_seqlens or (0, tokens), dtype=torch.int32, device=device)
    packed: Any = varlen_attn
    longest, window = int(starts.diff().max()), mask.window

    def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x[0].transpose(0, 1) for x in (q, k, v))
        return packed(*rows, starts, starts, longest, longest, window_size=window).transpose(0, 1)[None]

    return attend_packed
