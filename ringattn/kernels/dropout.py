"""Dropout of attention weights: the seed, batch element, head, query and key decide whether a weight is dropped.

Random numbers are those of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA
2014), in wrapping integers, so that all devices compute equal bits. Seed, batch element, query head and query position
give the seed of a stream, and number k of the stream decides about the key at position k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..dtypes import take_numbers
from ..errors import InvalidInput
from ..text import shown

#: Seeds are below this: they travel as 8 bytes, and torch's integers are signed.
SEEDS = 1 << 63
#: How many bits of a random number are compared with p.
BITS = 31
#: Number i of the stream of seed s is `finalize(s + (i + 1) * GAMMA)`.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights: each weight is dropped with probability `p`; the others are divided by 1 - p.

    p: 0 <= p < 1; the probability used is rounded to a multiple of 2^-31.
    seed: 0 <= seed < 2^63, equal on all ranks. Calls with equal seeds drop the same weights. With None, each call draws
        a seed from torch's default CPU generator on rank 0. When gradient checkpointing recomputes a call, it restores
        this generator, so the same weights are dropped.

    A weight is identified by the positions of its query and key. If the batch elements have documents of their own,
    positions count on from one batch element to the next.
    """

    p: float
    seed: int | None = None

    def __post_init__(self) -> None:
        take_numbers(self)
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p < 1:
            raise InvalidInput(
                f"dropout must be a number p with 0 <= p < 1, or ringattn.Dropout(p), got {shown(self.p)}"
            )
        if self.seed is None:
            return
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < SEEDS:
            raise InvalidInput(f"the seed of dropout must be an integer from 0 to 2^63 - 1, got {shown(self.seed)}")

    def __bool__(self) -> bool:
        return self.p > 0

    def seeded(self, seed: int | None = None) -> Dropout:
        """A copy with the seed `seed`; with None, it keeps its own seed, or gets a random one if it has none."""
        seed = self.seed if seed is None else seed
        return replace(self, seed=int(torch.randint(SEEDS - 1, (), device="cpu")) if seed is None else seed)


def finalize(x: Tensor) -> Tensor:
    """Apply the output function of the random generator SplitMix64 to states x, wrapping int64; overwrites x."""
    for bits, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= shift(x, bits)
        x *= factor - (1 << 64)
    x ^= shift(x, 31)
    return x


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def row_streams(seed: int, batch: int, heads: Tensor, positions: Tensor) -> Tensor:
    """The state of a random stream for each query row, int64 [B, H, n, 1].

    heads: int64 [H]; positions: int64 [1 or H, n]. The states are derived step by step: from `seed` that of each batch
    element, from it that of each head, and from it that of each row, by its position.
    """
    streams = torch.full((1, 1, 1), seed, dtype=torch.int64, device=heads.device)
    elements = torch.arange(batch, device=heads.device)
    for numbers in (elements[:, None, None], heads[:, None], positions):
        streams = finalize(streams + (numbers + 1) * GAMMA)
    return streams.unsqueeze(-1)


def key_steps(positions: Tensor) -> Tensor:
    """What to add to the state of a row's stream to get the random number for a key, int64 [...].

    The argument is the positions of the keys, int64 [...].
    """
    return (positions + 1) * GAMMA


def weight_factors(p: float, streams: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """The factors of attention weights, [B, H, rows, keys]: 0 for dropped weights, 1 / (1 - p) for the others.

    streams: int64 [B, H, rows, 1] from `row_streams`; steps: int64 [B, K, keys, 1] from `key_steps`.
    """
    states = streams.unflatten(1, (steps.shape[1], -1)) + steps.mT.unsqueeze(2)
    kept = shift(finalize(states), 64 - BITS) >= round(p * (1 << BITS))
    return kept.flatten(1, 2).to(dtype).mul_(1 / (1 - p))
