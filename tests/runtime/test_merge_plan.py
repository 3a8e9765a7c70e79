"""Works and merge plans: gathered keys, repetitions, sections, and which partial is copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense, error, make_case
from strategies import problems

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Pattern, Window, dilated_blocks, local_window, make_plan
from ringattn.kernels import sums
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.kernels.base import Kernel
from ringattn.kernels.reference import Reference
from ringattn.pattern.tile import shift_range
from ringattn.plan.work import Work, join_keys, join_repetitions
from ringattn.runtime.program import forward_program

MergePlan = tuple[list[tuple[sums.VisitPart, ...]], tuple[range, ...]]


@pytest.fixture
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SECTION_ROWS", 8)


def rows_of(call: Work) -> list[np.ndarray]:
    """[heads, rows] index pairs of each repetition."""
    found = []
    for turn in range(call.repeat):
        rows = np.array(call.q) + turn * call.q_shift
        found.append(np.array([(h, r) for h in call.heads for r in rows]))
    return found


@given(problems(), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.sampled_from([1, 40, 1 << 17]))
def test_a_merge_plan_copies_first_and_merges_after(
    case: tuple[Pattern, int, int, str], counts: tuple[int, int], least: int
) -> None:
    pattern, tokens, ranks, layout = case
    heads, kv_heads = counts
    plan = make_plan(
        pattern, tokens=tokens, ranks=ranks, layout=layout, schedule="ring", heads=heads, kv_heads=kv_heads
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "SECTION_ROWS", least)
        plan.cache.clear()
        for rank in range(ranks):
            for kernel in (AtenCpu(), Reference()):
                check(plan_forward(plan, rank, kernel), plan, rank)
    plan.cache.clear()


def plan_forward(plan: ra.Plan, rank: int, kernel: Kernel) -> MergePlan:
    """The kernel's calls in each visit of the forward, and the rows that see no key."""
    program = forward_program(plan, rank, kernel, torch.device("cpu"), save=False)
    return [one.visit.table for step in program.steps for one in step.visits], program.prepared


def check(found: MergePlan, plan: ra.Plan, rank: int) -> None:
    size = plan.layout.rows(rank)
    partials = np.zeros((plan.heads, size), dtype=int)
    closed: set[range] = set()
    sections = set()
    visits, empty = found
    for visit in visits:
        for part in visit:
            section = part.section
            sections.add(section)
            assert section.rows not in closed, "nothing comes after the last part"
            for call in part.calls:
                for index in rows_of(call.work):
                    assert section.rows.start <= index[:, 1].min() and index[:, 1].max() < section.rows.stop
                    seen = partials[index[:, 0], index[:, 1]]
                    if call.first:
                        assert (seen == 0).all()
                    elif not (seen > 0).all():
                        assert section.filled, "rows without a partial are merged with zeros"
                    np.add.at(partials, (index[:, 0], index[:, 1]), 1)
            if part.last:
                closed.add(section.rows)
    assert {section.rows for section in sections} == closed
    covered = sorted([*(s.rows for s in sections), *empty], key=lambda r: r.start)
    assert [row for rows in covered for row in rows] == list(range(size))
    for section in sections:
        counts = partials[:, section.rows.start : section.rows.stop]
        assert section.single == (counts.max() <= 1)
        assert section.filled or (counts > 0).all()
    for rows in empty:
        assert not partials[:, rows.start : rows.stop].any()


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "pattern",
    [
        Dilated((16, 32), (1, 3)),
        Dilated((16, 32), (1, 3), causal=True, mix="group"),
        local_window(8, blocks=1) & Causal(),
        Documents([16] * 8),
    ],
    ids=repr,
)
def test_sections_change_no_number(pattern: Pattern, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow output is gathered section by section, a wide one in place; the sums are the same."""
    q, k, v = make_case(128, 4, 2, dtype).leaves()
    for ranks in (1, 3):
        plan = make_plan(pattern, tokens=128, ranks=ranks, heads=4, kv_heads=2, head_dim=16, batch=2, dtype=dtype)
        plan.cache.clear()
        many = ra.virtual_attention(q, k, v, pattern, ranks=ranks)
        sections = {p.section for visit in plan_forward(plan, 0, AtenCpu())[0] for p in visit}
        assert len(sections) > 1 or ranks > 1
        with monkeypatch.context() as patch:
            patch.setattr(sums, "SECTION_ROWS", 1 << 30)
            plan.cache.clear()
            one = ra.virtual_attention(q, k, v, pattern, ranks=ranks)
            assert error(many, one.double()) <= (1e-14 if dtype == torch.float64 else 1e-2)
        plan.cache.clear()


@pytest.mark.parametrize(
    "pattern", [Window(150, 20), local_window(32, blocks=3), dilated_blocks(32), Window(40)], ids=repr
)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_overlapping_keys_of_a_batch(pattern: Pattern, heads: tuple[int, int]) -> None:
    """Repetitions stand for the batch; gradients of keys that several of them see are all added."""
    case = make_case(500, *heads, torch.float64, batch=2, dim=8)
    mask = torch.from_numpy(pattern.mask(500, heads[0]))
    truth = dense(case, mask)
    leaves = case.leaves()
    for ranks in (1, 2):
        out = ra.virtual_attention(*leaves, pattern, ranks=ranks)
        assert error(out, truth.out) < 1e-12
        for a, b in zip(torch.autograd.grad(out, leaves, case.grad), truth.grads, strict=True):
            assert error(a, b) < 1e-12


def test_equal_works_become_one() -> None:
    plan = make_plan(local_window(128, blocks=2), tokens=1 << 17, ranks=1, heads=8)
    works = plan.demand.joined_works(0, 0)
    assert (
        len(plan.demand.works(0, 0)) == 1024 and len(works) == 3
    )  # the interior, and the two kinds of rows at the ends
    assert max(w.repeat for w in works) == 1020


def test_runs_are_gathered_only_where_it_pays() -> None:
    def one(q: range, k: range, lo: int | None = None, hi: int | None = None) -> Work:
        return Work(range(2), range(2), q, (k,), lo, hi)

    rows, far = range(0, 128), range(1024, 1152)
    (both,) = join_keys([one(rows, range(128), lo=0), one(rows, far)])
    assert both.k == (far, range(128)) and both.lo == -128 and both.keys == 256
    long = [one(rows, range(0, 4096)), one(rows, range(8192, 12288))]
    assert join_keys(long) == long
    tall = [one(range(4096), range(128)), one(range(4096), far)]
    assert join_keys(tall) == tall
    window = [one(rows, range(128), hi=5), one(rows, far)]
    assert sorted(join_keys(window), key=repr) == sorted(window, key=repr)


def test_repetitions_need_equal_distances() -> None:
    def at(q: int, k: int) -> Work:
        return Work(range(1), range(1), range(q, q + 4), (range(k, k + 6),))

    (chain,) = join_repetitions([at(8, 3), at(0, 1), at(4, 2)])
    assert (chain.repeat, chain.q_shift, chain.k_shift) == (3, 4, 1) and chain.rows == range(12)
    assert list(chain.repetitions()) == [at(0, 1), at(4, 2), at(8, 3)]
    assert [part.repeat for part in chain.repetitions(2)] == [2, 1]
    assert len(join_repetitions([at(0, 0), at(4, 6), at(8, 0)])) == 2  # keys do not go back
    assert len(join_repetitions([at(0, 0), at(2, 6)])) == 2  # query rows overlap
    assert shift_range(range(1, 9, 2), 3) == range(4, 12, 2)
