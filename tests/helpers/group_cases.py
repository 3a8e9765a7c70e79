"""What the ranks of test_groups.py run: process groups that end, messages of several calls, and errors of others."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import told_by
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra
from ringattn.transport.base import Message, Post, Transport
from ringattn.transport.torchdist import TorchDist

DESTROYED = "the process group of this call or module was destroyed|torch.distributed is not initialised"
#: What the DataLoader of torch raises, in a signal handler, where one of its workers was killed.
KILLED = "DataLoader worker (pid 7) is killed by signal: Killed."


def join(rank: int, folder: str, number: int) -> None:
    store = dist.FileStore(f"{folder}/store{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def held() -> tuple[int, int, float]:
    """Threads, file descriptors and MiB of this process."""
    gc.collect()
    (size,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), int(size.split()[1]) / 1024


def cycles(rank: int, folder: str, count: int) -> list[tuple[int, int, float]]:
    """What the process holds after each of `count` times four groups, while results and modules of all are kept."""
    leave()
    found, kept, fewest = [], [], held()[0]
    for number in range(count):
        join(rank, folder, number)
        x = torch.randn(1, 2, 12, 8, requires_grad=True)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        calls: list[Callable[..., Any]] = [
            lambda q, k, v: ra.ring_attention(q, k, v, ra.Causal(), layout="contiguous"),
            ra.nn.RingAttention(ra.Causal(), layout="zigzag", group=dist.group.WORLD),
            ra.nn.RingAttention(ra.Causal(), layout="zigzag", mesh=mesh["cp"]),
            ra.nn.RingAttention(ra.Causal(), layout="zigzag", group=mesh["cp"]),
            ra.nn.RingAttention(ra.Causal(), layout="zigzag", transport=TorchDist(dist.new_group([0, 1]))),
        ]
        outs = [call(x, x, x) for call in calls]
        torch.stack(outs).sum().backward(retain_graph=True)
        del mesh
        kept.append((outs, calls))
        leave()
        end = time.monotonic() + 2.0
        while (now := held())[0] > fewest and time.monotonic() < end:  # threads that shall end take their time
            time.sleep(0.01)
        fewest = min(fewest, now[0])
        found.append(now)
    return found


def after_the_end(rank: int, folder: str) -> int:
    """A backward, a module and a transport whose group has ended are errors, also beside a new group. Calls made."""
    leave()
    join(rank, folder, 0)
    x = torch.randn(1, 2, 12, 8, requires_grad=True)
    module, transport = ra.nn.RingAttention(ra.Full(), layout="contiguous", group=dist.group.WORLD), TorchDist()
    out, group = module(x, x, x), dist.group.WORLD
    calls = (
        lambda: torch.autograd.grad(out.sum(), x, retain_graph=True),
        lambda: module(x, x, x),
        lambda: ra.ring_attention(x, x, x, ra.Full(), layout="contiguous", transport=transport),
        lambda: ra.ring_attention(x, x, x, ra.Full(), layout="contiguous", group=group),
    )
    leave()
    for number in (1, 2):
        for call in calls:
            with pytest.raises(ra.InvalidInput, match=DESTROYED):
                call()
        if number == 1:
            join(rank, folder, number)
            fresh = ra.ring_attention(x, x, x, ra.Full(), layout="contiguous")
            assert torch.equal(fresh, out)
            torch.autograd.grad(fresh.sum(), x)
    return len(calls)


class Layer:
    """Two calls of attention on this rank's shards, and their gradients as virtual ranks give them."""

    def __init__(self, transport: Transport, lengths: tuple[int, int]) -> None:
        self.transport = transport
        self.inputs, self.outs, self.wanted = [], [], []
        source = torch.Generator().manual_seed(0)
        for tokens in lengths:
            whole = [torch.randn(1, 2, tokens, 8, generator=source, dtype=torch.float64) for _ in range(3)]
            made = ra.make_layout("contiguous", tokens=tokens, ranks=transport.size)
            for x in whole:
                x.requires_grad_()
            grads = torch.autograd.grad(ra.attention(*whole, ra.Causal()).square().sum(), whole)
            self.wanted.append([made.shard_tensor(x, transport.rank) for x in grads])
            local = [made.shard_tensor(x.detach(), transport.rank).clone().requires_grad_() for x in whole]
            self.inputs.append(local)
            self.outs.append(self.call(local))

    def call(self, local: list[torch.Tensor]) -> torch.Tensor:
        found = ra.ring_attention(*local, ra.Causal(), layout="contiguous", transport=self.transport)
        assert isinstance(found, torch.Tensor)
        return found

    def error(self, index: int) -> float:
        """The largest error of the gradients of a call. Its graph is kept."""
        grads = torch.autograd.grad(self.outs[index].square().sum(), self.inputs[index], retain_graph=True)
        return max(float((a - b).abs().max()) for a, b in zip(grads, self.wanted[index], strict=True))


