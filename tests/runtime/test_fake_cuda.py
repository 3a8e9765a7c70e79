"""Ranks on fake CUDA tensors: devices, dtypes, launches per visit, and no copy to or from the host in a warm call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, NoMessages, Record, fake_cuda, recorded

import ringattn as ra
from ringattn.kernels.aten_cuda import AtenCuda
from ringattn.nn import MultiheadRingAttention
from ringattn.plan import row_sets
from ringattn.planner import make_plan
from ringattn.runtime.executor import Job, backward, forward
from ringattn.transport.base import drive

BF16, FP32 = torch.bfloat16, torch.float32
RANKS, RANK, HEADS, DIM = 4, 2, 4, 64


@dataclass(frozen=True)
class Ring:
    """A call of one rank, and the most launches per visit in its forward and its backward."""

    pattern: ra.Pattern
    forward: float
    backward: float
    tokens: int = 4096
    options: tuple[tuple[str, Any], ...] = ()
    kv_heads: int = HEADS
    dtype: torch.dtype = BF16
    lse: bool = False


def options(**named: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(named.items())


#: Ceilings: all launches of a pass, those of a call's start and end among them, over its visits. Lower them when a
#: change makes fewer.
RINGS = {
    "causal": Ring(ra.Causal(), 14, 19.5),
    "causal, queries travel": Ring(ra.Causal(), 14, 29.25, options=options(rotate="queries")),
    "causal, fp32": Ring(ra.Causal(), 12.75, 22.75, dtype=FP32),
    "causal, gradient of lse": Ring(ra.Causal(), 14, 25.25, lse=True),
    "grouped heads": Ring(ra.Causal(), 14, 19.5, kv_heads=2),
    "window": Ring(ra.Causal() & ra.Window(1024), 18, 21.75),
    "documents": Ring(ra.Documents((1500, 500, 96, 2000)) & ra.Causal(), 15.25, 17.75),
    "documents, striped": Ring(
        ra.Documents((1500, 500, 96, 2000)) & ra.Causal(), 23.25, 30.25, options=options(layout="striped")
    ),
    "dilated": Ring(ra.Dilated((1024, 4096), (1, 4)), 28.25, 30.75),
    "block mask": Ring(ra.BlockSparse(128, np.random.default_rng(0).random((1, 32, 32)) < 0.3), 22.25, 27.75),
    "16 bits travel": Ring(ra.Causal(), 20.5, 31, dtype=FP32, options=options(comm_dtype="bfloat16")),
    "index lists": Ring(ra.Causal() & ra.Window(1000), 22.75, 27.25),
    "ulysses": Ring(ra.Causal(), 27.5, 37, options=options(schedule="ulysses(2)")),
}
#: Rings whose first call brings index lists, or the lengths of sequences, to the device.
WITH_INDICES = ("index lists", "ulysses", "documents", "documents, striped", "dilated", "block mask")


def run(ring: Ring) -> tuple[int, Record, Record]:
    """The visits of a rank, and the records of its forward and its backward."""
    settings = {"layout": "zigzag", "schedule": "ring", "rotate": "keys", **dict(ring.options)}
    plan = make_plan(
        ring.pattern,
        tokens=ring.tokens,
        ranks=RANKS,
        heads=HEADS,
        kv_heads=ring.kv_heads,
        head_dim=DIM,
        value_dim=DIM,
        dtype=str(ring.dtype)[6:],
        batch=1,
        **settings,
    )
    rows, visits = plan.layout.rows(RANK), sum(len(step.visits) for step in plan.for_rank(RANK).forward)
    job = Job(plan, RANK, AtenCuda(None, ring.dtype, deterministic=False), 0.1, lse=ring.lse)
    q, k, v, grad = (
        torch.empty(1, heads, rows, DIM, dtype=ring.dtype, device=CUDA)
        for heads in (HEADS, ring.kv_heads, ring.kv_heads, HEADS)
    )
    carrier = NoMessages(RANK, RANKS)
    with recorded() as first:
        result = drive(forward(job, q, k, v, keep=True), carrier)
        grad_lse = torch.empty_like(result.lse) if ring.lse else None
    with recorded() as second:
        grads = drive(backward(job, grad, grad_lse, q, k, v, result), carrier)
    assert result.lse.dtype == FP32 and result.lse.shape == q.shape[:3]
    for x, like in zip((result.out, *grads), (q, q, k, v), strict=True):
        assert (x.shape, x.dtype, x.device) == (like.shape, like.dtype, CUDA)
    for record in (first, second):
        # Only lse is summed in fp64: one number per row of the largest group of ranks.
        assert record.largest.get(torch.float64, 0) <= HEADS * rows
    return visits, first, second


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="counts what torch does itself, which is more in torch 2.11")
@pytest.mark.parametrize("name", RINGS)
def test_launches_devices_and_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a plan may bring index lists to the device. No other call brings or fetches anything."""
    ring = RINGS[name]
    if name == "index lists":
        monkeypatch.setattr(row_sets, "MAX_SLICES", 0)
    with fake_cuda(monkeypatch):
        visits, *records = run(ring)
        if name in WITH_INDICES:
            assert any(record.crossings for record in records)
            visits, *records = run(ring)
    for record, ceiling in zip(records, (ring.forward, ring.backward), strict=True):
        assert record.crossings == [] and record.waits == [] and record.devices == {str(CUDA)}
        assert record.total <= ceiling * visits, f"{record.total / visits} launches per visit: {record.launches}"


def test_host_copies_and_waits_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder can fail."""
    with fake_cuda(monkeypatch), recorded() as record:
        x = torch.empty(3, 4, device=CUDA)
        x.cpu(), x.to("cpu"), torch.zeros(4).to(CUDA), x[0].copy_(torch.zeros(4)), torch.as_tensor([1], device=CUDA)
        assert len(record.crossings) == 5
        with pytest.raises(RuntimeError):  # the number is not known
            x.sum().item()
        assert record.waits == ["_local_scalar_dense"]
        assert "cpu" in record.devices


def test_a_module_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings and projections of a whole sequence, and of the shard of one rank."""
    for place in ({"ranks": None}, {"transport": NoMessages(1, 4), "layout": "zigzag", "schedule": "ring"}):
        with fake_cuda(monkeypatch), recorded():
            module = MultiheadRingAttention(64, 4, ra.Causal(), device=CUDA, dtype=BF16, **place)  # type: ignore[arg-type]
            x = torch.empty(128, 2, 64, dtype=BF16, device=CUDA)
            module(x, x, x)
            with recorded() as record:
                out, _ = module(x, x, x)
        assert (out.shape, out.dtype, out.device) == (x.shape, BF16, CUDA)
        assert record.crossings == [] and record.waits == [] and record.devices == {str(CUDA)}
