"""Problems of the seeds that no number of ranks divides, and their fp64 truth."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from oracle import Case, Result, dense, error, make_case
from seed_masks import Sample, blocks, dilated, families

HEADS = 5


#: Segments longer than a shard, shards that are no multiple of segments, segments longer than the sequence.
RINGS = [
    *(
        dilated(tokens, HEADS, segments, rates, mix=mix, causal=causal)
        for tokens, segments, rates in (
            (509, (128, 256, 512), (1, 2, 4)),
            (251, (50, 300), (1, 3)),
            (251, (64, 1024), (2, 6)),
            (127, (7, 16, 33, 100), (1, 2, 5, 3)),
        )
        for mix in ("lse", "group")
        for causal in (False, True)
    ),
    *(
        blocks(pattern, rule, 24, 251, HEADS, causal)
        for causal in (False, True)
        for pattern, rule in families(24, 251, 0.3)
    ),
]


def size(sample: Sample) -> int:
    return int(sample.mask.shape[-1])


@lru_cache(maxsize=1)
def truth_of(number: int) -> tuple[Case, Result]:
    """Dense attention under the mask of the definition."""
    sample = RINGS[number]
    case = make_case(size(sample), HEADS, HEADS, torch.float64, batch=1, dim=8, lse=True)
    return case, dense(case, sample.mask, sample.factor)


def compare(attend: Callable[..., Any], number: int) -> None:
    """Output, log-sum-exp and gradients in fp64. One device is held to the same truth: a plan with one rank."""
    case, truth = truth_of(number)
    inputs = case.leaves()
    out, lse = attend(*inputs, RINGS[number].pattern, return_lse=True)
    assert error(out, truth.out) <= 1e-12
    seen = truth.lse != -torch.inf
    assert torch.equal(lse == -torch.inf, ~seen) and error(lse[seen], truth.lse[seen]) <= 1e-12
    grads = torch.autograd.grad((out, lse), inputs, (case.grad, case.grad_lse))
    for found, wanted in zip(grads, truth.grads, strict=True):
        assert error(found, wanted) <= 1e-12