def order_of_passes(rank: int, transport: Transport | None = None) -> list[str]:
    """What this rank is told where it runs another pass than the last rank; the group can be used after each."""
    transport = transport or TorchDist()
    last, told = transport.rank == transport.size - 1, []
    for lengths in ((16, 16), (16, 24)):
        layer = Layer(transport, lengths)
        for attempt in (
            lambda layer: layer.error(int(last)),
            lambda layer: layer.error(0) if last else layer.call(layer.inputs[0]),
        ):
            told.append(told_by(lambda attempt=attempt: attempt(layer)))
            errors = [layer.error(index) for index in (1, 0, 0, 1)]
            assert max(errors) < 1e-12, (lengths, errors, told)
        if not torch.equal(layer.call(layer.inputs[0]), layer.outs[0]):
            told.append("another result")
    return told


def messages_of_others(rank: int) -> bool:
    """Messages of the program's own, received only after several calls, and those of the calls, meet nobody else's."""
    peer, tags = 1 - rank, (0, 1, 2, 3, 4, 1 << 20)
    mine = [torch.full((4096,), 10 * rank + i, dtype=torch.uint8) for i in range(len(tags))]
    early, late = ([torch.zeros_like(x) for x in mine] for _ in range(2))
    works = [dist.irecv(x, peer, tag=tag) for x, tag in zip(early, tags, strict=True)]
    layer = Layer(TorchDist(), (16, 24))
    works += [dist.isend(x, peer, tag=tag) for x, tag in zip(mine, tags, strict=True) for _ in range(2)]
    assert max(layer.error(index) for index in (1, 0)) < 1e-12
    works += [dist.irecv(x, peer, tag=tag) for x, tag in zip(late, tags, strict=True)]
    for work in works:
        work.wait()
    return all(x.eq(10 * peer + i).all() for found in (early, late) for i, x in enumerate(found))


