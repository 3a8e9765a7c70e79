"""Documents packed into one call of flash with cumulative lengths: the pairs, the numbers, and the number of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from emulated_ops import EmulatedOps, emulate, packed_sequences
from oracle import dense, error, make_case, trimmed

import ringattn as ra
from ringattn.call.planner import make_plan
from ringattn.kernels.aten_cuda import GRID, AtenCuda
from ringattn.kernels.base import band
from ringattn.kernels.cuda_device import flash_reads, flash_window
from ringattn.kernels.packing import ALONE_ROWS, _gather, _repeats_keys, cumulative, gather, pack, scatter, scatter_add
from ringattn.kernels.views import batches
from ringattn.plan.work import Work

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


def with_gaps(source: Random, count: int) -> list[Work]:
    """Works of all bands that flash reads, with rows at a stride, keys in several runs, and heads of their own."""
    works = []
    for work in neighbours(source, count):
        heads, step = source.choice((range(4), range(0, 4, 2), range(1, 2))), source.choice((1, 1, 2, 3))
        first, keys = source.randrange(30), source.sample(range(60), work.keys)
        rows = range(first, first + len(work.q) * step, step)
        works.append(replace(work, heads=heads, kv=heads, q=rows, k=tuple(range(j, j + 1) for j in keys)))
    return works


def visible_pairs(work: Work) -> Iterator[tuple[int, int]]:
    """(row, key) numbers of a call; of a packed work those that flash computes, as it is emulated."""
    if not work.sequences:
        yield from map(tuple, band(len(work.q), work.keys, work.lo, work.hi, CPU).nonzero().tolist())
        return
    rows, keys = (sum(sizes) for sizes in zip(*((len(x.q), x.keys) for x in work.sequences), strict=True))
    left, right = flash_window(work)
    window = {"window_size_left": left, "window_size_right": right}
    q, k = torch.zeros(rows, 1, 8), torch.zeros(keys, 1, 8)
    for rows, keys, bias in packed_sequences(q, k, cumulative(work, 1, CPU), window):
        yield from ((rows.start + i, keys.start + j) for i, j in (bias == 0).nonzero().tolist())


def pairs_of(work: Work) -> Iterator[tuple[int, int, int]]:
    """(head, row, key) of a call."""
    for single in work.repetitions():
        parts = single.sequences or (single,)
        rows = [(x.heads, i) for x in parts for i in x.q]
        keys = [j for x in parts for run in x.k for j in run]
        yield from ((head, rows[i][1], keys[j]) for i, j in visible_pairs(single) for head in rows[i][0])


@pytest.mark.parametrize("make", [neighbours, with_gaps])
def test_packed_works_hold_the_pairs_of_the_works(make: Callable[[Random, int], list[Work]]) -> None:
    source, packed, fewer = Random(0), 0, 0
    for _ in range(100):
        works = make(source, source.randrange(1, 12))
        source.shuffle(works)
        calls = pack(works)
        fewer += len(works) - len(calls)
        assert len(calls) <= len(works)
        assert sorted(x for call in calls for x in pairs_of(call)) == sorted(
            x for work in works for x in pairs_of(work)
        )
        for call in (call for call in calls if call.sequences):
            packed += len(call.sequences)
            assert call.gathered or make is neighbours
    assert packed > 150 and fewer > 100


def test_gathered_rows_come_back() -> None:
    """Tensors of any strides, keys in two sequences, and heads that differ between sequences."""
    parts = [Work(range(h, h + 1), range(h, h + 1), range(h, 9, 2), (range(5), range(h, 2))) for h in (0, 1)]
    (call,) = _gather([*parts, replace(parts[0], q=range(1, 9, 2))])
    assert call.gathered and _repeats_keys(call)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)):
        x = torch.zeros([(2, 2, 9, 3)[i] for i in order]).permute([order.index(i) for i in range(4)])
        x.copy_(torch.randn(x.shape))
        before, rows = x.clone(), gather(x, call)
        for sequence, part in zip(call.sequences, rows.split([len(x.q) for x in call.sequences], 2), strict=True):
            assert torch.equal(part, x[:, sequence.heads.start][:, None, list(sequence.q)])
        scatter(x, call, 2 * rows)
        assert torch.equal(gather(x, call), 2 * rows)
        x.copy_(before)
        scatter_add(x, call, gather(x, call, by_key=True), by_key=True)
        times = torch.tensor([[4, 4, 2, 2, 2, 0, 0, 0, 0], [1, 2, 1, 1, 1, 0, 0, 0, 0]])
        assert torch.allclose(x, before * (1 + times)[None, :, :, None])


def test_long_documents_and_other_heads_stay_alone() -> None:
    def at(first: int, last: int, **fields: Any) -> Work:
        return replace(Work(range(4), range(2), range(first, last), (range(first, last),), 0), **fields)

    rows = ALONE_ROWS // 4
    assert [len(work.sequences) for work in pack([at(0, rows), at(rows, rows + 5)])] == [2]
    for other in (at(5, 9, heads=range(4, 8)), at(5, 9, kv=range(2, 4)), at(5, 6 + rows), at(6, 9), at(5, 9, lo=None)):
        assert pack([at(0, 5), other]) == [at(0, 5), other]
    repeated = at(0, 5, repeat=3, q_shift=5, k_shift=5)
    assert pack([repeated]) == [repeated], "one call already"
    assert [len(work.sequences) for work in pack([repeated, at(15, 16)])] == [4]
    apart = at(0, 5, repeat=3, q_shift=6, k_shift=6)
    assert pack([apart, at(40, 41)]) == [apart, at(40, 41)], "never more calls"


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize(
    ("text", "layout"),
    [
        *(("Causal() & {}", "contiguous"), ("Causal() & {}", "zigzag"), ("{}", "contiguous")),
        *(("Causal() & {}", "striped"), ("global_local(4, globals=1, blocks=2)", "zigzag"), ("Strided(5)", "striped")),
    ],
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


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_gathered_calls_are_exact(ops: EmulatedOps, rotate: str) -> None:
    """A batch in several calls, grouped heads of which each has rows of its own, and the gradient of lse."""
    pattern = ra.parse_pattern("Dilated((32, 90), (1, 5), causal=True)")
    case = make_case(90, 6, 3, torch.float32, batch=3, lse=True)
    oracle = dense(case, torch.from_numpy(pattern.mask(90, 6)), pattern.output_scale)
    deterministic: dict[bool, int] = {}
    for equal_bits in (False, True):
        leaves, ops.packed = case.leaves(), 0
        out, lse = ra.virtual_attention(
            *(*leaves, pattern),
            **{"ranks": 2, "layout": "zigzag", "rotate": rotate, "kernel": "aten_cuda:flash", "return_lse": True},
            deterministic=equal_bits,
        )
        grads = torch.autograd.grad((out, lse), leaves, (case.grad, case.grad_lse.float()))
        for x, y in zip((out, lse, *grads), (oracle.out, oracle.lse, *oracle.grads), strict=True):
            assert error(x, y) <= 1e-5
        deterministic[equal_bits] = ops.packed
    assert deterministic[False] >= deterministic[True] > 0


def test_a_call_has_no_more_sequences_than_a_grid() -> None:
    one = Work(range(1), range(1), range(1), (range(1),))
    work = replace(one, q=range(999), k=(range(999),), sequences=(one,) * 999)
    slices = batches(work, 1000)
    assert slices[-1] is not None and slices[-1].stop >= 1000
    assert all(part is not None and 999 * (part.stop - part.start) <= GRID for part in slices)


def test_lengths_are_made_once(ops: EmulatedOps) -> None:
    """Later calls of a plan bring nothing to the device."""
    (work,) = pack([Work(range(1), range(1), range(a, b), (range(a, b),), 0) for a, b in ((0, 4), (4, 9))])
    for batch in (1, 2):
        rows, keys, most_rows, most_keys = cumulative(work, batch, CPU)
        assert rows.tolist() == keys.tolist() == [0, 4, 9, 13, 18][: 2 * batch + 1] and most_rows == most_keys == 5
        assert cumulative(work, batch, CPU)[0] is rows


def test_explain_tells_of_packed_calls(ops: EmulatedOps) -> None:
    documents = [Work(range(4), range(4), range(a, b), (range(a, b),), 0) for a, b in pairwise((0, 300, 700, 701))]
    told: dict[str | None, str] = {}
    gaps = [
        Work(range(4), range(4), range(a, a + 50), (range(b, b + 50),))
        for a, b in ((0, 70), (50, 0), (120, 9), (200, 4))
    ]
    for choice in (None, "flash", "cudnn", "efficient"):
        kernel = AtenCuda(choice, torch.float16, deterministic=False)
        kernel.check(*[torch.zeros(1, 4, 8, 64)] * 3)
        told[choice] = str(kernel.explain(*documents, head_dim=64))
        if choice is None:
            assert "FlexAttention: it is compiled for each mask" in str(kernel.explain(*gaps, head_dim=64))
            assert str(kernel.explain(*gaps)).startswith("gathered varlen flash; not cudnn")
    assert told[None].startswith("varlen flash; not cudnn: it gets one sequence per call; not efficient:")
    assert told["flash"].startswith("varlen flash; not cudnn:")
    assert told["cudnn"].startswith("2 calls of cudnn") and told["efficient"].startswith("3 calls of efficient")
