"""The valid acceptance cases of the seeds' test suites, for dilated attention in both conventions and every
block-sparse family, on one device and on virtual ranks.

tests/pattern asserts what these patterns mean, from segments and blocks that are written out by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle import error, errors, make_case, same_lse, solve, truth_of
from torch.nn.functional import normalize, scaled_dot_product_attention

import ringattn as ra
from ringattn import Causal, Dilated, InvalidInput, Pattern, local_window
from ringattn.nn.factories import FAMILIES

Tensor = torch.Tensor
Attend = Callable[..., Tensor]
#: One device, and every number of ranks under one layout.
PLACES: list[Attend] = [
    ra.attention,
    *(partial(ra.virtual_attention, ranks=ranks, layout=("contiguous", "zigzag")[ranks % 2]) for ranks in range(2, 6)),
]


def both(patterns: list[Pattern]) -> list[Pattern]:
    """The patterns, and the same without the future."""
    return [*patterns, *(pattern & Causal() for pattern in patterns)]


def blocks(block: int, density: float) -> list[Pattern]:
    """Every block-sparse family, by a width and by a density."""
    widths = (
        local_window(block, 2),
        ra.dilated_blocks(block),
        ra.global_local(block, globals=1, blocks=1),
        ra.strided_blocks(block, 3),
        ra.hierarchical(block, ((1, 0), (2, 1), (4, -1))),
    )
    return [*widths, *(make(block, density=density) for make in FAMILIES.values())]


def dilated(*branches: tuple[int, int]) -> list[Pattern]:
    segments, rates = zip(*branches, strict=True)
    return [Dilated(segments, rates, mix=mix) for mix in ("lse", "group")]


SMALL = both([*dilated((12, 1), (24, 2), (48, 4)), *blocks(8, 0.5)])
#: Segments longer than a shard, shards that are no multiple of segments, segments longer than the sequence.
CASES = [
    *((48, 4, pattern) for pattern in SMALL),
    *((41, 5, pattern) for pattern in both([*dilated((10, 1), (20, 2), (41, 4)), *blocks(7, 0.5)])),
    *((509, 5, pattern) for pattern in both(dilated((128, 1), (256, 2), (512, 4)))),
    *((251, 5, pattern) for pattern in both(dilated((50, 1), (300, 3)))),
    *((251, 5, pattern) for pattern in both(dilated((64, 2), (1024, 6)))),
    *((127, 5, pattern) for pattern in both(dilated((7, 1), (16, 2), (33, 5), (100, 3)))),
]


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_any_number_of_ranks_computes_the_pattern(number: int, case: tuple[int, int, Pattern]) -> None:
    """fp64 output, log-sum-exp and gradients against the dense oracle, whatever divides.

    One device, and 2 and 4 or 3 and 5 ranks in turns.
    """
    tokens, heads, pattern = case
    made = make_case(tokens, heads, heads, torch.float64, batch=1, lse=True)
    truth = truth_of(made, pattern)
    for attend in (PLACES[0], *PLACES[1 + (number + number // 4) % 2 :: 2]):
        found = solve(attend, made, pattern)
        assert max(errors(found, truth)) <= 1e-12
        same_lse(found.lse, truth.lse, 1e-12)


@pytest.mark.parametrize("pattern", SMALL, ids=repr)
def test_large_inputs_and_zeros(pattern: Pattern) -> None:
    """Where every token is by far most like itself, it gets its own value; large inputs stay finite, zeros zeros."""
    case = make_case(48, 4, 4, torch.float32, batch=1)
    q, k, v = case.inputs
    alike, zero = normalize(q, dim=-1), torch.zeros_like(q)
    mask = torch.from_numpy(pattern.mask(48, 4))
    itself = (mask.diagonal(dim1=-2, dim2=-1) > 0).unsqueeze(-1) * pattern.bind(4, 48).output_scale
    for attend in PLACES[:3]:
        for size, scale in ((100.0, None), (1.0, 100.0)):
            assert error(attend(alike * size, alike * size, v, pattern, scale=scale), v.double() * itself) <= 1e-5
        for inputs, empty in (((10 * q, 10 * k, 10 * v), False), ((zero,) * 3, True), ((q, k, zero), True)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = attend(*leaves, pattern)
            assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out, leaves, case.grad)))
            assert (out == 0).all() == empty


@pytest.mark.parametrize("causal", [False, True])
def test_fast_equals_reference(causal: bool) -> None:
    """The case that the seeds' own fast implementation fails, in fp32, and far inside its tolerance of 1e-3."""
    torch.manual_seed(42)
    q, k, v = torch.randn(3, 2, 8, 1024, 64)
    for pattern in dilated((256, 1), (512, 2)):
        pattern = pattern & Causal() if causal else pattern
        mask = torch.from_numpy(pattern.mask(1024, 8))
        reference = scaled_dot_product_attention(q, k, v, attn_mask=mask.double().log().to(q.dtype)).nan_to_num(0.0)
        for attend in (PLACES[0], PLACES[2 + causal], PLACES[4]):
            found = attend(q, k, v, pattern)
            torch.testing.assert_close(found, reference * pattern.bind(8, 1024).output_scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", PLACES[:2])
def test_shapes_that_do_not_match(attend: Attend) -> None:
    x = torch.zeros(1, 4, 16, 8)
    for wrong in (
        (x[0], x, x),
        (x, x[:, :, :8], x),
        (x, x, x[:, :, :8]),
        (x, x[..., :4], x),
        (x, x[:, :3], x[:, :3]),
        (x, x.double(), x),
    ):
        for pattern in (*dilated((4, 1), (8, 2)), local_window(4, 1)):
            with pytest.raises(InvalidInput):
                attend(*wrong, pattern)
