"""Streams from host memory on an emulated CUDA device: late copies change no number, and no wait can be left out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from oracle import Case, make_case
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ringattn import Dilated, Full, Pattern, Window
from ringattn.call.compile import compile_call
from ringattn.call.offload import OffloadRunner, make_offload
from ringattn.runtime.host import Host

Tensor = torch.Tensor
POLICIES = ("late", "at once", "shuffled")


def storage_key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@dataclass
class PendingCopy:
    """A copy that was launched and has not run."""

    target: Tensor
    source: Tensor
    is_send: bool
    recorded: bool = False

    @property
    def on_device(self) -> Tensor:
        return self.source if self.is_send else self.target


class Event:
    """The copies of a stream up to now."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.launched = stream, stream.launched

    def synchronize(self) -> None:
        self.stream.run(self.launched)


class Stream:
    """A side stream. `synced`: how many calls of the computation the copies of this stream wait for."""

    def __init__(self, device: object) -> None:
        self.pending: deque[PendingCopy] = deque()
        self.launched = self.ran = self.synced = 0
        assert LateCopies.running is not None
        LateCopies.running.streams.append(self)

    def wait_stream(self, other: Compute) -> None:
        self.synced = other.late_copies.calls

    def record_event(self) -> Event:
        return Event(self)

    def keep(self, x: Tensor) -> None:
        """Free the memory of x after the copies that were launched so far."""
        with torch._C.DisableTorchFunction():
            for copy in self.pending:
                copy.recorded |= storage_key(copy.on_device) == storage_key(x)

    def run(self, launched: int) -> None:
        """Run the copies that were launched before number `launched`."""
        with torch._C.DisableTorchFunction():
            while self.ran < launched:
                copy = self.pending.popleft()
                store = copy.on_device.untyped_storage()
                # The references of `copy` and `store`.
                freed = torch._C._storage_Use_Count(store._cdata) == 2  # type: ignore[attr-defined]
                assert copy.recorded or not freed, "a copy uses memory that was freed before the copy"
                copy.target.copy_(copy.source)
                self.ran += 1


class Compute:
    """The current stream: its work has run by the time that the call returns."""

    def __init__(self, late_copies: LateCopies) -> None:
        self.late_copies = late_copies

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class LateCopies(TorchFunctionMode):
    """The emulation, for as long as the context lasts. `copies` counts the copies on side streams."""

    running: LateCopies | None = None

    def __init__(self, policy: str, seed: int = 0) -> None:
        super().__init__()
        self.policy, self.random = policy, random.Random(seed)
        self.streams: list[Stream] = []
        self.current: Stream | None = None
        self.calls = self.copies = 0
        #: The number of the last call that read or wrote a storage.
        self.last_use: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.compute = Compute(self)

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., Any], types, args=(), kwargs=None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.policy == "shuffled" and self.random.random() < 0.1:
            stream = self.random.choice([x for x in self.streams if x.pending] or self.streams)
            stream.run(min(stream.ran + 1, stream.launched))
        if func is Tensor.copy_ and self.current is not None:
            assert kwargs.pop("non_blocking"), "a copy on a side stream must not block"
            return self._launch(self.current, *args)
        pinned = kwargs.pop("pin_memory", False)
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        self.calls += 1
        given, made = (
            {storage_key(x) for x in tree_leaves(some) if isinstance(x, Tensor)} for some in ((args, kwargs), result)
        )
        self.last_use.update(dict.fromkeys(given | made, self.calls))
        self.pinned = self.pinned | made if pinned else self.pinned - (made - given)
        return result

    def _launch(self, stream: Stream, target: Tensor, source: Tensor) -> Tensor:
        is_send = storage_key(target) in self.pinned
        on_device, host = (source, target) if is_send else (target, source)
        assert storage_key(host) in self.pinned, "a copy on a side stream has one end in pinned memory"
        used = self.last_use.get(storage_key(on_device), 0)
        assert used <= stream.synced, "a copy may run before computation that uses its memory"
        if self.policy != "at once":
            target.view(torch.uint8).fill_(255) if target.is_contiguous() else target.fill_(torch.nan)
        stream.pending.append(PendingCopy(target.detach(), source.detach(), is_send))
        stream.launched += 1
        self.copies += 1
        if self.policy == "at once":
            stream.pending[-1].recorded = True
            stream.run(stream.launched)
        return target


