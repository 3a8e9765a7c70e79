"""The valid acceptance cases of the seeds' test suites, for dilated attention in both conventions and every
block-sparse family, on one device and on virtual ranks. tests/multi/test_seed_ranks.py repeats them on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from oracle import error
from seed_cases import CASES, equals_the_definition, nothing_leaks_back
from seed_masks import Sample, families, head_groups, samples
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra
from ringattn import (
    BlockSparse,
    Causal,
    Dilated,
    InvalidInput,
    Pattern,
    dilated_blocks,
    global_local,
    hierarchical,
    local_window,
    make_plan,
    strided_blocks,
)

Tensor = torch.Tensor
PLACES = {
    "one device": ra.attention,
    **{
        f"{ranks} ranks {layout}": partial(ra.virtual_attention, ranks=ranks, layout=layout)
        for ranks in range(2, 6)
        for layout in ("contiguous", "zigzag")
    },
}
EVEN = samples(48, 4, 8)
RAGGED = samples(41, 5, 7)
ALL_CASES = ("one device", "2 ranks zigzag", "3 ranks contiguous", "4 ranks zigzag", "5 ranks contiguous")
place = pytest.mark.parametrize("attend", PLACES.values(), ids=PLACES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many tiny calls: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("sample", EVEN + RAGGED, ids=lambda s: f"{s.mask.shape[-1]} {s}")
def test_the_masks_are_those_of_the_definitions(sample: Sample) -> None:
    heads, tokens, _ = sample.mask.shape
    assert (torch.from_numpy(sample.pattern.mask(tokens, heads)) == sample.mask).all()
    plan = make_plan(sample.pattern, tokens=tokens, ranks=1, heads=heads)
    assert plan.density == pytest.approx(float(sample.mask.sum()) / (heads * tokens**2), abs=1e-12)
    assert plan.pattern.output_scale == sample.factor


@place
@pytest.mark.parametrize("sample", EVEN, ids=str)
def test_acceptance(attend: Callable[..., Tensor], sample: Sample) -> None:
    """The definition, in fp64, and that nothing leaks: everywhere. The rest: by every number of ranks."""
    all_cases = attend in [PLACES[name] for name in ALL_CASES]
    for case in CASES if all_cases else (equals_the_definition, nothing_leaks_back):
        case(attend, sample)


@pytest.mark.parametrize("where", ["one device", "3 ranks zigzag"])
@pytest.mark.parametrize("sample", RAGGED, ids=str)
def test_acceptance_where_nothing_divides(where: str, sample: Sample) -> None:
    for case in CASES:
        case(PLACES[where], sample)


def everything(tokens: int, heads: int) -> list[Pattern]:
    """Full attention, as a special case of each kind of pattern."""
    return [
        Dilated((tokens,), (1,)),
        Dilated((3 * tokens,), (1,)),  # a segment that no sequence fills
        Dilated((tokens,), (1,), mix="group"),
        *(p for p, _ in families(tokens, tokens, 1.0) if getattr(p, "density", None) is None),
        *(f(64, density=1.0) for f in (local_window, dilated_blocks, global_local, strided_blocks, hierarchical)),
        BlockSparse(64, [[[1] * (tokens // 64)] * (tokens // 64)] * heads),
    ]


@place
def test_full_attention_for_every_ring_size(attend: Callable[..., Tensor]) -> None:
    """fp32 against torch's own dense attention, and what permutations of full attention leave alone."""
    tokens, heads = 128, 2
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, tokens, 32, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, heads, tokens, 32)
    order = torch.randperm(tokens)
    q, k, v = (x.detach() for x in inputs)
    for causal in (False, True):
        wide = [x.detach().double().requires_grad_() for x in inputs]
        truth = scaled_dot_product_attention(*wide, is_causal=causal)
        truths = torch.autograd.grad(truth, wide, grad.double())
        for pattern in everything(tokens, heads):
            chosen = pattern & Causal() if causal else pattern
            out = attend(*inputs, chosen)
            assert error(out, truth) <= 1e-6
            for found, wanted in zip(torch.autograd.grad(out, inputs, grad), truths, strict=True):
                assert error(found, wanted) <= 2e-6
            if not causal:
                assert error(attend(q, k[:, :, order], v[:, :, order], pattern), truth) <= 1e-6
                moved = attend(q[:, :, order], k[:, :, order], v[:, :, order], pattern)
                assert error(moved, truth[:, :, order]) <= 1e-6


