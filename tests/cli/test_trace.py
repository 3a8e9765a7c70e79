"""Traces: the spans of the ranks, measured and modelled, and the ranges that profilers show."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Inside, ringattn
from rank_cases import profiled_ranges

import ringattn as ra
from ringattn.transport.base import Message, Post
from ringattn.transport.launcher import run_local
from ringattn.transport.trace import Trace, end_on_arrival

SIZES = ("pattern=window", "pattern.left=200", "layout=contiguous", "schedule=ring", "tokens=512", "heads=2")


def events_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]


def planned(ranks: int) -> tuple[Counter[int], int]:
    """Visits of each rank, and messages, of a forward and a backward."""
    plan = ra.make_plan(
        "Causal() & Window(200)", tokens=512, ranks=ranks, heads=2, layout="contiguous", schedule="ring"
    )
    visits: Counter[int] = Counter()
    for rank in range(ranks):
        steps = plan.for_rank(rank)
        visits[rank] = sum(len(step.visits) for step in (*steps.forward, *steps.backward))
    return visits, plan.messages() + plan.messages(backward=True)


@pytest.mark.multi
def test_a_run_is_traced(tmp_path: Path) -> None:
    """Each planned visit and message once, none outside of the run, visits and waits of a rank one after another."""
    ringattn("run", *SIZES, "ranks=3", "backward=true", "repeat=1", f"trace={tmp_path / 't.json'}", cwd=tmp_path)
    events = events_of(tmp_path / "t.json")
    work = [event for event in events if event["ph"] == "X"]
    visits, messages = planned(3)
    assert Counter(event["tid"] for event in work if "block of rank" in event["name"]) == visits
    assert len([event for event in events if event["ph"] == "b"]) == messages
    assert len([event for event in events if event["ph"] == "e"]) == messages
    assert {event["cat"] for event in events} == {"measured"}
    for rank in range(3):
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work if event["tid"] == rank)
        assert spans[0][0] >= 0 and all(one[1] <= other[0] + 1e-3 for one, other in pairwise(spans))


def test_a_message_ends_when_its_receiver_has_it() -> None:
    """Not with the wait of its sender, which ends first here."""
    data = torch.zeros(8, dtype=torch.uint8)
    with Trace() as trace:
        trace.post(0, Post((Message(1, 7, data),), (Message(1, 8, data),), "step 0"), "ticket of 0")
        trace.post(1, Post((Message(0, 8, data),), (Message(0, 7, data),), "step 0"), "ticket of 1")
        trace.wait("ticket of 0")
        trace.wait("ticket of 1")
    ends = {span.rank: span.end for span in trace.spans}
    sent, answered = end_on_arrival(trace.spans)
    assert (sent.rank, sent.peer, sent.end) == (0, 1, ends[1]) and ends[1] > ends[0]
    assert (answered.rank, answered.peer, answered.end) == (1, 0, ends[0])
    assert sent.name == "step 0: 8 bytes to rank 1"


def test_a_simulation_is_traced(inside: Inside, tmp_path: Path) -> None:
    """In the format of a measured run; the last rank ends when the timeline ends. A dense ring has messages, too."""
    sizes = ("pattern=full", "tokens=512", "schedule=ring", "ranks=4")
    inside("simulate", *sizes, f"trace={tmp_path / 's.json'}", "output.path=s")
    events = events_of(tmp_path / "s.json")
    work = [event for event in events if event["ph"] == "X"]
    seconds = json.loads((tmp_path / "s").read_text())["passes"]["forward"]["seconds"]
    assert max(event["ts"] + event["dur"] for event in work) == pytest.approx(seconds * 1e6, rel=1e-9)
    assert {event["tid"] for event in work} == {0, 1, 2, 3} and {event["cat"] for event in events} == {"modelled"}
    assert {"b", "e"} <= {event["ph"] for event in events}


def test_profilers_show_visits() -> None:
    q, k, v = (torch.randn(1, 2, 512, 8, requires_grad=True) for _ in range(3))
    with torch.profiler.profile() as profile:
        ra.virtual_attention(q, k, v, "Causal() & Window(200)", ranks=3, schedule="ring").sum().backward()
    names = Counter(event.name.partition(",")[0] for event in profile.events() if ", block of rank" in event.name)
    assert names == {f"rank {rank}": count for rank, count in planned(3)[0].items()}


@pytest.mark.multi
def test_profilers_show_visits_and_waits_of_ranks() -> None:
    """On each of two Gloo ranks: every planned visit, and a wait for every step of messages, under the rank's name."""
    visits, _ = planned(2)
    for rank, names in enumerate(run_local(profiled_ranges, 2, timeout=120, threads=1)):
        assert {name.partition(",")[0] for name in names} == {f"rank {rank}"}
        assert sum(", block of rank" in name for name in names) == visits[rank]
        waits = [name for name in names if name.endswith(", wait")]
        assert len(waits) + visits[rank] == len(names)
        assert any("forward" in name for name in waits) and any("backward" in name for name in waits)


def test_an_error_closes_the_trace() -> None:
    with pytest.raises(ZeroDivisionError), Trace():
        raise ZeroDivisionError
    with Trace() as trace:
        ra.virtual_attention(*torch.randn(3, 1, 1, 64, 8), "Full()", ranks=2, schedule="ring")
    assert len(trace.spans) == 4
