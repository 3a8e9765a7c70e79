"""Which backend, and which device, a process group's messages and records take. No GPU: NCCL is a name here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import group_cases
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringattn as ra
from ringattn.transport.torchdist import TorchDist

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone, made without the name of a backend."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "undefined"
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backends", "carried"),
    [
        ("cpu:gloo", {CPU}),
        ("cpu:gloo,cuda:gloo", {CPU}),  # what "gloo" stands for
        ("cuda:nccl", {CUDA}),
        ("cpu:gloo,cuda:nccl", {CPU, CUDA}),
    ],
)
def test_each_device_has_its_backend(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, backends: str, carried: set[torch.device]
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    transport = TorchDist()
    for device in (CPU, CUDA):
        if device in carried:
            transport.check(device)
        else:
            with pytest.raises(ra.InvalidInput, match=f"tensors are on {device} but .* {backends}; try .*'cpu:gloo"):
                transport.check(device)


def test_nccl_connects_the_ranks_on_the_device_of_the_tensors(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    devices: list[Any] = []
    honest = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device, **k: devices.append(device) or honest(*a, **k))  # type: ignore[func-returns-value]
    transport = TorchDist()
    assert transport.gather(b"before any tensor") == [b"before any tensor"] and devices == []
    transport.check(CUDA)
    assert transport.gather(b"after") == [b"after"] == transport.gather(b"after") and devices == [CUDA]
    group.bound_device_id = CUDA
    bound = TorchDist()
    bound.gather(b"bound")
    assert devices == [CUDA]  # the group's other transport has connected it
    with pytest.raises(ra.InvalidInput, match=r"on cuda:0 but device_id= .* has bound the group to cuda:1"):
        bound.check(torch.device("cuda", 0))
    names: dict[str, Any] = {"__name__": "torch.distributed.nccl"}
    exec("def all_gather(*args, **options): raise RuntimeError('no route to host')", names)
    monkeypatch.setattr(dist, "all_gather", names["all_gather"])
    bound.channel.device = None
    with pytest.raises(ra.CommFailure, match="no route to host"):
        TorchDist().gather(b"unconnected")


def test_a_mesh_as_group(group: dist.ProcessGroup) -> None:
    x = torch.randn(1, 2, 6, 8)
    whole = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    for mesh in (whole["cp"], init_device_mesh("cpu", (1,))):
        found = ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", group=mesh)
        assert torch.equal(found, ra.virtual_attention(x, x, x, ra.Causal(), ranks=1))
        assert ra.nn.RingAttention(ra.Causal(), layout="contiguous", group=mesh)(x, x, x).equal(found)
    with pytest.raises(ra.InvalidInput, match=r"axes \('dp', 'cp'\); give one of them, such as mesh\['cp'\]"):
        ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", group=whole)
    with pytest.raises(ra.InvalidInput, match="both group= and mesh="):
        ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", group=whole["cp"], mesh=whole["cp"])


def test_a_rank_outside_the_group_is_told_what_to_call(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, outside = torch.randn(1, 2, 6, 8), dist.GroupMember.NON_GROUP_MEMBER
    module = ra.nn.RingAttention(ra.Causal(), layout="contiguous", group=outside)  # made on every rank, called on some
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(DeviceMesh, "get_coordinate", lambda self: None)  # as on a rank that the mesh leaves out
    for call in (
        lambda: module(x, x, x),
        lambda: ra.train.mean_over_ranks(x.mean(), group=outside),
        lambda: ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", mesh=mesh),
    ):
        with pytest.raises(ra.InvalidInput, match=r"this rank is no member .*; call on the members only, or"):
            call()
    with pytest.raises(ra.InvalidInput, match="group='cp': expected a ProcessGroup"):
        ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", group="cp")  # type: ignore[arg-type]


@pytest.mark.multi
def test_all_ranks_connect_nccl_before_the_first_message(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(group_cases.connections, 2, timeout=60) == [[0, 0, 1, 1, 1]] * 2
