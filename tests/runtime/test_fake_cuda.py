"""Ranks on tensors without memory, in place of CUDA: devices, dtypes, launches, and no copy to or from the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringattn as ra
from ringattn import kernels
from ringattn.call.planner import make_plan
from ringattn.kernels.aten_cuda import AtenCuda
from ringattn.kernels.cuda_device import CudaDevice
from ringattn.nn import MultiheadRingAttention
from ringattn.plan import row_sets
from ringattn.runtime.passes import backward, forward
from ringattn.runtime.ring import Job
from ringattn.transport.base import Counters, Post, drive

BF16, FP32 = torch.bfloat16, torch.float32
RANKS, RANK, HEADS, DIM = 4, 2, 4, 64


#: Tensors without memory stand for those of CUDA: a copy of theirs to the host, and a number of theirs, is an error.
CUDA = torch.device("meta")
#: Ops that make tensors without a launch.
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
#: Ops for which the host waits for the device.
WAITING = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}


class Recorder(TorchDispatchMode):
    """What happens in this context: a record of its aten ops."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = Counter[str]()
        #: Ops that copy between host and device, and ops for which the host waits.
        self.crossings: list[str] = []
        self.waits: list[str] = []
        self.devices: set[str] = set()
        #: The numbers of the largest tensor of each dtype that was made.
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func: Any, types, args=(), kwargs=None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if name in WAITING:
            self.waits.append(name)
        result = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if name in ("_to_copy", "copy_", "_copy_from"):
            devices = {x.device.type for x in (*given, *made)}
            if len(devices) > 1:
                self.crossings.append(name)
        if name not in NO_LAUNCH and not _is_view(func) and any(x.numel() for x in made):
            self.launches[name] += 1
        for x in made:
            self.devices.add(str(x.device))
            self.largest[x.dtype] = max(x.numel(), self.largest.get(x.dtype, 0))
        return result


def _is_view(func: Any) -> bool:
    """Whether the outputs of an op are views of its inputs, which the op does not write to."""
    return any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.arguments)


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA kernel takes tensors without memory for those of a device of capability 9.0."""
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(CudaDevice, "read", classmethod(lambda cls, place=None: cls((9, 0), None)))
        patch.setattr(AtenCuda, "check", lambda self, q, k, v: self.use(CudaDevice.read(q.device), q.shape[-1]))
        patch.setitem(kernels.AUTO, CUDA.type, "aten_cuda")
        yield


class NoMessages:
    """A transport of equal ranks that carries nothing, and checks what it is handed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.counters, self.events = Counters(), 0

    def check(self, device: torch.device) -> None:
        assert device == CUDA

    def gather(self, record: bytes, stage: str) -> list[bytes]:
        return [record] * self.size

    def defers(self, check: str | None) -> bool:
        return False

    def wait(self, ticket: None) -> None:
        pass

    def post(self, post: Post) -> None:
        for message in (*post.sends, *post.recvs):
            assert (message.data.device, message.data.dtype) == (CUDA, torch.uint8)


@dataclass(frozen=True)
class Ring:
    """A call of one rank, and the most launches per visit in its forward and its backward."""

    pattern: ra.Pattern
    forward: float
    backward: float
    options: dict[str, str] = field(default_factory=dict)
    lse: bool = False


#: Ceilings: all launches of a pass, those of a call's start and end among them, over its visits. Lower them when a
#: change makes fewer.
RINGS = {
    "causal": Ring(ra.Causal(), 14, 19.5),
    "causal, queries travel": Ring(ra.Causal(), 14, 29.25, options={"rotate": "q"}),
    "causal, gradient of lse": Ring(ra.Causal(), 14, 25.25, lse=True),
    "documents": Ring(ra.Documents((1500, 500, 96, 2000)) & ra.Causal(), 15.25, 17.75),
    "dilated": Ring(ra.Dilated((1024, 4096), (1, 4)), 28.25, 30.75),
    "block mask": Ring(ra.BlockSparse(128, np.random.default_rng(0).random((1, 32, 32)) < 0.3), 22.25, 27.75),
    "index lists": Ring(ra.Causal() & ra.Window(1000), 22.75, 27.25),
    "ulysses": Ring(ra.Causal(), 27.5, 37, options={"schedule": "ulysses(2)"}),
}
#: Rings whose first call brings index lists, or the lengths of sequences, to the device.
WITH_INDICES = ("index lists", "ulysses", "documents", "dilated", "block mask")


def run(ring: Ring) -> tuple[int, Recorder, Recorder]:
    """The visits of a rank, and the records of its forward and its backward."""
    settings: dict[str, Any] = {"layout": "zigzag", "schedule": "ring", "rotate": "kv", **ring.options}
    plan = make_plan(
        ring.pattern, tokens=4096, ranks=RANKS, heads=HEADS, head_dim=DIM, dtype="bfloat16", batch=1, **settings
    )
    rows, visits = plan.layout.rows(RANK), sum(len(step.visits) for step in plan.for_rank(RANK).forward)
    job = Job(plan, RANK, AtenCuda(None, BF16, deterministic=False), 0.1, lse=ring.lse)
    q, k, v, grad = (torch.empty(1, HEADS, rows, DIM, dtype=BF16, device=CUDA) for _ in range(4))
    carrier = NoMessages(RANK, RANKS)
    with Recorder() as first:
        result = drive(forward(job, q, (k, v), save=True), carrier)
        grad_lse = torch.empty_like(result.lse) if ring.lse else None
    with Recorder() as second:
        grads = drive(backward(job, grad, grad_lse, q, (k, v), result), carrier)
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
        per_visit = record.launches.total() / visits
        assert per_visit <= ceiling, f"{per_visit} launches per visit: {record.launches}"


def test_host_copies_and_waits_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder can fail."""
    with fake_cuda(monkeypatch), Recorder() as record:
        x = torch.empty(3, 4, device=CUDA)
        torch.zeros(4).to(CUDA), x[0].copy_(torch.zeros(4))
        assert len(record.crossings) == 2
        for to_host in (x.cpu, lambda: torch.zeros(3, 4).copy_(x), lambda: x.sum().item()):
            with pytest.raises((NotImplementedError, RuntimeError)):
                to_host()
        assert record.waits == ["_local_scalar_dense"]
        assert "cpu" in record.devices


def test_a_module_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings and projections of a whole sequence, and of the shard of one rank."""
    for place in ({"ranks": None}, {"transport": NoMessages(1, 4), "layout": "zigzag", "schedule": "ring"}):
        with fake_cuda(monkeypatch), Recorder():
            module = MultiheadRingAttention(64, 4, ra.Causal(), device=CUDA, dtype=BF16, **place)  # type: ignore[arg-type]
            x = torch.empty(128, 2, 64, dtype=BF16, device=CUDA)
            module(x, x, x)
            with Recorder() as record:
                out, _ = module(x, x, x)
        assert (out.shape, out.dtype, out.device) == (x.shape, BF16, CUDA)
        assert record.crossings == [] and record.waits == [] and record.devices == {str(CUDA)}
