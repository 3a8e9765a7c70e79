"""What a caller's modes and threads leave behind: inference mode, default devices, and threads."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch

import ringattn as ra
from ringattn import Causal, Pattern, Window
from ringattn.kernels import aten_cpu, base

#: Functions of torch that make a tensor on the default device where none is named.
MAKERS = (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip
Leaves = tuple[torch.Tensor, ...]


def leaves(tokens: int = 48, dim: int = 8, dtype: torch.dtype = torch.float32) -> Leaves:
    source = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 4, tokens, dim, generator=source).to(dtype).requires_grad_() for _ in range(3))


def virtual(schedule: str, rotate: str, layout: str) -> Callable[[Leaves], torch.Tensor]:
    def call(x: Leaves) -> torch.Tensor:
        return ra.virtual_attention(*x, Window(9, 3), ranks=4, schedule=schedule, rotate=rotate, layout=layout)

    return call


def module(x: Leaves) -> torch.Tensor:
    out = ra.nn.RingAttention(Causal(), ranks=3, layout="zigzag")(*(t.transpose(1, 2) for t in x))
    return out[0] if isinstance(out, tuple) else out


CALLS: dict[str, Callable[[Leaves], torch.Tensor]] = {
    "one device": lambda x: ra.attention(*x, ra.dilated_blocks(4, offsets=(2, 5))),
    "ring": virtual("ring", "kv", "contiguous"),
    "ring, queries": virtual("ring", "q", "zigzag"),
    "direct": virtual("direct", "kv", "striped"),
    "ulysses": virtual("ulysses(2)", "kv", "contiguous"),
    "stream": lambda x: ra.attention(*x, Causal(), offload="host", chunk=7, device="cpu"),
    "module": module,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_empty_batch(name: str) -> None:
    x = tuple(t.detach()[:0].requires_grad_() for t in leaves())
    out = CALLS[name](x)
    assert 0 in out.shape and sorted(out.shape) == sorted(x[0].shape)
    assert all(torch.equal(g, t) for g, t in zip(torch.autograd.grad(out.sum(), x), x, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_inference_then_training_and_back(name: str, dtype: torch.dtype) -> None:
    """Each call meets caches that were filled in the other mode."""
    call, x = CALLS[name], leaves(dtype=dtype)
    frozen = tuple(t.detach() for t in x)  # for which a forward keeps nothing
    for make in (aten_cpu._mask, base.band):
        make.cache_clear()

    def train() -> list[torch.Tensor]:
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]

    with torch.inference_mode():
        first = call(frozen)
    trained = train()
    with torch.inference_mode():
        second = call(x)
    again = train()
    assert torch.equal(first, second) and torch.equal(first, trained[0])
    assert all(torch.equal(a, b) for a, b in zip(trained, again, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_a_result_can_be_modified_in_place_until_its_backward(name: str) -> None:
    x = leaves()
    out = CALLS[name](x)
    expected = out + 1
    out += 1
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as torch's own attention
        torch.autograd.grad(out.sum(), x)


def test_a_thread_in_inference_mode_beside_one_that_trains() -> None:
    x, failures = leaves(), []
    call = CALLS["ring"]
    wanted = call(x).detach()

    def repeat(inference: bool) -> None:
        try:
            for _ in range(15):
                with torch.inference_mode(inference):
                    out = call(x)
                if not inference:
                    torch.autograd.grad(out.sum(), x)
                assert torch.equal(out, wanted)
        except (AssertionError, RuntimeError, KeyError) as error:
            failures.append(error)

    threads = [Thread(target=repeat, args=(turn % 2 == 0,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("pattern", [Window(300), ra.local_window(32, blocks=1)], ids=repr)
def test_the_default_device_of_a_call_does_not_matter(pattern: Pattern) -> None:
    x = leaves(600)
    wanted = ra.attention(*x, pattern, kernel="reference").detach()
    for make in (aten_cpu._mask, base.band):
        make.cache_clear()
    torch.manual_seed(0)
    adaptive = ra.nn.AdaptiveAttention(4, 8, block=32, k=3)
    with torch.device("meta"):
        inside = ra.virtual_attention(*x, pattern, ranks=2)
        chosen = adaptive(*x)
        grads = torch.autograd.grad(inside.sum() + chosen.sum(), x)
    assert inside.device.type == chosen.device.type == "cpu" and all(g.isfinite().all() for g in grads)
    for found in (inside, ra.virtual_attention(*x, pattern, ranks=2)):
        assert (found - wanted).abs().max() <= 1e-5


def test_every_tensor_of_ours_is_made_on_a_device_that_is_named() -> None:
    for path in sorted(Path(ra.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                ours = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                named = {"device", None} & {keyword.arg for keyword in node.keywords}
                assert not ours or named, f"{path}:{node.lineno}: name the device"
