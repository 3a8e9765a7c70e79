"""Streams from host memory on an emulated CUDA device: late copies change no number, and no wait can be left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from late_copies import POLICIES, Compute, Event, LateCopies, Stream, late_copies
from oracle import Case, make_case

from ringattn import Dilated, Full, Pattern, Window
from ringattn.runtime.handshake import Call
from ringattn.runtime.host import Host
from ringattn.runtime.offload import HostStream, make_stream

TOKENS = 61
PATTERNS: tuple[Pattern, ...] = (Full(), Window(20, 5), Dilated((16, 61), (1, 2), causal=True))


def make_stream_of(pattern: Pattern, case: Case) -> HostStream:
    call = Call(pattern=pattern, layout="contiguous", schedule="direct", scale=0.3)
    return make_stream(call, *case.inputs, chunk=13, device=torch.device("cpu"), backward=True)


def results_of(stream: HostStream, case: Case) -> list[torch.Tensor]:
    result = stream.forward(*case.inputs, keep=True)
    return [result.out, result.lse, *stream.backward(case.grad, case.grad_lse, *case.inputs, result)]


def emulate(
    monkeypatch: pytest.MonkeyPatch, pattern: Pattern, policy: str, seed: int = 0
) -> tuple[bool, LateCopies, HostStream]:
    """Whether an emulated CUDA device gives the bits of the CPU."""
    case = make_case(TOKENS, 4, 2, torch.float64, dim=8, lse=True)
    stream = make_stream_of(pattern, case)
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