@place
def test_no_tokens(attend: Callable[..., Tensor]) -> None:
    patterns = [s.pattern for s in samples(0, 4, 8)]
    for pattern in patterns:
        inputs = [torch.zeros(2, 4, 0, 32, requires_grad=True) for _ in range(3)]
        out, lse = attend(*inputs, pattern, return_lse=True)
        assert out.shape == (2, 4, 0, 32) and lse.shape == (2, 4, 0)
        out.sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


@place
def test_equal_scores_of_eight_tokens(attend: Callable[..., Tensor]) -> None:
    """One head, all in one segment: the first causal row is v[0], the last full row the mean."""
    ones = torch.ones(1, 1, 8, 16)
    v = torch.arange(128.0).view(1, 1, 8, 16)
    for mix in ("lse", "group"):
        out = attend(ones, ones, v, Dilated((8,), (1,), causal=True, mix=mix))
        assert torch.equal(out[0, 0, 0], v[0, 0, 0])
        for last in (out[0, 0, -1], attend(ones, ones, v, Dilated((8,), (1,), mix=mix))[0, 0, -1]):
            assert error(last, v[0, 0].mean(0).double()) <= 1e-6


@pytest.mark.parametrize("heads", [4, 8, 12, 16])
@pytest.mark.parametrize("segments", [(4,), (2, 4), (2, 4, 8), (1, 2, 4, 8)])
def test_every_head_has_one_group(heads: int, segments: tuple[int, ...]) -> None:
    """Rate 1, equal scores: the mean that row 0 gets tells which segment its head has."""
    pattern = Dilated(segments, (1,) * len(segments), mix="group")
    ones = torch.ones(1, heads, 8, 4)
    v = torch.arange(8.0).view(-1, 1).expand(1, heads, 8, 4)
    found = [round(2 * float(x)) + 1 for x in ra.attention(ones, ones, v, pattern)[0, :, 0, 0] * len(segments)]
    assert found == [segments[i] for i in head_groups(heads, len(segments))]
    sizes = [found.count(w) for w in segments]
    assert sum(sizes) == heads and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@place
def test_shapes(attend: Callable[..., Tensor]) -> None:
    """The sizes of both repositories' tests."""
    for heads in (4, 8):
        for segments, rates in (((4,), (1,)), ((2, 4, 8), (1, 2, 4))):
            for mix in ("lse", "group"):
                for causal in (False, True):
                    x = torch.randn(1, heads, 16, 8)
                    assert attend(x, x, x, Dilated(segments, rates, mix=mix, causal=causal)).shape == x.shape


@place
def test_shapes_that_do_not_match(attend: Callable[..., Tensor]) -> None:
    x = torch.zeros(1, 4, 16, 8)
    for wrong in (
        (x[0], x, x),
        (x, x[:, :, :8], x),
        (x, x, x[:, :, :8]),
        (x, x[..., :4], x),
        (x, x[:, :3], x[:, :3]),
        (x, x.double(), x),
    ):
        for pattern in (Dilated((4, 8), (1, 2)), Dilated((4, 8), (1, 2), mix="group"), local_window(4, 1)):
            with pytest.raises(InvalidInput):
                attend(*wrong, pattern)


@pytest.mark.parametrize("mix", ["lse", "group"])
def test_lists_that_do_not_match(mix: str) -> None:
    assert issubclass(InvalidInput, ValueError)
    for segments, rates in (((4, 8), (1,)), ((4,), (1, 2)), ((), ()), ((0,), (1,)), ((4,), (0,)), ((-4,), (1,))):
        with pytest.raises(InvalidInput):
            Dilated(segments, rates, mix=mix)
        with pytest.raises(InvalidInput):
            ra.nn.DilatedAttention(segments, rates, mix=mix)
