"""Patterns from arrays: the key blocks with the best scores, and FlexAttention's BlockMask. Does not import torch."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput, Unsupported
from ..text import shown
from .base import Pattern, check_integer
from .block_table import BlockSparse
from .documents import Documents
from .families import check_density, count_blocks
from .simple import Causal, Full, Window
from .tile import ceil_div

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

#: The attributes of a BlockMask that this module reads.
ATTRIBUTES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "BLOCK_SIZE", "seq_lengths", "mask_mod",
)  # fmt: skip


def top_k(
    block: int, k: int | None, scores: ArrayLike, *, causal: bool = False, density: float | None = None
) -> BlockSparse:
    """The pattern in which each query block attends the `k` key blocks with the highest scores; ties go to the first.

    `block` is the number of tokens of a block. `scores` is a real array, CPU tensor or nested list of shape [heads or
    1, blocks, blocks] or [blocks, blocks], indexed by query block, then key block; -inf is allowed, NaN is not. If
    `density` is given instead of k, k is that fraction of the key blocks, rounded, at least 1.

    With `causal`, only the key blocks up to the query block compete and the query's own block is always kept; a query
    block with fewer than k candidates keeps all of them. Later keys inside the query's own block stay visible: combine
    the result with `& Causal()` to hide them.

    Raises InvalidInput for NaN or complex scores, for other shapes, and unless exactly one of k, density is given.
    """
    ranking = _read_scores(scores)
    total = ranking.shape[-1]
    if (k is None) == (density is None):
        raise InvalidInput(f"top_k: give either k or density; got k={shown(k)}, density={shown(density)}")
    if density is not None:
        kept = count_blocks(check_density(density, "top_k"), total)
    else:
        kept = check_integer(k, "top_k: k", 1, "top_k(128, 8, scores)")
    # A stable descending order: the reverse of a stable ascending sort of the reversed scores.
    order = total - 1 - np.argsort(ranking[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    if causal:
        distance = np.arange(total)[:, None] - np.arange(total)
        # The query's own block comes first, then the candidates, then the blocks that may not be chosen.
        group = np.where(distance == 0, 0, np.where(distance > 0, 1, 2)).astype(np.int8)
        ordered_group = np.take_along_axis(np.broadcast_to(group, ranking.shape), order, -1)
        order = np.take_along_axis(order, np.argsort(ordered_group, axis=-1, kind="stable"), -1)
    table = np.zeros(ranking.shape, dtype=bool)
    np.put_along_axis(table, order[..., :kept], True, axis=-1)
    return BlockSparse(block, np.tril(table) if causal else table)


def _read_scores(scores: ArrayLike) -> np.ndarray:
    """The scores as a real array without NaN, [heads or 1, blocks, blocks]."""
    try:
        array = np.asarray(scores)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidInput(f"top_k: numpy cannot read the scores ({error}); try scores.float().cpu()") from None
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or not len(array) or array.shape[1] != array.shape[2]:
        raise InvalidInput(f"top_k: scores of shape {array.shape}, expected [heads or 1, blocks, blocks]")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and np.isnan(array).any()):
        content = "NaN" if array.dtype.kind == "f" else f"dtype {array.dtype}"
        raise InvalidInput(f"top_k: the scores hold {content}, which has no order; give real numbers (-inf is allowed)")
    return array


def from_block_mask(mask: BlockMask, batch: int = 0) -> Pattern:
    """Convert a torch.nn.attention.flex_attention.BlockMask to a pattern.

    A mask that consists of causality, a window and documents becomes `Causal() & Window(left) & Documents(lengths)`, or
    those of the three that it has; documents may differ between batch elements. Any other mask becomes a BlockSparse
    pattern, with or without `& Causal()`. Partially visible blocks are accepted only if each of them shows exactly its
    causal part and `& Causal()` would not change any full block; otherwise Unsupported is raised. A BlockSparse pattern
    holds for the whole batch, so the masks of all batch elements must equal the mask of element `batch`.

    Raises InvalidInput for an object without the attributes of a BlockMask, blocks that are not square, different
    numbers of queries and keys, or masks that differ within the batch.
    """
    missing = [name for name in ATTRIBUTES if not hasattr(mask, name)]
    if missing:
        raise InvalidInput(f"from_block_mask: {type(mask).__name__} has no {missing[0]}; give a BlockMask")
    q_block, k_block = mask.BLOCK_SIZE
    if q_block != k_block:
        raise InvalidInput(f"from_block_mask: blocks of {q_block} x {k_block} are not square; try BLOCK_SIZE={q_block}")
    tokens, keys = mask.seq_lengths
    if tokens != keys:
        raise InvalidInput(f"from_block_mask: {tokens:,} queries but {keys:,} keys; make a mask with Q_LEN == KV_LEN")
    elements, heads = mask.kv_num_blocks.shape[:2]
    if not 0 <= batch < elements:
        raise InvalidInput(f"from_block_mask: batch={batch} is not one of the {elements} elements of the mask; try 0")
    read = [_Element(mask, element, heads, int(q_block), int(tokens)) for element in range(elements)]
    band = _find_band(read)
    if band is not None:
        return band
    patterns = [element.make_table() for element in read]
    for element, pattern in enumerate(patterns):
        if pattern != patterns[batch]:
            raise InvalidInput(f"from_block_mask: batch elements {batch} and {element} differ; make masks with B=1")
    return patterns[batch]


class _Element:
    """One batch element of a BlockMask: its blocks, and the keys that each query sees.

    `full` and `causal` are bool [heads, blocks, blocks]: the blocks that keep all pairs, and those that keep the pairs
    with q >= k. `finer` is (head, row, column) of the first block that keeps other pairs, or None. `first` and `last`
    are the first and last key of each query, int64 [heads, tokens]; `has_runs` if no query skips a key between them.
    """

    def __init__(self, mask: BlockMask, element: int, heads: int, block: int, tokens: int) -> None:
        total = ceil_div(tokens, block)
        shape = (heads, total, total)
        self.block, self.tokens, self.finer = block, tokens, None
        self.full = _read_table(mask.full_kv_num_blocks, mask.full_kv_indices, element, shape)
        self.causal = np.zeros(shape, dtype=bool)
        edges = np.minimum(np.arange(total + 1) * block, tokens)
        widths = np.diff(edges)
        first = np.where(self.full, edges[:-1], tokens).min(-1, initial=tokens)
        last = np.where(self.full, edges[1:] - 1, -1).max(-1, initial=-1)
        self.first, self.last, count = (np.repeat(x, widths, axis=-1) for x in (first, last, self.full @ widths))
        partial = _read_table(mask.kv_num_blocks, mask.kv_indices, element, shape)
        for head, row, column in np.argwhere(partial & ~self.full).tolist():
            q, k = (np.arange(edges[i], edges[i + 1]) for i in (row, column))
            seen = _evaluate(mask, element, head, q, k)
            if seen.all():
                self.full[head, row, column] = True
            elif seen.any() and (seen == (q[:, None] >= k)).all():
                self.causal[head, row, column] = True
            elif seen.any() and self.finer is None:
                self.finer = head, row, column
            rows = head, slice(q[0], q[-1] + 1)
            self.first[rows] = np.minimum(self.first[rows], np.where(seen, k, tokens).min(-1))
            self.last[rows] = np.maximum(self.last[rows], np.where(seen, k, -1).max(-1))
            count[rows] += seen.sum(-1)
        self.has_runs = bool((count == self.last - self.first + 1).all())

    def make_table(self) -> Pattern:
        """Convert the mask's blocks to a BlockSparse pattern, with `& Causal()` if partial blocks need it."""
        if self.finer is not None:
            raise _unsupported(*self.finer, "holds neither all, nor none, nor the causal part of its pairs")
        occupied = self.full | self.causal
        table = occupied[:1] if (occupied == occupied[:1]).all() else occupied
        if not self.causal.any():
            return BlockSparse(self.block, table)
        for head, row, column in np.argwhere(self.full).tolist():
            if row * self.block < min((column + 1) * self.block, self.tokens) - 1:  # Causal() would remove pairs
                raise _unsupported(head, row, column, "is whole and above the diagonal, while other blocks are causal")
        return BlockSparse(self.block, table) & Causal()


