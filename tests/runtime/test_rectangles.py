"""Queries and keys at different positions: against the dense oracle, on real ranks, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import dense, errors, make_case, solve
from rank_pool import told_by
from rectangles import draw_rectangle, name_layout

import ringattn as ra
from ringattn import Causal, Documents, Full, InvalidInput, Unsupported, Window
from ringattn.call.functional import get_transport
from ringattn.kernels import get_kernel
from ringattn.runtime.passes import backward, forward
from ringattn.runtime.ring import Job
from ringattn.transport.virtual import VirtualRanks


@pytest.mark.parametrize("cross", [False, True])
def test_random_rectangles_equal_the_oracle(cross: bool) -> None:
    found = [draw_rectangle(seed, cross=cross).worst_error(seed) for seed in range(20 if cross else 40)]
    assert max(found) <= 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_a_batch_have_documents_of_their_own(seed: int) -> None:
    rng = random.Random(seed)
    drawn, first = draw_rectangle(seed), rng.choice([0, 9, 30])

    def split(tokens: int) -> list[int]:
        cuts = sorted(rng.choices(range(tokens + 1), k=2))
        return [cuts[0], cuts[1] - cuts[0], tokens - cuts[1]]

    keys, queries = 30, 11
    if seed % 2:
        first, pattern = 0, Documents([split(keys), split(keys)], q_lengths=[split(queries), split(queries)])
    else:
        pattern = Causal() & Documents([split(keys + queries), split(keys + queries)])
    layouts = {"layout": name_layout(rng, keys, drawn.ranks), "q_layout": name_layout(rng, queries, drawn.ranks, first)}
    rectangle = replace(
        drawn, pattern=pattern, keys=keys, queries=queries, first=first, options={**drawn.options, **layouts}
    )
    case = rectangle.case(seed)
    masks = [replace(rectangle, pattern=pattern.row(row)).mask() for row in range(2)]
    assert max(errors(rectangle.solve(case), dense(case, torch.stack(masks)))) <= 1e-12
    plan = rectangle.plan(batch=2)
    assert ra.Plan.from_json(plan.to_json()).hash == plan.hash


def test_auto_compares_layouts_of_the_keys() -> None:
    sizes = {"tokens": 4096, "q_tokens": 1024, "ranks": 4, "layout": "auto", "machine": "h100_nvlink_ib"}
    for named in ("shifted(auto, 3072)", "shifted(zigzag, 3072)"):
        plan = ra.make_plan(Causal(), q_layout=named, **sizes)
        assert plan.q_layout is not None and plan.choice is not None
        assert plan.q_layout.name == named.replace("auto", plan.layout.name)
        assert {"contiguous", "zigzag", "striped(64)"} == {candidate.layout for candidate in plan.choice.candidates}
        assert plan.choice.picked.seconds <= min(x.seconds for x in plan.choice.candidates if x.prediction) * 1.02
    q, k = torch.randn(2, 2, 11, 8, dtype=torch.float64), torch.randn(2, 2, 30, 8, dtype=torch.float64)
    for layout, q_layout in (
        ("auto", "shifted(zigzag, 19)"),
        ("auto", "shifted(auto, 19)"),
        ("zigzag", "shifted(auto, 19)"),
    ):
        out = ra.virtual_attention(q, k, k, Causal(), ranks=3, layout=layout, q_layout=q_layout)
        assert torch.allclose(out, ra.attention(q, k, k, Causal(), first=19), atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_counted_are_the_bytes_planned(seed: int) -> None:
    rectangle = draw_rectangle(seed)
    plan = rectangle.plan(head_dim=8, value_dim=(8, 5)[seed % 2], dtype="float64", batch=2)
    case = rectangle.case(seed, lse=False)
    jobs = [Job(plan, rank, get_kernel("reference", *case.inputs), 1.0) for rank in range(plan.ranks)]
    layouts = plan.layout_of("q"), plan.layout, plan.layout
    shards = [[x.shard_tensor(y, job.rank) for x, y in zip(layouts, case.inputs, strict=True)] for job in jobs]
    grads = [layouts[0].shard_tensor(case.grad, job.rank) for job in jobs]
    transport = VirtualRanks(plan.ranks)
    results = transport.run([forward(job, q, (k, v), save=True) for job, (q, k, v) in zip(jobs, shards, strict=True)])
    for rank, counters in enumerate(transport.counters):
        assert (counters.sent_bytes, counters.sent_messages) == (plan.bytes_sent(rank), plan.messages(rank))
        counters.reset()
    each = zip(jobs, grads, shards, results, strict=True)
    transport.run([backward(job, grad, None, q, (k, v), result) for job, grad, (q, k, v), result in each])
    for rank, counters in enumerate(transport.counters):
        planned = plan.bytes_sent(rank, backward=True), plan.messages(rank, backward=True)
        assert (counters.sent_bytes, counters.sent_messages) == planned


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_reads_its_layouts_back(seed: int) -> None:
    rectangle = draw_rectangle(seed, cross=seed % 3 == 0)
    plan = rectangle.plan()
    again = ra.Plan.from_json(plan.to_json())
    assert (again, again.hash) == (plan, plan.hash)
    assert plan.pairs() == sum(map(plan.pairs, range(plan.ranks))) == int(rectangle.mask().sum())
    assert plan.q_layout is None or plan.hash != ra.make_plan(
        Full(), tokens=plan.tokens, ranks=plan.ranks, heads=plan.heads, kv_heads=plan.kv_heads
    ).hash  # fmt: skip
    assert plan.picture(ascii=True)


@pytest.mark.parametrize("schedule", ["ring", "direct", "allgather", "double_ring(2)"])
def test_queries_may_travel_in_the_forward_of_a_square(schedule: str) -> None:
    """Nothing is kept for the backward then; also where tables tell what blocks need."""
    case = make_case(40, 4, 2, torch.float64, lse=True)
    for layout in ("zigzag", "contiguous", "striped(2)"):
        options: dict[str, Any] = {"ranks": 4, "layout": layout, "schedule": schedule}
        truth = solve(ra.virtual_attention, case, Causal() & Window(9), **options)
        found = solve(ra.virtual_attention, case, Causal() & Window(9), rotate="q, kv", **options)
        assert max(errors(found, truth)) <= 1e-12


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_what_travels_is_never_rounded_with_queries(layout: str) -> None:
    """Queries and (out, lse) keep their dtype with a comm_dtype, so that the result is bit for bit that without one."""
    case = make_case(32, 2, 2, torch.float32)
    options: dict[str, Any] = {"ranks": 4, "layout": layout, "q_layout": "striped(4)", "schedule": "ring"}
    both = [ra.virtual_attention(*case.inputs, Causal(), rotate="q", comm_dtype=d, **options)
            for d in (None, "bfloat16")]  # fmt: skip
    assert torch.equal(*both)


@pytest.mark.parametrize(
    ("cache", "chunk", "keys", "queries"),
    [(1 << 17, 256, 3.764e9, 4.427e7), (1 << 17, 1 << 14, 4.110e9, 2.833e9), (1 << 17, 1 << 15, 4.463e9, 5.667e9)],
)
def test_the_bytes_of_a_chunk_are_those_of_the_formulas(cache: int, chunk: int, keys: float, queries: float) -> None:
    """One layer of Llama-3-8B on 8 ranks: of keys skipped by the causal mask, and (P-1) T H (D e + (Dv+1) a)."""
    sizes: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "schedule": "ring"}
    layout, q_layout = f"joined(zigzag[{cache}], shifted(zigzag, {cache})[{chunk}])", f"shifted(zigzag, {cache})"
    sides: dict[str, Any] = {"tokens": cache + chunk, "q_tokens": chunk, "layout": layout, "q_layout": q_layout}
    by_keys, by_queries = (ra.make_plan(Causal(), ranks=8, rotate=x, **sides, **sizes) for x in ("kv", "q"))
    assert by_keys.bytes_sent() == pytest.approx(keys, rel=5e-4) and by_keys.messages() == 7 * 8
    assert by_queries.bytes_sent() == 7 * chunk * 32 * (128 * 2 + 129 * 4) == pytest.approx(queries, rel=5e-4)


def test_equal_layouts_are_a_square() -> None:
    sizes: dict[str, Any] = {"tokens": 24, "ranks": 3, "layout": "zigzag", "schedule": "ring"}
    square = ra.make_plan(Causal(), **sizes)
    assert ra.make_plan(Causal(), q_layout="zigzag", **sizes) is square and square.q_layout is None
    assert "q_layout" not in square.to_json()
    with pytest.raises(InvalidInput, match="the sequence has 24 tokens"):
        ra.make_plan(Documents([30]), q_layout="zigzag", **sizes)


@pytest.mark.parametrize("q_layout", ["zigzag", "striped"])
def test_rotate_is_for_both_passes_with_a_layout_of_queries(q_layout: str) -> None:
    """Also where the layout of the queries is that of the keys; without it, for the backward alone."""
    sizes: dict[str, Any] = {"tokens": 24, "ranks": 3, "layout": "zigzag", "rotate": "q"}
    for schedule in ("ring", "auto"):
        plan = ra.make_plan(Causal(), q_layout=q_layout, schedule=schedule, **sizes)
        assert (plan.forward_rotates, plan.rotates) == ("q", "q")
        square = ra.make_plan(Causal(), schedule=schedule, **sizes)
        assert (square.forward_rotates, square.rotates) == ("kv", "q")
        machine = ra.Machine(flops=1e9, latency=0.0, bandwidth=1e9)
        assert ra.predict(plan, machine).seconds == ra.simulate(plan, machine).seconds


def test_a_picture_shows_the_pairs_of_travelling_queries() -> None:
    """All queries see all keys of ranks 0 and 1, half of them all of rank 2; blocks of two ways share a step."""
    sizes: dict[str, Any] = {"tokens": 32, "ranks": 4, "layout": "contiguous", "schedule": "ring"}
    plan = ra.make_plan(Causal(), q_layout="shifted(contiguous, 16)", q_tokens=16, rotate="q", **sizes)
    lines = [line.split()[2:] for line in plan.picture(ascii=True, width=100).splitlines()[1:5]]
    assert [sum("#" in cell for cell in line) for line in lines] == [3, 3, 1, 0]


def test_a_layout_with_a_partition_serves_both_sides() -> None:
    """A balanced layout made for a square is a partition like any other."""
    cut = ra.make_layout("balanced(3)", tokens=30, ranks=3, pattern=Causal())
    plan = ra.make_plan(Causal(), tokens=40, ranks=3, layout="zigzag", q_layout=cut, schedule="ring")
    assert ra.Plan.from_json(plan.to_json()).q_layout == cut
    case = make_case(40, 2, 1, torch.float64, lse=True)
    part = type(case)(case.q[:, :, :30], case.k, case.v, case.grad[:, :, :30], case.grad_lse[:, :, :30])  # type: ignore[index]
    truth = dense(part, torch.from_numpy(Causal().mask(40, 2)[:, :30]))
    found = solve(ra.virtual_attention, part, Causal(), ranks=3, layout="zigzag", q_layout=cut)
    assert max(errors(found, truth)) <= 1e-12


@pytest.mark.parametrize("first", [0, 9, 23])
def test_rows_of_a_square(first: int) -> None:
    """Of a square, dropout, softcap, padding and a batch included, some query rows are what a rectangle computes."""
    case = make_case(31, 4, 2, torch.float64)
    padding = (torch.arange(31) % 7 == 3).expand(2, -1)
    options: dict[str, Any] = {"dropout": ra.Dropout(0.3, seed=5), "softcap": 3.0, "key_padding_mask": padding}
    square = ra.attention(*case.inputs, Causal(), return_lse=True, **options)
    rows = slice(first, first + 8)
    one = ra.attention(case.q[:, :, rows], case.k, case.v, Causal(), first=first, return_lse=True, **options)
    many = ra.virtual_attention(
        case.q[:, :, rows], case.k, case.v, Causal(), ranks=3, layout="zigzag",
        q_layout=f"shifted(striped(2), {first})", return_lse=True, **options,
    )  # fmt: skip
    for whole, *parts in zip(square, one, many, strict=True):
        for part in parts:
            torch.testing.assert_close(part, whole[:, :, rows], rtol=1e-12, atol=1e-12)


def test_modules_and_graphs() -> None:
    case = make_case(24, 4, 2, torch.float64)
    q, (k, v) = case.q[:, :, :10], case.inputs[1:]
    wanted = ra.virtual_attention(q, k, v, Window(9), ranks=2, q_layout="shifted(contiguous, 20)")
    module = ra.nn.RingAttention(Window(9), ranks=2, order="BNHD")
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(module(*turned, q_layout="shifted(contiguous, 20)").transpose(1, 2), wanted)

    def call(q: torch.Tensor) -> Any:
        return ra.virtual_attention(q.sin(), k, v, Window(9), ranks=2, q_layout="shifted(contiguous, 20)")

    leaf = q.clone().requires_grad_()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(leaf)
    assert torch.equal(compiled, call(leaf))
    grads = [torch.autograd.grad(out, leaf, case.grad[:, :, :10])[0] for out in (compiled, call(leaf))]
    assert torch.equal(*grads)


def on_ranks(rank: int) -> int:
    """Real ranks against virtual ones, bit for bit, and the bytes of the plan. Cases checked."""
    size, ring, checked = dist.get_world_size(), get_transport(), 0
    for seed in range(60):
        rectangle = draw_rectangle(seed, cross=seed % 4 == 0)
        if rectangle.ranks != size:
            continue
        case = rectangle.case(seed, torch.float32)
        plan, wanted = rectangle.plan(head_dim=8, value_dim=case.v.shape[-1], batch=2), rectangle.solve(case)
        layouts = plan.layout_of("q"), plan.layout, plan.layout
        shards = [x.shard_tensor(y, rank).clone().requires_grad_() for x, y in zip(layouts, case.inputs, strict=True)]
        ring.counters.reset()
        out, lse = ra.ring_attention(*shards, rectangle.pattern, return_lse=True, **rectangle.options)
        assert (ring.counters.sent_bytes, ring.counters.sent_messages) == (plan.bytes_sent(rank), plan.messages(rank))
        assert case.grad_lse is not None
        cotangents = [
            layouts[0].shard_tensor(case.grad, rank),
            layouts[0].shard_tensor(case.grad_lse.float(), rank, -1),
        ]
        grads = torch.autograd.grad((out, lse), shards, cotangents)
        for x, found, whole in zip((*layouts[:1], *layouts), (out, *grads), (wanted.out, *wanted.grads), strict=True):
            assert torch.equal(found, x.shard_tensor(whole, rank)), seed
        assert torch.equal(lse, layouts[0].shard_tensor(wanted.lse, rank, -1))
        options = {**rectangle.options, "layout": layouts[1], "q_layout": layouts[0], "check": "deferred"}
        with torch.no_grad():  # compared beside the messages, as the layouts are objects
            assert torch.equal(ra.ring_attention(*shards, rectangle.pattern, **options), out), seed
        checked += 1
    return checked


def disagreements(rank: int) -> list[str]:
    """What ranks are told that give different layouts of queries, or rows of another layout."""
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)

    def call(q_layout: Any, rows: int = 3) -> str:
        return told_by(lambda: ra.ring_attention(q[:, :, :rows], k, k, Causal(), layout="zigzag", q_layout=q_layout))

    made = ra.make_layout("shifted(zigzag, 8)", tokens=6, ranks=2)
    return [
        call(("shifted(zigzag, 8)", "shifted(zigzag, 9)")[rank]),
        call(("contiguous", None)[rank], rows=4),
        call("shifted(contiguous, 8)", rows=3 - 2 * rank),
        call((made, "shifted(zigzag, 8)")[rank]),
    ]


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 3])
def test_real_ranks_equal_virtual_ones(run_ranks: Callable[..., list[Any]], ranks: int) -> None:
    (checked, *others) = run_ranks(on_ranks, ranks, timeout=120)
    assert checked >= 5 and set(others) == {checked}


@pytest.mark.multi
def test_ranks_compare_both_layouts(run_ranks: Callable[..., list[Any]]) -> None:
    for told in run_ranks(disagreements, 2, timeout=60):
        assert "Mismatch" in told[0] and "q_layout" in told[0]
        assert "Mismatch" in told[1] and "q_layout" in told[1]
        assert "Mismatch" in told[2] and "the shards do not fit the layout shifted(contiguous, 8)" in told[2]
        assert "Error" not in told[3] and "Mismatch" not in told[3]


def test_what_is_refused() -> None:
    q, k = torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 8, 8)
    with pytest.raises(InvalidInput, match="need q_layout= or first="):
        ra.virtual_attention(q, k, k, Causal(), ranks=2)
    with pytest.raises(InvalidInput, match="layout='balanced' needs queries and keys at the same positions"):
        ra.virtual_attention(q, k, k, Causal(), ranks=2, layout="balanced", q_layout="zigzag")
    with pytest.raises(InvalidInput, match="the q_lengths sum to 4, but there are 3 queries"):
        ra.virtual_attention(q, k, k, Documents([8], q_lengths=[4]), ranks=2, q_layout="zigzag")
    with pytest.raises(InvalidInput, match="2 q_lengths but 1 lengths"):
        Documents([8], q_lengths=[4, 4])
    with pytest.raises(InvalidInput, match="1 q_lengths but 2 lengths"):
        Documents([[8], [4, 4]], q_lengths=[[3], [3]])
    with pytest.raises(InvalidInput, match="first=2"):
        ra.attention(q, k, k, Causal(), first=2, offload="host")
    with pytest.raises(InvalidInput, match="expected auto, kv, q, or two such as"):
        ra.make_plan(Causal(), tokens=8, ranks=2, rotate="kv, v")
    with pytest.raises(InvalidInput, match="q_tokens=3: the positions of the queries are unknown"):
        ra.make_plan(Causal(), tokens=8, q_tokens=3, ranks=2)
    with pytest.raises(Unsupported, match="selects blocks of one sequence only"):
        ra.nn.AdaptiveAttention(2, 8, k=1)(q, k, k, q_layout="zigzag")
