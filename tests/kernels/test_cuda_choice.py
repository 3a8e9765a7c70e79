"""What kernel=auto takes on CUDA, on emulated ops and interpreted Triton kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from emulated_ops import EmulatedOps, emulate
from oracle import Case, dense, error, make_case

import ringattn as ra
from ringattn import kernels
from ringattn.call import compile as compiling
from ringattn.errors import Unsupported
from ringattn.kernels import cuda, get_kernel, merges
from ringattn.kernels.cuda import Cuda
from ringattn.kernels.visit import Config, Tiles, VisitPass, VisitTriton
from ringattn.plan.work import Work

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton, whose interpreter needs no GPU here"
)
SMALL = Config(16, 4, 1)
LIMIT = 2e-2


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedOps]:
    """Emulated ops, "cuda" for CPU tensors, and small tiles."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    monkeypatch.setitem(kernels.AUTO, "cpu", "cuda")
    monkeypatch.setattr(VisitTriton, "tiles", Tiles(32, SMALL, SMALL, SMALL))
    monkeypatch.setattr(cuda, "LARGE", 24)
    yield emulate(monkeypatch)
    forget()


def forget() -> None:
    """The next call looks anew whether Triton can run, and which kernel it takes."""
    for name in ("fused", "visit_triton"):
        sys.modules.pop(f"ringattn.kernels.{name}", None)
    merges.missing.cache_clear()
    merges._by_triton.cache_clear()
    compiling._calls.clear()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the visit kernel's launches."""
    names: list[str] = []
    run = VisitPass._run

    def counted(self: VisitPass, group: list[Any]) -> None:
        names.append(group[0].name)
        run(self, group)

    monkeypatch.setattr(VisitPass, "_run", counted)
    return names


def case_of(tokens: int = 48) -> Case:
    return make_case(tokens, 2, 1, torch.bfloat16, batch=1, dim=16)


def differs(case: Case, pattern: ra.Pattern, **options: Any) -> float:
    """The largest error of out and of the gradients of a call on two virtual ranks."""
    leaves = case.leaves()
    out = ra.virtual_attention(*leaves, pattern, ranks=2, layout="contiguous", schedule="ring", **options)
    found = [out, *torch.autograd.grad(out, leaves, case.grad)]
    truth = dense(case, torch.from_numpy(pattern.mask(case.q.shape[2], 2)))
    return max(error(x, exact) for x, exact in zip(found, (truth.out, *truth.grads), strict=True))


def test_masks_are_computed_by_visits_and_large_calls_by_ops(ops: EmulatedOps, launches: list[str]) -> None:
    case = case_of()
    assert differs(case, ra.Causal()) < LIMIT
    assert not launches and ops.calls
    called = len(ops.calls)
    assert differs(case, ra.Causal() & ra.Window(9)) < LIMIT
    assert len(ops.calls) == called
    assert sorted({*launches}) == ["dkv", "dq", "forward"]
    short = case_of(20)  # each rank has fewer rows than a large call
    assert differs(short, ra.Causal()) < LIMIT
    assert len(ops.calls) == called


def test_a_refused_visit_kernel_is_replaced(
    ops: EmulatedOps, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason in `explain`; a call that names it fails."""
    monkeypatch.setattr(VisitTriton, "missing", classmethod(lambda cls: "its self-test failed"))
    case, pattern = case_of(), ra.Causal() & ra.Window(9)
    assert differs(case, pattern) < LIMIT
    assert not launches and ops.calls
    kernel = get_kernel("auto", *case.inputs)
    assert "not visit: kernel visit: its self-test failed" in str(kernel.explain(windowed(48)))
    with pytest.raises(Unsupported, match="kernel visit: its self-test failed; try kernel=auto"):
        ra.attention(*case.inputs, pattern, kernel="visit")
    assert get_kernel("auto", *case.inputs, softcap=5.0).name == "reference"


def windowed(rows: int) -> Work:
    return Work(range(2), range(1), range(rows), (range(rows),), 0, 9)


def test_explanations_name_the_other(ops: EmulatedOps) -> None:
    case = case_of()
    kernel = get_kernel("auto", *case.inputs)
    assert isinstance(kernel, Cuda)
    assert "one launch of kernel visit; not aten_cuda" in str(kernel.explain(windowed(48)))
    causal = Work(range(2), range(1), range(48), (range(48),), 0, None)
    assert "not visit: one large dense or causal call" in str(kernel.explain(causal))


def test_options_that_no_op_has_go_to_visits(ops: EmulatedOps, launches: list[str]) -> None:
    q, k, v = case_of().inputs
    capped = ra.attention(q, k, v, ra.Causal(), softcap=3.0)
    truth = ra.attention(*(x.double() for x in (q, k, v)), ra.Causal(), softcap=3.0, kernel="reference")
    assert error(capped, truth) < LIMIT and launches == ["forward"] and not ops.calls


def test_steps_of_a_cache(ops: EmulatedOps, launches: list[str]) -> None:
    """They are single calls: by ops, or by the reference for options that these do not have."""
    q, k, v = case_of(12).inputs
    with torch.no_grad():
        for softcap in (None, 3.0):
            cache = ra.KVCache(ra.Causal(), layers=1, ranks=2)
            out = cache.step(0, q, k, v, softcap=softcap)
            exact = [x.double() for x in (q, k, v)]
            truth = ra.attention(*exact, ra.Causal(), softcap=softcap, kernel="reference")
            assert error(out, truth) < LIMIT and not launches
        with pytest.raises(Unsupported, match="kernel visit computes no steps of a cache; try kernel=auto"):
            ra.KVCache(ra.Causal(), layers=1, ranks=2).step(0, q, k, v, kernel="visit")
