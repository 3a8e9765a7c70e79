"""A carrier between one rank and storage in host memory: it copies K/V rows from storage, and adds gradients there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..dtypes import ITEM_BYTES
from ..plan.plan import Plan
from ..plan.row_sets import ALL_ROWS
from ..plan.steps import Hop, Kind, Step
from ..transport.base import Counters, Post, Program, drive
from .buffers import message_views, shared_rows
from .tensors import RowIndex, move_rows

T = TypeVar("T")
#: The most copies in flight per direction before the host waits. Bounds the pinned memory.
UNDER_WAY = 2


def stored_names(plan: Plan) -> dict[Kind, tuple[str, ...]]:
    """The names of the stored tensors whose rows a part of a message holds: of a block, and of its gradients."""
    tensors = plan.tensors("kv")
    names = ("k", "v") if plan.block is None else tuple(f"row tensor {i}" for i in range(len(tensors)))
    with_gradients = (name for name, (*_, dtype) in zip(names, tensors, strict=True) if dtype in ITEM_BYTES)
    return {"kv": names, "grad": tuple(f"d{name}" for name in with_gradients)}


class Storage(Protocol):
    """A store of whole tensors [B, heads, N, D] (lse: [B, H, N]), in host memory or in a file."""

    def rows(self, name: str, r: range) -> Tensor:
        """A CPU view of the consecutive rows `r` of tensor `name`; writes to the view change a writable tensor."""


class Host:
    """Runs ranks one after another on one device; their messages are copies from and to storage on the host.

    `counters` add up the messages that all ranks sent and received. On a CPU, copies are made immediately. For a CUDA
    device, they are staged in pinned memory and run on two streams, one per direction, while the device computes
    (tested on an emulated device only). The host waits for the device only in `finish`, and when more than UNDER_WAY
    copies of one direction would be in flight. PyTorch does not reuse a pinned tensor before its copies are done.
    """

    def __init__(self, plan: Plan, storage: Storage, device: torch.device, counters: Counters) -> None:
        self.plan, self.storage, self.device, self.counters = plan, storage, device, counters
        self.names = stored_names(plan)
        #: The planned messages of the running rank by peer, tag, and whether the rank sends the message.
        self._hops: dict[tuple[int, int, bool], Hop] = {}
        self._inbound, self._outbound = (_Direction(device, inward=inward) for inward in (True, False))

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
        """Rows of stored tensors, copied to the device; for a CPU, the stored rows themselves."""
        stored = [self.storage.rows(name, rows) for name in names]
        if self._inbound.stream is None:
            return stored
        tensors = [torch.empty_like(x, device=self.device) for x in stored]
        self.wait(self._inbound.carry(tensors, [partial(_fill, x) for x in stored]))
        return tensors

    def store(self, rows: range, tensors: dict[str, Tensor], *, add: bool = False) -> None:
        """Write tensors to the given rows of the stored tensors with the same names, or with `add` add them.

        The writes are complete after `finish`.
        """
        stored = [self.storage.rows(name, rows) for name in tensors]
        self._outbound.carry([*tensors.values()], [x.add_ if add else x.copy_ for x in stored])

    def finish(self) -> None:
        """Wait until all copies from the device are in storage."""
        while self._outbound.under_way:
            self._outbound.end_oldest()

    def post(self, post: Post) -> list[torch.cuda.Event]:
        """Start the copies for these messages; returns events to wait for.

        A receive copies rows from storage to the device; a send adds rows from the device to the stored sums.
        """
        self.counters.add(post)
        events = []
        for direction, messages, is_send in ((self._outbound, post.sends, True), (self._inbound, post.recvs, False)):
            hops = [self._hops[message.peer, message.tag, is_send] for message in messages]
            uses = [partial(self._copy_stored, hop, add=is_send) for hop in hops]
            events += direction.carry([message.data for message in messages], uses)
        return events

    def wait(self, ticket: list[torch.cuda.Event]) -> None:
        """Make later work on the device wait for the copies of a ticket; the host does not wait."""
        for copied in ticket:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def _copy_stored(self, hop: Hop, data: Tensor, *, add: bool) -> None:
        """Copy stored rows to the bytes `data` of a message; with `add`, add the bytes to the stored rows."""
        tensors = message_views(data, self.plan, hop.parts)
        for part in hop.parts:
            (rows,) = self.plan.layout.shard(part.owner)
            whole = part._replace(row_set=ALL_ROWS)
            copies = shared_rows(self.plan, *((whole, part) if add else (part, whole)))
            for name, x in zip(self.names[part.kind], tensors[part], strict=True):
                stored = self.storage.rows(name, rows)
                to, of = (stored, x) if add else (x, stored)
                for shared in copies:
                    rows_of = RowIndex.of(shared, to.shape, of.shape, to.device)
                    move_rows((to,), (of,), rows_of, "add" if add else "copy")


class _Direction:
    """Copies to the device (`inward`) or to the host, on a separate stream; for a CPU nothing is copied.

    `under_way` lists for each copy the event recorded after it, and the writes to storage that follow.
    """

    def __init__(self, device: torch.device, *, inward: bool) -> None:
        self.device, self.inward = device, inward
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.under_way: deque[tuple[torch.cuda.Event, list[Callable[[], object]]]] = deque()

    def carry(self, tensors: list[Tensor], uses: Sequence[Callable[[Tensor], object]]) -> list[torch.cuda.Event]:
        """Copy tensors between host and device; returns the events recorded after the copies.

        For each tensor, the function in `uses` fills the host's copy before, or reads it after, the transfer. Copies
        start after all work launched so far, and run in parallel with later work.
        """
        if self.stream is None or not tensors:
            for use, x in zip(uses, tensors, strict=True):
                use(x)
            return []
        if len(self.under_way) == UNDER_WAY:
            self.end_oldest()
        pinned = [torch.empty_like(x, device="cpu", pin_memory=True) for x in tensors]
        on_host = [partial(use, x) for use, x in zip(uses, pinned, strict=True)]
        if self.inward:
            for fill in on_host:
                fill()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in zip(*((tensors, pinned) if self.inward else (pinned, tensors)), strict=True):
                target.copy_(source, non_blocking=True)
        for x in tensors:  # its memory is not reused before the copy, even if an error drops x early
            x.record_stream(self.stream)
        copied = self.stream.record_event()
        self.under_way.append((copied, [] if self.inward else [*on_host]))
        return [copied]

    def end_oldest(self) -> None:
        """Wait for the oldest copy in flight, and write its data to storage."""
        copied, writes = self.under_way.popleft()
        copied.synchronize()
        for write in writes:
            write()


def _fill(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