@contextmanager
def late_copies(monkeypatch: pytest.MonkeyPatch, policy: str, seed: int = 0) -> Iterator[LateCopies]:
    """The emulation in place of torch.cuda's streams."""
    emulated = LateCopies(policy, seed)

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        before, emulated.current = emulated.current, stream
        yield
        emulated.current = before

    with monkeypatch.context() as patch, emulated:
        patch.setattr(LateCopies, "running", emulated)
        patch.setattr(Tensor, "record_stream", lambda x, stream: stream.keep(x))
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: emulated.compute)
        yield emulated


TOKENS = 61
PATTERNS: tuple[Pattern, ...] = (Full(), Window(20, 5), Dilated((16, 61), (1, 2), causal=True))


def make_offload_of(pattern: Pattern, case: Case) -> OffloadRunner:
    q, k, v = case.inputs
    call = compile_call(q, k, v, pattern, "contiguous", {"schedule": "direct", "scale": 0.3})
    return make_offload(call, chunk=13, backward=True)


def results_of(stream: OffloadRunner, case: Case) -> list[torch.Tensor]:
    result = stream.forward(case.q, (case.k, case.v), save=True)
    return [result.out, result.lse, *stream.backward(case.grad, case.grad_lse, case.q, (case.k, case.v), result)]


def emulate(
    monkeypatch: pytest.MonkeyPatch, pattern: Pattern, policy: str, seed: int = 0
) -> tuple[bool, LateCopies, OffloadRunner]:
    """Whether an emulated CUDA device gives the bits of the CPU."""
    case = make_case(TOKENS, 4, 2, torch.float64, dim=8, lse=True)
    stream = make_offload_of(pattern, case)
    truth = results_of(stream, case)
    stream.counters.reset()
    with late_copies(monkeypatch, policy, seed) as emulated:
        found = results_of(replace(stream, device=torch.device("cuda:0")), case)
    return all(map(torch.equal, found, truth)), emulated, stream


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_late_copies_change_no_number(pattern: Pattern, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    equal, emulated, stream = emulate(monkeypatch, pattern, policy)
    assert equal
    assert not any(x.pending for x in emulated.streams), "every copy has run"
    assert len(emulated.streams) == 4, "one stream per direction and pass"
    counters = stream.counters
    messages = counters.sent_messages + counters.received_messages
    # q, k and v in, out and lse out; with out, lse, dout and dlse in, dq, dk and dv out.
    assert emulated.copies == messages + stream.plan.ranks * (3 + 2 + 7 + 3)


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        pytest.param(Compute, "wait_event", lambda self, event: None, id="no order after any copy"),
        pytest.param(Event, "synchronize", lambda self: None, id="no wait of the host"),
        pytest.param(Stream, "wait_stream", lambda self, other: None, id="no order before a copy"),
        pytest.param(Stream, "keep", lambda self, x: None, id="no memory kept"),
        pytest.param(Host, "finish", lambda self: None, id="no wait at the end"),
        # In a ticket of both directions the event of what leaves comes first.
        pytest.param(Host, "wait", lambda self, ticket: wait(self, ticket[-1:]), id="no order after what leaves"),
        pytest.param(Host, "wait", lambda self, ticket: wait(self, ticket[:1]), id="no order after what arrives"),
    ],
)
def test_every_wait_is_needed(
    owner: object, name: str, mutant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    try:
        equal, *_ = emulate(monkeypatch, Full(), "late")
    except AssertionError:
        return
    assert not equal


wait = Host.wait
