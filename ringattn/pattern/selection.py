"""Block-sparse patterns chosen by scores: the best key blocks of each query block."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from .base import check_integer
from .block_table import BlockSparse
from .families import check_density, kept_blocks


def top_k(
    block: int, k: int | None, scores: ArrayLike, *, causal: bool = False, density: float | None = None
) -> BlockSparse:
    """The pattern in which each query block attends the `k` key blocks with the highest scores; ties go to the first.

    `block` is the tokens of a block. `scores` is a real array, CPU tensor or nested list of shape [heads or 1, blocks,
    blocks] or [blocks, blocks], indexed by query block, then key block; -inf is allowed, NaN is not. With `density`
    instead of k, k is that fraction of the key blocks, rounded, at least 1.

    With `causal`, only the key blocks up to the query block compete and the query's own block is always kept; a query
    block with fewer than k candidates keeps all of them. Inside the own block later keys stay visible: combine the
    result with `& Causal()` to hide them.

    Raises InvalidInput for scores that have no order, another shape, or unless exactly one of k and density is given.
    """
    ranking = _read_scores(scores)
    total = ranking.shape[-1]
    if (k is None) == (density is None):
        raise InvalidInput(f"top_k: give k or density, one of them; got k={k!r}, density={density!r}")
    if density is not None:
        kept = kept_blocks(check_density(density, "top_k"), total)
    else:
        kept = check_integer(k, "top_k: k", 1, "top_k(128, 8, scores)")
    # A stable descending order: the reverse of a stable ascending sort of the reversed scores.
    order = total - 1 - np.argsort(ranking[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    if causal:
        distance = np.arange(total)[:, None] - np.arange(total)
        # The own block comes first, then the candidates, then the blocks that may not be chosen.
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
