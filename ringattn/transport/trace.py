"""Records what the ranks of this process do and when: ranges for profilers, and spans of a `Trace`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Self

from torch.autograd import profiler


class Span(NamedTuple):
    """An interval in a rank's time, in seconds: computing, waiting, or a message to `peer` from its post to its wait.

    A span without a name is a message from `peer`; both ranks know a message by its `tag`.
    """

    rank: int
    name: str
    start: float
    end: float
    peer: int | None = None
    tag: int | None = None


def end_on_arrival(spans: Iterable[Span]) -> list[Span]:
    """The spans of all ranks, of which messages end with the wait of their receiver."""
    spans = list(spans)
    arrivals = {(span.peer, span.rank, span.tag): span.end for span in spans if not span.name}
    return [
        span if span.peer is None else span._replace(end=max(span.start, arrivals[span.rank, span.peer, span.tag]))
        for span in spans
        if span.name
    ]


class Trace:
    """A context that records when each rank of this process computes, waits and sends, as `spans`.

    Times are in seconds of `time.perf_counter`. `advance` is called with a rank whenever the rank begins a step with
    messages, to show progress. On CUDA devices, spans show when the host starts kernels; torch.profiler shows the
    device, with ranges of the same names.
    """

    def __init__(self, advance: Callable[[int], None] = lambda rank: None) -> None:
        self.spans: list[Span] = []
        self.advance = advance
        self._posted: dict[int, tuple[float, int, Any]] = {}

    def __enter__(self) -> Self:
        global _open
        assert _open is None, "traces are not nested"
        _open = self
        return self

    def __exit__(self, *error: object) -> None:
        global _open
        _open = None

    @contextmanager
    def span(self, rank: int, name: str) -> Iterator[None]:
        """A context that records a rank's work or waiting in its block as a span called `name`."""
        start = time.perf_counter()
        yield
        self.spans.append(Span(rank, name, start, time.perf_counter()))

    def post(self, rank: int, request: Any, ticket: Any) -> None:
        """Note that the messages of a ticket start, as a rank's request `Post` lists them."""
        self.advance(rank)
        self._posted[id(ticket)] = time.perf_counter(), rank, request

    def wait(self, ticket: Any) -> None:
        """Note that the messages of a ticket are done."""
        end, (start, rank, request) = time.perf_counter(), self._posted.pop(id(ticket))
        for message in request.sends:
            name = f"{request.label}: {message.data.numel():,} bytes to rank {message.peer}"
            self.spans.append(Span(rank, name, start, end, message.peer, message.tag))
        self.spans += [Span(rank, "", start, end, message.peer, message.tag) for message in request.recvs]


#: The open trace of this process, for all threads: torch runs a backward on CUDA in its own threads.
_open: Trace | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


def get_trace() -> Trace | None:
    """The open trace of this process; None if there is none."""
    return _open


def named_range(rank: int, name: str) -> AbstractContextManager[object]:
    """A context for a rank's work, which an open trace, or else a running profiler, records under `name`."""
    if _open is not None:
        return _open.span(rank, name)
    return profiler.record_function(f"rank {rank}, {name}") if profiler._is_profiler_enabled else _NOTHING
