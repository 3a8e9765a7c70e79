"""Triton kernels for CUDA: the merge of partial softmaxes, and the sum of gradients, in one launch and one pass each.

Imports Triton, so import this module only if Triton is chosen.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The number of elements that one program computes.
TILE = 2048
#: Whether Triton interprets kernels, which then run on CPU tensors.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """The same as `kernels.softmax.merge_`, with a Triton kernel.

    out and part are [B, H, n, D], lse and part_lse [B, H, n], with any strides.
    """
    _launch(merge_kernel, (out, lse, part, part_lse), out)


def add_(total: Tensor, part: Tensor) -> None:
    """Add `part` to `total` in place, both [B, H, n, D] with any strides; the sum has the dtype of `total`."""
    _launch(add_kernel, (total, part), total)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], like: Tensor) -> None:
    """Launch a kernel on every tile of `like` [B, H, n, D]; its arguments are the tensors, their strides and sizes."""
    batch, heads, rows, width = like.shape
    if not like.numel():
        return
    columns = triton.next_power_of_2(width)
    tile_rows = max(1, TILE // columns)
    grid = (batch * heads * triton.cdiv(rows, tile_rows),)
    strides = [stride for x in tensors for stride in x.stride()]
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():  # Triton launches on the current device
        kernel[grid](*tensors, *strides, heads, rows, width, tile_rows, columns)


@triton.jit
def _tile(heads, rows, TILE_ROWS: tl.constexpr):
    """(batch, head, local rows) of this program, in 64 bits: offsets of long sequences do not fit into 32."""
    tiles = tl.cdiv(rows, TILE_ROWS)
    program = tl.program_id(0).to(tl.int64)
    row = program % tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
    return program // tiles // heads, program // tiles % heads, row


@triton.jit
def merge_kernel(
    out, lse, part, part_lse,
    out_b, out_h, out_n, out_d, lse_b, lse_h, lse_n,
    part_b, part_h, part_n, part_d, part_lse_b, part_lse_h, part_lse_n,
    heads, rows, width, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the partial result of one tile of rows into out and lse, in place.

    lse is summed in its own dtype; the weight of `part` is rounded to the dtype of out.
    """
    b, h, row = _tile(heads, rows, TILE_ROWS)
    inside = row < rows
    lse += b * lse_b + h * lse_h + row * lse_n
    old = tl.load(lse, inside, other=0.0)
    new = tl.load(part_lse + b * part_lse_b + h * part_lse_h + row * part_lse_n, inside, other=0.0).to(old.dtype)
    # exp(-|x|) cannot overflow. If both are equal and infinite, x is NaN, and so is the gate, except for two -inf.
    x = new - old
    e = tl.exp(-tl.abs(x))
    gate = tl.where(x < 0, e, 1.0) / (1.0 + e)
    gate = tl.where(new == float("-inf"), 0.0, gate)
    larger = tl.where(new > old, new, old)
    tl.store(lse, tl.where((new == old) & (tl.abs(new) == float("inf")), new, larger + tl.log(1.0 + e)), inside)

    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    inside = inside[:, None] & (column < width)
    out += b * out_b + h * out_h + row[:, None] * out_n + column * out_d
    old_row = tl.load(out, inside, other=0.0)
    part += b * part_b + h * part_h + row[:, None] * part_n + column * part_d
    new_row = tl.load(part, inside, other=0.0).to(old_row.dtype)
    gate = gate.to(old_row.dtype)[:, None]
    step = new_row - old_row
    # As torch.lerp: exact at both ends.
    tl.store(out, tl.where(tl.abs(gate) < 0.5, old_row + gate * step, new_row - step * (1.0 - gate)), inside)


@triton.jit
def add_kernel(
    total, part,
    total_b, total_h, total_n, total_d, part_b, part_h, part_n, part_d,
    heads, rows, width, TILE_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add one tile of rows of `part` to `total` in place, in the dtype of `total`."""
    b, h, row = _tile(heads, rows, TILE_ROWS)
    column = tl.arange(0, COLUMNS)[None, :].to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)
    total += b * total_b + h * total_h + row[:, None] * total_n + column * total_d
    part += b * part_b + h * part_h + row[:, None] * part_n + column * part_d
    old = tl.load(total, inside, other=0.0)
    tl.store(total, old + tl.load(part, inside, other=0.0).to(old.dtype), inside)
