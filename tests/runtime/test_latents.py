"""Rows that travel in place of keys and values, against dense attention in fp64, with all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from latent_cases import HEADS, KINDS, distance, draw_latents, make_latents
from rank_pool import told_by
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.call import autograd
from ringattn.kernels import expand as expanding
from ringattn.machine.presets import get_machine
from ringattn.transport.virtual import VirtualRanks

EXACT = 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "chunk"),
    [
        ({"ranks": 1}, 7),
        ({"ranks": 2, "layout": "zigzag", "schedule": "ring", "rotate": "kv"}, None),
        ({"ranks": 3, "layout": "contiguous", "schedule": "ring", "rotate": "q"}, 5),
        ({"ranks": 4, "layout": "striped", "schedule": "double_ring(2)", "rotate": "kv"}, 4),
        ({"ranks": 5, "layout": "zigzag", "schedule": "allgather"}, 3),
        ({"ranks": 5, "layout": "contiguous", "schedule": "direct"}, 1),
    ],
)
def test_blocks(kind: str, options: dict[str, Any], chunk: int | None) -> None:
    pattern = ra.Causal() & ra.Documents([17, 3, 23]) if chunk == 5 else ra.Causal()
    case = make_latents(kind, 43, pattern, chunk=chunk, options=options)
    assert case.error(case.solve()) < EXACT


@pytest.mark.parametrize("first", range(0, 40, 5))
def test_random_cases(first: int) -> None:
    for seed in range(first, first + 5):
        case = draw_latents(seed)
        assert case.error(case.solve()) < EXACT, (seed, case.options, case.pattern)


@pytest.mark.parametrize(
    ("kind", "size"), [("mla", 2), ("mla", 3), ("gqa", 2), ("absorbed", 2), ("int8", 6), ("k=v", 3), ("mixed", 3)]
)
def test_ulysses_gathers_rows_and_expands_own_heads(kind: str, size: int) -> None:
    case = make_latents(kind, 37, ra.Causal() & ra.Window(20), chunk=6)
    heads: list[range | None] = []
    if kind == "mla":
        inner = case.expand

        def expand(*tensors: Tensor, heads: range | None = None) -> Any:
            asked.append(heads)
            return inner(*tensors, heads=heads)

        asked, case.expand = heads, expand
    for ranks in (size, 2 * size):
        found = case.solve(ranks=ranks, layout="zigzag", schedule=f"ulysses({size})")
        assert case.error(found) < EXACT
    share = HEADS // size
    wanted = {None, *(range(first, first + share) for first in range(0, HEADS, share))}
    assert kind != "mla" or {*heads} == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 20, 43])
def test_offload_copies_rows(kind: str, chunk: int) -> None:
    """Rows of other chunks are copied from host memory and expanded, and their gradients summed there."""
    pattern = ra.Causal() & ra.Documents([17, 3, 23]) if chunk == 7 else ra.Causal()
    case = make_latents(kind, 43, pattern, chunk=6)
    source = torch.Generator().manual_seed(1)
    if chunk == 20:
        case.mask, case.sinks = torch.rand(2, 43, generator=source) < 0.3, torch.randn(HEADS, dtype=torch.float64)
    if kind in ("mla", "gqa"):
        case.chosen = torch.rand(2, 1, 43, 43, generator=source).argsort(-1)[..., :9]
    if kind == "absorbed":
        case.options = {"scale": -0.3}
    assert case.error(case.solve(ra.attention, offload="host", device="cpu", chunk=chunk)) < EXACT


@pytest.mark.parametrize("rotate", ["auto", "kv", "q", "q, kv", "kv, q"])
def test_queries_after_a_cache(rotate: str) -> None:
    """With `rotate="q"`, queries visit in the forward, too, and bring their output so far."""
    case = make_latents("mla", 50, ra.Causal(), chunk=7)
    options: dict[str, Any] = {"ranks": 3, "layout": "zigzag", "rotate": rotate, "schedule": "ring"}
    leaves, q, rows, weights = case.leaves()
    queries = q[:, :, 40:]
    given = ra.Rows(*rows, expand=case.expand, weights=weights, chunk=7)
    found = ra.virtual_attention(queries, given, ra.Causal(), q_layout="shifted(contiguous, 40)", **options)
    grad = torch.randn(found.shape, dtype=torch.float64)
    grads = torch.autograd.grad(found, leaves, grad)
    mask = torch.arange(50)[None] <= torch.arange(40, 50)[:, None]
    k, v = case.expand(*rows, *weights)
    wanted = torch.nn.functional.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
    truth = torch.autograd.grad(wanted, leaves, grad)
    assert all(distance(x, y) < EXACT for x, y in zip((found, *grads), (wanted, *truth), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["ring", "ulysses(2)"])
def test_rows_of_k_and_v_are_k_and_v(dtype: torch.dtype, schedule: str) -> None:
    q, k, v = (torch.randn(2, heads, 40, 16).to(dtype).requires_grad_() for heads in (4, 2, 2))
    options: dict[str, Any] = {"ranks": 4, "layout": "zigzag", "schedule": schedule, "return_lse": True}
    for rows, exact in ((ra.Rows(k, v), True), (ra.Rows(k, v, expand=lambda k, v: (k, v)), False)):
        wanted, found = (
            (*results, *torch.autograd.grad(results, (q, k, v), [torch.ones_like(x) for x in results]))
            for results in (
                ra.virtual_attention(q, k, v, ra.Causal(), **options),
                ra.virtual_attention(q, rows, ra.Causal(), **options),
            )
        )
        # Expanded, only sums of dk and dv round in another order, and only in 16 bits by more than their last bits.
        same = [*map(torch.equal, wanted, found)]
        assert all(same if exact else same[:3])
        assert exact or all(torch.allclose(x, y, rtol=2e-2, atol=2e-2) for x, y in zip(wanted, found, strict=True))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[VirtualRanks]:
    """The virtual ranks of every pass from now on."""
    made: list[VirtualRanks] = []

    def make(size: int) -> VirtualRanks:
        made.append(VirtualRanks(size))
        return made[-1]

    monkeypatch.setattr(autograd, "VirtualRanks", make)
    return made


@pytest.mark.parametrize(
    "schedule", ["ring", "direct", "allgather", "double_ring(2)", "ulysses(2)", "ulysses(2, direct)"]
)
@pytest.mark.parametrize("kind", ["mla", "int8"])
def test_the_bytes_sent_are_those_of_the_plan(schedule: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    for pattern, rotate in ((ra.Causal(), "auto"), (ra.Causal() & ra.Window(9), "kv"), (ra.Full(), "q")):
        case = make_latents(kind, 41, pattern, batch=1)
        options = {"ranks": 4, "layout": "zigzag", "schedule": schedule, "rotate": rotate}
        assert case.error(case.solve(**options)) < EXACT
        block = [(x.shape[1], x.shape[3], x.dtype) for x in case.rows]
        plan = ra.make_plan(
            pattern, tokens=41, heads=HEADS, head_dim=case.q.shape[3], value_dim=6, dtype="float64", block=block,
            **options,
        )  # fmt: skip
        assert ra.Plan.from_json(plan.to_json()) == plan
        for ranks, backward in zip(made[-2:], (False, True), strict=True):
            for rank, counters in enumerate(ranks.counters):
                assert counters.sent_bytes == plan.bytes_sent(rank, backward=backward)
                listed = str(plan.listing(rank)).splitlines()[-1]
                assert f"{counters.sent_bytes:,} B in" in listed


def test_gradients_of_rows_travel_in_fp32_within_a_group_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made, case = counted(monkeypatch), make_latents("mla", 41, ra.Causal(), batch=1)
    narrow = replace(case, **{x: [y.bfloat16() for y in getattr(case, x)] for x in ("rows", "weights")})
    replace(narrow, q=case.q.bfloat16()).solve(ranks=4, schedule="ulysses(2)")
    sizes: dict[str, Any] = {"tokens": 41, "heads": HEADS, "head_dim": 12, "value_dim": 6, "dtype": "bfloat16"}
    plan = ra.make_plan(ra.Causal(), ranks=4, schedule="ulysses(2)", block=((1, 16), (1, 4)), **sizes)
    assert [x.sent_bytes for x in made[-1].counters] == [plan.bytes_sent(rank, backward=True) for rank in range(4)]
    assert plan.exchange_tensors("dqkv", 2)[1:] == ((1, 16, "float32"), (1, 4, "float32"))


def test_a_token_of_deepseek_v3_is_576_numbers() -> None:
    sizes: dict[str, Any] = {"tokens": 4096, "ranks": 4, "layout": "zigzag", "schedule": "ring", "dtype": "bfloat16"}
    latent = ra.make_plan(
        ra.Full(), heads=128, head_dim=192, value_dim=128, block=((1, 512), (1, 64)), rotate="kv", **sizes
    )
    assert latent.bytes_sent(0) == 3 * 1024 * 576 * 2
    # The backward begins with the last block of the forward, and gradients in fp32 go home.
    assert latent.bytes_sent(0, backward=True) == 1024 * 576 * (2 * 2 + 3 * 4)
    assert latent.rotates == "kv" and latent.demand.block_heads == 1


H100 = get_machine("h100_nvlink_ib")


@pytest.mark.parametrize("kind", ["mla", "mixed", "int8"])
@pytest.mark.parametrize(
    ("machine", "form"), [(H100.changed(bandwidth=1e3), "rows"), (H100.changed(matmul=1e3), "k, v")]
)
def test_the_faster_form_travels(kind: str, machine: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows if messages take long, keys and values if products do; int8 are not known to be expanded by a product."""
    made, case = counted(monkeypatch), make_latents(kind, 41, ra.Causal(), chunk=5, travel="auto")
    case.mask = torch.zeros(2, 41, dtype=torch.bool)
    case.mask[0, 3:9] = True
    options: dict[str, Any] = {"ranks": 3, "layout": "zigzag", "schedule": "ring"}
    case.sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert case.error(case.solve(machine=machine, **options)) < EXACT
    block = [(x.shape[1], x.shape[3], x.dtype) for x in case.rows] + [(1, 1, torch.bool)]
    sizes: dict[str, Any] = {"tokens": 41, "heads": HEADS, "head_dim": case.q.shape[3] + 8, "value_dim": 6, "batch": 2}
    named = {"block": block} if form == "rows" or kind == "int8" else {}
    plan = ra.make_plan(ra.Causal(), dtype="float64", **sizes, **named, **options)
    for ranks, backward in zip(made[-2:], (False, True), strict=True):
        assert [x.sent_bytes for x in ranks.counters] == [plan.bytes_sent(i, backward=backward) for i in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        q, *rows = (x.float() for x in (case.q, *case.rows))
        weights = [x.float() for x in case.weights]
        given = ra.Rows(*rows, expand=case.expand, weights=weights, travel="auto")
        assert ra.virtual_attention(q, given, ra.Causal(), machine=machine, **options).dtype == torch.bfloat16


def test_row_sets_of_one_head_serve_all_heads() -> None:
    """The works of restricted rows have all pairs of all heads."""
    plan = ra.make_plan(
        ra.Causal() & ra.Window(5), tokens=64, ranks=4, layout="contiguous", schedule="ring", heads=8, block=((1, 4),)
    )
    parts = [part for step in plan.for_rank(2).forward for part in step.visits if part.owner != 2]
    assert [part.row_set.heads for part in parts] == [(0,)]  # type: ignore[union-attr]
    works = plan.demand.works(2, 1, parts[0].row_set)
    assert {head for work in works for head in work.heads} == {*range(8)}
    assert sum(work.pairs for work in works) == plan.demand.pairs(2, 1) == 8 * 15


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_a_visit_expands_a_chunk_at_a_time(rotate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_latents("mla", 64, ra.Causal(), options={"ranks": 4, "layout": "zigzag", "rotate": rotate})
    expand, sizes = case.expand, list[int]()

    def recording(*tensors: Tensor) -> Any:
        k, v = expand(*tensors)
        sizes.append(k.numel() + v.numel())
        return k, v

    case.expand = recording
    per_row = 2 * HEADS * (12 + 6)
    for case.chunk, most in ((5, 5), (None, 16), (None, 3)):
        monkeypatch.setattr(expanding, "CHUNK_BYTES", 8 * per_row * (3 if most == 3 else 1000))
        sizes.clear()
        assert case.error(case.solve()) < EXACT
        assert max(sizes[:-1]) == most * per_row  # the last one is the oracle's


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_sums_that_are_new_are_not_read(rotate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(
        "ringattn.runtime.tensors.empty", lambda shape, dtype, device: empty(shape, dtype=dtype).fill_(255)
    )
    monkeypatch.setattr("torch.empty_like", lambda x, **named: empty_like(x, **named).fill_(torch.nan))
    pattern = ra.Causal() & ra.Documents([9, 30, 2])
    case = make_latents("mla", 41, pattern, chunk=4, options={"ranks": 4, "layout": "zigzag", "rotate": rotate})
    case.mask = torch.zeros(2, 41, dtype=torch.bool)
    case.mask[:, 9:20] = True
    assert case.error(case.solve()) < EXACT


def test_padding_holds_anything() -> None:
    case = make_latents("mla", 24, ra.Causal(), options={"ranks": 3})
    case.mask = torch.zeros(2, 24, dtype=torch.bool)
    case.mask[0, 3:7] = case.mask[1, 20:] = True
    wanted = case.dense()
    case.rows = [x.masked_fill(case.mask[:, None, :, None], torch.nan) for x in case.rows]
    found = case.solve()
    assert all(distance(x, y) < EXACT for x, y in zip(found, wanted, strict=True))


def test_weights_have_one_gradient_a_call_and_may_be_frozen() -> None:
    case = make_latents("mla", 32, ra.Causal())
    _, q, rows, weights = case.leaves()
    weights[1].requires_grad_(False)
    fired: list[Tensor] = []
    weights[0].register_hook(fired.append)
    given = ra.Rows(*rows, expand=case.expand, weights=weights, chunk=5)
    ra.virtual_attention(q, given, case.pattern, ranks=4, layout="zigzag").sum().backward()
    assert len(fired) == 1 and weights[1].grad is None and weights[0].grad is not None
    # Only weights: ranks agree that a gradient is needed.
    frozen = ra.Rows(*(x.detach() for x in rows), expand=case.expand, weights=weights)
    (grad,) = torch.autograd.grad(ra.virtual_attention(q.detach(), frozen, case.pattern, ranks=4).sum(), (weights[0],))
    assert distance(grad, weights[0].grad) < EXACT


def test_sums_over_visits_are_in_fp32() -> None:
    """In bf16, gradients of weights have the error of one visit's rounding, not of a sum in bf16."""
    case = make_latents("mla", 256, ra.Causal(), batch=1, chunk=2)
    truth = case.dense()
    narrow = replace(
        case, q=case.q.bfloat16(), rows=[x.bfloat16() for x in case.rows], weights=[x.bfloat16() for x in case.weights]
    )
    for found, wanted in zip(narrow.solve(ranks=4)[2:], truth[2:], strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_dropout_drops_the_same_weights() -> None:
    case = make_latents("mla", 40, ra.Causal(), chunk=3)
    k, v = case.expand(*case.rows, *case.weights)
    options: dict[str, Any] = {"dropout": ra.Dropout(0.4, seed=5), "ranks": 4, "return_lse": True}
    for more in ({"layout": "zigzag", "rotate": "kv"}, {"schedule": "ulysses(2)"}, {"rotate": "q"}):
        leaves, q, rows, weights = case.leaves()
        given = ra.Rows(*rows, expand=case.expand, weights=weights, chunk=3)
        found = ra.virtual_attention(q, given, case.pattern, **options, **more)
        kept = [x.detach().requires_grad_() for x in (q, k, v)]
        wanted = ra.virtual_attention(*kept, case.pattern, **options, **more)
        grads = torch.autograd.grad(sum(x.square().sum() for x in found), leaves)
        dq, dk, dv = torch.autograd.grad(sum(x.square().sum() for x in wanted), kept)
        _, _, rows, weights = case.leaves()
        back = torch.autograd.grad(case.expand(*rows, *weights), [*rows, *weights], (dk, dv))
        for one, other in zip((*found, *grads), (*wanted, dq, *back), strict=True):
            assert distance(one, other) < EXACT


def test_checkpoints_and_graphs() -> None:
    case = make_latents("mla", 32, ra.Causal())

    def loss(q: Tensor, *tensors: Tensor) -> Tensor:
        rows = ra.Rows(*tensors[:2], expand=case.expand, weights=tensors[2:])
        return ra.virtual_attention(q * 1.0, rows, ra.Causal(), ranks=2).square().sum()

    def solve(call: Callable[..., Tensor]) -> list[Tensor]:
        leaves, q, rows, weights = case.leaves()
        found = call(q, *rows, *weights)
        return [found, *torch.autograd.grad(found, leaves)]

    wanted = solve(loss)
    for options in ({}, {"context_fn": ra.keep_attention}):
        found = solve(lambda *x, options=options: checkpoint(loss, *x, use_reentrant=False, **options))
        assert all(map(torch.equal, wanted, found))
    if torch.__version__ >= "2.12":
        compiled: Any = torch.compile(loss, backend="aot_eager", fullgraph=True)
        assert max(map(distance, solve(compiled), wanted)) < EXACT


def whole_heads(c: Tensor, w: Tensor) -> Any:
    """k and v of width 12 and 6, as a function of a module."""
    return (c @ w).split((12, 6), -1)


class Heads(torch.nn.Module):
    def forward(self, c: Tensor, w: Tensor) -> Any:
        return whole_heads(c, w)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="older torch.compile leaves attention out of its graphs")
def test_what_expand_may_be_in_a_compiled_function() -> None:
    q, c, w = (torch.randn(*shape, requires_grad=True) for shape in ((1, 2, 24, 12), (1, 1, 24, 8), (2, 8, 18)))

    def attend(*expands: Any) -> Tensor:
        given = expands or (lambda c, w: whole_heads(c, w),)
        rows = [ra.Rows(c, expand=expand, weights=(w,)) for expand in given]
        return torch.stack([ra.virtual_attention(q, x, ra.Causal(), ranks=2) for x in rows])

    compiled: Any = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expands = whole_heads, lambda c, w: whole_heads(c, w), Heads(), Heads().forward
    found, wanted = (call(*expands).square().sum((1, 2, 3, 4)) for call in (compiled, attend))
    assert torch.equal(found, wanted) and len({*found.tolist()}) == 1
    grads = (torch.autograd.grad(x.sum(), (q, c, w)) for x in (found, wanted))
    assert all(map(torch.equal, *grads))
    for expands in ((partial(whole_heads),), ()):
        with pytest.raises(RuntimeError, match="make it outside of the compiled function, expand= not as a functools"):
            compiled(*expands)


def test_autocast_casts_rows_and_weights() -> None:
    case = make_latents("mla", 32, ra.Causal())
    case = replace(
        case, q=case.q.float(), rows=[x.float() for x in case.rows], weights=[x.float() for x in case.weights]
    )
    leaves, q, rows, weights = case.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        out = ra.virtual_attention(q, ra.Rows(*rows, expand=case.expand, weights=weights), ra.Causal(), ranks=2)
    assert out.dtype == torch.bfloat16
    assert [x.dtype for x in torch.autograd.grad(out.float().sum(), leaves)] == [torch.float32] * 5


def test_rounded_messages_leave_integers_alone() -> None:
    case = make_latents("int8", 32, ra.Causal(), options={"ranks": 4, "comm_dtype": "float32"})
    assert 1e-9 < case.error(case.solve()) < 1e-5


def refused(*arguments: Any, call: Callable[..., Any] = ra.virtual_attention, **options: Any) -> str:
    with pytest.raises((ra.InvalidInput, ra.Unsupported)) as told:
        call(*arguments, **options)
    return str(told.value)


def test_what_is_refused() -> None:
    case = make_latents("mla", 8, ra.Causal())
    (c, rope), weights = case.rows, case.weights
    rows = ra.Rows(c, rope, expand=case.expand, weights=weights)
    assert "no pattern" in refused(case.q, rows, ranks=2)
    assert "leave out v=" in refused(case.q, rows, c, "Causal()", ranks=2)
    assert "without expand=" in refused(c, call=ra.Rows)
    assert "expected a function" in refused(c, call=ra.Rows, expand=3)
    assert "chunk" in refused(c, call=ra.Rows, expand=case.expand, chunk=0)
    assert "expected rows or auto" in refused(c, call=ra.Rows, expand=case.expand, travel="heads")
    for tensors, text in (((c[0], rope), "rows must be tensors"), ((c[:, :, 1:], rope), "one batch, the same tokens")):
        wrong = ra.Rows(*tensors, expand=case.expand, weights=weights)
        assert text in refused(case.q, wrong, "Causal()", ranks=2)
    complex_rows = ra.Rows(c.to(torch.complex64), rope, expand=case.expand, weights=weights)
    assert "complex64 are not supported" in refused(case.q, complex_rows, "Causal()", ranks=2)
    for expand, text in (
        (lambda c, r: c, "expected k and v"),
        (lambda c, r: (c.repeat(1, 1, 2, 1),) * 2, "(2, 1, 2, 16), (2, 1, 2, 16) for one row"),
        (lambda c, r: (c[:, :, :1],) * 2, "same head dim"),
    ):
        assert text in refused(case.q, ra.Rows(c, rope, expand=expand), "Causal()", ranks=2)
    first = ra.Rows(c, rope, expand=lambda c, r: (x[:, :, :1] for x in ()), weights=())
    assert "expand= returned" in refused(case.q, first, "Causal()", ranks=2)
    not_by_row = ra.Rows(c, rope, expand=lambda c, r: (torch.cat([c, r], -1)[:, :, :1, :12], r[:, :, :1]))
    assert "make one of each row" in refused(case.q, not_by_row, "Causal()", ranks=2)


def on_ranks(rank: int) -> dict[str, Any]:
    """How far real ranks are from virtual ones, and what ranks with other rows are told."""
    size, found = dist.get_world_size(), {}
    layout = ra.make_layout("zigzag", tokens=40, ranks=size)
    for kind, travel in (("mla", "rows"), ("int8", "rows"), ("mixed", "auto")):
        whole = make_latents(kind, 40, ra.Causal() & ra.Window(30), chunk=4, travel=travel)
        options: dict[str, Any] = {"layout": "zigzag", "machine": H100.changed(matmul=1e3)}
        out, lse, *grads = whole.solve(ranks=size, **options)
        leaves, q, rows, weights = whole.leaves()
        q, *rows = (layout.shard_tensor(x, rank) for x in (q, *rows))
        given = ra.Rows(*rows, expand=whole.expand, weights=weights, chunk=4, travel=travel)
        mine, of_rows = ra.ring_attention(q, given, whole.pattern, return_lse=True, **options)
        grad, grad_lse = whole.cotangents(out, lse)
        loss = (mine * layout.shard_tensor(grad, rank)).sum() + (
            of_rows * layout.shard_tensor(grad_lse, rank, -1)
        ).sum()
        local = torch.autograd.grad(loss, leaves)
        for x in local:
            dist.all_reduce(x)
        same = torch.equal(mine, layout.shard_tensor(out, rank))
        found[kind] = (same, max(map(distance, local, grads)))

    def call(*tensors: Tensor, expand: Any, travel: str = "rows", group: Any = None) -> None:
        given = ra.Rows(*tensors, expand=expand, travel=travel)
        machine = H100.changed(matmul=1e3)
        ra.ring_attention(q.detach(), given, ra.Causal(), layout="zigzag", machine=machine, group=group)

    c = torch.zeros(2, 1, q.shape[2], 12, dtype=torch.float64)
    other = torch.zeros(2, 1 + rank, q.shape[2], 3, dtype=torch.float64)
    found["other rows"] = told_by(lambda: call(c, other, expand=lambda c, x: (c, c)))

    def fails(c: Tensor) -> Any:
        if rank == 0:
            raise MemoryError("planted")
        return c, c

    found["raises"] = told_by(lambda: call(c, expand=fails))

    def fails_late(c: Tensor) -> Any:
        return fails(c) if c.shape[2] > 1 else (c, c)

    groups = {travel: dist.new_group() for travel in ("auto", "rows")}  # whose calls end with the error
    for travel, group in groups.items():
        how = {"travel": travel, "group": group}
        found[travel] = told_by(lambda how=how: call(c, expand=fails_late, **how))
        # A rank that needed nothing more of the failing one hears of it in the next call.
        found[travel] += told_by(lambda how=how: call(c, expand=lambda c: (c, c), **how))
    return found


def test_real_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, found in enumerate(run_ranks(on_ranks, 3, timeout=240)):
        for kind in ("mla", "int8", "mixed"):
            same, apart = found[kind]
            assert same and apart < EXACT, (rank, found)
        assert "Mismatch" in found["other rows"] and "block" in found["other rows"]
        assert "planted" in found["raises"]
        assert all("planted" in found[travel] for travel in ("auto", "rows")), [found[x] for x in ("auto", "rows")]
