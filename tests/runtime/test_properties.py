"""Properties of the executor on virtual ranks: random problems, bytes, causality, repetition, bad numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Result, dense, errors, make_case, solve
from strategies import problems
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import Causal, Full, Pattern, Sinks, Window, make_plan
from ringattn.kernels import get_kernel
from ringattn.kernels.reference import Reference
from ringattn.runtime.passes import backward, forward
from ringattn.runtime.program import forward_program
from ringattn.runtime.ring import Job
from ringattn.transport.base import Message, Post, Wait
from ringattn.transport.virtual import VirtualRanks

SCHEDULES = st.sampled_from(["ring", "direct", "allgather", "double_ring", "ulysses"])
ROTATE = st.sampled_from(["auto", "kv", "q"])
Problem = tuple[Pattern, int, int, str]


def fitting(schedule: str, ranks: int, kv_heads: int) -> str:
    """The schedule on that many ranks: nodes of the largest size that divides them, Ulysses groups of two."""
    if schedule == "ulysses":
        return "direct" if ranks % 2 or kv_heads % 2 else "ulysses(2, direct)"
    inner = max(n for n in range(1, ranks + 1) if ranks % n == 0 and (n < ranks or n == 1))
    return f"double_ring({inner})" if schedule == "double_ring" else schedule


@given(problems(), SCHEDULES, ROTATE, st.sampled_from([(1, 1), (4, 2), (3, 1), (4, 4)]), st.booleans())
@settings(max_examples=50)
def test_random_problems_equal_the_oracle(
    problem: Problem, schedule: str, rotate: str, heads: tuple[int, int], lse: bool
) -> None:
    """Invariant 4: gradients come home, for a random cotangent of out and of lse."""
    pattern, tokens, ranks, layout = problem
    schedule = fitting(schedule, ranks, heads[1])
    case = make_case(tokens, *heads, torch.float64, batch=1, dim=8, lse=lse)
    oracle = dense(case, torch.from_numpy(pattern.mask(tokens, heads[0])))
    options = {"ranks": ranks, "layout": layout, "schedule": schedule, "rotate": rotate, "return_lse": lse}
    assert max(errors(solve(ra.virtual_attention, case, pattern, **options), oracle)) <= 1e-12


@given(problems(), SCHEDULES, ROTATE)
@settings(max_examples=40)
def test_bytes_counted_are_the_bytes_planned(problem: Problem, schedule: str, rotate: str) -> None:
    """Invariant 3, on virtual ranks; for real ranks see tests/transport."""
    pattern, tokens, ranks, layout = problem
    schedule = fitting(schedule, ranks, 2)
    plan = make_plan(
        pattern, tokens=tokens, ranks=ranks, layout=layout, schedule=schedule, heads=4, kv_heads=2, head_dim=8,
        value_dim=4, dtype="bfloat16", batch=2, rotate=rotate,
    )  # fmt: skip
    q, k, v = (torch.randn(2, h, tokens, d).bfloat16() for h, d in ((4, 8), (2, 8), (2, 4)))
    jobs = [Job(plan, rank, get_kernel("reference", q, k, v), 1.0) for rank in range(ranks)]
    shards = [[plan.layout.shard_tensor(x, rank) for x in (q, k, v)] for rank in range(ranks)]
    transport = VirtualRanks(ranks)
    results = transport.run([forward(job, q, (k, v), save=True) for job, (q, k, v) in zip(jobs, shards, strict=True)])
    for rank, counters in enumerate(transport.counters):
        assert (counters.sent_bytes, counters.sent_messages) == (plan.bytes_sent(rank), plan.messages(rank))
        counters.reset()
    transport.run(
        [
            backward(job, result.out, None, q, (k, v), result)
            for job, (q, k, v), result in zip(jobs, shards, results, strict=True)
        ]
    )
    for rank, counters in enumerate(transport.counters):
        planned = plan.bytes_sent(rank, backward=True), plan.messages(rank, backward=True)
        assert (counters.sent_bytes, counters.sent_messages) == planned
    assert sum(c.received_bytes for c in transport.counters) == plan.bytes_sent(backward=True)


@given(
    st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 6),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
    st.sampled_from(
        [
            *(Causal(), Causal() & Window(5), Causal() & (Sinks(2) | Window(3))),
            *(ra.Dilated((8, 16), (1, 2), causal=True, mix=mix) for mix in ("lse", "group")),
            Causal() & ra.local_window(4, blocks=1),
        ]
    ),
    st.sampled_from(["kv", "q"]),
)
@settings(max_examples=60)
def test_the_future_never_changes_the_past(
    cut: tuple[int, int], ranks: int, layout: str, pattern: Pattern, rotate: str
) -> None:
    """Invariant 5: bit for bit, forward and backward."""
    tokens, edge = cut
    case = make_case(tokens, 2, 1, torch.float32)
    results = []
    for change in (0.0, 3.0):
        q, k, v = case.leaves()
        with torch.no_grad():
            for x in (q, k, v):
                x[:, :, edge:] += change
        out = ra.virtual_attention(q, k, v, pattern, ranks=ranks, layout=layout, rotate=rotate)
        past = case.grad.clone()
        past[:, :, edge:] = 0  # a loss of the past
        grads = torch.autograd.grad(out, (q, k, v), past)
        assert all((g[:, :, edge:] == 0).all() for g in grads), "the future has no part in the past's loss"
        results.append((out[:, :, :edge], *(g[:, :, :edge] for g in grads)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_repeated_runs_are_bitwise_equal(deterministic: bool, rotate: str) -> None:
    case = make_case(200, 4, 2, torch.bfloat16)
    runs = []
    for _ in range(2):
        q, k, v = case.leaves()
        options = {"layout": "zigzag", "deterministic": deterministic, "rotate": rotate}
        out = ra.virtual_attention(q, k, v, Causal(), ranks=4, **options)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), case.grad)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_block_changed_in_flight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The virtual transport makes a race show: here the executor writes to a block that is being sent."""
    honest = Reference.forward

    def scribble(kernel, q, k, v, work, scale):  # type: ignore[no-untyped-def]
        result = honest(kernel, q, k, v, work, scale)
        k.zero_()
        return result

    x = torch.randn(1, 1, 64, 8)
    monkeypatch.setattr(Reference, "forward", scribble)
    with pytest.raises(AssertionError, match="written to while in flight"):
        ra.virtual_attention(x, x.clone(), x.clone(), Full(), ranks=4, kernel="reference")


