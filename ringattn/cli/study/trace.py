"""A window of a pass as trace events for Perfetto and chrome://tracing."""

from __future__ import annotations

import math
from typing import Any

from ...simulator.timing.window import StepWindow

#: Processes of the trace: the work of the ranks, and the messages by sender.
RANKS, LINKS = 0, 1
#: Traces count microseconds.
MICROSECONDS = 1e6


def make_events(window: StepWindow, pass_name: str) -> list[dict[str, Any]]:
    """The names of processes and threads, then complete events ("ph": "X") in order of time. Microseconds, modelled."""
    names = [_name("process_name", RANKS, 0, f"{pass_name}: ranks")]
    names += [_name("thread_name", RANKS, rank, f"rank {rank}") for rank in window.ranks]
    events = []
    for row, step in enumerate(window.steps):
        for column, rank in enumerate(window.ranks):
            start, busy, following = window.begun[row, column], window.busy[row, column], window.begun[row + 1, column]
            if math.isnan(busy):
                continue
            events.append(_event("busy", RANKS, rank, start, busy, step))
            for_peers = window.for_peers[row, column]
            if math.isnan(for_peers):  # the solver does not know what the rank waits for
                waits = [("wait", following - start - busy)]
            else:
                waits = [("wait for peers", for_peers), ("wait for messages", following - start - busy - for_peers)]
            begun = start + busy
            for name, seconds in waits:
                if seconds > 0:
                    events.append(_event(name, RANKS, rank, begun, seconds, step))
                    begun += seconds
    if window.messages is not None:
        names.append(_name("process_name", LINKS, 0, f"{pass_name}: messages by sender"))
        names += [_name("thread_name", LINKS, rank, f"from rank {rank}") for rank in window.ranks]
        for message in window.messages:
            target = f"to rank {message.target}"
            events.append(_event(target, LINKS, message.source, message.begun, message.seconds, message.step))
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"], event["name"]))
    return names + events


def _event(name: str, process: int, thread: int, start: float, seconds: float, step: int) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "cat": "modelled",
        "ts": float(start) * MICROSECONDS,
        "dur": float(seconds) * MICROSECONDS,
        "pid": process,
        "tid": thread,
        "args": {"step": step},
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "dur": 0, "pid": process, "tid": thread, "args": {"name": name}}
