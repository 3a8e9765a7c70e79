"""The memory of messages, running out of memory, and gradient checkpointing."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import note_passes
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import Causal, Full, OutOfMemory, Window
from ringattn.call.arguments import computing
from ringattn.call.autograd import Runner
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.runtime import peak_memory
from ringattn.runtime.program import backward_program, forward_program
from ringattn.simulator.timing.costs import memory


def inputs(tokens: int = 96, heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, 16, generator=source).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_message_buffers_are_those_of_the_model(ranks: int, rotate: str) -> None:
    """What a rank takes for messages is what the model of memory says, but for the rounding of sizes."""
    plan = ra.make_plan(Full(), tokens=256 * ranks, ranks=ranks, heads=2, head_dim=16, schedule="ring", rotate=rotate)
    kernel, device = AtenCpu(), torch.device("cpu")
    programs = (forward_program(plan, 0, kernel, device, save=True), backward_program(plan, 0, kernel, device))
    taken = max(program.memory.stores[0] for program in programs)
    wanted = memory(plan, backward=True)["message buffers"]
    assert 0.95 * wanted < taken < 1.1 * wanted, (taken, wanted)


def test_lack_of_memory_is_told_with_its_cause() -> None:
    with pytest.raises(OutOfMemory, match="still full") as caught, computing(torch.device("cuda")):
        raise torch.OutOfMemoryError("still full")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(RuntimeError, match="not about memory") as other, computing(torch.device("cuda")):
        raise RuntimeError("not about memory at all")
    assert not isinstance(other.value, OutOfMemory)


def test_a_real_lack_of_memory() -> None:
    """In a process that may have 512 MiB more: an output of 1 GiB is a typed error, and a smaller batch works after
    it."""
    code = """
import resource, torch, ringattn as ra
q = torch.zeros(1, 1, 1, 8).expand(1 << 14, 8, 256, 8)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), used + (1 << 29)))
try:
    ra.attention(q, q, q, ra.Full())
    raise SystemExit("it fitted")
except ra.OutOfMemory as error:
    assert isinstance(error.__cause__, RuntimeError) and isinstance(error, MemoryError), error
