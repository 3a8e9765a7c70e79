"""A transport over torch.distributed: Gloo for CPU tensors, NCCL for CUDA tensors, or both in one group."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import CommFailure, InvalidInput, raised_below
from ..text import first_line, shown
from .base import CHECKS, TAG_BITS, Counters, Message, Post, check_timeout, describe_loss, sort_by_tag
from .channel import Channel, find_channel, get_channel
from .records import RECORDS, digest

#: The first tag on Gloo. Lower tags are for the program's own messages. A tag is below 2^31.
FIRST_TAG = 1 << 30
#: A byte that a rank of a group with Gloo and NCCL adds to its record: whether its tensors are on a CUDA device, and
#: whether NCCL has connected that device.
NO_CUDA, UNCONNECTED, CONNECTED = b"\0", b"\1", b"\2"
#: The packages whose Python code runs between this module and a backend.
BETWEEN = ("torch.distributed", "contextlib")


class WeakGroup:
    """A weak reference to a ProcessGroup, or to the group of a one-dimensional DeviceMesh (as `group` or as `mesh`).

    The threads and sockets of a group live as long as anything refers to the group. A weak reference lets them end in
    `destroy_process_group`; until then torch itself refers to the group.
    """

    def __init__(self, group: Any = None, *, mesh: Any = None) -> None:
        if mesh is not None and group is not None:
            raise InvalidInput("both group= and mesh= are given; give one")
        if isinstance(group, DeviceMesh):
            mesh = group
        if mesh is not None:
            if not isinstance(mesh, DeviceMesh):
                raise InvalidInput(f"mesh={mesh!r}: expected one axis of a DeviceMesh, such as mesh['cp']")
            if mesh.ndim != 1:
                names: tuple[Any, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
                raise InvalidInput(f"mesh has axes {names}; give one of them, such as mesh[{names[-1]!r}]")
            is_member = mesh.get_coordinate() is not None  # torch would raise IndexError
            group = mesh.get_group() if is_member else dist.GroupMember.NON_GROUP_MEMBER
        self._is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        self._group: Callable[[], Any] = ref(group) if self._is_group else lambda: group

    def __reduce__(self) -> str:
        raise InvalidInput(
            "a process group cannot be pickled, nor a module, model or transport that attends over one; save its "
            "state_dict(), and make it again, with a group, in the program that loads it"
        )

    @property
    def group(self) -> Any:
        """The group. Raises InvalidInput if it was destroyed, or is not a group."""
        group = self._group()
        if not self._is_group:
            check_group(group)
        elif group is None or not _is_registered(group):
            raise InvalidInput(
                "the process group of this call or module was destroyed; run every backward before "
                "destroy_process_group, and make modules and transports again after init_process_group"
            )
        elif dist.group.WORLD in _inherited:
            raise InvalidInput(
                "this process is a fork of a rank, and no member of the rank's group; make the call in the rank itself"
            )
        return group


def place_group(group: Any) -> WeakGroup:
    """A weak reference to a ProcessGroup or an axis of a DeviceMesh; None: all processes."""
    if group is not None:
        check_group(group)
    return WeakGroup(dist.group.WORLD if group is None else group)


def check_group(group: object) -> None:
    """Raise InvalidInput unless `group` is a ProcessGroup or a DeviceMesh that this rank belongs to."""
    if dist.is_available() and isinstance(group, dist.ProcessGroup | DeviceMesh):
        return
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInput(
            f"this rank is no member of the group or mesh (new_group returns {group!r} there); call on the members "
            "only, or give every rank a group, by torch.distributed.new_subgroups or an axis of a DeviceMesh of all "
            "ranks; for attention on one device use ringattn.attention, which takes no group"
        )
    raise InvalidInput(f"group={shown(group)}: expected a ProcessGroup, or a DeviceMesh such as mesh['cp']")


def find_group(group: Any = None, mesh: Any = None) -> WeakGroup:
    """A weak reference to the given group, to a mesh's group, or to the world. Raises InvalidInput."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInput(
            "torch.distributed is not initialised in this process; call torch.distributed.init_process_group, "
            "start with torchrun, or use ringattn.virtual_attention for ranks within one process"
        )
    return WeakGroup(dist.group.WORLD if group is None and mesh is None else group, mesh=mesh)


