"""Documents packed into one call of flash with cumulative lengths: the pairs, the numbers, and the number of calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from emulated_ops import EmulatedOps, emulate, packed_sequences
from oracle import dense, error, make_case
from works import trimmed

import ringattn as ra
from ringattn.kernels.aten_cuda import GRID, AtenCuda
from ringattn.kernels.bands import flash_reads, flash_window
from ringattn.kernels.base import band
from ringattn.kernels.packing import ALONE_ROWS, cumulative, pack, visible_runs
from ringattn.plan.work import Work
from ringattn.planner import make_plan
from ringattn.runtime.rank_program import batches

CPU = torch.device("cpu")
#: Odd lengths, empty documents, single tokens, and documents over the borders of shards.
LENGTHS = [3, 0, 1, 1, 7, 30, 0, 0, 2, 1, 25, 9, 11, 0]
TOKENS = sum(LENGTHS)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> EmulatedOps:
    """Emulated ops of an H100, which take fp32, so that small errors show."""
    return emulate(monkeypatch, any_dtype=True)


def neighbours(source: Random, count: int) -> list[Work]:
    """Works of all bands that flash reads, most of which follow one another in rows and keys."""
    shapes = [(1, 1), (1, 9), (5, 5), (5, 5), (3, 8), (8, 3)]
    bands = [(None, None), (0, None), (0, None), (0, 2), (0, 0), (-5, None), (None, 2)]
    works, row, key = [], 0, 0
    while len(works) < count:
        work = trimmed(*source.choice(shapes), *source.choice(bands))
        if work is None or not flash_reads(work):
            continue
        row, key = (place + (source.random() < 0.1) for place in (row, key))
        rows, keys = len(work.q), work.keys
        works.append(replace(work, q=range(row, row + rows), k=(range(key, key + keys),)))
        row, key = row + rows, key + keys
    return works


def pairs_of(work: Work) -> Iterator[tuple[int, int]]:
    for single in work.singles():
        for i, j in band(len(single.q), single.keys, single.lo, single.hi, CPU).nonzero().tolist():
            yield single.q[i], single.k[0][j]


def packed_pairs(work: Work) -> list[tuple[int, int]]:
    """The pairs that flash, as it is emulated, computes for a packed work."""
    q, k = torch.zeros(len(work.q), 1, 8), torch.zeros(work.keys, 1, 8)
    left, right = flash_window(work)
    window = {"window_size_left": left, "window_size_right": right}
    return [
        (work.q[rows.start + i], work.k[0][keys.start + j])
        for rows, keys, bias in packed_sequences(q, k, cumulative(work, 1, CPU), window)
        for i, j in (bias == 0).nonzero().tolist()
    ]


def test_packed_works_hold_the_pairs_of_the_works() -> None:
    source, packed = Random(0), 0
    for _ in range(150):
        works = neighbours(source, source.randrange(1, 12))
        source.shuffle(works)
        calls = pack(works)
        assert len(calls) <= len(works)
        found = [pair for call in calls for pair in (packed_pairs(call) if call.cuts else pairs_of(call))]
        assert sorted(found) == sorted(pair for work in works for pair in pairs_of(work))
        packed += sum(len(call.cuts) for call in calls)
        for call in (call for call in calls if call.cuts):
            for by_key in (False, True):
                first, stop = visible_runs(call, CPU, by_key=by_key)
                mask = torch.zeros(len(call.q), call.keys, dtype=torch.bool)
                for i, j in packed_pairs(call):
                    mask[i - call.q.start, j - call.k[0].start] = True
                mask = mask.mT if by_key else mask
                place = torch.arange(mask.shape[1])
                assert torch.equal(mask, (first[:, None] <= place) & (place < stop[:, None]))
    assert packed > 300


def test_long_documents_and_other_heads_stay_alone() -> None:
    def at(first: int, last: int, **fields: Any) -> Work:
        return replace(Work(range(4), range(2), range(first, last), (range(first, last),), 0), **fields)

    rows = ALONE_ROWS // 4
    assert [work.sequences for work in pack([at(0, rows), at(rows, rows + 5)])] == [((rows, rows), (5, 5))]
    for other in (at(5, 9, heads=range(4, 8)), at(5, 9, kv=range(2, 4)), at(5, 6 + rows), at(6, 9), at(5, 9, lo=None)):
        assert pack([at(0, 5), other]) == [at(0, 5), other]
    repeated = at(0, 5, repeat=3, q_shift=5, k_shift=5)
    assert pack([repeated]) == [repeated], "one call already"
    assert [work.sequences for work in pack([repeated, at(15, 16)])] == [((5, 5),) * 3 + ((1, 1),)]
    apart = at(0, 5, repeat=3, q_shift=6, k_shift=6)
    assert pack([apart, at(40, 41)]) == [apart, at(40, 41)], "never more calls"


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("text", ["{}", "Causal() & {}", "Causal() & Window(4) & {}", "Window(3, 2) & {}"])
def test_documents_are_exact(ops: EmulatedOps, text: str, layout: str, rotate: str) -> None:
    """Grouped heads, a batch of 2, and the gradient of lse."""
    pattern = ra.parse_pattern(text.format(f"Documents({LENGTHS})"))
    case = make_case(TOKENS, 4, 2, torch.float32, lse=True)
    oracle = dense(case, torch.from_numpy(pattern.mask(TOKENS, 4)))
    leaves = case.leaves()
    out, lse = ra.virtual_attention(
        *(*leaves, pattern),
        **{"ranks": 3, "layout": layout, "rotate": rotate, "kernel": "aten_cuda:flash", "return_lse": True},
    )
    grads = torch.autograd.grad((out, lse), leaves, (case.grad, case.grad_lse.float()))
    for x, y in zip((out, lse, *grads), (oracle.out, oracle.lse, *oracle.grads), strict=True):
        assert error(x, y) <= 1e-5
    assert ops.packed > 0


@pytest.mark.parametrize("rotate", ["keys", "queries"])
@pytest.mark.parametrize(
    ("text", "layout"), [("Causal() & {}", "contiguous"), ("Causal() & {}", "zigzag"), ("{}", "contiguous")]
)
def test_one_call_for_each_visit(ops: EmulatedOps, text: str, layout: str, rotate: str) -> None:
    pattern = ra.parse_pattern(text.format(f"Documents({LENGTHS})"))
    options: dict[str, Any] = {"layout": layout, "schedule": "ring", "rotate": rotate}
    plan = make_plan(pattern, tokens=TOKENS, ranks=3, heads=2, head_dim=8, batch=2, dtype="float16", **options)
    q, k, v = (torch.randn(2, 2, TOKENS, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    ra.virtual_attention(q, k, v, pattern, ranks=3, kernel="aten_cuda", **options).sum().backward()
    visits = sum(len(step.visits) for rank in range(3) for step in plan.for_rank(rank).forward)
    backwards = sum(count for op, count in ops.calls.items() if op.endswith("backward"))
    assert ops.calls.total() == 2 * backwards == 2 * visits and ops.packed >= 3


def test_a_call_has_no_more_sequences_than_a_grid() -> None:
    work = Work(range(1), range(1), range(999), (range(999),), sequences=())
    slices = batches(work, 1000)
    assert slices[-1] is not None and slices[-1].stop >= 1000
    assert all(part is not None and 999 * (part.stop - part.start) <= GRID for part in slices)


def test_lengths_are_made_once(ops: EmulatedOps) -> None:
    """Later calls of a plan bring nothing to the device."""
    work = Work(range(1), range(1), range(9), (range(9),), 0, cuts=((4, 4), (5, 5)))
    for batch in (1, 2):
        rows, keys, most_rows, most_keys = cumulative(work, batch, CPU)
        assert rows.tolist() == keys.tolist() == [0, 4, 9, 13, 18][: 2 * batch + 1] and most_rows == most_keys == 5
        assert cumulative(work, batch, CPU)[0] is rows
    assert visible_runs(work, CPU, by_key=True)[0] is visible_runs(work, CPU, by_key=True)[0]


def test_the_emulated_op_refuses(ops: EmulatedOps) -> None:
    q, good = torch.zeros(9, 1, 8), torch.tensor([0, 4, 9], dtype=torch.int32)

    def call(cum_q: torch.Tensor, cum_k: torch.Tensor, most: int = 5) -> None:
        rest = (cum_q, cum_k, most, 5, 0.0, False, False)
        ops._flash_attention_forward(q, q, q, *rest, scale=1.0, window_size_left=-1, window_size_right=-1)

    call(good, good)
    for wrong in (good.long(), good.repeat_interleave(2)[::2], good[:2]):
        with pytest.raises(RuntimeError, match="cu_seqlens"):
            call(good, wrong)
    for short in (good - 1, torch.tensor([0, 4, 8], dtype=torch.int32)):
        with pytest.raises(AssertionError):
            call(short, good)
    with pytest.raises(AssertionError):
        call(good, good, most=4)


def test_explain_tells_of_packed_calls(ops: EmulatedOps) -> None:
    documents = [Work(range(4), range(4), range(a, b), (range(a, b),), 0) for a, b in pairwise((0, 300, 700, 701))]
    told: dict[str | None, str] = {}
    for choice in (None, "flash", "cudnn", "efficient"):
        kernel = AtenCuda(choice, torch.float16, deterministic=False)
        kernel.check(*[torch.zeros(1, 4, 8, 64)] * 3)
        told[choice] = str(kernel.explain(*documents, head_dim=64))
    assert told[None].startswith("varlen flash; not cudnn: it gets one document per call; not efficient:")
    assert told["flash"].startswith("varlen flash; not cudnn:")
    assert told["cudnn"].startswith("2 calls of cudnn") and told["efficient"].startswith("3 calls of efficient")
