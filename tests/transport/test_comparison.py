"""How ranks compare what they do, on simulated connections: what is sent, and who learns what is wrong."""

from __future__ import annotations

import json
import random
from collections import deque

import pytest

from ringattn import CommFailure, Mismatch
from ringattn.transport import comparison
from ringattn.transport.comparison import Comparison, Event, read_frames
from ringattn.transport.records import add_hosts


class Network:
    """Ranks whose frames arrive in order between two ranks, and in random order else."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.random, self.wires = random.Random(seed), dict[tuple[int, int], deque[bytes]]()
        self.sent: list[list[int]] = [[] for _ in range(size)]
        self.ranks = [Comparison(rank, size, self.sender(rank)) for rank in range(size)]
        #: Ranks that take no frames, and pairs of sender and receiver between which frames are lost.
        self.stopped: set[int] = set()
        self.lost: set[tuple[int, int]] = set()

    def sender(self, rank: int):  # type: ignore[no-untyped-def]
        def send(peer: int, frame: bytes) -> None:
            self.sent[rank].append(len(frame))
            if (rank, peer) in self.lost:
                return
            self.wires.setdefault((rank, peer), deque()).append(frame)

        return send

    def deliver(self) -> None:
        """Let all frames arrive."""
        while ready := [key for key, frames in self.wires.items() if frames and key[1] not in self.stopped]:
            sender, receiver = self.random.choice(ready)
            for kind, number, body in read_frames(bytearray(self.wires[sender, receiver].popleft())):
                self.ranks[receiver].receive(sender, kind, number, body)

    def call(self, rank: int, mark: bytes, stage: str = "call") -> None:
        self.ranks[rank].announce(Event(mark, json.dumps({"stage": stage, "pattern": mark.decode()}).encode()))


def exchange(network: Network, records: list[bytes]) -> list[list[bytes] | None]:
    """What each rank has of an exchange in which all ranks take part."""
    numbers = [rank.contribute(record, b"{}") for rank, record in zip(network.ranks, records, strict=True)]
    network.deliver()
    return [rank.take(number) for rank, number in zip(network.ranks, numbers, strict=True)]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8, 13, 64])
def test_an_exchange_gives_all_records_to_all_ranks(size: int) -> None:
    network = Network(size, size)
    for number in range(3):
        records = [bytes((number, rank)) * (rank % 3) for rank in range(size)]
        assert exchange(network, records) == [records] * size


@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_what_warm_calls_send(size: int) -> None:
    """A deferred forward and backward: one message each. Compared before: ceil(log2 P) each. None above 64 bytes."""
    network, rounds = Network(size), (size - 1).bit_length()
    for mark in (b"forward.", b"backward"):
        for rank in range(size):
            network.call(rank, mark)
    network.deliver()
    assert all(len(lengths) == 2 and max(lengths) <= 64 for lengths in network.sent)
    for lengths in network.sent:
        lengths.clear()
    for _ in range(2):
        assert exchange(network, [b"r" * 41] * size) == [[b"r" * 41] * size] * size
    assert all(len(lengths) == 2 * rounds and max(lengths) <= 64 for lengths in network.sent)
    assert all(rank.confirmed == rank.count == 4 and rank.error is None for rank in network.ranks)


def test_no_rank_waits_for_another() -> None:
    """All but one rank are 1,000 calls ahead; what they have done is confirmed once that rank comes."""
    network = Network(4)
    for number in range(1000):
        for rank in (0, 1, 3):
            network.call(rank, number.to_bytes(8, "little").hex().encode())
        network.deliver()
    assert [rank.count for rank in network.ranks] == [1000, 1000, 0, 1000]
    for number in range(1000):
        network.call(2, number.to_bytes(8, "little").hex().encode())
    assert exchange(network, [b""] * 4) == [[b""] * 4] * 4


@pytest.mark.parametrize("size", [2, 3, 4, 9])
@pytest.mark.parametrize("odd", [0, 1])
def test_another_call_is_named_on_all_ranks(size: int, odd: int) -> None:
    network = Network(size)
    for number in range(5):
        for rank in range(size):
            network.call(rank, b"other" if number == 3 and rank == odd else b"plain")
    network.deliver()
    for rank in network.ranks:
        assert isinstance(rank.error, Mismatch) and "the ranks disagree about pattern" in str(rank.error)
        assert f"other on rank {odd}" in str(rank.error)


def test_a_call_too_few_is_named_by_what_follows() -> None:
    network = Network(3)
    for rank in range(3):
        for stage in ("call", "backward") if rank == 1 else ("call", "call", "backward"):
            network.call(rank, stage.encode(), stage)
    network.deliver()
    assert {str(rank.error) for rank in network.ranks} == {
        "the ranks disagree about call: call on ranks 0, 2; backward on rank 1. Run backwards and calls "
        "in the same order on all ranks"
    }


def test_no_exchange_ends_before_all_earlier_calls_were_alike() -> None:
    for seed in range(200):
        network = Network(5, seed)
        odd = network.random.randrange(5)
        for rank in range(5):
            network.call(rank, b"other" if rank == odd else b"plain")
        assert exchange(network, [b""] * 5) == [None] * 5
        assert all(isinstance(rank.error, Mismatch) for rank in network.ranks)


def test_an_exception_and_the_end_of_a_process_reach_all_ranks() -> None:
    for fault, kind in (("fails", Mismatch), ("dies", CommFailure), ("leaves", CommFailure)):
        network = Network(6)
        for rank in range(6):
            network.call(rank, b"plain")
        network.deliver()
        if fault == "fails":
            network.ranks[4].fail("it raised MemoryError: no room")
        elif fault == "dies":
            network.ranks[5].lose(4)
        else:
            network.ranks[4].end()
            network.call(5, b"plain")
        network.deliver()
        for rank in network.ranks:
            if rank.rank != 4:
                assert type(rank.error) is kind and "rank 4" in str(rank.error), (fault, rank.rank, rank.error)


def test_late_and_silent_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "GRACE", 0.0)
    for odd, named in (({3}, "rank 3"), ({3, 5, 6}, "ranks 3, 5 and 6"), ({6, 7}, "ranks 6 and 7 on node-3")):
        for stopped in (False, True):
            network = Network(8)
            network.stopped = odd if stopped else set()
            for rank in network.ranks:
                if "node" in named:
                    rank.hosts = {each: f"node-{each // 2}" for each in (rank.rank, *rank.peers)}
                if rank.rank not in odd:
                    rank.contribute(b"", b"{}")
            network.deliver()
            network.ranks[0].part(0, "it took 2 s")
            network.deliver()
            verb = (("has", "have"), ("does", "do"))[stopped][len(odd) > 1]
            done = f"{verb} not {'answer' if stopped else 'joined the call of the others'}"
            for rank in network.ranks:
                rank.tick()
                if rank.rank not in odd:
                    assert f"{named} {done}: a process" in str(rank.error) and "(it took 2 s)" in str(rank.error)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("deferred", [False, True])
def test_loss_in_one_direction_is_named(monkeypatch: pytest.MonkeyPatch, size: int, deferred: bool) -> None:
    """Nothing that rank 1 sends to the next rank arrives; the other direction works."""
    monkeypatch.setattr(comparison, "GRACE", 0.0)
    network = Network(size, size)
    for rank in network.ranks:
        rank.hosts = {each: f"node-{each}" for each in (rank.rank, *rank.peers)}
    network.lost = {(1, 2 % size)}
    for rank in range(size):
        if deferred:
            network.call(rank, b"plain")
        network.ranks[rank].contribute(b"", b'{"stage": "call"}')
    network.deliver()
    number = int(deferred)
    waits = next(rank for rank in network.ranks if rank._gatherings[number].received < rank.rounds)
    waits.part(number, "records of all ranks: not done within 3 s")
    network.deliver()
    for rank in network.ranks:
        rank.tick()
    there = f"what rank 1 on node-1 sends does not reach rank {2 % size} on node-{2 % size}: a network"
    silent = "rank 1 on node-1 does not answer: a process"
    told = [str(rank.error) for rank in network.ranks]
    assert all(there in text or (silent in text and size == 2 and rank == 0) for rank, text in enumerate(told)), told
    assert there in told[1]


def test_messages_of_the_backend_name_hosts() -> None:
    text = "rank 0 of 12: forward step 1: receive from rank 11, 2,097,152 bytes; look at ranks 1, 2 and 3, or rank 7"
    hosts = {0: "a", 11: "b", 1: "a", 2: "b", 3: "b"}
    assert add_hosts(text, hosts) == (
        "rank 0 of 12 on a: forward step 1: receive from rank 11 on b, 2,097,152 bytes; "
        "look at ranks 1, 2 and 3 on a, b, or rank 7"
    )
    assert add_hosts(text, dict.fromkeys(range(12), "a")) == text