def test_a_block_read_too_early_is_poison() -> None:
    seen = []

    def program(rank: int):  # type: ignore[no-untyped-def]
        data = torch.ones(64, dtype=torch.float32).view(torch.uint8)
        target = torch.zeros(256, dtype=torch.uint8)
        ticket = yield Post((Message(1 - rank, 0, data),), (Message(1 - rank, 0, target),), "step 0")
        seen.append(bool(target.view(torch.float32).isnan().all()))
        yield Wait(ticket)
        assert (target.view(torch.float32) == 1).all()

    VirtualRanks(2).run([program(0), program(1)])
    assert seen == [True, True]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    def program(rank: int):  # type: ignore[no-untyped-def]
        ticket = yield Post((), (Message(1 - rank, 7, torch.zeros(4, dtype=torch.uint8)),), "step 5")
        yield Wait(ticket)

    with pytest.raises(ra.CommFailure, match="rank 0, step 5: receive from rank 1"):
        VirtualRanks(2).run([program(0), program(1)])


def test_only_two_receive_buffers_per_rank() -> None:
    plan = ra.make_plan(Full(), tokens=1024, ranks=8, heads=2, head_dim=16, schedule="ring")
    kernel = get_kernel("auto", *[torch.zeros(1, 2, 128, 16)] * 3)
    program = forward_program(plan, 3, kernel, torch.device("cpu"), save=False)
    message = plan.part_bytes(plan.for_rank(3).forward[0].sends[0].parts[0])
    assert len(program.memory.stores) == 1 and 2 * message <= program.memory.stores[0] < 3 * message


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_gradients_of_lse_alone_and_of_nothing(rotate: str) -> None:
    case = make_case(40, 2, 2, torch.float64, lse=True)
    q, k, v = case.leaves()
    out, lse = ra.virtual_attention(q, k, v, Causal(), ranks=3, return_lse=True, rotate=rotate)
    assert case.grad_lse is not None
    found = torch.autograd.grad(lse, (q, k, v), case.grad_lse)
    zero = dense(
        type(case)(q, k, v, torch.zeros_like(case.grad), case.grad_lse), torch.from_numpy(Causal().mask(40, 2))
    )
    assert max(errors(Result(out, lse, found), Result(out.double(), lse, zero.grads))) <= 1e-12


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("pattern", [Causal(), Window(30, 20)])
def test_keys_that_share_a_large_part(pattern: Pattern, rotate: str) -> None:
    """Logits of 374 and more or less: gradients in fp32 are as exact as in one call of torch, on however many ranks."""
    case = make_case(160, 4, 2, torch.float64, batch=2, dim=32, lse=True)
    shared = torch.nn.functional.normalize(torch.randn(32, dtype=torch.float64, generator=torch.manual_seed(4)), dim=0)
    case = replace(case, q=case.q + 20 * shared, k=case.k + 374 / 20 * 32**0.5 * shared)
    mask = torch.from_numpy(pattern.mask(160, 4))

    def gradients(attend: Callable[..., Any], lse: bool, **options: Any) -> tuple[torch.Tensor, ...]:
        leaves = [x.float().requires_grad_() for x in case.inputs]
        out = attend(*leaves, **options)
        return torch.autograd.grad(
            out, leaves, (case.grad.float(), case.grad_lse.float()) if lse else case.grad.float()
        )

    def off(found: tuple[torch.Tensor, ...], lse: bool) -> list[float]:
        exact = dense(case if lse else replace(case, grad_lse=None), mask).grads
        return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    torchs = off(gradients(scaled_dot_product_attention, False, attn_mask=mask.bool(), enable_gqa=True), False)
    for lse in (False, True):
        options = {"pattern": pattern, "rotate": rotate, "layout": "zigzag", "return_lse": lse}
        for ranks, kernel in ((1, "auto"), (2, "reference"), (6, "auto")):
            found = off(gradients(ra.virtual_attention, lse, ranks=ranks, kernel=kernel, **options), lse)
            assert all(a <= 2 * b for a, b in zip(found, torchs, strict=True)), (ranks, kernel, lse, found, torchs)


