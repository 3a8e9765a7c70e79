"""One layout for the masks of all layers of a model: balance, weights, exactness, what reads back, and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ringattn as ra
from ringattn import Causal, Documents, InvalidInput, Machine, Pattern, Plan, Window, make_layout, make_plan, make_plans
from ringattn.simulator.timing.auto import EQUAL, LAYOUTS

TOKENS, RANKS = 1 << 14, 8
DOCUMENTS = Documents((3000, 400, 2500, 100, 800, 5000, 384, 2200, 2000))


def masks(window: int, documents: Pattern = DOCUMENTS) -> list[Pattern]:
    return [Causal() & Window(window - 1) & documents, Causal() & documents]


def imbalances(patterns: list[Pattern], weights: list[int], **options: Any) -> list[float]:
    sizes = {"tokens": TOKENS, "ranks": RANKS, "schedule": "ring", "layout": "balanced", **options}
    return [plan.imbalance for plan in make_plans(patterns, weights, **sizes)]


def test_every_mask_is_balanced() -> None:
    patterns, weights = masks(512), [5, 1]
    both, window, causal = (imbalances(patterns, each) for each in (weights, [1, 0], [0, 1]))
    assert max(both) <= 1.03, both
    assert max(window) > 1.1 and max(causal) > 1.05, "layouts of one mask leave the other one unequal"
    assert min(imbalances(patterns, weights, layout="contiguous")) > 1.1


def test_weights_say_which_mask_matters() -> None:
    """Rows that are heavy in one mask are not in the other: a layout of one of them leaves the other one unequal."""
    sizes: dict[str, Any] = {"tokens": 256, "ranks": 4}
    source = torch.Generator().manual_seed(0)
    tables = [torch.rand(1, 32, 32, generator=source) < torch.rand(1, 32, 1, generator=source) for _ in range(2)]
    patterns: list[Pattern] = [ra.BlockSparse(8, table.numpy()) for table in tables]

    def found(weights: list[int]) -> list[float]:
        layout = make_layout("balanced(8)", patterns=patterns, weights=weights, **sizes)
        return [make_plan(pattern, layout=layout, schedule="ring", **sizes).imbalance for pattern in patterns]

    first, both, second = found([1, 0]), found([1, 1]), found([0, 1])
    assert max(both) <= 1.06 and first[1] > 1.1 and second[0] > 1.3, (first, both, second)
    assert found([1000, 1])[0] <= 1.025 and found([7, 7]) == both


def test_one_pattern_is_a_list_of_one() -> None:
    sizes: dict[str, Any] = {"tokens": TOKENS, "ranks": RANKS}
    causal = masks(128)[1]
    alone = make_layout("balanced", pattern=causal, **sizes)
    assert make_layout("balanced", patterns=[causal], weights=[3], **sizes) == alone
    assert make_layout("balanced", patterns=["Causal()", causal], weights=[0, 2], **sizes) == alone
    assert make_plans([causal], layout="auto", **sizes)[0] is make_plan(causal, layout="auto", **sizes)


def test_attention_of_all_masks_is_exact_and_their_plans_read_back() -> None:
    tokens, heads = 96, 2
    patterns = masks(12, Documents((60, 20, 16)))
    plans = make_plans(patterns, [5, 1], tokens=tokens, ranks=3, layout="balanced(4)", heads=heads)
    layout = plans[0].layout
    assert plans[1].layout == layout and any(len(layout.shard(rank)) > 1 for rank in range(3))
    for plan in plans:
        read = Plan.from_json(plan.to_json())
        assert read == plan and read.layout == layout and read.layout.digest == layout.digest
    source = torch.Generator().manual_seed(1)
    q, k, v, grad = (torch.randn(1, heads, tokens, 8, dtype=torch.float64, generator=source) for _ in range(4))
    for pattern in patterns:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = ra.virtual_attention(*inputs, pattern, ranks=3, layout=layout)
        found = torch.autograd.grad(out, inputs, grad)
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        scores = (own[0] @ own[1].transpose(2, 3) / 8**0.5).masked_fill(
            ~torch.from_numpy(pattern.mask(tokens, heads)), -torch.inf
        )
        right = scores.softmax(-1) @ own[2]
        for ours, theirs in zip((out, *found), (right, *torch.autograd.grad(right, own, grad)), strict=True):
            assert float((ours - theirs).detach().abs().max()) <= 1e-12


#: Links so slow that windows want neighbours together; a causal mask wants balance.
SLOW = Machine(flops=2e11, latency=1e-5, bandwidth=1e9)


@pytest.mark.parametrize("schedule", ["auto", "direct"])
def test_auto_takes_the_layout_with_the_least_weighted_time(schedule: str) -> None:
    patterns: list[Pattern] = [Causal() & Window(800), Causal()]
    sizes: dict[str, Any] = {"tokens": 1 << 13, "ranks": 8, "heads": 2, "machine": SLOW, "schedule": schedule}

    def seconds(pattern: Pattern, name: str) -> float:
        layout = make_layout(name, tokens=1 << 13, ranks=8, patterns=patterns, weights=weights)
        plan = make_plan(pattern, layout=layout, **sizes)
        return ra.predict(plan, SLOW).seconds

    taken = []
    for weights in ([1, 0], [40, 1], [1, 1], [0, 1]):
        plans = make_plans(patterns, weights, layout="auto", **sizes)
        assert plans[0].layout == plans[1].layout
        times = {
            name: sum(w * seconds(p, name) for p, w in zip(patterns, weights, strict=True) if w) for name in LAYOUTS
        }
        name = plans[0].layout.name
        assert times[name.partition("(")[0] if name.startswith("balanced") else name] <= min(times.values()) * EQUAL**2
        for plan in plans:
            assert plan.choice is not None and f"all {sum(weights)} layer" in plan.choice.reason
            assert plan == make_plan(plan.pattern, **{**sizes, "layout": plan.layout, "schedule": plan.schedule})
        taken.append(name)
    assert taken[0] == "contiguous" != taken[-1], taken


def test_auto_without_an_estimate_takes_the_first_layout() -> None:
    for options in ({"ranks": 1}, {"tokens": 0}):
        plans = make_plans(["Causal()", "Window(3)"], layout="auto", **{"tokens": 64, "ranks": 2, **options})
        assert {plan.layout.name for plan in plans} == {"contiguous"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patterns": ["Causal()"], "weights": [1, 2]}, "give a list of patterns and the number of layers of each"),
        ({"patterns": ["Causal()", "Full()"], "weights": [1, -1]}, "with weights=[1, -1]"),
        ({"patterns": ["Causal()", "Full()"], "weights": [0.5, 1]}, "with weights=[0.5, 1]"),
        ({"patterns": ["Causal()", "Full()"], "weights": [0, 0]}, "with weights=[0, 0]"),
        ({"patterns": []}, "patterns=[]"),
        ({"patterns": ["Causal()", "Ful()"]}, "did you mean 'Full'"),
        ({"patterns": ["Causal()", Documents((5,))]}, "the 1 lengths sum to 5"),
        ({"patterns": ["Causal()"], "pattern": "Causal()"}, "got pattern='Causal()' and patterns=['Causal()']"),
    ],
)
def test_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_layout("balanced", tokens=8, ranks=2, **options)
    assert words in str(caught.value)


def test_a_list_where_one_pattern_is_expected() -> None:
    with pytest.raises(InvalidInput, match="2 patterns where one is expected"):
        ra.parse_pattern("[Causal(), Full()]")
    assert replace(make_plan("[Causal()]", tokens=8, ranks=2, schedule="ring")).pattern == Causal()
