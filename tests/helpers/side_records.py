"""What the ranks of test_handshake.py run on a group that NCCL would serve, with Gloo in its place."""

from __future__ import annotations

from typing import Any
from weakref import ref

import handshake_cases
import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn import Causal, Window
from ringattn.transport import torchdist
from ringattn.transport.base import Post
from ringattn.transport.torchdist import TorchDist

#: What waits for a device.
WAITS = ((torch.cuda, "synchronize"), (torch.Tensor, "item"), (torch.Tensor, "cpu"), (torch.Tensor, "cuda"))


class OnGpu(TorchDist):
    """A group that NCCL would serve: messages travel on Gloo, records as for NCCL."""

    connected = 0

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__(group, **{"timeout": handshake_cases.PATIENCE, **options})
        self._backends = {"cuda": "nccl"}

    def check(self, device: torch.device) -> None:
        """CPU tensors stand for those of CUDA."""
        self._device = device

    def post(self, post: Post) -> list[tuple[Any, str]]:
        self._backends = {"cpu": "gloo"}
        try:
            return super().post(post)
        finally:
            self._backends = {"cuda": "nccl"}

    def _connect(self) -> None:
        self.connected += 1


def _raise(*_: object, **__: object) -> None:
    raise AssertionError("a handshake waits for a device")


def handshakes(rank: int, name: str) -> Any:
    """A case of `handshake_cases` whose records travel as for NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake_cases, "TorchDist", OnGpu)
        return getattr(handshake_cases, name)(rank)


def calls(rank: int) -> tuple[list[str], int]:
    """(what each of some calls told this rank, how often NCCL was asked to connect the ranks)."""
    group, told = dist.new_group(), []
    ring = OnGpu(group)
    source = torch.Generator().manual_seed(rank)
    rows = handshake_cases.TOKENS // dist.get_world_size()
    x = [torch.randn(1, 2, rows, 8, generator=source).requires_grad_() for _ in range(3)]

    def step(pattern: ra.Pattern) -> None:
        out = ra.ring_attention(*x, pattern, layout="contiguous", transport=ring, kernel="reference")
        torch.autograd.grad(out, x, torch.ones_like(out))

    told.append(handshake_cases.told_by(lambda: step(Causal())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_connect", _raise)
        patch.setattr(dist, "all_gather", _raise)
        patch.setattr(dist, "all_gather_into_tensor", _raise)
        for owner, name in WAITS:
            patch.setattr(owner, name, _raise)
        made: list[torch.Tensor] = []
        honest = torch.frombuffer

        def noted(*arguments: Any, **options: Any) -> torch.Tensor:
            made.append(honest(*arguments, **options))
            return made[-1]

        patch.setattr(torch, "frombuffer", noted)
        for _ in range(3):
            told.append(handshake_cases.told_by(lambda: step(Causal())))
        assert len(made) == 6, "a digest for each forward, and a number for each backward"
        assert all(mark.device.type == "cpu" and mark.numel() <= torchdist.SHORT + torchdist.HEAD for mark in made)
        told.append(handshake_cases.told_by(lambda: step(Window(5) if rank == 1 else Causal())))
        told.append(handshake_cases.told_by(lambda: step(Causal())))
    dist.destroy_process_group(group)
    return told, ring.connected


def lifetimes(rank: int) -> list[bool]:
    """For some groups that are made, used and destroyed in turn: whether what carried their records lives on."""
    lives = []
    for _ in range(3):
        group = dist.new_group()
        ring = OnGpu(group)
        ring.gather(b"record")
        carrier = ref(torchdist._record_carriers[group])
        dist.destroy_process_group(group)
        del group
        lives.append(carrier() is not None)
    return lives
