"""Kernels of packages beside torch, on stand-ins for the packages, which are not installed: flash_attn 2 by the dense
math and the refusals of `EmulatedOps`, the hook for FlashAttention 3 and 4 by a record of its calls."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from emulated_ops import HOPPER, EmulatedOps, emulate
from oracle import Case, dense, errors, solve

import ringattn as ra
from ringattn.kernels import KERNELS, available, get_kernel
from ringattn.kernels.cuda_device import CudaDevice
from ringattn.kernels.flash_attn import FlashAttn, FlashAttn3, FlashAttn4

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Tensor = torch.Tensor


def make_interface(ops: EmulatedOps) -> ModuleType:
    """flash_attn.flash_attn_interface with the signatures of flash_attn 2.8."""
    module: Any = ModuleType("flash_attn.flash_attn_interface")

    def varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert (dropout_p, causal, softcap, alibi_slopes, return_softmax) == (0.0, False, 0.0, None, False)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        out, lse, *_ = ops._flash_attention_forward(q, k, v, *lengths, 0.0, False, False, scale=softmax_scale, **window)
        return out, lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64)

    def varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        assert (dropout_p, causal, softcap, alibi_slopes) == (0.0, False, 0.0, None)
        assert all(x.stride(-1) == 1 for x in (dq, dk, dv))
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        window = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        tensors = dout, q, k, v, out, softmax_lse
        found = ops._flash_attention_backward(*tensors, *lengths, 0.0, False, None, None, scale=softmax_scale, **window)
        for x, y in zip((dq, dk, dv), found, strict=True):
            x.copy_(y)
        ops.calls["deterministic"] += deterministic
        return softmax_lse

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, **options: Any
    ) -> tuple[Tensor, ...]:
        return varlen_forward(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, **options)

    def backward(*tensors: Any, **options: Any) -> Tensor:
        *tensors, dropout_p, softmax_scale = tensors
        _, q, k, *_ = tensors
        return varlen_backward(*tensors, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, **options)

    module._wrapped_flash_attn_varlen_forward, module._wrapped_flash_attn_varlen_backward = (
        varlen_forward,
        varlen_backward,
    )
    module._wrapped_flash_attn_forward, module._wrapped_flash_attn_backward = forward, backward
    return module


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> EmulatedOps:
    """flash_attn on emulated ops; torch's own ops raise."""
    emulate(monkeypatch, any_dtype=True)
    monkeypatch.setattr("ringattn.kernels.aten_cuda._aten", None)
    ops = EmulatedOps(any_dtype=True)
    package: Any = ModuleType("flash_attn")
    package.flash_attn_interface = make_interface(ops)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package.flash_attn_interface)
    return ops


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch, ops: EmulatedOps) -> type:
    """The kernel of examples/own_kernel.py, offered by an entry point; it takes fp32, in which errors show."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "own_kernel", raising=False)
    point = EntryPoint("varlen", "own_kernel:Varlen", "ringattn.kernels")
    monkeypatch.setitem(KERNELS.installed, "varlen", point)
    kernel: type = point.load()
    monkeypatch.setattr(kernel, "check", lambda self, q, k, v: None)
    return kernel


PATTERNS = (
    "Full()",
    "Causal()",
    "Causal() & Window(7)",
    "Window(7, 4)",
    "Causal() & (Sinks(3) | Window(6))",
    "Causal() & Documents([9, 1, 14, 0, 16])",
    "Documents([5, 5, 5, 5, 5, 5, 5, 5])",
    "mix(Causal(), Window(5, 5), Strided(4))",
    "Dilated((8, 24, 40), (1, 2, 5))",
    "Causal() & dilated_blocks(4, (1, 2, 4))",
)


@pytest.mark.parametrize("name", ["flash_attn", "varlen"])
@pytest.mark.parametrize("text", PATTERNS)
def test_rings_equal_dense_attention(ops: EmulatedOps, varlen: type, name: str, text: str) -> None:
    """out, lse and all gradients in fp32, grouped heads, a value dim of its own, one device and rings both ways."""
    source = torch.Generator().manual_seed(7)
    q, k, v, grad = (
        torch.randn(2, heads, 40, width, generator=source) for heads, width in ((4, 20), (2, 20), (2, 36), (4, 36))
    )
    grad_lse = torch.randn(2, 4, 40, generator=source)
    pattern = ra.parse_pattern(text).bind(4, 40)
    case = Case(q, k, v, grad, grad_lse)
    truth = dense(case, torch.from_numpy(pattern.mask(40, heads=4)))
    for options in (
        {"ranks": 1},
        {"ranks": 3, "layout": "zigzag", "rotate": "kv"},
        {"ranks": 4, "layout": "striped", "rotate": "q"},
    ):
        found = solve(ra.virtual_attention, case, pattern, kernel=name, **options)
        assert max(errors(found, truth)) < 2e-5, (text, options)
    assert set(ops.calls) <= {"flash", "flash backward", "deterministic"}
    assert name == "flash_attn" or ops.packed == ops.calls["flash"], "the example makes varlen calls only"


def test_determinism_is_an_argument_of_the_backward(ops: EmulatedOps) -> None:
    q = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    for wanted in (False, True):
        ops.calls.clear()
        ra.virtual_attention(q, q, q, "Causal()", ranks=2, kernel="flash_attn", deterministic=wanted).sum().backward()
        assert ops.calls["flash backward"] > 0
        assert ops.calls["deterministic"] == wanted * ops.calls["flash backward"]


@pytest.mark.skipif(
    bool(find_spec("flash_attn") or find_spec("flash_attn_interface")), reason="about machines without the packages"
)
def test_a_package_that_is_missing_is_named() -> None:
    """Nothing of the packages is imported before their kernel is named, and the error says what to install."""
    states = available()
    for kernel, module in ((FlashAttn, "flash_attn"), (FlashAttn3, "flash_attn_interface"), (FlashAttn4, "flash_attn")):
        assert f"No module named '{module}'" in states[kernel.title] and kernel.package in states[kernel.title]
        with pytest.raises(ra.Unsupported, match=f"No module named '{module}'.* install {kernel.package}"):
            kernel(None, torch.bfloat16, deterministic=False).use(HOPPER, 128)
    x = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    with pytest.raises(ra.Unsupported, match="kernel flash_attn needs tensors on a cuda device"):
        get_kernel("flash_attn", x, x, x)


@pytest.mark.parametrize("kernel", [FlashAttn3, FlashAttn4])
def test_torch_activates_newer_versions_by_name(monkeypatch: pytest.MonkeyPatch, kernel: type[FlashAttn3]) -> None:
    """The calls are those of torch's flash op, and the version is activated once, where it runs."""
    emulated, active = emulate(monkeypatch), list[str]()
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    attention: Any = torch.nn.attention
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
    for capability, width in (((8, 0), 128), ((9, 0), 264)):
        with pytest.raises(ra.Unsupported, match=f"{kernel.implementation}|head dims up to 256"):
            kernel(None, torch.bfloat16, deterministic=False).use(CudaDevice(capability), width)
    assert not active
    q = torch.randn(1, 2, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        ra.virtual_attention(q, q, q, "Causal()", ranks=2, kernel=kernel.title).sum().backward()
    assert active == [kernel.implementation] and set(emulated.calls) == {"flash", "flash backward"}
