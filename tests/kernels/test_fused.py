"""Merges and sums of gradients by Triton: the numbers of torch under the interpreter, and code for GPUs that are not
here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from oracle import error

import ringattn as ra
from ringattn.kernels import merges, merging
from ringattn.kernels.softmax import add_, merge_

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
INF, NAN = torch.inf, torch.nan
SPECIAL = (0.0, 1.5, -3.0, 60.0, -200.0, 1e30, INF, -INF, NAN)


#: Where Triton computes in these tests.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Compiles both kernels for the capabilities in argv, and prints the first bytes of the machine code and the target.
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ringattn.kernels import fused

constants = {"TILE_ROWS": 16, "COLUMNS": 128}
for capability in map(int, sys.argv[1:]):
    for kernel, tensors in ((fused.merge_kernel, "fp32 fp64 bf16 fp32"), (fused.add_kernel, "fp32 fp16")):
        names = kernel.arg_names
        types = dict.fromkeys(names, "i32") | dict(zip(names, ("*" + x for x in tensors.split()), strict=False))
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
        target = code["ptx"].split(".target ")[1].split()[0].rstrip(",")
        print(code["cubin"][:4] == b"\\x7fELF", target)
"""


def forget() -> None:
    """The next use of Triton looks anew whether Triton can run, and how."""
    sys.modules.pop("ringattn.kernels.fused", None)
    merges.missing.cache_clear()
    merges._by_triton.cache_clear()


@pytest.fixture
def triton_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton on the GPU; without a GPU, Triton's interpreter, after which this process can compile nothing."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    yield
    forget()


def rows_first(shape: tuple[int, ...], source: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random [B, H, n, ...] that lies in memory as [B, n, H, ...]."""
    batch, heads, rows, *width = shape
    return torch.randn(batch, rows, heads, *width, generator=source, dtype=dtype).transpose(1, 2)


def by_both(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> list[list[torch.Tensor]]:
    """[out, lse] after a merge by torch, and after a merge by triton."""
    merged = []
    for choice, device in (("torch", "cpu"), ("triton", DEVICE)):
        found = [x.to(device, copy=True) for x in (out, lse)]
        with merging(choice):
            merge_(*found, part.to(device), part_lse.to(device))
        merged.append([x.cpu() for x in found])
    return merged


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merges_by_triton(triton_runs: None, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(3)
    for width, shape in ((40, (2, 3, 70)), (80, (1, 1, 1)), (249, (1, 2, 9)), (1, (3, 1, 5))):
        for lse_dtype in (torch.float32, torch.float64):
            out, part_lse = rows_first((*shape, width), source), rows_first(shape, source) * 6
            part = torch.randn(*shape, 2 * width, generator=source).to(dtype)[..., ::2]
            lse = torch.randn(shape, generator=source, dtype=lse_dtype) * 6
            wanted, found = by_both(out, lse, part, part_lse)
            assert all(error(x, y.double()) <= 5e-7 for x, y in zip(found, wanted, strict=True))


@needs_triton
@pytest.mark.parametrize("lse_dtype", [torch.float32, torch.float64])
def test_special_cases_of_merges_by_triton(triton_runs: None, lse_dtype: torch.dtype) -> None:
    """Rows that saw nothing, and infinite and bad numbers, in every pair and in out and part, too."""
    values, count = torch.tensor(SPECIAL), len(SPECIAL)
    lse, part_lse = values.repeat_interleave(count)[None, None].to(lse_dtype), values.repeat(count)[None, None]
    out, part = torch.randn(2, 1, 1, count**2, 8, generator=torch.Generator().manual_seed(4))
    out[..., 1], part[..., 2], part[..., 3] = NAN, NAN, INF
    out[lse.isnan()] = NAN
    wanted, found = by_both(out, lse, part, part_lse)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=5e-7, atol=5e-7, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_by_triton_are_exact(triton_runs: None, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(5)
    for width, shape in ((40, (2, 3, 70)), (249, (1, 2, 9)), (1, (3, 1, 5)), (8, (0, 2, 4))):
        total = rows_first((*shape, width), source)
        part = torch.randn(*shape, 2 * width, generator=source).to(dtype)[..., ::2]
        wanted, found = total + part, total.to(DEVICE)
        with merging("triton"):
            add_(found, part.to(DEVICE))
        assert torch.equal(found.cpu(), wanted)


@needs_triton
def test_a_ring_by_triton(triton_runs: None) -> None:
    source = torch.Generator().manual_seed(6)
    inputs = [torch.randn(1, heads, 24, 5, generator=source).to(DEVICE).requires_grad_() for heads in (2, 1, 1)]
    results = []
    for choice in ("torch", "triton"):
        with merging(choice):
            out = ra.virtual_attention(*inputs, "Causal()", ranks=3, layout="zigzag", kernel="reference")
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    assert "ringattn.kernels.fused" in sys.modules
    assert all(error(x, y.double()) <= 2e-6 for x, y in zip(*results, strict=True))


@needs_triton
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """Machine code for GPUs that are not here, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, "80", "90", "100"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["True", target] for target in ("sm_80", "sm_80", "sm_90a", "sm_90a", "sm_100a", "sm_100a")
    ]


def test_what_computes_is_never_chosen_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with (
        pytest.raises(ra.InvalidInput, match=r"merging\('cuda'\): unknown; expected auto, torch, triton"),
        merging("cuda"),
    ):
        pass
    forget()
    x = torch.zeros(1, 1, 2, 2)
    add_(x, x.clone())
    assert "ringattn.kernels.fused" not in sys.modules, "auto on a CPU"
    with pytest.raises(ra.Unsupported, match=r"merging\('triton'\)"), merging("triton"):
        add_(x, x.clone())
    add_(x, x.clone())
    forget()


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Images for running only have no compiler and no headers: "auto" then merges by torch, and doctor says why."""
    compilers, compiled = {"gcc"}, ModuleType("fused")
    vars(compiled).update(INTERPRETED=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(merges, "find_spec", lambda name: name)
    monkeypatch.setattr(merges, "_fused", lambda: compiled)
    monkeypatch.setattr(merges.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(merges.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def lacks() -> tuple[str | None, bool]:
        forget()
        return merges.missing(), merges._by_triton("auto", torch.device("cuda", 0))

    (tmp_path / "Python.h").touch()
    assert lacks() == (None, True)
    compilers.clear()
    assert lacks() == ("Triton finds no C compiler; install gcc, or set CC", False)
    monkeypatch.setenv("CC", "cc")
    (tmp_path / "Python.h").unlink()
    reason, by_triton = lacks()
    assert reason is not None and "Triton needs Python.h" in reason and not by_triton
    forget()
