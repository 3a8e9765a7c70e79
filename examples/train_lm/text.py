"""Packed documents of bytes: the topics of Python's help, which come with every CPython."""

from __future__ import annotations

import pydoc_data.topics

import numpy as np
import torch


class Text:
    """Sequences of `tokens` bytes, packed from whole topics; the last topic of a sequence is cut.

    Every tenth topic is held out for evaluation: a Text has either those topics or all others.
    """

    def __init__(self, tokens: int, seed: int, *, held_out: bool = False) -> None:
        self.tokens, self.seed = tokens, seed
        topics = pydoc_data.topics.topics
        names = [name for number, name in enumerate(sorted(topics)) if (number % 10 == 9) == held_out]
        self.documents = [np.frombuffer(topics[name].encode(), dtype=np.uint8) for name in names]

    def row(self, step: int, row: int) -> tuple[torch.Tensor, list[int]]:
        """(bytes int64 [1, tokens], lengths of the documents); depends only on seed, step and row."""
        order = np.random.default_rng((self.seed, step, row)).permutation(len(self.documents))
        parts: list[np.ndarray] = []
        left = self.tokens
        while left:
            for index in order:
                part = self.documents[index][:left]
                parts.append(part)
                left -= len(part)
                if not left:
                    break
        ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        return ids.unsqueeze(0), [len(part) for part in parts]


def shift(ids: torch.Tensor, lengths: list[int], ignored: int) -> torch.Tensor:
    """Labels [1, tokens]: the next byte at each position, `ignored` at document ends. Call it before the cut."""
    labels = ids.roll(-1, 1)
    labels[:, torch.tensor(lengths).cumsum(0) - 1] = ignored
    return labels
