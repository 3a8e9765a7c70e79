"""Offloading to host memory: the numbers, the bytes that are copied, and the memory of the device."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Case, Result, dense, error, errors, make_case, same_lse, solve, truth_of
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringattn as ra
from ringattn import (
    Causal,
    Dilated,
    Documents,
    Full,
    InvalidInput,
    OutOfMemory,
    Pattern,
    Sinks,
    Strided,
    Unsupported,
    Window,
)
from ringattn.call.compile import compile_call
from ringattn.call.offload import HostTensors, OffloadRunner, chunk_rows, make_offload, row_bytes
from ringattn.cli.tensor_files import create_safetensors
from ringattn.runtime.peak_memory import available

TOKENS, HEADS, KV_HEADS = 101, 4, 2
CPU = torch.device("cpu")
TABLE = np.random.default_rng(3).random((HEADS, 13, 13)) < 0.3
PATTERNS: tuple[Pattern, ...] = (
    Full(),
    Causal(),
    Window(20, 5),
    Causal() & (Sinks(3) | Window(9)),
    Documents((20, 0, 30, 51)),
    Dilated((16, 50), (1, 3)),
    Dilated((16, 101), (1, 2), causal=True, mix="group"),
    ra.BlockSparse(8, TABLE),
    Sinks(0),
)


def attend(case: Case, pattern: Pattern, **options) -> Result:  # type: ignore[no-untyped-def]
    """Streamed by the CPU, unless `ranks` asks for virtual ranks."""
    if "ranks" in options:
        found = solve(ra.virtual_attention, case, pattern, schedule="direct", rotate="kv", **options)
    else:
        found = solve(ra.attention, case, pattern, **{"offload": "host", "device": "cpu", **options})
    assert all(x.device.type == "cpu" for x in (found.out, found.lse, *found.grads))
    assert [x.dtype for x in (found.out, *found.grads)] == [case.q.dtype] * 4
    return found


@pytest.mark.parametrize("chunk", [12, 50, 101])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_equals_the_oracle(pattern: Pattern, chunk: int) -> None:
    """Chunks that do not divide N, and one chunk; grouped-query heads, another value dim, other scales, dlse."""
    case = make_case(TOKENS, HEADS, KV_HEADS, torch.float64, dim=8, value_dim=6, lse=True)
    case = replace(case, scale={12: -0.3, 50: 0.0}.get(chunk))
    truth, found = truth_of(case, pattern), attend(case, pattern, chunk=chunk)
    assert max(errors(found, truth)) <= 1e-12
    same_lse(found.lse, truth.lse, 1e-12)


@pytest.mark.parametrize("pattern", [Causal(), Strided(3)], ids=repr)
def test_a_chunk_may_be_one_token(pattern: Pattern) -> None:
    case = make_case(23, HEADS, KV_HEADS, torch.float64, lse=True)
    assert max(errors(attend(case, pattern, chunk=1), truth_of(case, pattern))) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_bits_are_those_of_virtual_ranks(pattern: Pattern, dtype: torch.dtype) -> None:
    """out, lse and dq are gathered in the same order. dk and dv are where a key has no more than two chunks'
    queries."""
    case = make_case(TOKENS, HEADS, KV_HEADS, dtype, lse=True)
    found, virtual = attend(case, pattern, chunk=21), attend(case, pattern, ranks=5)
    assert torch.equal(found.out, virtual.out) and torch.equal(found.lse, virtual.lse)
    assert torch.equal(found.grads[0], virtual.grads[0])
    if pattern == Window(20, 5) & Causal() or pattern == Sinks(0):
        assert all(torch.equal(a, b) for a, b in zip(found.grads[1:], virtual.grads[1:], strict=True))


def test_chunks_of_other_rows_are_another_plan() -> None:
    x = torch.zeros(1, 2, 24, 4)
    call = compile_call(x, x, x, Causal(), "contiguous", {})
    made = [make_offload(call, chunk=chunk, backward=False).plan.ranks for chunk in (4, 8, 4, 24)]
    assert made == [6, 3, 6, 1]


def test_sums_in_storage_are_not_rounded_to_16_bits() -> None:
    """dv, which no rounding of out has a part in, has the error of fp32; each chunk adds its own keys' part to others'.

    In fp16, which every CPU computes in fp32.
    """
    case = make_case(TOKENS, HEADS, KV_HEADS, torch.float16)
    truth, runner = truth_of(case, Full()), runner_of(Full(), *case.inputs, chunk=34)
    result = runner.forward(case.q, (case.k, case.v), save=True)
    names = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")
    sums = [torch.full_like(x, torch.nan, dtype=torch.float32) for x in case.inputs]
    stored = dict(zip(names, (*case.inputs, case.grad, result.out, result.lse, *sums), strict=True))
    runner.differentiate(HostTensors(stored))
    assert error(stored["dv"], truth.grads[2]) <= 1e-6
    for name, x in zip(("dq", "dk"), truth.grads, strict=False):
        assert error(stored[name], x) <= 2.0**-10


@pytest.mark.parametrize("pattern", [Causal(), Dilated((16, 50), (1, 3))], ids=repr)
@pytest.mark.parametrize("lse", [False, True])
def test_padding(pattern: Pattern, lse: bool) -> None:
    """The oracle of each element of the batch with its own mask; what padded keys hold does not matter."""
    case = make_case(TOKENS, HEADS, KV_HEADS, torch.float64, lse=lse)
    hidden = torch.zeros(2, TOKENS, dtype=torch.bool)
    hidden[0, 60:], hidden[1, :30] = True, True
    seen = torch.from_numpy(pattern.mask(TOKENS, HEADS))
    dirty = [x.clone() for x in case.inputs[1:]]
    for x in dirty:
        x.transpose(1, 2)[hidden] = torch.nan
    found = attend(replace(case, k=dirty[0], v=dirty[1]), pattern, chunk=17, key_padding_mask=hidden)
    truth = dense(case, seen * ~hidden[:, None, None])
    assert max(errors(found, truth)) <= 1e-12
    same_lse(found.lse, truth.lse, 1e-12)


def test_no_tokens_and_no_batch() -> None:
    for shape in ((2, 2, 0, 8), (0, 2, 5, 8)):
        x = torch.zeros(shape, requires_grad=True)
        out, lse = ra.attention(x, x, x, Causal(), offload="host", chunk=2, device="cpu", return_lse=True)
        assert out.shape == shape and lse.shape == shape[:3]
        assert torch.autograd.grad(out.sum(), x)[0].shape == shape


# -- bytes ----------------------------------------------------------------------------------------------------


def runner_of(pattern: Pattern, *tensors: torch.Tensor, chunk: int, backward: bool = False) -> OffloadRunner:
    q, k, v = tensors
    call = compile_call(q, k, v, pattern, "contiguous", {"schedule": "direct"})
    return make_offload(call, chunk=chunk, backward=backward)


@pytest.mark.parametrize(("chunk", "dtype"), [(10, torch.bfloat16), (34, torch.float32)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_needed_rows_are_copied_and_no_others(pattern: Pattern, chunk: int, dtype: torch.dtype) -> None:
    """Counted by the transport, by the plan, and here on the dense mask: rows of other chunks that a chunk sees."""
    case = make_case(TOKENS, HEADS, KV_HEADS, dtype, dim=8, value_dim=4)
    runner = runner_of(pattern, *case.inputs, chunk=chunk)
    edges = [TOKENS * i // runner.plan.ranks for i in range(runner.plan.ranks + 1)]
    assert max(np.diff(edges)) <= chunk
    mask = pattern.mask(TOKENS, HEADS).reshape(KV_HEADS, HEADS // KV_HEADS, TOKENS, TOKENS).any(1)
    rows = 0
    for first, stop in pairwise(edges):
        needed = mask[:, first:stop].any(1)
        needed[:, first:stop] = False
        rows += int(needed.sum())
    pairs = rows * case.q.shape[0] * (8 + 4)
    result = runner.forward(case.q, (case.k, case.v), save=True)
    assert (runner.counters.received_bytes, runner.counters.sent_bytes) == (pairs * dtype.itemsize, 0)
    assert runner.plan.bytes_sent() == pairs * dtype.itemsize
    runner.counters.reset()
    runner.backward(case.grad, None, case.q, (case.k, case.v), result)
    assert (runner.counters.received_bytes, runner.counters.sent_bytes) == (pairs * dtype.itemsize, pairs * 4)
    assert runner.plan.bytes_sent(backward=True) == pairs * (dtype.itemsize + 4)
    counted = runner.plan.messages(), runner.plan.messages(backward=True)
    assert counted[1] == 2 * counted[0] == runner.counters.received_messages + runner.counters.sent_messages


# -- memory ---------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of all tensors that are made in this context and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        #: By address, which another storage may have had before.
        self.known = weakref.WeakValueDictionary[int, torch.UntypedStorage]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if not isinstance(x, torch.Tensor) or (store := x.untyped_storage())._cdata in given:
                continue
            if self.known.get(store._cdata) is not store:
                self.known[store._cdata] = store
                self.now += store.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(store, self._gone, store.nbytes())
        return result

    def _gone(self, size: int) -> None:
        self.now -= size


@dataclass(frozen=True)
class Apart(HostTensors):
    """What a rank reads of its own rows is a copy, as on a device that has memory of its own."""

    def rows(self, name: str, r: range) -> torch.Tensor:
        x = super().rows(name, r)
        return x if name in ("dq", "dk", "dv") else x.clone()


def device_peak(pattern: Pattern, tokens: int, chunk: int, dtype: torch.dtype, *, backward: bool) -> int:
    """The most bytes that lived at a time beside the whole tensors."""
    torch.manual_seed(1)  # keys of a chunk that share a component by chance take a way with more memory
    q, k, v, out, dout = (torch.randn(1, h, tokens, 32).to(dtype) for h in (4, 2, 2, 4, 4))
    lse, dq = torch.zeros(1, 4, tokens), torch.empty_like(q)
    storage = Apart(
        {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dq": dq, "dk": k.float(), "dv": v.float()}
    )
    runner = runner_of(pattern, q, k, v, chunk=chunk)
    peaks = []
    for _ in range(3):  # masks that kernels remember are there the second time
        with Live() as live:
            runner.differentiate(storage) if backward else runner.compute(storage)
        peaks.append(live.peak)
    return max(peaks[1:])


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("pattern", [Causal(), Window(50, 20), Dilated((32, 128), (1, 4))], ids=repr)
def test_the_device_holds_nothing_that_grows_with_tokens(pattern: Pattern, backward: bool) -> None:
    peaks = [device_peak(pattern, tokens, 32, torch.float32, backward=backward) for tokens in (128, 320)]
    assert max(peaks) <= 1.01 * peaks[0]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chosen_chunk_fits(dtype: torch.dtype, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`row_bytes` is enough for what lives on the device, and not far too much; a chosen chunk takes half of it."""
    facts = {"heads": 4, "kv_heads": 2, "head_dim": 32, "value_dim": 32, "dtype": str(dtype)[6:], "batch": 1}
    per_row, _ = row_bytes(**facts, backward=backward)
    for pattern in (Causal(), Full()):
        peak = device_peak(pattern, 2048, 512, dtype, backward=backward)
        assert 0.5 * 512 * per_row <= peak <= 1.2 * 512 * per_row  # `Apart` copies blocks that hops read, too
    results = 4096 * (4 * (32 * dtype.itemsize + 4))
    if backward:
        results += 4096 * (4 * 32 * dtype.itemsize + 2 * 64 * (4 + dtype.itemsize))
    for room, rows in ((1024, 1024), (1100, 1024), (300, 256), (100, 100), (9999, 4096)):
        monkeypatch.setattr("ringattn.call.offload.available", lambda room=room: results + 2 * room * per_row)
        assert chunk_rows(4096, device=CPU, backward=backward, **facts) == rows
    monkeypatch.setattr("ringattn.call.offload.available", lambda: results)
    with pytest.raises(OutOfMemory, match="and host memory has 0 left; free memory, or give chunk="):
        chunk_rows(4096, device=CPU, backward=backward, **facts)


