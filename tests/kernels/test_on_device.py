"""Whole calls on a device: the CUDA device that scripts/gpu names, or emulated ops on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from emulated_device import DEVICE, emulate_device
from oracle import Case, dense, error, make_case

import ringattn as ra

TOKENS, LIMIT = 120, 3e-2
BLOCKS = [[(j <= i and (i * 5 + j * 3) % 4 != 1) or i == j for j in range(4)] for i in range(4)]
PATTERNS: list[ra.Pattern] = [
    ra.Full(),
    ra.Causal(),
    ra.Causal() & (ra.Window(40) | ra.Sinks(3)),
    ra.Causal() & ra.Documents([50, 1, 49, 20]),
    ra.Dilated((32, 64), (1, 4)),
    ra.BlockSparse(32, BLOCKS),
]


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        emulate_device(monkeypatch)
    else:
        assert torch.cuda.is_available(), f"RINGATTN_TEST_DEVICE={DEVICE}, but torch sees no CUDA device"


def case_of(dim: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A case on the device."""
    made = make_case(TOKENS, 4, 2, dtype, batch=1, dim=dim)
    return Case(*(x.to(DEVICE) for x in (*made.inputs, made.grad)))


def check(out: torch.Tensor, leaves: tuple[torch.Tensor, ...], case: Case, pattern: ra.Pattern) -> None:
    """The output and the gradients are those of dense attention in fp64."""
    found = [out, *torch.autograd.grad(out, leaves, case.grad.to(out.device))]
    host = Case(*(x.cpu() for x in (*case.inputs, case.grad)))
    bound = pattern.bind(4, TOKENS)
    truth = dense(host, torch.from_numpy(bound.mask(TOKENS, 4)), bound.output_scale)
    for x, exact in zip(found, (truth.out, *truth.grads), strict=True):
        assert error(x.cpu(), exact) <= LIMIT


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_rings(pattern: ra.Pattern) -> None:
    for layout, dim, rotate in (("contiguous", 64, "kv"), ("zigzag", 40, "q"), ("striped", 128, "kv")):
        case = case_of(dim)
        leaves = case.leaves()
        out = ra.virtual_attention(*leaves, pattern, ranks=3, layout=layout, schedule="ring", rotate=rotate)
        check(out, leaves, case, pattern)


def test_offload() -> None:
    """Tensors in host memory, chunks on the device."""
    for pattern in PATTERNS[1:3]:
        case = case_of(64)
        leaves = tuple(x.detach().cpu().requires_grad_() for x in case.inputs)
        check(ra.attention(*leaves, pattern, offload="host", chunk=50, device=DEVICE), leaves, case, pattern)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone: NCCL on a CUDA device, else Gloo."""
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def test_one_rank(group: None) -> None:
    for pattern in PATTERNS[2:3]:
        case = case_of(64)
        leaves = case.leaves()
        for _ in range(2):  # the second call is remembered by the handshake
            check(ra.ring_attention(*leaves, pattern, layout="contiguous"), leaves, case, pattern)


@pytest.mark.parametrize("pattern", PATTERNS if DEVICE != "cpu" else PATTERNS[2:3], ids=repr)
def test_a_warm_call_does_not_wait(pattern: ra.Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward in torch's mode in which a call that waits for a CUDA device is an error."""
    modes: list[str] = []
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    case = case_of(64)
    leaves = case.leaves()
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = ra.virtual_attention(*leaves, pattern, ranks=3, layout="contiguous", schedule="ring")
            torch.autograd.grad(out, leaves, case.grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert DEVICE != "cpu" or modes == ["default", "default", "error", "default"]
