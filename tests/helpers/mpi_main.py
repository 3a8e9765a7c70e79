"""What a rank of test_mpi.py runs: `python mpi_main.py '[[ranks, case, argument, ...], ...]'` under mpirun."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import generations
import group_cases
import pytest
import rank_cases
import torch
from mpi4py import MPI

import ringattn as ra
from ringattn import Causal, Full, Sinks, Strided, Window, mix
from ringattn.transport.base import Message, Post
from ringattn.transport.mpi import AbortOnError, Mpi

PATTERNS = (Causal(), Window(5, 9), Causal() & (Sinks(2) | Window(7)), mix(Causal(), Strided(3)))


def equals_virtual(transport: Mpi, dtype: str, heads: list[int]) -> int:
    return rank_cases.compare_with_virtual(transport, dtype, (heads[0], heads[1]), PATTERNS)


def cache(transport: Mpi, seeds: list[int]) -> list[Any]:
    """The error of generations, and the messages and bytes of a step by both merges."""
    worst = generations.compare_with_virtual(transport, seeds)
    return [worst, *(generations.count_step(transport, merge, (6, 2, 16), 1) for merge in ("gather", "scatter"))]


def errors(transport: Mpi) -> list[str]:
    return rank_cases.errors_on_every_rank(transport.rank, transport)


def same_bits(transport: Mpi) -> list[str]:
    return rank_cases.same_bits(transport.rank, transport)


def records(transport: Mpi) -> list[int]:
    """Records of any length, also none and more than a message's eager size; the lengths by rank."""
    for scale in (0, 1, 5000, 300_000):
        mine = [bytes([rank]) * (rank * scale) for rank in range(transport.size)]
        assert transport.gather(mine[transport.rank]) == mine
    frames = []
    transport._comm.Barrier()  # a rank that is ahead sends frames of its next exchange
    receive = transport._receive
    transport._receive = lambda number: frames.append(number) or receive(number)  # type: ignore[method-assign, func-returns-value]
    lengths = [len(x) for x in transport.gather(bytes(transport.rank))]
    transport._receive = receive  # type: ignore[method-assign]
    transport._comm.Barrier()
    assert len(frames) == (transport.size - 1).bit_length()
    return lengths


def shapes(transport: Mpi) -> bool:
    """What must be contiguous bytes is refused otherwise, on this rank and before anything is sent."""
    peer = (transport.rank + 1) % transport.size
    square = torch.arange(12, dtype=torch.uint8).view(3, 4)
    for bad in (square.T, square[:, ::2], square.to(torch.float32), torch.zeros(4, dtype=torch.bfloat16)):
        for post in (Post((Message(peer, 0, bad),), (), "test"), Post((), (Message(peer, 0, bad),), "test")):
            with pytest.raises(ra.InvalidInput, match="a message is a contiguous uint8 tensor"):
                transport.post(post)
    with pytest.raises(ra.InvalidInput, match="timeout=0"):
        Mpi(timeout=0)
    assert transport.counters.sent_messages == transport.counters.received_messages == 0
    with pytest.raises(ra.InvalidInput, match="gpu_aware=True"):
        transport.check(torch.device("cuda", 0))
    # Attention itself takes a transposed tensor: it packs its rows.
    x = torch.randn(1, 6, 2, 8)
    options = {"pattern": Full(), "transport": transport, "layout": "contiguous"}
    plain = ra.ring_attention(*(x.transpose(1, 2).contiguous() for _ in range(3)), **options)
    return torch.equal(plain, ra.ring_attention(*(x.transpose(1, 2) for _ in range(3)), **options))


def tags(transport: Mpi) -> list[int]:
    """Messages whose tags are equal modulo the bound, and a tag above it, arrive where they belong."""
    right, left = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    numbers = [7, 7 + transport._tags, 3 * transport._tags + 1]
    out = [torch.full((100,), i, dtype=torch.uint8) for i in range(3)]
    got = [torch.empty(100, dtype=torch.uint8) for _ in range(3)]
    sends = tuple(Message(right, tag, x) for tag, x in zip(numbers, out, strict=True))
    recvs = tuple(Message(left, tag, x) for tag, x in zip(numbers, got, strict=True))
    transport.wait(transport.post(Post(sends, recvs[::-1], "test")))
    return [int(x.unique()) for x in got]


def checks(transport: Mpi) -> list[Any]:
    return [records(transport), shapes(transport), tags(transport), len(transport._open_requests)]


def passes(transport: Mpi) -> list[list[str]]:
    """What is told of passes in different order, and of errors that a signal handler raises during a wait."""
    told = group_cases.order_of_passes(transport.rank, transport)
    return [told, group_cases.errors_of_others(transport.rank, transport)]


def split(transport: Mpi) -> bool:
    """Communicators of ranks 0 and 2, and of rank 1, give what whole worlds of their sizes give."""
    part = Mpi(MPI.COMM_WORLD.Split(transport.rank % 2))
    torch.manual_seed(transport.rank % 2)
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    layout = ra.make_layout("zigzag", tokens=30, ranks=part.size)
    local = [layout.shard_tensor(x, part.rank) for x in (q, k, v)]
    wanted = ra.virtual_attention(q, k, v, Causal(), ranks=part.size, layout="zigzag")
    with pytest.raises(ra.InvalidInput, match="not an intra-communicator"):
        Mpi(MPI.COMM_NULL)
    found = ra.ring_attention(*local, Causal(), transport=part, layout="zigzag")
    return torch.equal(found, layout.shard_tensor(wanted, part.rank))


def lost(transport: Mpi, how: str, folder: str) -> None:
    """The last rank leaves after the handshake of its second call; who is told of it writes that down."""
    Path(folder, f"pid_{transport.rank}").write_text(str(os.getpid()))
    mapped = re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text())
    Path(folder, f"mapped_{transport.rank}").write_text("\n".join(mapped))
    transport.timeout = 3.0
    x = torch.randn(1, 2, 64, 8)
    ra.ring_attention(x, x, x, Full(), transport=transport, layout="contiguous")
    if transport.rank == transport.size - 1:
        transport.post = lambda post: _leave(how)  # type: ignore[method-assign, assignment]
    try:
        ra.ring_attention(x, x, x, Full(), transport=transport, layout="contiguous")
    except ra.CommFailure as error:
        again = ""
        try:
            transport.gather(b"")
        except ra.CommFailure as second:
            again = str(second)
        Path(folder, f"told_{transport.rank}").write_text(f"{error}\n{again}")
        time.sleep(2)  # for the others to be told too
        raise


def _leave(how: str) -> None:
    if how == "raises":
        raise ValueError("a bad day on the last rank")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def main() -> None:
    """Run the cases on the first ranks; rank 0 prints their results as one line of JSON for each case."""
    torch.set_num_threads(1)
    with AbortOnError():
        world, cases = MPI.COMM_WORLD, json.loads(sys.argv[1])
        # All at once, as ranks that wait for a split keep a core busy.
        parts = {n: world.Split(int(world.rank >= n)) for n in sorted({ranks for ranks, *_ in cases}) if n < world.size}
        for ranks, name, *arguments in cases:
            if world.rank >= ranks:
                continue
            transport = Mpi(parts.get(ranks, world), timeout=30)
            result: Any = globals()[name](transport, *arguments)
            everyone = [json.loads(raw) for raw in transport.gather(json.dumps(result).encode())]
            if transport.rank == 0:
                print("RESULTS", json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()
