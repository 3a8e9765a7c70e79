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
from ringattn.kernels import get_kernel
from ringattn.kernels.cuda import Cuda

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


#: For kernel visit, whose tiles have up to 128 rows: patterns of 600 tokens.
LONG = 600
LONG_BLOCKS = [[i == j or (j < i and (i * 5 + j * 3) % 4 == 1) for j in range(10)] for i in range(10)]
LONG_PATTERNS: list[ra.Pattern] = [
    ra.Full(),
    ra.Causal(),
    ra.Causal() & ra.Window(200),
    ra.Causal() & (ra.Window(70) | ra.Sinks(3)),
    ra.Causal() & ra.Documents([250, 5, 245, 100]),
    ra.Causal() & ra.Strided(3),
    ra.Dilated((128, 256), (1, 4)),
    ra.Dilated((256,), (4,), mix="group"),
    ra.BlockSparse(64, LONG_BLOCKS) & ra.Causal(),
    ra.mix(ra.Causal() & ra.Window(40), ra.Causal() & ra.Documents([300, 300])),
]
#: The largest errors of a ring, relative to the largest number: some roundings of the dtype.
BOUND = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: LIMIT}
only_on_a_device = pytest.mark.skipif(DEVICE == "cpu", reason="kernel visit runs on a CUDA device")


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        emulate_device(monkeypatch)
    else:
        assert torch.cuda.is_available(), f"RINGATTN_TEST_DEVICE={DEVICE}, but torch sees no CUDA device"


def case_of(dim: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A case on the device."""
    return on_device(make_case(TOKENS, 4, 2, dtype, batch=1, dim=dim))


def long_case(dim: int, dtype: torch.dtype) -> Case:
    return on_device(make_case(LONG, 4, 2, dtype, dim=dim))


def on_device(made: Case) -> Case:
    return Case(*(x.to(DEVICE) for x in (*made.inputs, made.grad)))


def check(
    out: torch.Tensor, leaves: tuple[torch.Tensor, ...], case: Case, pattern: ra.Pattern, **options: float | None
) -> list[torch.Tensor]:
    """The output and the gradients, on the host, are those of dense attention in fp64."""
    found = [x.cpu() for x in (out, *torch.autograd.grad(out, leaves, case.grad.to(out.device)))]
    host = Case(*(x.cpu() for x in (*case.inputs, case.grad)))
    tokens = host.q.shape[2]
    bound = pattern.bind(4, tokens)
    truth = dense(host, torch.from_numpy(bound.mask(tokens, 4)), bound.output_scale, **options)
    for x, exact in zip(found, (truth.out, *truth.grads), strict=True):
        assert error(x, exact) <= BOUND[out.dtype]
    return found


@only_on_a_device
def test_visit_kernel_is_what_auto_takes() -> None:
    """The first thing to know of a device: why its masks would go elsewhere, such as an old ptxas."""
    kernel = get_kernel("auto", *case_of(64).inputs)
    assert isinstance(kernel, Cuda) and kernel.refused is None, kernel.refused


@only_on_a_device
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(128, torch.bfloat16), (64, torch.bfloat16), (40, torch.float16), (256, torch.bfloat16), (64, torch.float32)],
    ids=str,
)
def test_visit_kernel_on_rings_and_alone(dim: int, dtype: torch.dtype) -> None:
    """One launch for all virtual ranks, keys and queries that travel, and one visit alone; twice, with equal bits."""
    case = long_case(dim, dtype)
    for number, pattern in enumerate(LONG_PATTERNS):
        layout, rotate = (("contiguous", "kv"), ("zigzag", "q"), ("striped", "kv"))[number % 3]
        for ranks in (1, 3):
            results = []
            for _ in range(2):
                leaves = case.leaves()
                out = ra.virtual_attention(
                    *leaves, pattern, ranks=ranks, layout=layout, schedule="ring", rotate=rotate, kernel="visit"
                )
                results.append(check(out, leaves, case, pattern))
            assert all(map(torch.equal, *results)), "one owner of each row"


@only_on_a_device
def test_visit_kernel_with_options() -> None:
    """A softcap, and dropout, padded keys, sinks and lse as kernel reference has them in fp64."""
    case, pattern = long_case(64, torch.bfloat16), LONG_PATTERNS[3]
    leaves = case.leaves()
    out = ra.virtual_attention(*leaves, pattern, ranks=3, softcap=2.0, kernel="visit", layout="contiguous")
    check(out, leaves, case, pattern, softcap=2.0)
    padding = torch.zeros(len(case.q), LONG, dtype=torch.bool)
    padding[:, LONG - 60 :] = True
    options = {"dropout": ra.Dropout(0.3, 7), "return_lse": True, "layout": "contiguous"}
    results = []
    for device, dtype, kernel in ((DEVICE, torch.bfloat16, "visit"), ("cpu", torch.float64, "reference")):
        leaves = tuple(x.detach().to(device, dtype).requires_grad_() for x in case.inputs)
        sinks = torch.linspace(-1, 2, 4, device=device, requires_grad=True)
        out, lse = ra.virtual_attention(
            *leaves, pattern, ranks=3, kernel=kernel, key_padding_mask=padding.to(device), sinks=sinks, **options
        )
        loss = (out * case.grad.to(out)).sum() + lse.sin().sum()
        results.append([x.cpu() for x in (out, lse, *torch.autograd.grad(loss, (*leaves, sinks)))])
    for found, exact in zip(*results, strict=True):
        assert error(found, exact.double()) <= LIMIT


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
