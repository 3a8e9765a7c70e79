"""What the patterns of the seeds mean, written down from segments and block indices: no tile of the package is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from ringattn import Causal, Dilated, Pattern, dilated_blocks, global_local, hierarchical, local_window, strided_blocks

Tensor = torch.Tensor
#: The key blocks that query block i of `total` sees.
Rule = Callable[[int, int], set[int]]


@dataclass(frozen=True)
class Sample:
    """A pattern, the multiplicities [H, N, N] of its definition, and the factor of its outputs."""

    pattern: Pattern
    mask: Tensor
    causal: bool
    factor: float = 1.0

    @property
    def seen(self) -> Tensor:
        """[H, N, 1]: the rows that see a key."""
        return self.mask.sum(-1, keepdim=True) > 0

    def __str__(self) -> str:
        return repr(self.pattern)


def head_groups(heads: int, groups: int) -> list[int]:
    """The branch of every head where heads are dealt to branches, extra heads to the first."""
    sizes = [heads // groups + (i < heads % groups) for i in range(groups)]
    return [i for i, size in enumerate(sizes) for _ in range(size)]


def members(tokens: int, segment: int, rate: int, offset: int) -> Iterator[Tensor]:
    """bool [N] for each segment: the positions of it that take part."""
    place = torch.arange(tokens)
    for start in range(0, tokens, segment):
        yield (place >= start) & (place < start + segment) & ((place - start) % rate == offset)


def branch_mask(tokens: int, segment: int, rate: int, offset: int, causal: bool) -> Tensor:
    """bool [N, N] of one branch of one head."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for chosen in members(tokens, segment, rate, offset):
        mask |= chosen[:, None] & chosen[None, :]
    return mask.tril() if causal else mask


def dilated(
    tokens: int, heads: int, segments: tuple[int, ...], rates: tuple[int, ...], *, mix: str, causal: bool = False
) -> Sample:
    """Dilated attention. mix="lse": head j runs all branches with offsets j mod r; mix="group": only its own."""
    owner = head_groups(heads, len(segments))
    mask = torch.zeros(heads, tokens, tokens, dtype=torch.int64)
    for head in range(heads):
        for i, (segment, rate) in enumerate(zip(segments, rates, strict=True)):
            if mix == "lse" or owner[head] == i:
                mask[head] += branch_mask(tokens, segment, rate, (head if mix == "lse" else i) % rate, causal)
    pattern = Dilated(segments, rates, causal=causal, mix=mix)
    return Sample(pattern, mask, causal, 1 / len(segments) if mix == "group" else 1.0)


def blocks(pattern: Pattern, rule: Rule, block: int, tokens: int, heads: int, causal: bool) -> Sample:
    """A block-sparse pattern, with or without & Causal(), and the mask of its rule."""
    total = -(-tokens // block)
    mask = torch.zeros(tokens, tokens, dtype=torch.int64)
    for i in range(total):
        for j in rule(i, total):
            mask[i * block : (i + 1) * block, j * block : (j + 1) * block] = 1
    mask = mask.tril() if causal else mask
    return Sample(pattern & Causal() if causal else pattern, mask.expand(heads, -1, -1), causal)


def near(i: int, width: int, total: int, low: int = 0) -> set[int]:
    """`width` blocks of [low, total) around i, the one more before it; pushed inward at the edges."""
    start = max(low, min(i - width // 2, total - width))
    return set(range(start, start + width))


def within(i: int, reach: int, total: int) -> set[int]:
    return {j for j in range(total) if abs(i - j) <= reach}


def jumps(i: int, count: int, total: int) -> set[int]:
    """i and then i -+ 1, 2, 4, 8, ..., and after all powers of two the other distances, as long as blocks are left."""
    powers = [1 << e for e in range(total.bit_length())]
    distances = powers + [d for d in range(1, total) if d not in powers]
    order = chain([i], *((i - d, i + d) for d in distances))
    return set([j for j in order if 0 <= j < total][:count])


def families(block: int, tokens: int, density: float) -> list[tuple[Pattern, Rule]]:
    """Every family by its width and by a density, with the key blocks of a query block."""
    whole = -(-tokens // block)
    keep = max(1, round(density * whole))
    # How wide a density makes each level is the package's choice; what levels of that width mean is not.
    graded = hierarchical(block, density=density)
    levels: tuple[tuple[int, int], ...] = graded.bind(1, tokens).resolved if tokens else ()  # type: ignore[attr-defined]

    def leveled(levels: tuple[tuple[int, int], ...]) -> Rule:
        return lambda i, total: set().union(
            *(within(i, total if reach < 0 else reach, total) for stride, reach in levels if i % stride == 0)
        )

    return [
        (local_window(block, 2), lambda i, total: within(i, 2, total)),
        (local_window(block, density=density), lambda i, total: near(i, keep, total)),
        (dilated_blocks(block), lambda i, total: {j for j in range(total) if abs(i - j) in (0, 1, 2, 4)}),
        (dilated_blocks(block, density=density), lambda i, total: jumps(i, keep, total)),
        (
            global_local(block, globals=1, blocks=1),
            lambda i, total: set(range(total)) if i == 0 else {0} | within(i, 1, total),
        ),
        (
            global_local(block, globals=1, density=density),
            lambda i, total: set(range(total)) if i == 0 else {0} | near(i, keep - 1, total, low=1),
        ),
        (strided_blocks(block, 3), lambda i, total: set(range(i % 3, total, 3))),
        (
            strided_blocks(block, density=density),
            lambda i, total: {(i + turn * total // keep) % total for turn in range(keep)},
        ),
        (hierarchical(block, ((1, 0), (2, 1), (4, -1))), leveled(((1, 0), (2, 1), (4, -1)))),
        (graded, leveled(levels)),
    ]


def samples(tokens: int, heads: int, block: int, density: float = 0.5) -> list[Sample]:
    """Dilated attention in both conventions and every block-sparse family, without and with causality."""
    segments, rates = (max(1, tokens // 4), max(1, tokens // 2), max(1, tokens)), (1, 2, 4)
    return [
        sample
        for causal in (False, True)
        for sample in (
            *(dilated(tokens, heads, segments, rates, mix=mix, causal=causal) for mix in ("lse", "group")),
            *(blocks(p, rule, block, tokens, heads, causal) for p, rule in families(block, tokens, density)),
        )
    ]
