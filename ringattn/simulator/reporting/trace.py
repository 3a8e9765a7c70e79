"""Writes spans of ranks, measured or modelled, to a file for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files import write_text

if TYPE_CHECKING:
    from ...transport.trace import Span
    from ..timing.window import StepWindow

#: For each kind of number, the first of two processes in a trace: ranks, then messages by sender.
PROCESSES = {"measured": 0, "modelled": 2}
#: Traces are in microseconds.
MICROSECONDS = 1e6
#: A span of a rank: (rank, name, start, end, peer), the first fields of `transport.trace.Span`.
Row = tuple[int, str, float, float, int | None]


def write_trace(path: str, kind: str, spans: Iterable[Span | Row]) -> None:
    """Write spans to a Chrome trace file, with two rows per rank: its work and its messages.

    `kind` says whether the spans are "measured" or "modelled".
    """
    ranks, messages = PROCESSES[kind], PROCESSES[kind] + 1
    titles = ((ranks, "ranks"), (messages, "messages by sender"))
    events = [_name("process_name", process, 0, f"{title}, {kind}") for process, title in titles]
    known: set[int] = set()
    for number, (rank, name, start, end, peer, *_) in enumerate(sorted(spans, key=lambda span: span[2])):
        if rank not in known:
            known.add(rank)
            events += [_name("thread_name", process, rank, f"rank {rank}") for process in (ranks, messages)]
        event = {"name": name, "cat": kind, "pid": ranks, "tid": rank, "ts": start * MICROSECONDS}
        if peer is None:
            events.append({**event, "ph": "X", "dur": (end - start) * MICROSECONDS})
        else:  # messages of a rank overlap
            event |= {"pid": messages, "id": number}
            events += [{**event, "ph": "b"}, {**event, "ph": "e", "ts": end * MICROSECONDS}]
    write_text(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def modelled_spans(window: StepWindow, direction: str, since: float = 0.0) -> Iterator[Row]:
    """Yield the spans of the steps in `window`, for a trace; the pass starts `since` seconds into the trace."""
    begun, busy_seconds = window.begun.tolist(), window.busy.tolist()
    for step, each in enumerate(zip(begun, busy_seconds, begun[1:], strict=False)):
        label = f"{direction} step {step}"
        for rank, (start, busy, following) in enumerate(zip(*each, strict=True)):
            if busy:
                yield rank, label, since + start, since + start + busy, None
            if following > start + busy:
                yield rank, f"{label}, wait", since + start + busy, since + following, None
    for message in window.messages or ():
        start = since + message.begun
        name = f"{direction} step {message.step}: to rank {message.target}"
        yield message.source, name, start, start + message.seconds, message.target
