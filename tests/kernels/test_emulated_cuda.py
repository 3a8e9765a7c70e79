"""The CUDA kernel on emulated ops: every choice gives the numbers of dense attention, and no op is handed what it
refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from emulated_ops import EmulatedOps
from oracle import error
from works import trimmed

import ringattn as ra
from ringattn.kernels import aten_cuda, base
from ringattn.kernels.aten_cuda import AtenCuda, _flash_calls, _reads_band
from ringattn.kernels.base import band
from ringattn.plan.work import Work

SHAPES = [(1, 9), (9, 1), (13, 7), (16, 16), (40, 24), (31, 64)]
BANDS = [
    (None, None),
    (0, None),
    (-3, None),
    (5, None),
    (None, 0),
    (None, 7),
    (-5, 9),
    (0, 6),
    (-1, 30),
    (2, 12),
    (-9, -2),
]


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> EmulatedOps:
    """Emulated ops in place of torch's, a device of capability 9.0, and checks that take CPU tensors for CUDA
    tensors."""
    emulated = EmulatedOps()
    monkeypatch.setattr(aten_cuda, "_aten", emulated)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(AtenCuda, "check", lambda self, q, k, v: None)
    return emulated


def all_works() -> list[Work]:
    return [work for rows, keys in SHAPES for lo, hi in BANDS if (work := trimmed(rows, keys, lo, hi)) is not None]


def visible(work: Work) -> torch.Tensor:
    return band(len(work.q), work.keys, work.lo, work.hi, torch.device("cpu"))


def test_flash_calls_hold_the_pairs_of_the_work() -> None:
    several = 0
    for work in all_works():
        calls = list(_flash_calls(work))
        several += len(calls) > 1
        found = torch.zeros(len(work.q), work.keys, dtype=torch.int64)
        for call in calls:
            assert call.dense or _reads_band(call)
            (keys,) = call.k
            found[call.q.start - work.q.start : call.q.stop - work.q.start, keys.start - work.k[0].start :][
                :, : len(keys)
            ] += visible(call)
        assert torch.equal(found, visible(work).long()), work
        assert len(calls) <= 3
    assert several > 3, "some bands are misread as one call"


@pytest.mark.parametrize("choice", [None, "flash", "cudnn", "efficient"])
@pytest.mark.parametrize(
    ("dtype", "lay_out"),
    [
        (torch.float32, "contiguous"),
        (torch.float32, "heads last"),
        (torch.float32, "columns apart"),
        (torch.float32, "odd offset"),
        (torch.bfloat16, "odd offset"),
        (torch.float16, "contiguous"),
    ],
)
def test_every_choice_gives_dense_attention(
    ops: EmulatedOps, choice: str | None, dtype: torch.dtype, lay_out: str
) -> None:
    """Forward and backward, grouped heads, value dims of their own; fp32 shows errors that 16 bits would hide."""
    kernel = AtenCuda(choice, dtype, deterministic=False)
    source = torch.Generator().manual_seed(5)

    def make(heads: int, rows: int, width: int) -> torch.Tensor:
        x = torch.randn(2, heads, rows, width, generator=source).to(dtype)
        if lay_out == "heads last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if lay_out == "columns apart":
            return x.mT.contiguous().mT
        if lay_out == "odd offset":
            return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
        return x

    for work in all_works():
        q, grad = make(4, len(work.q), 16), make(4, len(work.q), 24)
        k, v = make(2, work.keys, 16), make(2, work.keys, 24)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        wide = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
        logits = (wide[0] @ wide[1].mT * 0.3).masked_fill(~visible(work), -torch.inf)
        lse, out = logits.logsumexp(-1), logits.softmax(-1) @ wide[2]
        truth = torch.autograd.grad((out * grad.double()).sum(), leaves)
        grads = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)]
        total = torch.zeros(2, 4, len(work.q), 24, dtype=torch.float64)
        norm = torch.full((2, 4, len(work.q)), -torch.inf, dtype=torch.float64)
        for call in kernel.split(work):
            rows = slice(call.q.start - work.q.start, call.q.stop - work.q.start)
            (run,) = call.k
            keys = slice(run.start - work.k[0].start, run.stop - work.k[0].start)
            mine = [x[:, :, rows] for x in (grad, q)]
            part, part_lse = kernel.forward(mine[1], k[:, :, keys], v[:, :, keys], call, 0.3)
            both = torch.logaddexp(norm[:, :, rows], part_lse.double())
            old, new = ((x - both).exp().unsqueeze(-1) for x in (norm[:, :, rows], part_lse.double()))
            total[:, :, rows], norm[:, :, rows] = total[:, :, rows] * old + part.double() * new, both
            found = kernel.backward(
                *(mine[0], mine[1], k[:, :, keys], v[:, :, keys]),
                *(out.to(dtype)[:, :, rows], lse.float()[:, :, rows], call, 0.3),
            )
            for x, y, some in zip(grads, found, (rows, keys, keys), strict=True):
                x[:, :, some] += y.double()
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        assert error(total, out) <= limit and error(norm, lse) <= limit, work
        for x, y in zip(grads, truth, strict=True):
            assert error(x, y) <= limit, work
    assert ops.calls


def test_emulated_flash_misreads_windows(ops: EmulatedOps) -> None:
    """The emulation can fail: a band that is handed over unsplit gives wrong numbers."""
    wrong = 0
    for work in (work for work in all_works() if not work.dense and not _reads_band(work)):
        q, k = torch.ones(1, 1, len(work.q), 8), torch.ones(1, 1, work.keys, 8)
        v = torch.eye(work.keys, max(8, -(-work.keys // 8) * 8))[None, None]
        single = Work(range(1), range(1), work.q, work.k, work.lo, work.hi)
        out, _ = AtenCuda("flash", torch.float32, deterministic=False).forward(q, k, v, single, 1.0)
        wrong += not torch.equal(out[0, 0, :, : work.keys] > 0, visible(work))
    assert wrong > 3


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("choice", ["flash", "cudnn", "efficient"])
def test_virtual_rings_on_emulated_ops(
    ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch, layout: str, choice: str
) -> None:
    """Windows on zigzag and striped shards have calls with more rows than keys."""
    q, k, v = (torch.randn(1, heads, 53, 20, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    for pattern in ("Causal()", "Causal() & Window(9)", "Causal() & (Window(5) | Sinks(3))", "Window(4, 6)", "Full()"):
        for rotate in ("keys", "queries"):
            results = []
            for kernel in ("reference", f"aten_cuda:{choice}"):
                inputs = [x.clone().requires_grad_() for x in (q, k, v)]
                out, lse = ra.virtual_attention(
                    *inputs,
                    pattern,
                    ranks=4,
                    layout=layout,
                    schedule="ring",
                    kernel=kernel,
                    rotate=rotate,
                    return_lse=True,
                )
                grads = torch.autograd.grad((out.square().sum() + lse.sum()), inputs)
                results.append([x.double() for x in (out, lse, *grads)])
            for found, truth in zip(results[1], results[0], strict=True):
                assert error(found, truth) <= 2e-5, (pattern, rotate)
    assert ops.calls


def test_the_mode_of_the_caller_stays_as_it_is() -> None:
    """Deterministic mode of torch is the caller's, warn_only included."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        for enabled, warn_only in ((False, False), (True, True), (True, False)):
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            for wanted in (False, True):
                with aten_cuda._deterministic(wanted):
                    assert torch.are_deterministic_algorithms_enabled() == (enabled or wanted)
                assert torch.are_deterministic_algorithms_enabled() == enabled
                assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_head_dims_without_room_for_the_gradient_of_lse_are_refused(ops: EmulatedOps) -> None:
    """Before the first message: else the op would refuse 264 columns in the middle of a backward."""
    q = torch.randn(1, 1, 16, 250)
    options = {"ranks": 2, "kernel": "aten_cuda:flash", "return_lse": True}
    ra.virtual_attention(q, q, q, "Causal()", **options)
    with pytest.raises(ra.Unsupported, match=r"250 with return_lse and gradients.*256 at most"):
        ra.virtual_attention(q.requires_grad_(), q, q, "Causal()", **options)
    ra.virtual_attention(q, q, q, "Causal()", **{**options, "return_lse": False}).sum().backward()
    narrow = torch.randn(1, 1, 16, 248, requires_grad=True)
    out, lse = ra.virtual_attention(narrow, narrow, narrow, "Causal()", **options)
    (out.sum() + lse.sum()).backward()


