"""The valid acceptance cases of the seeds' test suites, for dilated attention in both conventions and every
block-sparse family, on one device and on virtual ranks. test_seed_ranks.py repeats them on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import seed_cases
import torch
from seed_cases import CASES, EVEN, RAGGED
from seed_masks import Sample, head_groups

import ringattn as ra
from ringattn import (
    Dilated,
    InvalidInput,
    local_window,
    make_plan,
)

Tensor = torch.Tensor
#: One device, and every number of ranks under one of two layouts.
PLACES = {
    "one device": ra.attention,
    **{
        f"{ranks} ranks {layout}": partial(ra.virtual_attention, ranks=ranks, layout=layout)
        for ranks, layout in ((2, "zigzag"), (3, "contiguous"), (3, "zigzag"), (4, "zigzag"), (5, "contiguous"))
    },
}
#: Acceptance cases that bring their own inputs.
SHARED = (
    seed_cases.full_attention_for_every_ring_size,
    seed_cases.no_tokens,
    seed_cases.equal_scores_of_eight_tokens,
    seed_cases.shapes,
)
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


@pytest.mark.parametrize(
    ("where", "sample"),
    [
        (where, sample)
        for number, sample in enumerate(EVEN)
        for turn, where in enumerate(PLACES)
        if turn == 0 or (turn + number) % 5 < 3
    ],
    ids=str,
)
def test_acceptance(where: str, sample: Sample) -> None:
    """The definition, in fp64, that nothing leaks, and the other cases of the seeds, on one device and three of the
    rings."""
    for case in CASES:
        case(PLACES[where], sample)


@pytest.mark.parametrize("where", ["one device", "3 ranks zigzag"])
@pytest.mark.parametrize("sample", RAGGED, ids=str)
def test_acceptance_where_nothing_divides(where: str, sample: Sample) -> None:
    for case in CASES:
        case(PLACES[where], sample)


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


@place
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.__name__)
def test_acceptance_without_a_sample(attend: Callable[..., Tensor], case: Callable[..., None]) -> None:
    case(attend)
