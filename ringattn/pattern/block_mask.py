"""FlexAttention's BlockMask as a pattern. Reads its attributes only: torch is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidInput, Unsupported
from .base import Pattern
from .block_table import BlockSparse
from .causal import Causal
from .ranges import ceil_div

FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "BLOCK_SIZE",
    "seq_lengths",
    "mask_mod",
)


def from_block_mask(mask: Any, batch: int = 0) -> Pattern:
    """The pattern of a torch.nn.attention.flex_attention.BlockMask.

    Whole blocks become a BlockSparse, and a diagonal of causal blocks becomes `& Causal()`; a mask_mod that cuts
    blocks otherwise is Unsupported. A pattern holds for the whole batch: the masks of its elements must be equal.
    """
    missing = [name for name in FIELDS if not hasattr(mask, name)]
    if missing:
        raise InvalidInput(
            f"from_block_mask: {type(mask).__name__} has no {missing[0]}; "
            "give what torch.nn.attention.flex_attention.create_block_mask returns"
        )
    q_block, k_block = mask.BLOCK_SIZE
    if q_block != k_block:
        raise InvalidInput(
            f"from_block_mask: blocks of {q_block} x {k_block} are not square; try create_block_mask(..., "
            f"BLOCK_SIZE={max(q_block, k_block)})"
        )
    tokens, keys = mask.seq_lengths
    if tokens != keys:
        raise InvalidInput(
            f"from_block_mask: {tokens:,} queries but {keys:,} keys; patterns are of one sequence with itself"
        )
    elements, heads = mask.kv_num_blocks.shape[:2]
    if not 0 <= batch < elements:
        raise InvalidInput(f"from_block_mask: batch={batch} is not one of the {elements} batch elements of the mask")
    found = [_element(mask, element, heads, int(q_block), int(tokens)) for element in range(elements)]
    for element, other in enumerate(found):
        if other != found[batch]:
            raise InvalidInput(
                f"from_block_mask: the masks of batch elements {batch} and {element} differ, and a pattern holds for "
                "the whole batch; make one pattern per element, from masks made with B=1"
            )
    return found[batch]


def _element(mask: Any, element: int, heads: int, block: int, tokens: int) -> Pattern:
    """The pattern of one batch element."""
    total = ceil_div(tokens, block)
    shape = (heads, total, total)
    full = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices, element, shape)
    causal = np.zeros(shape, dtype=bool)
    for head, row, column in np.argwhere(_blocks(mask.kv_num_blocks, mask.kv_indices, element, shape)).tolist():
        q = np.arange(row * block, min((row + 1) * block, tokens))
        k = np.arange(column * block, min((column + 1) * block, tokens))
        seen = _evaluate(mask, element, head, q, k)
        if seen.all():
            full[head, row, column] = True
        elif seen.any():
            if (seen != (q[:, None] >= k)).any():
                raise _finer(head, row, column, "holds neither all, nor none, nor the causal part of its pairs")
            causal[head, row, column] = True
    either = full | causal
    table = either[:1] if (either == either[:1]).all() else either
    if not causal.any():
        return BlockSparse(block, table)
    for head, row, column in np.argwhere(full).tolist():
        if row * block < min((column + 1) * block, tokens) - 1:  # Causal() would cut this block, too
            raise _finer(head, row, column, "is whole and not below the diagonal, while other blocks are causal")
    return BlockSparse(block, table) & Causal()


def _blocks(numbers: Any, indices: Any, element: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The bool table of [B, H, rows] counts and [B, H, rows, columns] indices, of which each row uses its first."""
    table = np.zeros(shape, dtype=bool)
    if numbers is None or not table.size:
        return table
    count, index = np.asarray(numbers[element].tolist()), np.asarray(indices[element].tolist())
    used = np.arange(index.shape[-1]) < count[..., None]
    head, row, place = np.nonzero(used)
    table[head, row, index[head, row, place]] = True
    return table


def _evaluate(mask: Any, element: int, head: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """mask_mod on the grid q x k: bool [len(q), len(k)]."""
    tensor = mask.kv_indices
    b, h = tensor.new_tensor(element).long(), tensor.new_tensor(head).long()
    rows, columns = tensor.new_tensor(q.tolist()).long()[:, None], tensor.new_tensor(k.tolist()).long()[None, :]
    found = np.asarray(mask.mask_mod(b, h, rows, columns).tolist(), dtype=bool)
    return np.broadcast_to(found, (len(q), len(k)))


def _finer(head: int, row: int, column: int, why: str) -> Unsupported:
    return Unsupported(
        f"from_block_mask: block ({row}, {column}) of head {head} {why}; flex masks finer than blocks cannot be "
        "imported: write the pattern itself, such as BlockSparse(block, table) & Causal() & Window(4096)"
    )
