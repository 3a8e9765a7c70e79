"""Recurrent layers over ranks: equal to steps of single tokens, and on real ranks to virtual ones bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import recurrence_cases
import torch
from recurrence_cases import KINDS, draw, draw_hard, error, oracle, run_virtual
from shares import share_of

import ringattn as ra
from ringattn.recurrence import runs

Run = Callable[..., list[Any]]
#: Random calls of each kind.
CASES = share_of(30)


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_equal_single_steps(kind: str) -> None:
    for seed in range(CASES):
        case = draw(seed, kind)
        expected, one = oracle(case), run_virtual(case, 1)
        bound = min(max(4 * error(one, expected), 1e-13), 1e-10)
        assert error(run_virtual(case), expected) <= bound, (seed, case.layout.name, case.documents)


@pytest.fixture
def by_scan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """States travel by scans, as they do between many ranks."""
    monkeypatch.setattr(runs, "MOST_GATHERED", 0)
    runs.plan_states.cache_clear()
    yield
    runs.plan_states.cache_clear()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_scan_composes_the_same_states(kind: str, by_scan: None) -> None:
    for seed in range(share_of(8)):
        case = draw(seed + 1000, kind, ranks=5)
        expected = oracle(case)
        assert error(run_virtual(case), expected) <= max(8 * error(run_virtual(case, 1), expected), 1e-12), seed


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_equals_virtual_and_the_plan(run_ranks: Run, ranks: int) -> None:
    count = share_of(42)
    assert run_ranks(recurrence_cases.equals_virtual, ranks, count, timeout=120) == [count] * ranks


@pytest.mark.multi
def test_wrong_calls_raise_on_every_rank(run_ranks: Run) -> None:
    words = (
        "rank 0 holds 24 runs of consecutive tokens", "disagree about layout", "disagree about tensors",
        "the shards do not fit", "x must be a floating-point tensor [B C n]", "disagree about documents",
        "lengths sum to 12", "documents=[24, 24]: give Documents", "but K is 0", "with K=4 needs K - 1",
        "disagree about activation", "disagree about requires_grad", "disagree about tensors",
        "at stage", "disagree about scale", "initial_state (1, 24, 2, 4) is read as [B HV K V]",
        *(
            f"{layer} has no reproducible=: maps of runs are composed"
            for layer in ("causal_conv1d", "affine_scan", "causal_conv1d", "gated_delta_rule", "selective_scan", "ssd")
        ),
        "fine",
    )  # fmt: skip
    told = run_ranks(recurrence_cases.refusals, 2, timeout=60)
    for word, *texts in zip(words, *told, strict=True):
        assert all(word in text for text in texts), (word, texts)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_strong_decays_and_second_derivatives_are_exact(kind: str) -> None:
    for seed in range(share_of(6)):
        case = draw_hard(seed, kind)
        found = run_virtual(case)
        assert all(x.dtype == torch.float32 for x in found.values())
        assert error(found, oracle(case)) <= 5e-6, (seed, case.autocast, case.twice)


@pytest.mark.multi
def test_hard_calls_are_exact_on_ranks(run_ranks: Run) -> None:
    assert max(run_ranks(recurrence_cases.hard_calls, 2, 100, 14, timeout=120)) <= 5e-6


@pytest.mark.multi
def test_derivatives_of_one_input_and_of_different_orders(run_ranks: Run) -> None:
    for first, *others in run_ranks(recurrence_cases.of_one_input, 3, timeout=60):
        assert first == others[-1] == "fine" and "disagree about which backward" in others[0]


@pytest.mark.parametrize("log", [-1e3, -math.inf])
@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "ssd"])
def test_a_strong_decay_beside_weak_ones(kind: str, log: float) -> None:
    """A token whose decay ends all before it, in one run and at its borders; the others are not rounded to it."""
    case = replace(draw(3, kind, ranks=2, plain=True), padding=None)
    x = case.tensors
    for at in (0, 1, case.layout.tokens // 2, case.layout.tokens - 1):
        if kind == "ssd":
            x["dt"], x["A"] = torch.full_like(x["dt"], 1e-3), -torch.ones_like(x["A"])
            x["dt"][:, at] = -max(log, -1e7)
            x["x"][:, at] *= 1e-3
        else:
            x["g"] = torch.full_like(x["g"], -1e-3)
            x["g"][:, at] = log
        single = replace(case, tensors={name: y.float() for name, y in x.items()})
        assert error(run_virtual(single), oracle(single)) <= 2e-6, at


@pytest.mark.parametrize("kind", KINDS)
def test_results_can_be_modified_in_place(kind: str) -> None:
    case = draw(5, kind, ranks=3)
    given = {name: x.clone().requires_grad_() for name, x in case.tensors.items()}

    def gradients(double: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        results = [double(x) for x in case.call(given, case.padding, ranks=3)]
        grads = torch.autograd.grad([x.square().sum() for x in results], list(given.values()), materialize_grads=True)
        return [*results, *grads]

    apart = zip(gradients(lambda x: x.mul_(2)), gradients(lambda x: x * 2), strict=True)
    assert all(torch.equal(a, b) for a, b in apart)
    assert all(torch.equal(given[name], x) for name, x in case.tensors.items())


@pytest.mark.parametrize("kind", ["gated_delta_rule", "ssd", "selective_scan"])
def test_half_precision_keeps_states_in_fp32(kind: str) -> None:
    case = draw(11, kind, ranks=2)
    out, state = case.call({k: x.bfloat16() for k, x in case.tensors.items() if k != "S"}, case.padding, ranks=2)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    exact = case.call({k: x.bfloat16().double() for k, x in case.tensors.items() if k != "S"}, case.padding, ranks=2)
    assert error({"out": out, "state": state}, dict(zip(("out", "state"), exact, strict=True))) < 2**-7


def test_a_function_of_the_user_computes_the_pieces() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 777, 2, 16), dim=-1) for _ in "qk")
    v, g, beta = torch.randn(1, 777, 2, 16), -torch.rand(1, 777, 2), torch.rand(1, 777, 2)
    expected, final = modeling.torch_chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    calls = []

    def step(*given: Any, scale: float, cu_seqlens: Any, initial_state: Any, output_final_state: bool) -> Any:
        calls.append(len(cu_seqlens) - 1)
        options = {"initial_state": initial_state, "output_final_state": output_final_state}
        return modeling.torch_chunk_gated_delta_rule(*given, **options)  # of a single piece here

    out, state = ra.gated_delta_rule(
        q, k, v, g, beta, layout="rows(100, 500, 177)", ranks=3, output_final_state=True, function=step
    )
    assert calls == [1] * 5  # the last rank's states go nowhere
    assert (out - expected).abs().max() < 1e-5 and (state - final).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
def test_bytes_do_not_depend_on_the_length(name: str) -> None:
    sent = set()
    for tokens in (8_192, 1 << 20):
        layout = ra.make_layout(name, tokens=tokens, ranks=8)
        plan = runs.plan_states(layout, None, 1 << 20, ra.get_machine("cpu"))
        sent.add(tuple(plan.messages.items()))
    assert len(sent) == 1


def test_many_ranks_scan_and_documents_cut_the_exchange() -> None:
    machine = ra.get_machine("h100_nvlink_ib")
    layout = ra.make_layout("zigzag", tokens=1 << 16, ranks=64)
    plan = runs.plan_states(layout, None, 1 << 24, machine)
    assert plan.way == "scan" and len(plan.rounds) == 1 + 7  # 127 runs
    small = runs.plan_states(layout, None, 1 << 6, machine)
    assert small.way == "gather" and small.seconds(machine) < plan.seconds(machine)
    apart = runs.plan_states(layout, ra.Documents([512] * 128), 1 << 20, machine)
    assert not apart.rounds  # every run is a document
    lone = runs.plan_states(layout, ra.Documents([1024] * 64), 1 << 20, machine)
    assert len(lone.rounds[0]) == 64 and all(hop.target - hop.source == 1 for hop in lone.rounds[0])
    halo = runs.plan_rows(ra.make_layout("rows(1, 1, 1, 5)", tokens=8, ranks=4), None, 3, 4)
    assert [tuple(hop) for hop in halo.rounds[0]] == [(0, 1, 1), (0, 2, 1), (1, 2, 1), (0, 3, 1), (1, 3, 1), (2, 3, 1)]


def test_layouts_of_other_positions_are_refused() -> None:
    x = torch.randn(1, 8, 2)
    with pytest.raises(ra.Unsupported, match="all positions from 0 on"):
        ra.affine_scan(x, x, layout=ra.make_layout("shifted(zigzag, 8)", tokens=8, ranks=2), ranks=2)
    with pytest.raises(ra.InvalidInput, match="does not broadcast"):
        ra.affine_scan(torch.randn(1, 8, 3), x, layout="zigzag", ranks=2)
    with pytest.raises(ra.InvalidInput, match="ranks=2 asks for virtual ranks"):
        ra.affine_scan(x, x, layout="zigzag", ranks=2, group=object())
    with pytest.raises(TypeError, match="size"):
        ra.affine_scan(x, x, layout="zigzag", ranks=2, size=2)