def _find_band(elements: list[_Element]) -> Pattern | None:
    """The combination of `Causal`, `Window` and `Documents` that equals these elements, or None if there is none.

    A document begins where a query sees no earlier key.
    """
    heads = [x for element in elements for x in (element.first, element.last)]
    if not all(element.has_runs for element in elements) or any((x != x[:1]).any() for x in heads):
        return None
    first, last = (np.stack([x[0] for x in heads[side::2]]) for side in (0, 1))
    tokens = np.arange(first.shape[-1])
    starts = [np.flatnonzero(row == tokens) for row in first]
    if any(row[:1].tolist() != [0] for row in starts):
        return None
    lengths = [np.diff(row, append=len(tokens)) for row in starts]
    begin = np.stack([np.repeat(row, n) for row, n in zip(starts, lengths, strict=True)])
    end = np.stack([np.repeat(row + n - 1, n) for row, n in zip(starts, lengths, strict=True)])
    left, right = int((tokens - first).max()), int((last - tokens).max())
    if (first != np.maximum(begin, tokens - left)).any() or (last != np.minimum(end, tokens + right)).any():
        return None
    parts: list[Pattern] = [] if right else [Causal()]
    if (first != begin).any() or (right and (last != end).any()):
        parts.append(Window(left, right))
    if any(len(row) > 1 for row in starts):
        parts.append(Documents([row.tolist() for row in lengths]))
    return reduce(and_, parts or [Full()])


def _read_table(
    counts: torch.Tensor | None, indices: torch.Tensor | None, element: int, shape: tuple[int, int, int]
) -> np.ndarray:
    """The bool table [H, rows, columns] of one batch element.

    `counts` is [B, H, rows], `indices` [B, H, rows, columns]; the first `counts` entries of a row of indices are valid.
    """
    table = np.zeros(shape, dtype=bool)
    if counts is None or indices is None or not table.size:
        return table
    count, index = np.asarray(counts[element].tolist()), np.asarray(indices[element].tolist())
    valid = np.arange(index.shape[-1]) < count[..., None]
    head, row, place = np.nonzero(valid)
    table[head, row, index[head, row, place]] = True
    return table


def _evaluate(mask: BlockMask, element: int, head: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """`mask_mod` evaluated for all pairs of q and k: bool [len(q), len(k)]."""
    like = mask.kv_indices
    b, h = like.new_tensor(element).long(), like.new_tensor(head).long()
    rows, columns = like.new_tensor(q).long()[:, None], like.new_tensor(k).long()[None, :]
    seen = mask.mask_mod(b, h, rows, columns).cpu().numpy()
    return np.broadcast_to(seen, (len(q), len(k)))


def _unsupported(head: int, row: int, column: int, reason: str) -> Unsupported:
    return Unsupported(
        f"from_block_mask: block ({row}, {column}) of head {head} {reason}; flex masks finer than blocks cannot be "
        "imported: write the pattern itself, such as BlockSparse(block, table) & Causal() & Window(4096)"
    )