def test_memory_that_the_allocator_holds_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has freed tensors gets the chunk of a process that never had them."""
    facts = {"heads": 4, "kv_heads": 2, "head_dim": 32, "value_dim": 32, "dtype": "float32", "batch": 1}
    per_row, _ = row_bytes(**facts, backward=True)
    for driver, reserved, allocated, rows in ((1000, 0, 0, 500), (400, 650, 50, 500), (1000, 300, 300, 500)):
        bytes_of = {"mem_get_info": (driver * per_row, 0), "memory_reserved": reserved, "memory_allocated": allocated}
        for name, value in bytes_of.items():
            found = value if isinstance(value, tuple) else value * per_row
            monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
        assert chunk_rows(4096, device=torch.device("cuda:0"), backward=True, **facts) == rows // 128 * 128


def test_without_a_chunk_the_memory_of_this_machine_decides() -> None:
    assert available() > 0
    case = make_case(TOKENS, HEADS, KV_HEADS, torch.float64)
    assert max(errors(attend(case, Causal()), truth_of(case, Causal()))) <= 1e-12


# -- files ----------------------------------------------------------------------------------------------------


def test_rows_that_are_written_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        for name, shape, dtype in (
            ("out", (2, 3, 17, 5), torch.bfloat16),
            ("lse", (2, 3, 17), torch.float32),
            ("dq", (2, 3, 17, 5), torch.float64),
        )
    }
    made = create_safetensors(path, {name: (x.shape, x.dtype) for name, x in wanted.items()})
    assert all((x == 0).all() for x in load_file(path).values())
    for name, x in wanted.items():
        for rows in (range(9, 17), range(9)):
            made[name][:, :, rows.start : rows.stop].copy_(x[:, :, rows.start : rows.stop])
    found = load_file(path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in wanted.items())


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (
            {"offload": "disk"},
            InvalidInput,
            "offload='disk': expected 'host'. Tensors that are mapped from a file are host tensors",
        ),
        ({"offload": "host", "chunk": 0}, InvalidInput, "chunk=0 must be an integer >= 1"),
        ({"offload": "host", "chunk": 2.0}, InvalidInput, "chunk=2.0 must be an integer >= 1"),
        ({"offload": "host", "device": "meta"}, InvalidInput, "device=meta: offload= computes on cpu or cuda"),
        ({"offload": "host", "device": "gpu"}, InvalidInput, "device='gpu' is not a device"),
        ({"offload": "host", "device": "cuda:99"}, InvalidInput, "there is no such CUDA device"),
        ({"offload": "host", "device": "cpu", "kernel": "aten_cuda"}, Unsupported, "needs tensors on a cuda device"),
        ({"chunk": 4}, InvalidInput, "chunk=4 needs offload='host'"),
        ({"device": "cpu"}, InvalidInput, "device='cpu' needs offload='host'"),
        (
            {"offload": "host", "device": "cpu", "key_padding_mask": torch.zeros(1, 9)},
            InvalidInput,
            "must be a bool tensor",
        ),
    ],
)
def test_errors(options: dict[str, object], kind: type[Exception], words: str) -> None:
    x = torch.zeros(1, 1, 9, 8)
    with pytest.raises(kind) as caught:
        ra.attention(x, x, x, Full(), **options)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_wrong_tensors() -> None:
    x = torch.zeros(1, 1, 9, 8)
    options = {"offload": "host", "chunk": 4, "device": "cpu"}
    with pytest.raises(InvalidInput, match=r"k is on meta; pass its cpu\(\)"):
        ra.attention(x, x.to("meta"), x, Full(), **options)
    with pytest.raises(InvalidInput, match="the same batch and the same tokens"):
        ra.attention(x, x, x[:, :, :8], Full(), **options)
    with pytest.raises(InvalidInput, match="q must be a tensor"):
        ra.attention(None, x, x, Full(), **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="unknown name 'causal'; did you mean 'Causal'"):
        ra.attention(x, x, x, "causal", **options)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_on_a_cuda_device(pattern: Pattern) -> None:
    case = make_case(1000, HEADS, KV_HEADS, torch.float32, dim=64, lse=True)
    pattern = pattern if not isinstance(pattern, Documents | ra.BlockSparse) else Causal()
    truth = truth_of(case, pattern)
    for kernel, chunk in (("reference", 130), ("auto", 130), ("auto", None)):
        found = attend(case, pattern, chunk=chunk, device="cuda", kernel=kernel)
        assert max(errors(found, truth)) <= (2e-3 if kernel == "auto" else 1e-4)
        same_lse(found.lse, truth.lse, 1e-3)
