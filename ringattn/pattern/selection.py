"""Block-sparse patterns from scores: the best key blocks of each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidInput
from .block_table import BlockSparse, whole
from .families import check_density, share


def top_k(block: int, k: int | None, scores: Any, *, causal: bool = False, density: float | None = None) -> BlockSparse:
    """Each query block sees the `k` key blocks with the highest scores; of equal scores the first.

    `scores` is [heads or 1, blocks, blocks] or [blocks, blocks]. With `causal` only key blocks up to the query
    block compete, and its own is always kept (add `& Causal()` to mask inside it). Rows with fewer than k
    candidates keep all. With `density` and k None, k is that fraction of the key blocks.
    """
    score = _scores(scores)
    total = score.shape[-1]
    if (k is None) == (density is None):
        raise InvalidInput(f"top_k: give k or density, one of them; got k={k!r}, density={density!r}")
    if density is not None:
        kept = share(check_density(density, "top_k"), total)
    else:
        kept = whole(k, "top_k: k", 1)
    # Stable and descending: the reverse of a stable ascending sort of the reverse.
    order = total - 1 - np.argsort(score[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    if causal:
        away = np.arange(total)[:, None] - np.arange(total)
        group = np.where(away == 0, 0, np.where(away > 0, 1, 2)).astype(np.int8)  # own block, candidates, the rest
        turn = np.take_along_axis(np.broadcast_to(group, score.shape), order, -1)
        order = np.take_along_axis(order, np.argsort(turn, axis=-1, kind="stable"), -1)
    table = np.zeros(score.shape, dtype=bool)
    np.put_along_axis(table, order[..., :kept], True, axis=-1)
    return BlockSparse(block, np.tril(table) if causal else table)


def _scores(scores: Any) -> np.ndarray:
    """Comparable numbers, [heads or 1, blocks, blocks]."""
    try:
        found = np.asarray(scores)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidInput(
            f"top_k: numpy cannot read the scores ({error}); try scores.detach().float().cpu().numpy()"
        ) from None
    if found.ndim == 2:
        found = found[None]
    if found.ndim != 3 or not len(found) or found.shape[1] != found.shape[2]:
        raise InvalidInput(
            f"top_k: scores of shape {found.shape}, expected [heads or 1, blocks, blocks] or [blocks, blocks]"
        )
    if found.dtype.kind not in "biuf" or (found.dtype.kind == "f" and np.isnan(found).any()):
        what = "NaN" if found.dtype.kind == "f" else f"dtype {found.dtype}"
        raise InvalidInput(f"top_k: the scores hold {what}, which has no order; give real numbers (-inf is allowed)")
    return found
