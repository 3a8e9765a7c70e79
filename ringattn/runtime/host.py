"""A carrier between one rank and storage in host memory: K/V rows come from storage, gradients are added there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from ..kernels.base import marked
from ..plan.plan import Plan
from ..plan.row_overlap import find_copies
from ..plan.row_sets import ALL_ROWS
from ..plan.steps import Hop, Kind, Step
from ..transport.base import Counters, Message, Post, Program, drive
from .message_buffers import message_views
from .rank_run import RowIndex, copy_rows

T = TypeVar("T")
#: The names of the stored tensors whose rows a part of a message holds.
STORED: dict[Kind, tuple[str, str]] = {"kv": ("k", "v"), "grad": ("dk", "dv")}
#: Pinned tensors that take turns: the host fills one while the device still reads the other.
STAGES = 2


class Storage(Protocol):
    """Whole tensors [B, heads, N, D] (lse: [B, H, N]) in host memory or in a file."""

    def rows(self, name: str, r: range) -> torch.Tensor:
        """A CPU view of consecutive rows `r` of a tensor; writing to the view writes to a writable tensor."""


@dataclass(frozen=True)
class HostFlight:
    """A message in flight: its bytes in host memory, and the CUDA event that is recorded after its copy."""

    hop: Hop
    is_send: bool
    stage: torch.Tensor
    copied: torch.cuda.Event | None


class Host:
    """Runs one rank after another and carries their messages. `counters` add up what all ranks sent and received.

    The messages of a CPU rank are copied at once. The messages of a CUDA rank are staged in pinned memory and copied on
    a separate stream while the visits of the step are computed (written from PyTorch's documentation, not yet run on a
    GPU).
    """

    def __init__(self, plan: Plan, storage: Storage, device: torch.device, counters: Counters) -> None:
        self.plan, self.storage, self.device, self.counters = plan, storage, device, counters
        #: The planned messages of the running rank by peer, tag, and whether the rank sends the message.
        self._hops: dict[tuple[int, int, bool], Hop] = {}
        self._copy_stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stage_bytes = 0
        #: Pinned tensors, least recently used first, each with the event that is recorded after its last copy.
        self._stages: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def run(self, program: Program[T], steps: Sequence[Step]) -> T:
        """Run the program of a rank whose plan has these steps, and return the program's result."""
        self._hops = {
            (hop.peer, hop.tag, is_send): hop
            for step in steps
            for is_send, hops in ((True, step.sends), (False, step.recvs))
            for hop in hops
        }
        largest = max((sum(map(self.plan.part_bytes, hop.parts)) for hop in self._hops.values()), default=0)
        if largest > self._stage_bytes:
            self._stage_bytes = largest
            self._stages.clear()
        return drive(program, self)

    def post(self, post: Post) -> list[HostFlight]:
        """Start to copy what arrives to the device, and to the host what the rank sends."""
        self.counters.add(post)
        return [*map(self._fetch, post.recvs), *map(self._send, post.sends)]

    def wait(self, ticket: list[HostFlight]) -> None:
        """Order later computation after what arrived, and add to the stored sums what the rank sent."""
        for flight in ticket:
            if flight.copied is not None:
                if flight.is_send:
                    flight.copied.synchronize()
                else:
                    torch.cuda.current_stream(self.device).wait_event(flight.copied)
            if flight.is_send:
                self._copy_stored(flight.hop, flight.stage, add=True)
            if flight.copied is not None:
                self._stages.append((flight.stage, flight.copied))

    def _fetch(self, message: Message) -> HostFlight:
        """Start a copy from storage to the device."""
        hop = self._hops[message.peer, message.tag, False]
        stage = self._stage(message.data)
        self._copy_stored(hop, stage, add=False)
        return HostFlight(hop, False, stage, self._copy_async(message.data, stage[: message.data.numel()]))

    def _send(self, message: Message) -> HostFlight:
        """Start a copy from the device to host memory."""
        hop = self._hops[message.peer, message.tag, True]
        stage = self._stage(message.data)
        return HostFlight(hop, True, stage, self._copy_async(stage[: message.data.numel()], message.data))

    def _copy_stored(self, hop: Hop, data: torch.Tensor, *, add: bool) -> None:
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
            if part.kind == "kv":
                *marked_views, clean = marked(views[0], views[1])
                if not clean:
                    for x, with_marks in zip(views, marked_views, strict=True):
                        x.copy_(with_marks)

    def _stage(self, data: torch.Tensor) -> torch.Tensor:
        """Host memory for the bytes of a message: the message itself on a CPU."""
        if self._copy_stream is None:
            return data
        if len(self._stages) < STAGES:
            return torch.empty(self._stage_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        stage, copied = self._stages.popleft()
        copied.synchronize()
        return stage

    def _copy_async(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copy after all work launched so far and beside all later work; an event that is recorded after the copy."""
        if self._copy_stream is None:
            return None
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
            return self._copy_stream.record_event()