#: Default groups inherited in a fork. A fork that used one would end all ranks on Gloo.
_inherited: list[Any] = []
os.register_at_fork(after_in_child=lambda: _inherited.append(dist.is_available() and dist.group.WORLD))


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows the group: it was made there, and is not destroyed."""
    return group in dist.distributed_c10d._world.pg_map


class TorchDist:
    """A transport over torch.distributed: one rank of a ProcessGroup or of a one-dimensional DeviceMesh.

    The group is not kept alive, see `WeakGroup`.

    Messages use the group's backend for the device of the tensors. On Gloo the tags of messages are 2^30 and above; a
    program's own messages on the group may have any lower tags. NCCL has no tags and matches messages between two ranks
    in the order in which they are posted: on NCCL nothing else may be sent on the group between the first and the last
    message of a call. If your program sends messages, too, give ring attention a separate group. Before the first
    message of every pass, or while its messages travel (`check`), ranks verify that they run the same call.

    Records and comparisons travel on separate TCP connections, so that a comparison never waits for a GPU. The first
    use connects every rank to the ranks 1, 2, 4, 8 ... ahead and behind, and starts a thread that notices when another
    rank fails; both end with the group. Before the first message of CUDA tensors, all ranks make one all-gather, in
    which NCCL connects them: not every rank has a message in the first step.

    `timeout` (seconds) bounds every wait on Gloo. The default is the group's timeout, as given to init_process_group or
    new_group. On NCCL a wait only orders streams, and the group's own timeout aborts a hung message.
    """

    def __init__(self, group: Any = None, *, mesh: Any = None, timeout: float | None = None) -> None:
        self._group = find_group(group, mesh)
        group = self._group.group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        #: The backend of each type of device. `dist.get_backend` is "undefined" for groups made without a backend.
        self._backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        #: The CUDA device of this rank, from device_id= of init_process_group or from the latest tensors.
        self._device: torch.device | None = group.bound_device_id
        check_timeout(timeout)
        self._timeout, self.counters = timeout, Counters()

    @property
    def timeout(self) -> float:
        """The longest wait, in seconds."""
        return _group_timeout(self.group) if self._timeout is None else self._timeout

    @property
    def group(self) -> Any:
        """The process group. Raises InvalidInput if the group was destroyed."""
        return self._group.group

    def check(self, device: torch.device) -> None:
        """Raise InvalidInput if no backend of the group carries tensors of `device`."""
        backend = self._backends.get(device.type)
        # Gloo registers itself for CUDA tensors, too, but cannot send them from rank to rank.
        if backend is None or (device.type == "cuda" and backend != "nccl"):
            names = ",".join(map(":".join, self._backends.items()))
            wanted = "nccl" if device.type == "cuda" else "gloo"
            raise InvalidInput(
                f"tensors are on {device} but the group's backends are {names}; try a group of backend {wanted}, or of "
                "both, 'cpu:gloo,cuda:nccl'"
            )
        if device.type == "cuda":
            bound = self.group.bound_device_id
            if bound not in (None, device):
                raise InvalidInput(
                    f"tensors are on {device} but device_id= of init_process_group has bound the group to {bound}; "
                    "move the tensors there, or leave out device_id="
                )
            self._device = device

    def post(self, post: Post) -> tuple[bool, list[tuple[Callable[[], Any], str]]]:
        """Start messages; returns (whether waiting blocks the host, the waits as functions with names for errors)."""
        group = self.group
        self.counters.add(post)
        # Receives first, each in tag order: both sides of a pair list their messages in the same order.
        order: list[tuple[str, Any, Message]] = [("receive from", dist.irecv, m) for m in sort_by_tag(post.recvs)]
        order += [("send to", dist.isend, m) for m in sort_by_tag(post.sends)]
        operations = [
            dist.P2POp(op, m.data, group=group, tag=FIRST_TAG + m.tag, group_peer=m.peer) for _, op, m in order
        ]
        names = [f"{post.label}: {verb} rank {m.peer}, {m.data.numel():,} bytes" for verb, _, m in order]
        try:
            works = self._call("; ".join(names), partial(dist.batch_isend_irecv, operations))
        except CommFailure as error:  # Gloo may notice the end of a rank first
            if (channel := find_channel(group)) is not None:
                channel.blame(error)
            raise
        if len(works) != len(names):  # NCCL coalesces a batch into one work
            names = ["; ".join(names)] * len(works)
        if self._backends[operations[0].tensor.device.type] == "nccl":
            return False, [(work.wait, name) for work, name in zip(works, names, strict=True)]
        within = timedelta(seconds=self.timeout)
        return True, [(partial(work.wait, within), name) for work, name in zip(works, names, strict=True)]

    def wait(self, ticket: tuple[bool, list[tuple[Callable[[], Any], str]]]) -> None:
        """Wait for the messages of a ticket. Raises errors of other ranks, and CommFailure after the timeout."""
        blocks, waits = ticket
        if blocks and (channel := find_channel(self.group)) is not None:
            channel.guard(partial(self._finish, waits))
        else:
            self._finish(waits)

    def _finish(self, waits: list[tuple[Callable[[], Any], str]]) -> None:
        for wait, name in waits:
            self._call(name, wait)

    def gather(self, record: bytes, stage: str = "exchange") -> list[bytes]:
        """Every rank's record, in rank order. Collective. `stage` names the exchange in errors."""
        if "nccl" not in self._backends.values():
            return self._gather(record, stage)
        state = NO_CUDA if self._device is None else CONNECTED if self._device == self.channel.device else UNCONNECTED
        both = self._gather(state + record, stage)
        states = {raw[:1] for raw in both}
        if UNCONNECTED in states and states <= {UNCONNECTED, CONNECTED}:
            self._connect()
            self.channel.device = self._device
        return [raw[1:] for raw in both]

    def _gather(self, record: bytes, stage: str) -> list[bytes]:
        if self.size == 1:
            return [record]
        return self.channel.gather(record, json.dumps({"stage": stage}).encode(), self.timeout)

    @property
    def channel(self) -> Channel:
        """The channel on which ranks compare their calls. The first use is collective."""
        group = self.group
        channel = find_channel(group) or get_channel(group, self.timeout)
        if "nccl" in self._backends.values():
            channel.on_error = self._abort
        return channel

    def _abort(self) -> None:
        """Abort NCCL messages that wait for a rank that will never send them (not run on a GPU yet)."""
        self.group._get_backend(torch.device("cuda")).abort()

    @property
    def events(self) -> int:
        """The number of exchanges and deferred calls so far, equal on all ranks."""
        channel = None if self.size == 1 else find_channel(self.group)
        return 0 if channel is None else channel.comparison.count

    def announce(self, record: bytes) -> int:
        """Begin a call that ranks compare while its messages travel; returns its number, see `Transport`."""
        fingerprint = digest(record)
        number = self.channel.announce(fingerprint, record)
        # Different calls have different tags, so a message never meets one of another call, which may differ in size.
        own = int.from_bytes(digest(fingerprint + number.to_bytes(8, "little")), "little") % (1 << TAG_BITS)
        return number << TAG_BITS | own

    def synchronize(self) -> None:
        """Wait until this rank's deferred calls are known to match on all ranks, or raise their error. Collective."""
        if (channel := find_channel(self.group)) is not None:
            channel.synchronize()

    def fail(self, text: str) -> None:
        """Report to all ranks that an exception has ended a call on this rank."""
        if self.size > 1:
            self.channel.fail(text)

    def defers(self, check: str | None) -> bool:
        """Whether ranks compare calls while messages travel: as `check` says, else RINGATTN_CHECK, else the backend."""
        default = "deferred" if "nccl" in self._backends.values() else "now"
        check = check or os.environ.get("RINGATTN_CHECK") or default
        if check not in CHECKS:
            raise InvalidInput(
                f"check={check!r} (the argument, or the variable RINGATTN_CHECK): expected one of {', '.join(CHECKS)}"
            )
        if check == "now" or self.size == 1:
            return False
        return self._device is None or self._device == self.channel.device  # else NCCL must first connect the ranks

    def _connect(self) -> None:
        """Let NCCL connect the ranks, by an all-gather of one byte per rank."""
        mine = torch.zeros(1, dtype=torch.uint8, device=self._device)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        work = self._call(RECORDS, partial(dist.all_gather, every, mine, group=self.group, async_op=True))
        self._call(RECORDS, work.wait)

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        """Return `call()`; an error of the backend becomes a CommFailure that names the messages.

        `call` must add no Python frame of its own (a partial adds none), as `raised_below` reads the traceback.
        """
        try:
            return call()
        except RuntimeError as error:
            if not raised_below(error, BETWEEN):
                raise
            raise self._failure(name, error) from error

    def _failure(self, name: str, error: RuntimeError) -> CommFailure:
        return CommFailure(describe_loss(self, name, self.timeout, first_line(error)))


def _group_timeout(group: Any) -> float:
    """Seconds of the timeout that a process group was made with, or was given since."""
    for device in ("cpu", "cuda"):
        if torch.device(device) in group._device_types:
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            if options is not None:
                return float(options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())  # the backend does not expose its timeout