def calls_of_a_fork(rank: int) -> list[str]:
    """What a fork of rank 0 is told in its calls; the ranks go on meanwhile."""
    x, transport = torch.randn(1, 2, 8, 8), TorchDist()
    module = ra.nn.RingAttention(ra.Full(), layout="contiguous", group=dist.group.WORLD)
    calls: list[Callable[[], Any]] = [
        lambda: ra.ring_attention(x, x, x, ra.Full(), layout="contiguous"),
        lambda: ra.ring_attention(x, x, x, ra.Full(), layout="contiguous", transport=transport),
        lambda: module(x, x, x),
    ]
    told = b""
    if rank == 0:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            for call in calls:
                try:
                    call()
                except ra.InvalidInput as error:
                    os.write(theirs, f"{error}\n".encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
    for call in calls:
        call()
    return told.decode().splitlines()


def errors_of_others(rank: int, transport: Transport | None = None) -> list[str]:
    """A signal handler raises while rank 0 waits for rank 1: what rank 0 catches."""
    transport = transport or TorchDist()
    data = torch.zeros(100, dtype=torch.uint8)
    told = []

    def handler(number: int, frame: Any) -> None:
        raise RuntimeError(KILLED)

    def during(call: Callable[[], Any]) -> None:
        if transport.rank == 1:
            time.sleep(0.5)
            call()
            return
        if transport.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(RuntimeError) as caught:
                call()
            told.append(f"{type(caught.value).__name__}: {caught.value}")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        if transport.rank < 2:
            message = (Message(1 - transport.rank, 7, data),)
            posts = Post(message, (), "test"), Post((), message, "test")
            ticket = transport.post(posts[1]) if transport.rank == 0 else None
            during(lambda: transport.wait(ticket or transport.post(posts[0])))
        during(lambda: transport.gather(b"record"))
    finally:
        signal.signal(signal.SIGALRM, before)
    return told


def errors_of_others_in_a_post(rank: int) -> list[str]:
    """A handler runs before the first message of a batch, and of an exchange of records, is started."""
    transport, told = TorchDist(), []

    def interrupted(*given: Any, **named: Any) -> None:
        raise RuntimeError(KILLED)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", interrupted)
        post = Post((Message(1 - rank, 0, torch.zeros(1, dtype=torch.uint8)),), (), "test")
        with pytest.raises(RuntimeError) as caught:
            transport.post(post)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    return told


#: What ranks 0 and 1 are told in `order_of_passes` where they run backwards of two calls, and where rank 0 begins a
#: call. What both ranks are told where they run backwards of different calls, and what each is told of the other
#: where rank 0 begins a call while rank 1 begins a backward.
BACKWARDS = (
    r"which backward to run: that of call (\d+) on rank 0; that of call (\d+) on rank 1. Run backwards and calls in"
)


STAGES = (r"rank 1 is at stage 'backward' .* stage 'call'", r"rank 0 is at stage 'call' .* stage 'backward'")


def check_order(told: list[list[str]]) -> None:
    """What two ranks are told in the two rounds of `order_of_passes`."""
    for texts, stage in zip(told, STAGES, strict=True):
        assert len(texts) == 4 and all(text.startswith("Mismatch: ") for text in texts), texts
        numbers = [[int(number) for number in re.findall(BACKWARDS, text)[0]] for text in texts[::2]]
        assert numbers[0] < numbers[1] and all(first < second for first, second in numbers), texts
        assert all(re.search(stage, text) for text in texts[1::2]), texts


def connections(rank: int) -> list[int]:
    """In a group with Gloo and NCCL: how often NCCL has connected after each exchange of records."""
    connected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        patch.setattr(TorchDist, "_connect", lambda self: connected.append(self._device))
        counts, transport = [], TorchDist()

        def exchange() -> None:
            records = [b"rank 0", b"the record of rank 1" * 100]
            assert transport.gather(records[rank]) == records
            counts.append(len(connected))

        exchange()
        for ready in (rank == 1, True, rank == 0):  # rank 0 meets its tensors later
            if ready:
                transport.check(torch.device("cuda", rank))
            exchange()
        if rank == 1:
            transport = TorchDist()
            transport.check(torch.device("cuda", rank))
        exchange()
    assert set(connected) == {torch.device("cuda", rank)}
    return counts


#: What strangers send: nothing, part of what a rank sends, as many other bytes, far more, and a reset.
STRANGE = (b"", b"short", bytes(20), bytes(100_000), b"reset")


def among_strangers(rank: int, count: int) -> str:
    """What a first call is told while `count` strangers keep connections to ranks 1 and 2.

    Rank 1 does not accept connections yet when they come, as it waits for rank 2, and rank 2 does.
    """
    group, kept = dist.new_group(), list[socket.socket]()
    store = dist.PrefixStore("ringattn/channel", group.get_group_store())
    if rank == 0:
        for peer in (1, 2):
            host, port, *_ = store.get(str(peer)).decode().split()
            for number in range(count):
                kept.append(socket.create_connection((host, int(port)), timeout=5.0))
                kept[-1].send(words := STRANGE[number % len(STRANGE)])
                if words == b"reset":
                    kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    kept.pop().close()
            store.set("strangers", "there")
    if rank == 2:
        store.get("strangers")
    x = torch.ones(1, 2, 4, 8)
    transport = TorchDist(group, timeout=10.0)
    return told_by(lambda: ra.ring_attention(x, x, x, ra.Full(), layout="contiguous", transport=transport))
