"""A window of a pass as trace events that Perfetto and chrome://tracing read."""

from __future__ import annotations

import math
from typing import Any

from ...timing.window import StepWindow

#: Processes of the trace: what ranks do, and the messages that they send.
RANKS, LINKS = 0, 1
#: Traces count microseconds.
MICRO = 1e6


def events(window: StepWindow, pass_name: str) -> list[dict[str, Any]]:
    """Complete events ("ph": "X") in order of time, after the names of processes and threads. Microseconds, modelled."""
    named = [_named("process_name", RANKS, 0, f"{pass_name}: ranks")]
    named += [_named("thread_name", RANKS, rank, f"rank {rank}") for rank in window.ranks]
    found = []
    for k, step in enumerate(window.steps):
        for place, rank in enumerate(window.ranks):
            begun, busy, then = window.begun[k, place], window.busy[k, place], window.begun[k + 1, place]
            if math.isnan(busy):
                continue
            found.append(_event("busy", RANKS, rank, begun, busy, step))
            if then > begun + busy:
                found.append(_event("wait", RANKS, rank, begun + busy, then - begun - busy, step))
    if window.messages is not None:
        named.append(_named("process_name", LINKS, 0, f"{pass_name}: messages by sender"))
        named += [_named("thread_name", LINKS, rank, f"from rank {rank}") for rank in window.ranks]
        for one in window.messages:
            found.append(_event(f"to rank {one.target}", LINKS, one.source, one.begun, one.seconds, one.step))
    found.sort(key=lambda event: (event["ts"], event["pid"], event["tid"], event["name"]))
    return named + found


def _event(name: str, process: int, thread: int, begun: float, seconds: float, step: int) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "cat": "modelled", "ts": float(begun) * MICRO, "dur": float(seconds) * MICRO,
        "pid": process, "tid": thread, "args": {"step": step},
    }  # fmt: skip


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "dur": 0, "pid": process, "tid": thread, "args": {"name": name}}
