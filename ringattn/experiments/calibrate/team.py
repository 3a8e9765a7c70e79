"""The ranks that measure together, and timing on them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...transport.base import Message, Post, Transport
from ...transport.records import Exchange

#: Seconds that the repetitions of one measurement may take, beyond the least number of them, and the most of them.
ENOUGH, MOST = 0.1, 50
#: Measurements are made in so many rounds, so that a busy moment of the machine does not meet all repetitions of one.
ROUNDS = 3


class Team:
    """One rank of those that measure, or a process alone (transport None). All methods but `timed` are collective."""

    def __init__(self, transport: Transport | None, device: torch.device, nodes: int | None = None) -> None:
        self.transport, self.device = transport, device
        self.rank, self.size = (0, 1) if transport is None else (transport.rank, transport.size)
        #: Ranks per node; all of them where that is not known.
        self.inner = nodes or self.size

    def barrier(self) -> None:
        self.everyone(None)

    def everyone(self, mine: Any) -> list[Any]:
        """What every rank has, in rank order."""
        if self.transport is None:
            return [mine]
        with Exchange(self.transport, "calibration") as told:
            told.mine = pickle.dumps(mine)
        return [pickle.loads(raw) for raw in told.records]

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds of one call, with what it left to a device."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def repeated(self, call: Callable[[], Any], least: int, enough: float = ENOUGH) -> list[float]:
        """Seconds of equally many calls on every rank, all ranks at the same time, after one that does not count."""
        return self.alternating((call,), least, enough)[0]

    def alternating(
        self, calls: Sequence[Callable[[], Any]], least: int, enough: float = ENOUGH
    ) -> tuple[list[float], ...]:
        """Seconds of each of some calls, made one after the other, again and again, after one of each that does not count."""
        self.barrier()
        first = max(self.everyone(sum(self.timed(call) for call in calls)))
        count = max(least, min(MOST, int(enough / first)))
        self.barrier()
        turns = [[self.timed(call) for call in calls] for _ in range(count)]
        return tuple(list(seconds) for seconds in zip(*turns, strict=True))

    def exchange(self, sends: dict[int, torch.Tensor], recvs: dict[int, torch.Tensor]) -> Any:
        """Start one message to and from each of some peers; the ticket is for `finish`."""
        assert self.transport is not None, "a process alone sends nothing"
        posts = [tuple(Message(peer, 0, data) for peer, data in side.items()) for side in (sends, recvs)]
        return self.transport.post(Post(posts[0], posts[1], "calibration"))

    def finish(self, ticket: Any) -> None:
        assert self.transport is not None, "a process alone sends nothing"
        self.transport.wait(ticket)
        self.synchronize()

    def buffer(self, size: int) -> torch.Tensor:
        """A message of `size` bytes, whose memory is there."""
        return torch.zeros(size, dtype=torch.uint8, device=self.device)
