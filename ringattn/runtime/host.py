"""The other end of every hop is storage in host memory: one rank runs alone, takes K/V rows and adds gradients there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..kernels.base import marked
from ..plan.plan import Plan
from ..plan.row_overlap import find_copies
from ..plan.row_sets import ALL_ROWS
from ..plan.steps import Hop, Kind, Step
from ..transport.base import Counters, Message, Post, Program, drive
from .message_buffers import Buffer, put

T = TypeVar("T")
#: The stored tensors that a part of a message holds rows of.
STORED: dict[Kind, tuple[str, str]] = {"kv": ("k", "v"), "grad": ("dk", "dv")}
#: Pinned tensors that take turns, so that one is filled while the device still reads the other.
STAGES = 2


class Storage(Protocol):
    """Whole tensors [B, heads, N, D] (lse: [B, H, N]) that live in host memory or in a file."""

    def rows(self, name: str, r: range) -> torch.Tensor:
        """Rows `r` (without a step) of a tensor, on the CPU: a view that is written through, where it may be written."""


@dataclass(frozen=True)
class HostFlight:
    """A message on its way: its bytes on the host, and what a device has recorded behind the copy."""

    hop: Hop
    sends: bool
    stage: torch.Tensor
    done: Any


class Host:
    """Carries the hops of one rank after another. `counters` hold what all of them sent and received.

    A CPU rank's messages are copied at once. A CUDA rank's are gathered in pinned memory and cross on a stream of their
    own while the visits of the step are computed (written from PyTorch's documentation, not yet run on a GPU).
    """

    def __init__(self, plan: Plan, storage: Storage, device: torch.device, counters: Counters) -> None:
        self.plan, self.storage, self.device, self.counters = plan, storage, device, counters
        self._hops: dict[tuple[int, int, bool], Hop] = {}
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._capacity = 0
        self._stages: deque[tuple[torch.Tensor, Any]] = deque()

    def run(self, program: Program[T], steps: Sequence[Step]) -> T:
        """Run the program of a rank whose plan has these steps, and return its result."""
        self._hops = {
            (hop.peer, hop.tag, sends): hop
            for step in steps
            for sends, hops in ((True, step.sends), (False, step.recvs))
            for hop in hops
        }
        capacity = max((sum(map(self.plan.part_bytes, hop.parts)) for hop in self._hops.values()), default=0)
        if capacity > self._capacity:
            self._capacity = capacity
            self._stages.clear()
        return drive(program, self)

    def post(self, post: Post) -> list[HostFlight]:
        """Start to copy what arrives to the device, and what leaves it from there."""
        self.counters.add(post)
        return [*map(self._fetch, post.recvs), *map(self._bring, post.sends)]

    def wait(self, ticket: list[HostFlight]) -> None:
        """What is computed next sees what has arrived; what has left the device is added to the stored sums."""
        for flight in ticket:
            if self._side is not None:
                if flight.sends:
                    flight.done.synchronize()
                else:
                    torch.cuda.current_stream(self.device).wait_event(flight.done)
            if flight.sends:
                self._put(flight.hop, flight.stage, add=True)
            if self._side is not None:
                self._stages.append((flight.stage, flight.done))

    def _fetch(self, message: Message) -> HostFlight:
        hop = self._hops[message.peer, message.tag, False]
        stage = self._stage(message.data)
        self._put(hop, stage, add=False)
        return HostFlight(hop, False, stage, self._copied(message.data, stage[: message.data.numel()]))

    def _bring(self, message: Message) -> HostFlight:
        hop = self._hops[message.peer, message.tag, True]
        stage = self._stage(message.data)
        return HostFlight(hop, True, stage, self._copied(stage[: message.data.numel()], message.data))

    def _put(self, hop: Hop, data: torch.Tensor, *, add: bool) -> None:
        """Copy the stored rows of the parts of a message to its bytes, or add what these hold to the stored rows."""
        buffer = Buffer(data, hop.parts, self.plan, wire=True)
        for part in hop.parts:
            (rows,) = self.plan.layout.shard(part.owner)
            to, of = (ALL_ROWS, part.row_set) if add else (part.row_set, ALL_ROWS)
            shared = find_copies(to, of, self.plan.part_heads(part.kind), len(rows))
            for name, x in zip(STORED[part.kind], buffer.view(part), strict=True):
                stored = self.storage.rows(name, rows)
                for move in shared:
                    put(*((stored, x) if add else (x, stored)), move, add=add)
            if part.kind == "kv":
                views = buffer.view(part)
                *found, clean = marked(views[0], views[1])
                for x, made in zip(views, () if clean else found, strict=not clean):
                    x.copy_(made)

    def _stage(self, data: torch.Tensor) -> torch.Tensor:
        """Host memory for the bytes of a message: on a CPU the message itself."""
        if self._side is None:
            return data
        if len(self._stages) < STAGES:
            return torch.empty(self._capacity, dtype=torch.uint8, pin_memory=True, device="cpu")
        stage, done = self._stages.popleft()
        done.synchronize()  # the copy that used it last
        return stage

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy after all that was launched so far, beside all that is launched from now on; an event behind it."""
        if self._side is None:
            return None
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            return self._side.record_event()
