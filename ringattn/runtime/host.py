"""A carrier between one rank and storage in host memory: K/V rows come from storage, gradients are added there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..plan.plan import Plan
from ..plan.row_sets import ALL_ROWS, find_copies
from ..plan.steps import Hop, Kind, Step
from ..transport.base import Counters, Post, Program, drive
from .message_buffers import message_views
from .rank_run import RowIndex, copy_rows

T = TypeVar("T")
#: The names of the stored tensors whose rows a part of a message holds.
STORED: dict[Kind, tuple[str, str]] = {"kv": ("k", "v"), "grad": ("dk", "dv")}
#: Copies in each direction that may be under way while the host goes on. Bounds the pinned memory.
UNDER_WAY = 2


class Storage(Protocol):
    """Whole tensors [B, heads, N, D] (lse: [B, H, N]) in host memory or in a file."""

    def rows(self, name: str, r: range) -> Tensor:
        """A CPU view of consecutive rows `r` of a tensor; writing to the view writes to a writable tensor."""


class Host:
    """Runs one rank after another, and carries their messages and their own rows from and to storage.

    `counters` add up the messages that all ranks sent and received. For a CPU all copies are made at once. For a CUDA
    device they are staged in pinned memory and copied on two streams, one per direction, while the device computes
    (emulated, not run on a GPU). The host waits for the device only where more than UNDER_WAY copies of one direction
    would be under way, and in `finish`. PyTorch does not reuse a pinned tensor before its copies are done.
    """

    def __init__(self, plan: Plan, storage: Storage, device: torch.device, counters: Counters) -> None:
        self.plan, self.storage, self.device, self.counters = plan, storage, device, counters
        #: The planned messages of the running rank by peer, tag, and whether the rank sends the message.
        self._hops: dict[tuple[int, int, bool], Hop] = {}
        on_cuda = device.type == "cuda"
        self._inbound: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_cuda else None
        self._outbound: torch.cuda.Stream | None = torch.cuda.Stream(device) if on_cuda else None
        #: For each copy under way the event that is recorded after the copy; for a copy to the host also the writes to
        #: storage that follow, in the order of the copies.
        self._arriving: deque[torch.cuda.Event] = deque()
        self._leaving: deque[tuple[torch.cuda.Event, list[Callable[[], object]]]] = deque()

    def run(self, program: Program[T], steps: Sequence[Step]) -> T:
        """Run the program of a rank whose plan has these steps, and return the program's result."""
        self._hops = {
            (hop.peer, hop.tag, is_send): hop
            for step in steps
            for is_send, hops in ((True, step.sends), (False, step.recvs))
            for hop in hops
        }
        return drive(program, self)

    def load(self, names: Sequence[str], rows: range) -> list[Tensor]:
        """Rows of stored tensors on the device; the stored rows themselves on a CPU."""
        stored = [self.storage.rows(name, rows) for name in names]
        if self._inbound is None:
            return stored
        tensors = [torch.empty_like(x, device=self.device) for x in stored]
        self.wait(self._copy_in(tensors, [partial(_fill, x) for x in stored]))
        return tensors

    def store(self, rows: range, tensors: dict[str, Tensor], *, add: bool = False) -> None:
        """Write tensors to rows of the stored tensors of the same names, or add them, at the latest in `finish`."""
        stored = [self.storage.rows(name, rows) for name in tensors]
        self._copy_out([*tensors.values()], [x.add_ if add else x.copy_ for x in stored])

    def finish(self) -> None:
        """Wait until everything that leaves the device is in storage."""
        while self._leaving:
            self._write_oldest()

    def post(self, post: Post) -> list[torch.cuda.Event]:
        """Start to copy what arrives to the device, and to the stored sums what the rank sends."""
        self.counters.add(post)
        sent = [self._hops[message.peer, message.tag, True] for message in post.sends]
        received = [self._hops[message.peer, message.tag, False] for message in post.recvs]
        return [
            *self._copy_out([m.data for m in post.sends], [partial(self._copy_stored, hop, add=True) for hop in sent]),
            *self._copy_in(
                [m.data for m in post.recvs], [partial(self._copy_stored, hop, add=False) for hop in received]
            ),
        ]

    def wait(self, ticket: list[torch.cuda.Event]) -> None:
        """Order later computation after the copies of a ticket, without waiting for the device."""
        for copied in ticket:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _copy_stored(self, hop: Hop, data: Tensor, *, add: bool) -> None:
        """Copy stored rows to the bytes `data` of a message; with `add`, add the bytes to the stored rows."""
        tensors = message_views(data, self.plan, hop.parts)
        for part in hop.parts:
            (rows,) = self.plan.layout.shard(part.owner)
            target, source = (ALL_ROWS, part.row_set) if add else (part.row_set, ALL_ROWS)
            copies = find_copies(target, source, self.plan.part_heads(part.kind), len(rows))
            views = tensors[part]
            for name, x in zip(STORED[part.kind], views, strict=True):
                stored = self.storage.rows(name, rows)
                to, of = (stored, x) if add else (x, stored)
                for shared in copies:
                    copy_rows(to, of, RowIndex.of(shared, to.shape, of.shape, to.device), add=add)

    def _copy_in(self, targets: list[Tensor], fill: list[Callable[[Tensor], object]]) -> list[torch.cuda.Event]:
        """Let each function of `fill` fill a tensor of the device; an event that is recorded after the copies."""
        if self._inbound is None or not targets:
            for write, target in zip(fill, targets, strict=True):
                write(target)
            return []
        if len(self._arriving) == UNDER_WAY:
            self._arriving.popleft().synchronize()
        pinned = [_pinned(x) for x in targets]
        for write, x in zip(fill, pinned, strict=True):
            write(x)
        self._arriving.append(self._copy(self._inbound, targets, pinned, on_device=targets))
        return [self._arriving[-1]]

    def _copy_out(self, sources: list[Tensor], take: list[Callable[[Tensor], object]]) -> list[torch.cuda.Event]:
        """Hand each function of `take` a tensor of the device, in host memory; an event recorded after the copies."""
        if self._outbound is None or not sources:
            for read, source in zip(take, sources, strict=True):
                read(source)
            return []
        if len(self._leaving) == UNDER_WAY:
            self._write_oldest()
        pinned = [_pinned(x) for x in sources]
        copied = self._copy(self._outbound, pinned, sources, on_device=sources)
        self._leaving.append((copied, [partial(read, x) for read, x in zip(take, pinned, strict=True)]))
        return [copied]

    def _write_oldest(self) -> None:
        """Write to storage what the oldest copy under way has brought to the host."""
        copied, writes = self._leaving.popleft()
        copied.synchronize()
        for write in writes:
            write()

    def _copy(
        self, stream: torch.cuda.Stream, targets: list[Tensor], sources: list[Tensor], *, on_device: list[Tensor]
    ) -> torch.cuda.Event:
        """Copy after all work launched so far and beside all later work; an event that is recorded after the copies."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        for x in on_device:  # its memory is not reused before the copy, also where an error drops x at once
            x.record_stream(stream)
        return stream.record_event()


def _fill(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _pinned(like: Tensor) -> Tensor:
    """A tensor in pinned memory with the shape and the order of strides of `like`."""
    return torch.empty_like(like, device="cpu", pin_memory=True)
