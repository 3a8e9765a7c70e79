"""Suite "host": the host time of a warm call on one rank without kernels and messages, and its launches and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ....call.planner import make_plan
from ....kernels.aten_cpu import AtenCpu
from ....kernels.base import Kernel
from ....plan.plan import Plan
from ....plan.work import Work
from ....runtime.passes import backward, forward
from ....runtime.ring import Job
from ....transport.base import Carrier, Post, Tags, drive
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Run

#: Rank RANK of RANKS in a causal ring, with so few tokens that copying and merging the data takes no time.
RANKS, RANK, HEADS, HEAD_DIM, TOKENS = 8, 3, 2, 16, 128
SCHEDULES = ("ring", "allgather", "direct", "ulysses(2)", "double_ring(2)")
#: Calls in a round; its time is divided by this number.
CALLS = 50
#: Maximum milliseconds of a warm forward and backward of the ring.
LIMITS = {"forward": 0.8, "backward": 1.5}
NOTE = (
    "host: seconds of 50 warm calls of rank 3 of 8, causal zigzag, from the program's start to its result: buffers, "
    "copies, merges and guards, with a kernel that returns stored zeros and a transport that writes zeros to what it "
    "receives; without the handshake, autograd, kernels and messages; launches: ops that are no views, kernels as one "
    "op each; bytes: what these ops, except kernels, read and write, for 128 tokens of 2 heads of 16 in fp32"
)


class NoKernel(AtenCpu):
    """A kernel that computes nothing, to measure the time of everything else. `calls` counts its calls.

    The results for a work are created once, so that a later call costs only a look-up.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._results: dict[tuple[str, Work], Any] = {}

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work, scale: float) -> Any:
        self.calls += 1
        key = "forward", work
        if key not in self._results:
            self._results[key] = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3])
        return self._results[key]

    def backward(self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, work: Work, scale: float) -> Any:
        self.calls += 1
        key = "backward", work
        if key not in self._results:
            self._results[key] = tuple(map(torch.zeros_like, (q, k, v)))
        return self._results[key]


class InstantMessages:
    """A replacement for messages that takes no time and delivers zeros, to measure the time of computing alone."""

    def post(self, post: Post) -> None:
        """Fill the receive buffers with zeros."""
        for message in post.recvs:  # NaNs in a reused buffer would slow kernels down
            message.data.zero_()

    def wait(self, ticket: None) -> None:
        """Return at once: no message is in flight."""


class LaunchCounter(TorchDispatchMode):
    """Counts the ops that a device would launch, and the bytes that they read and write."""

    launches = bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = func.is_view or func.namespace == "prim" or "empty" in func.__name__
        if not is_view:
            tensors = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
            self.launches += 1
            self.bytes += sum(x.numel() * x.element_size() for x in tensors.values())
        return result


def make_passes(plan: Plan, rank: int, kernel: Kernel, carrier: Carrier) -> dict[str, Callable[[], Any]]:
    """Functions {"forward": run, "backward": run} that run the passes of one rank in fp32, after a warm-up.

    They run the executor's own programs; `carrier` carries the messages.
    """
    shape = plan.batch, plan.heads, plan.layout.rows(rank), plan.head_dim
    q, k, v, grad = (torch.zeros(shape, device="cpu") for _ in range(4))
    job = Job(plan, rank, kernel, plan.head_dim**-0.5)

    def run_forward() -> Any:
        return drive(forward(job, q, (k, v), save=True, tags=Tags.of_call(0, backward=False)), carrier)

    result = run_forward()

    def run_backward() -> Any:
        return drive(backward(job, grad, None, q, (k, v), result, tags=Tags.of_call(0, backward=True)), carrier)

    run_backward()
    return {"forward": run_forward, "backward": run_backward}


def _make_host_passes(schedule: str, rotate: str) -> tuple[NoKernel, dict[str, Callable[[], Any]]]:
    """A kernel that computes nothing, and `make_passes` for one rank with it and without messages."""
    sizes: dict[str, Any] = {"tokens": TOKENS, "ranks": RANKS, "heads": HEADS, "head_dim": HEAD_DIM}
    plan, kernel = make_plan("Causal()", layout="zigzag", schedule=schedule, rotate=rotate, **sizes), NoKernel()
    return kernel, make_passes(plan, RANK, kernel, InstantMessages())


def count_passes(schedule: str, rotate: str = "auto") -> Iterator[tuple[str, dict[str, float]]]:
    """For each pass: the launches, the kernel calls, their ratio, and the bytes that all ops except kernels move."""
    kernel, passes = _make_host_passes(schedule, rotate)
    for name, run in passes.items():
        kernel.calls = 0
        with LaunchCounter() as counter:
            run()
        launches = counter.launches + kernel.calls
        counts = {"launches": launches, "kernel_calls": kernel.calls}
        yield name, {**counts, "launches_per_call": launches / max(kernel.calls, 1), "bytes": counter.bytes}


def list_cases() -> list[BenchCase]:
    """One case per schedule, and for the ring one per `rotate` of its backward."""
    return [*(_case(schedule, "auto") for schedule in SCHEDULES), *(_case("ring", rotate) for rotate in ("kv", "q"))]


def _case(schedule: str, rotate: str) -> BenchCase:
    name = schedule.replace("(", "_").replace(")", "")
    return BenchCase(
        name if rotate == "auto" else f"{name}_{rotate}",
        1,
        {"schedule": schedule, "rotate": rotate, "tokens": TOKENS, "ranks": RANKS},
        tuple(BenchColumn(column, 1, partial(_make, column=column)) for column in ("forward", "backward")),
        summarise=_summarise,
        notes=(NOTE,),
    )


def _make(context: Context, column: str) -> Run:
    _, passes = _make_host_passes(context.settings["schedule"], context.settings["rotate"])
    run = passes[column]

    def many() -> None:
        for _ in range(CALLS):
            run()

    return many


def _summarise(record: CaseRecord) -> dict[str, Any]:
    """Host milliseconds, launches and bytes per call, for both passes."""
    found: dict[str, Any] = {}
    for name, counts in count_passes(record["settings"]["schedule"], record["settings"]["rotate"]):
        found[f"{name}_ms"] = record["columns"][name]["median"] * 1e3 / CALLS
        found |= {f"{name}_{key}": value for key, value in counts.items()}
    return found


def _conclude(records: list[CaseRecord]) -> tuple[str, bool]:
    """Whether the ring's passes stay within the promised host time."""
    rings = [x["summary"] for x in records if x["settings"]["schedule"] == "ring" and "summary" in x]
    worst = max((ring[f"{name}_ms"] / limit for ring in rings for name, limit in LIMITS.items()), default=0.0)
    return f"host time of the ring: the slowest pass takes {worst:.2f} times its limit", 0 < worst <= 1


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="What a call costs the host",
    bars=("milliseconds of the host a call", {"forward": "forward_ms", "backward": "backward_ms"}),
)