@pytest.mark.parametrize("kind", ["plain", "offload", "checkpoint", "selective", "varying"])
def test_double_backward_is_refused(kind: str) -> None:
    """Each gradient of a graph refuses a derivative by each input; a cotangent without a gradient hides none."""
    case = make_case(16, 2, 1, torch.float64)
    leaves = case.leaves()
    context = {"context_fn": ra.keep_attention} if kind == "selective" else {}

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        if kind in ("checkpoint", "selective"):
            return checkpoint(ra.attention, *inputs, Causal(), use_reentrant=False, **context)
        return ra.attention(*inputs, Causal(), offload="host" if kind == "offload" else None)

    cotangent = case.grad.requires_grad_(kind == "varying")
    grads = torch.autograd.grad(attend(*leaves), leaves, cotangent, create_graph=True)
    for first, last in itertools.product(grads, leaves):
        with pytest.raises(ra.Unsupported, match="no second derivative"):
            torch.autograd.grad(first.square().sum(), last, retain_graph=True)
    expected = torch.autograd.grad(attend(*leaves), leaves, cotangent)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), "the first derivative is right"


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_backward_twice_over_a_kept_graph(rotate: str) -> None:
    case = make_case(40, 2, 1, torch.float64)
    q, k, v = case.leaves()
    out = ra.virtual_attention(q, k, v, Causal(), ranks=4, layout="zigzag", rotate=rotate)
    first = torch.autograd.grad(out, (q, k, v), case.grad, retain_graph=True)
    second = torch.autograd.grad(out, (q, k, v), case.grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_any_strides_are_taken() -> None:
    case = make_case(60, 2, 2, torch.float32)
    plain = ra.virtual_attention(*case.inputs, Causal(), ranks=3)
    odd = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in case.inputs]
    assert torch.equal(ra.virtual_attention(*odd, Causal(), ranks=3), plain)
    shifted = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in case.inputs]
    assert torch.equal(ra.virtual_attention(*shifted, Causal(), ranks=3), plain)


@given(problems(), SCHEDULES, st.sampled_from(["kv", "q"]))
@settings(max_examples=25)
def test_what_travels_may_be_rounded(problem: Problem, schedule: str, rotate: str) -> None:
    """In bf16 fewer bytes are sent, as planned, and results differ by the rounding of what was sent, no more."""
    pattern, tokens, ranks, layout = problem
    schedule = fitting(schedule, ranks, 2)
    case = make_case(tokens, 4, 2, torch.float32, batch=1, dim=8)
    results, sent = [], []
    for as_sent in (None, torch.bfloat16):
        q, k, v = case.leaves()
        options = {"ranks": ranks, "layout": layout, "schedule": schedule, "comm_dtype": as_sent, "rotate": rotate}
        out = ra.virtual_attention(q, k, v, pattern, **options)
        results.append((out, *torch.autograd.grad(out, (q, k, v), case.grad)))
        plan = make_plan(pattern, tokens=tokens, heads=4, kv_heads=2, head_dim=8, **options)
        sent.append(plan.bytes_sent() + plan.bytes_sent(backward=True))
    assert sent[1] <= sent[0] and (sent[1] < sent[0] or not sent[0] or "ulysses" in schedule)
    # A gradient of nothing is what rounded gradients of out, against their exact sums, leave of numbers of this size.
    largest = max((float(x.detach().abs().max()) for x in results[0] if x.numel()), default=0.0)
    size = largest if rotate == "q" else 0.0
    for exact, rounded in zip(*results, strict=True):
        bound = 0.02 * max(size, float(exact.detach().abs().max())) if exact.numel() else 0.0
        assert (exact - rounded).abs().max() <= bound + 1e-6 * max(1.0, largest) if exact.numel() else True
        if sent[1] == sent[0]:
            assert torch.equal(exact, rounded)


def test_wrong_wire_dtypes() -> None:
    q = k = v = torch.zeros(1, 1, 8, 8)
    for as_sent, words in (
        ("float16", "may travel as float32 or bfloat16"),
        ("int8", "comm_dtype=int8"),
        (3, "comm_dtype=3: expected"),
    ):
        with pytest.raises(ra.InvalidInput, match=words):
            ra.virtual_attention(q, k, v, Causal(), ranks=2, comm_dtype=as_sent)
    with pytest.raises(ra.InvalidInput, match="may travel as bfloat16"):
        ra.virtual_attention(q.half(), k.half(), v.half(), Causal(), ranks=2, comm_dtype=torch.float32)
