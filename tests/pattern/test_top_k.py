"""The best key blocks of each row, by scores."""

from __future__ import annotations

import numpy as np

from ringattn import top_k


def test_top_k() -> None:
    scores = np.array([[3, 1, 3, 2], [0, 0, 0, 0], [-5, -np.inf, 2, 2], [1, 2, 3, 4]])
    assert top_k(2, 2, scores).table[0].astype(int).tolist() == [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    causal = top_k(2, 2, scores, causal=True).table[0].astype(int).tolist()
    assert causal == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]]
    low = np.array([[9, 9, 9], [9, 0, 9], [5, 6, 0]])  # the own block is kept whatever its score
    assert top_k(1, 1, low, causal=True).table[0].tolist() == np.eye(3, dtype=bool).tolist()
    assert top_k(1, 9, scores).table.all() and top_k(2, None, scores, density=0.5) == top_k(2, 2, scores)
    rng = np.random.default_rng(1)
    many = rng.integers(0, 4, (5, 12, 12)).astype(np.uint8)
    for k in (1, 4, 12):
        for causal_ in (False, True):
            table = top_k(3, k, many, causal=causal_).table
            for h in range(5):
                for i in range(12):
                    near = [j for j in range(12) if not causal_ or j <= i]
                    best = sorted(near, key=lambda j: (causal_ and j != i, -int(many[h, i, j]), j))[:k]
                    assert np.flatnonzero(table[h, i]).tolist() == sorted(best)
    assert (top_k(2, 2, scores).mask(7)[0][::2, ::2] == top_k(2, 2, scores).table[0]).all()
