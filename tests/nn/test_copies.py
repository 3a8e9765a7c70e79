"""Modules under autocast and inference mode, and their copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ringattn as ra

CORES: dict[str, Callable[[], nn.Module]] = {
    "ring": lambda: ra.nn.RingAttention(ra.Causal(), ranks=2, layout="zigzag"),
    "dilated": lambda: ra.nn.DilatedAttention([8, 16], [1, 2], mix="group"),
    "block sparse": lambda: ra.nn.BlockSparseAttention(ra.local_window(8, blocks=1)),
    "adaptive": lambda: ra.nn.AdaptiveAttention(4, 8, block=8, k=2, noise=0),
}
MULTIHEAD: dict[str, Callable[[], nn.Module]] = {
    "multihead ring": lambda: ra.nn.MultiheadRingAttention(32, 4, ra.Causal(), rotary=True, qk_norm=True),
    "multihead dilated": lambda: ra.nn.MultiheadDilatedAttention(32, 4, [8], [2], recompute="projections"),
    "multihead block sparse": lambda: ra.nn.MultiheadBlockSparseAttention(32, 4, ra.local_window(8, blocks=1)),
    "multihead adaptive": lambda: ra.nn.MultiheadAdaptiveAttention(32, 4, block=8, k=2, noise=0.0),
}  # fmt: skip
MODULES = {**CORES, **MULTIHEAD}


def run(name: str, module: nn.Module) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    shape = (24, 1, 32) if name in MULTIHEAD else (1, 4, 24, 8)
    x = torch.randn(shape, generator=source)
    out = module(x, x, x)
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


@pytest.mark.parametrize("name", MODULES)
def test_copies_compute_the_same(name: str) -> None:
    module = MODULES[name]()
    wanted = run(name, module)
    if wanted.requires_grad:
        wanted.sum().backward()
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    other = MODULES[name]()
    other.load_state_dict(module.state_dict())
    copies = (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False), other)
    for same in copies:
        assert torch.equal(run(name, same), wanted)
        assert not {id(p) for p in same.parameters()} & {id(p) for p in module.parameters()}
    with torch.inference_mode():  # the module has been trained, and is trained again
        out = run(name, module)
        assert out.is_inference() and torch.equal(out, wanted)
    assert torch.equal(run(name, module), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_results_under_autocast_have_its_dtype(name: str, dtype: torch.dtype) -> None:
    module = MODULES[name]()
    with torch.autocast("cpu", dtype):
        out = run(name, module)
        q = torch.ones(1, 1, 4, 8)
        mixed, lse = ra.attention(q, q, q, ra.Full(), return_lse=True)
    assert out.dtype == mixed.dtype == dtype and lse.dtype == torch.float32
    if out.requires_grad:
        out.float().sum().backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in module.parameters())
