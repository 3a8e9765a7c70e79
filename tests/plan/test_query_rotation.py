"""Queries that rotate in the backward: what travels, in how many bytes, and when that is the way."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Result, dense, errors, make_case, mark_pairs

import ringattn as ra
from ringattn import Causal, Full, InvalidInput, Plan, make_plan
from ringattn.kernels.base import wide
from ringattn.kernels.pad import EXTRA, delta, with_delta
from ringattn.plan.row_sets import RowSet, to_numbers, to_ranges
from ringattn.plan.steps import Part
from ringattn.plan.work import Work, restrict_queries
from ringattn.runtime.buffers import message_views, place_parts


@given(st.sets(st.integers(0, 40)), st.integers(1, 3), st.integers(1, 9), st.integers(0, 9), st.integers(0, 4))
def test_a_work_is_split_where_a_cut_holds_its_rows_apart(
    others: set[int], step: int, count: int, keys: int, width: int
) -> None:
    """A band over rows that other rows lie between: each run of rows gets the bounds of its own place."""
    rows = range(3, 3 + count * step, step)
    for lo, hi in ((None, None), (None, width), (-width, None), (-width, 0)):
        stop = min(count + width, count + keys) if lo is not None else count
        work = Work(range(2, 4), range(1, 3), rows, (range(stop),), lo, hi)
        seen = [
            [(lo is None or i - j >= lo) and (hi is None or i - j <= hi) for j in range(stop)] for i in range(count)
        ]
        if not np.any(seen, axis=1).all():
            continue
        cut = RowSet((0, 2, 3), (to_ranges(np.array(sorted(others | set(rows)))),))
        found = np.zeros((count, stop), dtype=int)
        index = {row: place for place, row in enumerate(to_numbers(cut.rows[0]))}
        for part in restrict_queries([work], cut):
            assert (part.heads, part.kv) == (range(1, 3), range(1, 3))
            inside = np.zeros((1, cut.count, stop), dtype=int)
            mark_pairs(inside, replace(part, heads=range(1)), None)
            found += inside[0][[index[row] for row in rows]]
            assert inside.sum() == inside[0][[index[row] for row in rows]].sum()
        assert (found == np.array(seen)).all()


@pytest.mark.parametrize("schedule", ["ring", "direct", "allgather"])
def test_bytes_of_a_dense_backward(schedule: str) -> None:
    """Per row and hop (D + Dv) * item + D * wide + 2 * wide for each query head; what is fewer is taken."""
    options = {"tokens": 512, "ranks": 8, "head_dim": 16, "value_dim": 24, "dtype": "bfloat16", "schedule": schedule}
    plan = make_plan(Full(), heads=8, **options)
    hops = 7 * 512 * 8
    assert plan.rotates == "q" and all(not plan.for_rank(rank).saved for rank in range(8))
    assert plan.bytes_sent(backward=True) == hops * ((16 + 24) * 2 + 16 * 4 + 2 * 4)
    assert plan.bytes_sent(backward=True) == plan.full_ring_bytes(backward=True)
    by_keys = make_plan(Full(), heads=8, rotate="kv", **options)
    assert plan.bytes_sent(backward=True) < by_keys.bytes_sent(backward=True)
    shared = make_plan(Full(), heads=8, kv_heads=1, **options)
    assert shared.rotates == "kv"
    assert make_plan(Full(), heads=8, comm_dtype="bfloat16", **options).rotates == "kv"


def test_rotate_is_an_input_of_the_plan() -> None:
    plans = [make_plan(Causal(), tokens=64, ranks=4, heads=2, rotate=rotate) for rotate in ("auto", "kv", "q")]
    assert len({plan.hash for plan in plans}) == 3
    for plan in plans:
        assert Plan.from_json(plan.to_json()) == plan and json.loads(plan.to_json())["rotate"] == plan.rotate
    with pytest.raises(InvalidInput, match=r"rotate='querys': expected auto, kv, q, or two such as 'q, kv'"):
        make_plan(Causal(), tokens=64, ranks=4, rotate="querys")
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(InvalidInput, match="rotate=3: expected str"):
        ra.virtual_attention(x, x, x, Causal(), ranks=2, rotate=3)
    with pytest.raises(InvalidInput, match="rotate='quays'"):
        ra.nn.RingAttention(Causal(), ranks=2, rotate="quays")(x, x, x)


def test_members_of_ulysses_groups_choose_for_themselves() -> None:
    for kv_heads, rotates in ((8, "q"), (2, "kv")):
        plan = make_plan(Full(), tokens=64, ranks=8, schedule="ulysses(2)", heads=8, kv_heads=kv_heads)
        assert plan.rotates == plan.ring_plan(1)[0].rotates == rotates
        kinds = {part.kind for step in plan.for_rank(1).backward for hop in step.sends for part in hop.parts}
        assert ("dq" in kinds) == (rotates == "q")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wider", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_delta_from_a_row_that_has_it(size: float, wider: bool, dtype: torch.dtype) -> None:
    """Summed as kernels sum it, delta is as exact as the dtype is; with columns also where dO is zero, or small."""
    torch.manual_seed(0)
    grad, out = (torch.randn(1, 2, 300, 24).to(dtype) for _ in range(2))
    grad = grad * size
    dlse = torch.randn(1, 2, 300).to(dtype) * size if wider else None
    if wider:
        grad[0, 0, :100] = 0
        grad[0, 1, :100] *= 1e-3
    else:
        grad[0, 0, 7] = 0
    wanted = delta(grad, out, dlse)
    assert wanted.dtype == wide(dtype) and wanted.shape == (1, 2, 300, 1)
    more, row = with_delta(grad, wanted, wider=wider)
    assert more.dtype == row.dtype == dtype and more.shape[-1] == row.shape[-1] == 24 + (EXTRA if wider else 0)
    assert torch.equal(more[..., :24], grad)
    found = (more.to(wide(dtype)) * row.to(wide(dtype))).sum(-1, keepdim=True)
    assert ((found - wanted).abs() <= 4 * torch.finfo(dtype).eps * wanted.abs() + 1e-7 * size).all()


def test_rounded_queries_are_exact_up_to_their_rounding() -> None:
    """With a comm_dtype lse and delta still travel in fp32; keys rotate unless queries are asked for."""
    case = make_case(96, 2, 2, torch.float32, batch=1, dim=8)
    oracle = dense(case, torch.from_numpy(Causal().mask(96, 2)))
    q, k, v = case.leaves()
    out = ra.virtual_attention(q, k, v, Causal(), ranks=4, comm_dtype="bfloat16", rotate="q")
    grads = torch.autograd.grad(out, (q, k, v), case.grad)
    assert 1e-6 < max(errors(Result(out, oracle.lse, grads), oracle)) < 0.02
    plan = make_plan(Causal(), tokens=96, ranks=4, heads=2, head_dim=8, comm_dtype="bfloat16", rotate="q")
    part = Part("row", 1)
    assert {dtype for *_, dtype in plan.tensors(part.kind)} == {"float32"} and plan.part_bytes(part) == 24 * 2 * 2 * 4
    assert plan.part_bytes(Part("q", 1)) == 24 * 2 * 16 * 2 and plan.part_bytes(Part("dq", 1)) == 24 * 2 * 8 * 2


def test_only_some_ranks_may_use_the_gradient_of_lse() -> None:
    """A loss may depend on lse on one rank alone: the others, which compute for its rows, must do as it wants."""
    case = make_case(60, 2, 2, torch.float64, lse=True)
    assert case.grad_lse is not None
    case.grad[:, :, :15] = 0  # rows of rank 0, whose out nobody uses
    case.grad_lse[:, :, 15:] = 0
    oracle = dense(case, torch.from_numpy(Causal().mask(60, 2)))
    for schedule in ("ring", "direct", "allgather", "double_ring(2)"):
        q, k, v = case.leaves()
        options = {"ranks": 4, "schedule": schedule, "rotate": "q", "return_lse": True}
        out, lse = ra.virtual_attention(q, k, v, Causal(), **options)
        grads = torch.autograd.grad((out, lse), (q, k, v), (case.grad, case.grad_lse))
        assert max(errors(Result(out, lse, grads), oracle)) <= 1e-12


@pytest.mark.parametrize("dim", [4, 5, 7, 8])
@pytest.mark.parametrize("ranks", [3, 4])
def test_parts_of_a_message_are_aligned_whatever_the_sizes(ranks: int, dim: int) -> None:
    """A part of 2-byte numbers and odd size beside parts of 4-byte ones: views of each, in as many bytes as planned."""
    q, k, v = (torch.randn(1, 3, 21, dim, generator=torch.Generator().manual_seed(i)) for i in range(3))
    wanted = [x.requires_grad_() for x in (q, k, v)]
    truth = torch.autograd.grad(ra.attention(*wanted, Causal()).sum(), wanted)
    for schedule in ("ring", "direct"):
        out = ra.virtual_attention(*wanted, Causal(), ranks=ranks, schedule=schedule, rotate="q", comm_dtype="bfloat16")
        for a, b in zip(torch.autograd.grad(out.sum(), wanted), truth, strict=True):
            assert (a - b).abs().max() <= 0.05 * b.abs().max()


def test_parts_that_kernels_read_in_place_begin_at_multiples_of_16_bytes() -> None:
    plan = ra.make_plan(
        Full(), tokens=21, ranks=3, heads=3, kv_heads=3, head_dim=8, dtype="bfloat16", schedule="ring", rotate="q"
    )
    sent = {hop.parts for step in plan.for_rank(1).backward for hop in step.sends}
    assert any({"q", "row"} <= {part.kind for part in parts} for parts in sent)
    for parts in sent:
        size = sum(map(plan.part_bytes, parts))
        assert place_parts(plan, parts, as_sent=True)[0] == size  # not a byte of padding
        views = message_views(torch.empty(size, dtype=torch.uint8), plan, parts)
        for part in parts:
            offsets = [x.storage_offset() * x.element_size() for x in views[part]]
            assert part.kind == "row" or not offsets[0] % 16