def test_bad_numbers_on_emulated_ops(ops: EmulatedOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad number makes NaN of the rows that see it, and of no others, where nothing looks at the numbers."""
    monkeypatch.setattr(base, "finite", lambda *tensors: False)
    monkeypatch.setattr(base, "none", lambda flags: False)
    place = 17
    for text in ("Causal()", "Causal() & (Window(5) | Sinks(3))"):
        mask = torch.from_numpy(ra.parse_pattern(text).mask(40)[0] > 0)
        for choice, rotate, which in itertools.product(("flash", "efficient"), ("keys", "queries"), range(4)):
            q, k, v, grad = (torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(i)) for i in range(4))
            (q, k, v, grad)[which][0, 0, place, 3] = torch.nan
            rows = mask[:, place] if which in (1, 2) else torch.arange(40) == place
            inputs = [x.requires_grad_() for x in (q, k, v)]
            options = {"ranks": 3, "layout": "zigzag", "kernel": f"aten_cuda:{choice}", "rotate": rotate}
            out = ra.virtual_attention(*inputs, text, **options)
            dq, dk, dv = torch.autograd.grad(out, inputs, grad)
            keys = mask[rows].any(0)
            for x, wanted in ((out, rows & (which < 3)), (dq, rows), (dk, keys), (dv, keys)):
                assert torch.equal(x[0, 0].isnan().all(-1), wanted), (text, options, which)
                assert torch.equal(x[0, 0].isfinite().all(-1), ~wanted), (text, options, which)
    assert ops.calls
