"""Messages over torch.distributed: Gloo for CPU tensors, NCCL for CUDA tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommFailure, InvalidInput
from .base import HEAD, Counters, Message, Post, by_tag, gather_in_rounds

#: Bytes of a record that the first round of `gather` carries: all of most.
SHORT = 4096 - HEAD


class TorchDist:
    """One rank of a ProcessGroup, or of a one-dimensional DeviceMesh.

    `timeout` (seconds) bounds every wait on Gloo. On NCCL a wait only orders streams; there the group's own
    timeout, given to init_process_group, aborts a hung message.
    """

    def __init__(self, group: Any = None, *, mesh: Any = None, timeout: float = 60.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInput(
                "torch.distributed is not initialised in this process; call torch.distributed.init_process_group, "
                "start with torchrun, or use ringattn.virtual_attention for ranks within one process"
            )
        if mesh is not None:
            if group is not None:
                raise InvalidInput("both group= and mesh= are given; give one")
            if mesh.ndim != 1:
                names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
                raise InvalidInput(f"mesh has axes {names}; give one of them, such as mesh[{names[-1]!r}]")
            group = mesh.get_group()
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise InvalidInput("this process is not a member of the group; call ring_attention on its members only")
        self.backend = dist.get_backend(self.group)
        self.timeout, self.counters = timeout, Counters()
        self.agreed: dict[Any, Any] = {}

    def check(self, device: torch.device) -> None:
        """Raise InvalidInput where the group's backend does not carry tensors of `device`."""
        names = str(self.backend)
        if device.type == "cuda" and "nccl" not in names:
            raise InvalidInput(f"tensors are on {device} but the group's backend is {names}; try an nccl group")
        if device.type == "cpu" and names == "nccl":
            raise InvalidInput("tensors are on the cpu but the group's backend is nccl; try a gloo group")

    def post(self, post: Post) -> list[tuple[Any, str]]:
        self.counters.add(post)
        # Receives first, each in tag order: both sides of a pair list their messages in the same order.
        order: list[tuple[str, Any, Message]] = [("receive from", dist.irecv, m) for m in by_tag(post.recvs)]
        order += [("send to", dist.isend, m) for m in by_tag(post.sends)]
        operations = [dist.P2POp(op, m.data, group=self.group, tag=m.tag, group_peer=m.peer) for _, op, m in order]
        names = [f"{post.label}: {verb} rank {m.peer}, {m.data.numel():,} bytes" for verb, _, m in order]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._failure("; ".join(names), error) from error
        if len(works) != len(names):  # NCCL coalesces a batch into one work
            names = ["; ".join(names)] * len(works)
        return list(zip(works, names, strict=True))

    def wait(self, ticket: list[tuple[Any, str]]) -> None:
        for work, name in ticket:
            self._wait(work, name)

    def gather(self, record: bytes) -> list[bytes]:
        return gather_in_rounds(self._exchange, record, SHORT)

    def _exchange(self, record: bytes) -> list[bytes]:
        """Every rank's record; all are equally long."""
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(self.backend) else "cpu"
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        name = "records of all ranks, before the first message"
        try:
            work = dist.all_gather(found, mine, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failure(name, error) from error
        self._wait(work, name)
        return [r.cpu().numpy().tobytes() for r in found]

    def _wait(self, work: Any, name: str) -> None:
        try:
            if "nccl" in str(self.backend):
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise self._failure(name, error) from error

    def _failure(self, name: str, error: RuntimeError) -> CommFailure:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return CommFailure(
            f"rank {self.rank} of {self.size}: {name}: not done within {self.timeout:g} s or the peer is gone ({reason}). "
            "Look for the first error among the other ranks; ranks that call ring_attention with other arguments "
            "than before, or in another order, also end here"
        )
