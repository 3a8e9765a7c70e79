"""bf16 on CPUs with a matrix unit, with products of bf16, and without: which dtype the op gets, and the error of rings.

No such CPU is needed: the op computes bf16 on any CPU, only slowly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringattn as ra
from ringattn.kernels import aten_cpu, get_kernel
from ringattn.plan.work import Work

TOKENS, HEADS, KV, DIM = 512, 4, 2, 32
#: The error of rounding to bf16, root of the mean square: 8 bits of a number, whose last one is half wrong on average.
ROUNDING = 1.7e-3


@pytest.fixture(params=["matrix unit", "products", "neither"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the CPU has for bf16, as torch says."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param == "matrix unit")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: request.param != "neither")
    return str(request.param)


def test_only_bf16_is_computed_in_16_bits(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[torch.dtype]] = {"_forward": set(), "_backward": set()}

    def note(name: str, op: Any, *arguments: Any, **options: Any) -> Any:
        seen[name].update(x.dtype for x in arguments[:3])
        return op(*arguments, **options)

    for name in seen:
        monkeypatch.setattr(aten_cpu, name, partial(note, name, getattr(aten_cpu, name)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for dtypes in seen.values():
            dtypes.clear()
        x = torch.randn(1, 2, 96, 16).to(dtype).requires_grad_()
        for text in ("Full()", "Causal() & Window(20)"):
            out = ra.virtual_attention(x, x, x, text, ranks=2, return_lse=True)
            assert out[0].dtype == dtype
            torch.autograd.grad(out[0].sum() + out[1].sum(), x)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        fast = {"matrix unit": ("_forward", "_backward"), "products": ("_backward",), "neither": ()}[cpu]
        assert seen == {name: {dtype if dtype == torch.bfloat16 and name in fast else wide} for name in seen}


def test_small_triangles_are_for_fp32(cpu: str) -> None:
    """In bf16 a causal block is one call, as small calls take longer; in fp32 the op would compute hidden pairs."""
    triangle, x = Work(range(2), range(2), range(1024), (range(1024),), lo=0), torch.zeros(1, 2, 4, 8)
    for dtype in (torch.bfloat16, torch.float32):
        kernel = get_kernel("auto", *[x.to(dtype)] * 3)
        for one, fast in ((kernel, cpu == "matrix unit"), (kernel.for_backward(), cpu != "neither")):
            calls = one.calls_of([triangle])
            assert (calls == [triangle]) == (fast and dtype == torch.bfloat16)


def run(attend: Any, inputs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    *leaves, grad = (x.to(dtype) for x in inputs)
    out = attend(*(x.requires_grad_() for x in leaves))
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((x - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    "text", ["Full()", "Causal()", "Causal() & Window(100)", "Causal() & Documents([100, 300, 112])"]
)
def test_rings_are_within_two_roundings_of_one_call(cpu: str, text: str) -> None:
    """Against fp64: at most the error of one call of torch in bf16 and two roundings; with fp32 partials about one
    rounding, whatever the ranks."""
    source = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, heads, TOKENS, DIM, generator=source).bfloat16() for heads in (HEADS, KV, KV, HEADS)]
    mask = torch.from_numpy(ra.parse_pattern(text).mask(TOKENS)[0] > 0)

    def one_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    exact = run(one_call, inputs, torch.float64)
    limits = [error + 2 * ROUNDING for error in errors(run(one_call, inputs, torch.bfloat16), exact)]
    for options in (
        {"ranks": 1},
        {"ranks": 4, "layout": "zigzag", "rotate": "kv"},
        {"ranks": 4, "layout": "striped", "rotate": "q"},
        {"ranks": 8, "layout": "contiguous", "schedule": "direct"},
    ):
        found = errors(run(lambda *x, o=options: ra.virtual_attention(*x, text, **o), inputs, torch.bfloat16), exact)
        assert all(error < limit for error, limit in zip(found, limits, strict=True)), (options, found, limits)
        once = [error < 1.3 * ROUNDING for error in found]  # of out, dq, dk, dv
        assert once[0] or cpu == "matrix unit", (options, found)
        assert all(once[1:]) if cpu == "neither" else not any(once[1:]), (options, found)


def test_messages_of_bf16_for_fp32_inputs(cpu: str) -> None:
    """The dtype of messages is not the dtype of visits."""
    q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
    for rotate in ("kv", "q"):
        out = ra.virtual_attention(q, k, v, "Causal()", ranks=4, comm_dtype="bfloat16", rotate=rotate)
        exact = ra.virtual_attention(q, k, v, "Causal()", ranks=1)
        assert out.dtype == torch.float32 and (out - exact).norm() < 1e-2 * exact.norm()
        assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_every_row_that_sees_a_nan_is_nan(cpu: str) -> None:
    q, k, v = (torch.randn(1, 2, 24, 16).bfloat16() for _ in range(3))
    k[0, 0, 5, 3] = torch.nan
    for text in ("Causal()", "Causal() & Window(3)", "Documents([4, 8, 12])"):
        sees = torch.from_numpy(ra.parse_pattern(text).mask(24)[0] > 0)[:, 5]
        for ranks in (1, 4):
            out = ra.virtual_attention(q, k, v, text, ranks=ranks)
            assert out[0, 0].isnan().any(-1)[sees].all() and not out[0, 1].isnan().any()
