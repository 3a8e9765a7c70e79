"""The traps of attention libraries, on every backend that runs on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_device import DEVICE
from oracle import Case, Result, dense, error, solve_calls, trimmed, visible

from ringattn import InvalidInput, Unsupported
from ringattn.kernels import KERNELS, available, get_kernel
from ringattn.kernels.base import Kernel
from ringattn.kernels.softmax import merge, merge_
from ringattn.plan.work import Work

#: The kernels of single works; those of whole visits have tests of their own.
BACKENDS = [
    name for name, state in available().items() if state == "ok" and issubclass(KERNELS[name.partition(":")[0]], Kernel)
]
SHAPES = [(1, 1), (7, 13), (13, 7), (64, 64), (300, 300), (290, 700), (700, 290)]
BANDS = [(None, None), (0, None), (-3, None), (None, 0), (-5, 9), (-1, 300), (2, 40), (None, 5)]


def device(name: str) -> str:
    """The device that a kernel is tested on: the CUDA kernels on RINGATTN_TEST_DEVICE if it is set, else on "cuda"."""
    return ("cuda" if DEVICE == "cpu" else DEVICE) if name.startswith("aten_cuda") else "cpu"


def dtypes(name: str) -> list[torch.dtype]:
    if name == "aten_cuda:efficient" or name == "aten_cuda":
        return [torch.float32, torch.bfloat16, torch.float16]
    if name.startswith("aten_cuda"):
        return [torch.bfloat16, torch.float16]
    return [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def case_of(work: Work, name: str, dtype: torch.dtype) -> Case:
    source = torch.Generator().manual_seed(3)
    sizes = ((4, len(work.q)), (2, work.keys), (2, work.keys), (4, len(work.q)))
    made = [torch.randn(2, h, n, 16, generator=source, dtype=torch.float64) for h, n in sizes]
    return Case(*(x.to(dtype).to(device(name)) for x in made), scale=0.25)


def check(found: Result, case: Case, work: Work) -> None:
    """out, lse and the gradients are those of dense attention in fp64."""
    truth = dense(case, visible(work).to(case.q.device))
    limit = LIMIT[case.q.dtype]
    assert error(found.out, truth.out) <= limit and error(found.lse, truth.lse) <= limit, (work, case.q.dtype)
    for a, b in zip(found.grads, truth.grads, strict=True):
        assert error(a, b) <= 4 * limit, (work, case.q.dtype)


LIMIT = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def test_a_named_device_is_tested() -> None:
    """No run that asks for a CUDA device passes by testing the CPU."""
    assert DEVICE == "cpu" or "aten_cuda" in BACKENDS, f"RINGATTN_TEST_DEVICE={DEVICE}: {available()}"


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_band_and_rectangle(name: str, shape: tuple[int, int]) -> None:
    """Causal corners when Lq != Lk, windows, and bounds that bind on one side only."""
    for place, (lo, hi) in enumerate(BANDS, SHAPES.index(shape)):
        work = trimmed(*shape, lo, hi)
        if work is None:
            continue
        for dtype in dtypes(name)[place % 2 :: 2]:  # the next band or shape has the others
            case = case_of(work, name, dtype)
            check(solve_calls(get_kernel(name, *case.inputs), case, work), case, work)


@pytest.mark.parametrize("name", BACKENDS)
def test_strided_and_overlapping_views(name: str) -> None:
    dtype = dtypes(name)[0] if name.startswith("aten_cuda") else torch.float32
    work = Work(range(4), range(2), range(40), (range(40),))
    views = [torch.randn(2, h, 120, 16).to(dtype).to(device(name))[:, :, 1:120:3] for h in (4, 2, 2, 4)]
    turned = [x.mT.contiguous().mT for x in views]  # the last stride is not 1
    for tensors in (views, turned):
        case = Case(*tensors, scale=0.25)
        check(solve_calls(get_kernel(name, *case.inputs), case, work), case, work)


@pytest.mark.parametrize("name", BACKENDS)
def test_large_logits_stay_finite(name: str) -> None:
    work = Work(range(4), range(2), range(64), (range(64),), 0, None)
    case = case_of(work, name, dtypes(name)[0])
    case = replace(case, q=case.q * 100, k=case.k * 100)
    found = solve_calls(get_kernel(name, *case.inputs), case, work)
    assert found.out.isfinite().all() and found.lse.isfinite().all()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_bad_key_reaches_every_row_that_sees_it_and_no_other_head(name: str) -> None:
    dtype = dtypes(name)[-1]
    for lo, hi in ((0, None), (-3, 20)):
        work = Work(range(4), range(2), range(300), (range(300),), lo, hi)
        case = case_of(work, name, dtype)
        case.v[0, 1, 150, 0] = torch.nan
        case.k[1, 0, 200, 5] = torch.nan
        out = solve_calls(get_kernel(name, *case.inputs), case, work).out
        seen = visible(work).to(out.device)
        assert out[0, 2:, :, 0][:, seen[:, 150]].isnan().all() and out[1, :2][:, seen[:, 200]].isnan().all()
        assert out[0, :2].isfinite().all() and out[1, 2:].isfinite().all()


def test_merging_into_new_tensors_is_differentiable() -> None:
    """`merge` gives what `merge_` gives, and finite gradients where neither, one or both partials are empty."""
    source = torch.Generator().manual_seed(4)
    out, part = (torch.randn(1, 1, 4, 3, generator=source, dtype=torch.float64) for _ in range(2))
    lse, part_lse = (torch.randn(1, 1, 4, generator=source, dtype=torch.float64) for _ in range(2))
    for x, total, rows in ((out, lse, [1, 3]), (part, part_lse, [2, 3])):
        x[:, :, rows], total[:, :, rows] = 0.0, -torch.inf
    leaves = [x.clone().requires_grad_() for x in (out, lse, part, part_lse)]
    found, found_lse = merge(*leaves)
    merge_(out, lse, part, part_lse)
    assert error(found, out) <= 1e-15 and error(found_lse[..., :3], lse[..., :3]) <= 1e-15
    assert (found_lse[..., 3] == -torch.inf).all()
    seen = found_lse.masked_fill(found_lse == -torch.inf, 0.0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum() + seen.sum(), leaves))
    finite = [x[:, :, :1].detach().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(merge, finite)


def test_merging_many_partials_loses_nothing() -> None:
    scores, values = torch.randn(1, 1, 5, 4096, dtype=torch.float64) * 30, torch.randn(4096, 8, dtype=torch.float64)
    out, lse = torch.zeros(1, 1, 5, 8, dtype=torch.float64), torch.full((1, 1, 5), -torch.inf, dtype=torch.float64)
    for first in range(0, 4096, 16):
        part = scores[..., first : first + 16]
        merge_(out, lse, part.softmax(-1) @ values[first : first + 16], part.logsumexp(-1))
    assert error(out, scores.softmax(-1) @ values) <= 1e-12
    assert error(lse, scores.logsumexp(-1)) <= 1e-12


def test_a_name_is_never_replaced() -> None:
    x = torch.zeros(1, 1, 4, 8)
    assert get_kernel("auto", x, x, x).name == "aten_cpu"
    assert get_kernel("reference", x, x, x).name == "reference"
    with pytest.raises(InvalidInput, match=r"unknown kernel 'flash'; .*expected auto, reference"):
        get_kernel("flash", x, x, x)
    with pytest.raises(InvalidInput, match="did you mean 'aten_cpu'"):
        get_kernel("aten_cpus", x, x, x)
    for name in available():
        if name.startswith("aten_cuda"):
            with pytest.raises(Unsupported, match=f"kernel {name} needs tensors on a cuda device"):
                get_kernel(name, x, x, x)
    names = {"reference", "aten_cpu", "aten_cuda", "cuda", "visit", "flash_attn", "flash_attn_3", "flash_attn_4"}
    assert set(available()) == names | {f"aten_cuda:{choice}" for choice in ("flash", "cudnn", "efficient")}
    for wrong in ("aten_cuda:", "aten_cuda:flsh", "aten_cpu:flash", ":flash"):
        with pytest.raises(InvalidInput, match=f"unknown kernel '{wrong}'"):
            get_kernel(wrong, x, x, x)
