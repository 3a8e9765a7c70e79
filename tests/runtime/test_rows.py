"""Rows of a batch with documents of their own: each row is as if it ran alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import dense, errors, make_case, same_lse, solve

import ringattn as ra
from ringattn import Causal, Documents, InvalidInput, Pattern, Sinks, Unsupported, Window

TOKENS = 29
ROWS = Documents([[20, 0, 9], [29], [1, 3, 25]])
CASES: dict[str, tuple[Pattern, int, dict[str, Any]]] = {
    "one device": (Causal() & ROWS, 1, {}),
    "zigzag": (Causal() & ROWS, 3, {"layout": "zigzag", "schedule": "ring"}),
    "window": (Causal() & Window(4) & ROWS, 4, {"layout": "contiguous", "schedule": "direct"}),
    "first tokens of each row": (
        Causal() & ROWS & (Sinks(2) | Window(3)),
        3,
        {"layout": "striped", "schedule": "auto"},
    ),
    "union": (ROWS | (Causal() & Window(2)), 2, {"layout": "striped(3)", "schedule": "allgather"}),
    "no order": (ROWS, 4, {"layout": "balanced", "schedule": "double_ring(2)", "rotate": "q"}),
    "ulysses": (Causal() & ROWS, 4, {"layout": "zigzag", "schedule": "ulysses(2, ring)"}),
    "mix": (ra.mix(Causal() & ROWS, Window(2)), 2, {"layout": "zigzag", "rotate": "kv"}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_dense_masks_of_each_row(name: str) -> None:
    pattern, ranks, options = CASES[name]
    case = make_case(TOKENS, 4, 2, torch.float64, batch=3, dim=8, lse=True)
    result = solve(ra.virtual_attention, case, pattern, ranks=ranks, **options)
    masks = [torch.from_numpy(pattern.row(row).mask(TOKENS, 4)) for row in range(3)]
    expected = dense(case, torch.stack(masks))
    assert max(errors(result, expected)) <= 1e-12
    same_lse(result.lse, expected.lse, 1e-12)


def test_padding_and_learned_sinks_are_those_of_each_row() -> None:
    case = make_case(TOKENS, 4, 2, torch.float64, batch=3, dim=8)
    q, k, v = case.leaves()
    learned = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    padded = torch.zeros(3, TOKENS, dtype=torch.bool)
    padded[0, 20:], padded[2, :4] = True, True  # whole documents, whose rows see no key but the sink
    call: dict[str, Any] = {"sinks": learned, "return_lse": True}
    together = ra.nn.RingAttention(Causal() & ROWS, ranks=3, layout="zigzag")
    out, lse = together(q, k, v, key_padding_mask=padded, **call)
    alone = [
        ra.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], (Causal() & ROWS).row(i),
                     key_padding_mask=padded[i : i + 1], **call)
        for i in range(3)
    ]  # fmt: skip
    single_out, single_lse = (torch.cat(parts) for parts in zip(*alone, strict=True))
    grads, expected = (
        torch.autograd.grad((x, y), (q, k, v, learned), (case.grad, torch.ones_like(y)))
        for x, y in ((out, lse), (single_out, single_lse))
    )
    for found, right in zip((out, lse, *grads), (single_out, single_lse, *expected), strict=True):
        assert torch.allclose(found, right, rtol=0, atol=1e-12)


def test_what_a_pattern_of_rows_is_not() -> None:
    pattern, q = Causal() & ROWS, torch.zeros(2, 1, TOKENS, 8)
    with pytest.raises(InvalidInput, match=r"3 rows of documents, but the batch has 2 rows"):
        ra.virtual_attention(q, q, q, pattern, ranks=2)
    with pytest.raises(InvalidInput, match="batch has 1"):
        ra.make_plan(pattern, tokens=TOKENS, ranks=2)
    with pytest.raises(InvalidInput, match=r"one sequence is expected; try .row\(0\)"):
        pattern.mask(TOKENS)
    with pytest.raises(InvalidInput, match=r"batches of \['2', '3'\] rows"):
        ra.make_plan(pattern & Documents([[29], [28, 1]]), tokens=TOKENS, ranks=2, batch=3)
    with pytest.raises(InvalidInput, match="sum to 28"):
        ra.make_plan(Documents([[29], [28]]), tokens=TOKENS, ranks=2, batch=2)
    q = torch.zeros(3, 1, TOKENS, 8)
    with pytest.raises(Unsupported, match=r"compute row by row, .*pattern.row\(i\)"):
        ra.attention(q, q, q, pattern, offload="host", device="cpu")


def test_one_plan_of_all_rows_reads_back_from_json() -> None:
    pattern = Causal() & ROWS
    for layout in ("zigzag", "balanced"):
        plan = ra.make_plan(pattern, tokens=TOKENS, ranks=3, layout=layout, schedule="ring", batch=3)
        again = type(plan).from_json(plan.to_json())
        assert again.hash == plan.hash
        assert [again.for_rank(rank) for rank in range(3)] == [plan.for_rank(rank) for rank in range(3)]
        assert plan.pairs() == sum(pattern.row(row).count(range(TOKENS), range(TOKENS)) for row in range(3))