pattern = ra.Dilated((64,), (2,))
found, out = ra.auto_batch_size(lambda batch: ra.attention(q[:batch], q[:batch], q[:batch], pattern), 1 << 14)
assert 1 <= found < 1 << 14 and len(out) == found
print("batch", found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "batch" in done.stdout


def test_auto_batch_size() -> None:
    def call(batch: int) -> str:
        if batch > 5:
            raise torch.OutOfMemoryError("full")
        return "ok" * batch

    assert ra.auto_batch_size(call, 32) == (4, "okokokok")

    def never(batch: int) -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(OutOfMemory, match="batch of 1"):
        ra.auto_batch_size(never, 8)
    with pytest.raises(ZeroDivisionError):
        ra.auto_batch_size(lambda batch: batch // 0, 8)


def layer(weight: torch.Tensor, x: torch.Tensor, *, ranks: int) -> torch.Tensor:
    q, k, v = (weight @ x).chunk(3, -2)
    q, k, v = (t.unflatten(-2, (2, 8)).mT for t in (q, k, v))
    out = ra.virtual_attention(q, k, v, Causal() & Window(20), ranks=ranks)
    return torch.tanh(out.mT.flatten(1, 2))


@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoints_have_equal_gradients(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 16, generator=source, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 16, 50, generator=source, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 16, 50, generator=source, dtype=torch.float64)
    function = partial(layer, ranks=ranks)
    forwards = note_passes(monkeypatch, Runner, "forward")
    plain = torch.autograd.grad(function(weight, x), (weight, x), cotangent)
    assert len(forwards) == 1
    full = torch.autograd.grad(checkpoint(function, weight, x, use_reentrant=False), (weight, x), cotangent)
    assert len(forwards) == 3
    out = checkpoint(function, weight, x, use_reentrant=False, context_fn=ra.keep_attention)
    kept = torch.autograd.grad(out, (weight, x), cotangent)
    assert len(forwards) == 4, "the ring is not run again"
    for grads in (full, kept):
        assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


def test_checkpoints_that_cannot_be_kept() -> None:
    x = torch.randn(1, 1, 8, 4, requires_grad=True)

    def changed(y: torch.Tensor) -> torch.Tensor:
        return ra.attention(y, y, y, Full()).mul_(2) * y

    with pytest.raises(RuntimeError, match="has been mutated"):  # by torch
        checkpoint(changed, x, use_reentrant=False, context_fn=ra.keep_attention).sum().backward()


def saved_bytes(run) -> int:  # type: ignore[no-untyped-def]
    """Bytes of the tensors that the graph of `run()` keeps alive."""
    stores: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        stores[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(stores.values())


def test_checkpoints_save_memory() -> None:
    """Counted on the graph: everything without, out and lse with keep_attention, nothing but the inputs in full."""
    weight, x = torch.randn(48, 16, requires_grad=True), torch.randn(2, 16, 256, requires_grad=True)
    function = partial(layer, ranks=1)
    plain = saved_bytes(lambda: function(weight, x))
    full = saved_bytes(lambda: checkpoint(function, weight, x, use_reentrant=False))
    assert full <= weight.nbytes + x.nbytes < plain / 4


def test_a_multihead_keeps_what_the_functional_form_keeps_and_its_projections() -> None:
    pattern, tokens, size = ra.local_window(16, density=0.25), 256, 64
    x = torch.randn(1, tokens, size, requires_grad=True)
    q, k, v = (torch.randn(1, 4, tokens, 16, requires_grad=True) for _ in range(3))
    functional = saved_bytes(lambda: ra.attention(q, k, v, pattern))
    module = ra.nn.MultiheadBlockSparseAttention(size, 4, pattern, batch_first=True)
    weights = sum(p.nbytes for p in module.parameters())
    assert saved_bytes(lambda: module(x)) <= functional + x.nbytes + weights


V1 = ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("", "memory.max", "memory.current", "inactive_file")


@pytest.mark.parametrize(
    ("names", "groups", "limits", "wanted"),
    [
        (V2, "0::/job/step", {"": ("max", 9), "job": (8000, 5000), "job/step": ("max", 2000)}, 3000 + 500),
        (V2, "0::/job/step", {"job": (1 << 40, 5000), "job/step": (2000, 1900)}, 100 + 500),
        (V2, "0::/not/here", {"": (6000, 7000)}, 0),  # in a container: the host's path, and use beyond the limit
        (V2, "0::/", {"": (4000, 1000)}, 3000 + 500),
        (V1, "5:cpu:/job\n4:memory,hugetlb:/job\n0::/", {"": (1 << 62, 9), "job": (7000, 1000)}, 6000 + 500),
        (V1, "4:memory:/job", {"job": (1 << 62, 0)}, 9000 * 1024),
        (V2, "0::/job", {}, 9000 * 1024),
        (V2, None, {}, 9000 * 1024),
    ],
)
def test_free_memory_is_that_of_the_tightest_control_group(
    names: tuple[str, ...], groups: str | None, limits: dict[str, tuple[object, int]], wanted: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the process and of those above it, in both versions of Linux's files; 500 bytes of it are dropped cache."""
    root, most, used, cache = names
    for folder, (limit, usage) in limits.items():
        (at := tmp_path / "mount" / root / folder).mkdir(parents=True, exist_ok=True)
        (at / most).write_text(f"{limit}\n")
        (at / used).write_text(f"{usage}\n")
        (at / "memory.stat").write_text(f"anon 7\n{cache} 500\n{cache}_x 9\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9500 kB\nMemAvailable: 9000 kB\n")
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups + "\n")
    monkeypatch.setattr(peak_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(peak_memory, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(peak_memory, "_MOUNT", tmp_path / "mount")
    assert peak_memory.free() == peak_memory.available() == wanted
