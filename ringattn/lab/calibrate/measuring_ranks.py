"""The ranks of a calibration: their collective operations, and timing that all ranks do at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median
from typing import Any, TypeVar

import torch

from ...errors import InvalidInput
from ...files import Count
from ...transport.base import Message, Post, Transport
from ...transport.records import exchange_values

T = TypeVar("T")

#: Seconds to repeat one measurement per round, and the most repetitions.
ENOUGH, MOST_REPETITIONS = 0.03, 20
#: Total bytes of the copies of data that are used in turn, so that each has left the caches before its next turn, as in
#: a pass, where visits lie between merges and between messages; and the most copies, a limit for the smallest sizes.
COLD_BYTES, MOST_TURNS = 1 << 27, 64
#: Runs of the reference call before, and after, each measured call.
REFERENCE_RUNS = 3


def count_turns(nbytes: int) -> int:
    """How many copies of `nbytes` bytes of data to use in turn, so that the data is not in the caches.

    Together they have COLD_BYTES bytes; at least 2 copies, at most MOST_TURNS.
    """
    return max(2, min(COLD_BYTES // nbytes, MOST_TURNS))


@dataclass(frozen=True)
class Settings:
    """The settings of a calibration; `kernel` is a kernel name or "auto".

    Everything is measured in `repeat` rounds, so that a moment in which the machine is busy affects only one of them;
    more rounds follow if they end within `seconds`. Sizes are ascending: `rows` are rows and keys of tiles, `widths`
    are keys per row of bands, and `messages` are bytes.
    """

    heads: Count
    head_dim: Count
    dtype: str
    kernel: str
    repeat: int
    seconds: float = 0.0
    rows: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    messages: tuple[int, ...] = ()

    def check_sizes(self) -> None:
        """Raise InvalidInput if the sizes are too few to calibrate, or do not ascend."""
        for name, least in (("rows", 2), ("widths", 1), ("messages", 2)):
            sizes = getattr(self, name)
            if len(sizes) < least or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 1:
                raise InvalidInput(f"{name}={list(sizes)}: expected at least {least} ascending sizes >= 1")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of torch with the name `dtype`."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


@dataclass(frozen=True)
class TimedBytes:
    """Seconds of repeated messages or merges of `bytes` bytes, on all ranks or on some."""

    bytes: int
    seconds: tuple[float, ...]


class MeasuringRanks:
    """One rank of a calibration, with its transport to the others; the transport is None in a single process.

    All methods are collective except `time_call`, `synchronize`, `make_buffer`, and those that send messages.
    """

    def __init__(self, transport: Transport | None, device: torch.device, ranks_per_node: int | None = None) -> None:
        """With `ranks_per_node` None, all ranks are on one node."""
        self.transport, self.device = transport, device
        self.rank, self.size = (0, 1) if transport is None else (transport.rank, transport.size)
        self.ranks_per_node = ranks_per_node or self.size
        #: Ranks of a node that can compute at full speed at the same time.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.cores = max(cores // torch.get_num_threads(), 1)
        self._reference: Callable[[], Any] | None = None
        #: Seconds of the reference call at the pace to which all times are corrected; None: no correction.
        self.pace: float | None = None

    def keep_pace(self, reference: Callable[[], Any]) -> None:
        """Correct all later times for the speed of the machine: scale them to its speed now.

        `reference` is a function that is timed now, and again with later measurements. A CPU that is shared or hot can
        be slower for minutes, which would distort them.
        """
        self._reference = reference
        self._time_reference()
        self.pace = median(self._time_reference() for _ in range(2 * REFERENCE_RUNS))

    def rounds(self, settings: Settings) -> Iterator[int]:
        """Numbers of the rounds: `settings.repeat` rounds, and more while they end within `settings.seconds`."""
        begun = time.perf_counter()
        for number in count():
            if number >= settings.repeat:
                passed = max(self.gather(time.perf_counter() - begun))
                if passed * (number + 1) > settings.seconds * number:
                    return
            yield number

    def correction(self, call: Callable[[], T]) -> tuple[T, float]:
        """Run `call` on all ranks at once; returns its result, and the factor to correct seconds measured in it.

        The factor is the usual time of the reference call (`keep_pace`) divided by its mean time right before and after
        `call`; 1 without a reference.
        """
        if self.pace is None:
            self.barrier()
            return call(), 1.0
        before = self._time_reference()
        result = call()
        return result, 2 * self.pace / (before + self._time_reference())

    def _time_reference(self) -> float:
        """Median seconds of the reference call, run on as many ranks of a node at once as it has cores."""
        assert self._reference is not None
        self.barrier()  # a rank that is still computing would slow the reference down
        busy = self.rank % self.ranks_per_node < self.cores
        seconds = [self.time_call(self._reference) for _ in range(REFERENCE_RUNS)] if busy else []
        return median(self.gather_times(seconds))

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.size // self.ranks_per_node

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order."""
        return exchange_values(self.transport, "calibration", value)

    def time_call(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, including the device's work."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the work of a CUDA device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_alternating(self, calls: Sequence[Callable[[], Any]]) -> tuple[list[float], ...]:
        """Seconds of each repetition of each call, after a warm-up of all; the calls alternate A B C A B C.

        All ranks repeat at the same time and equally often: for ENOUGH seconds per call, at least once.
        """
        self.barrier()
        first = max(self.gather(sum(self.time_call(call) for call in calls)))
        repetitions = max(1, min(MOST_REPETITIONS, int(len(calls) * ENOUGH / first)))
        turns, factor = self.correction(lambda: [[self.time_call(call) for call in calls] for _ in range(repetitions)])
        return tuple([factor * t for t in seconds] for seconds in zip(*turns, strict=True))

    def gather_times(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """The seconds of all ranks, one rank after another."""
        return tuple(t for of_rank in self.gather(seconds) for t in of_rank)

    def start_messages(self, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> Any:
        """Start one message to and from each peer, keyed by rank; returns a ticket for `finish_messages`."""
        assert self.transport is not None, "a process alone sends nothing"
        sent, received = (
            tuple(Message(peer, 0, data) for peer, data in messages.items()) for messages in (sends, recvs)
        )
        return self.transport.post(Post(sent, received, "calibration"))

    def finish_messages(self, ticket: Any) -> None:
        """Block until the messages of a ticket have arrived on the device."""
        assert self.transport is not None, "a process alone sends nothing"
        self.transport.wait(ticket)
        self.synchronize()

    def exchange(self, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> None:
        """Send and receive as `start_messages`, and wait until all have arrived."""
        self.finish_messages(self.start_messages(sends, recvs))

    def make_buffer(self, size: int) -> torch.Tensor:
        """`size` bytes of zeros on the device, in memory that is really allocated and not only reserved."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)
