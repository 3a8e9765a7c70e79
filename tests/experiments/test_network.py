"""Two nodes on one machine: namespaces where they are possible, modelled links everywhere. No time is asserted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_cases
import torch

from ringattn.errors import InvalidInput, LaunchFailure
from ringattn.experiments.bench import links as bench_links
from ringattn.experiments.bench import network
from ringattn.experiments.bench.links import SLOTS, DelayedTransport, InstantTransport, Links, MessageBoard
from ringattn.experiments.bench.network import find_obstacle, run_nodes
from ringattn.transport.base import Counters, Message, Post

LINKS = Links(2, 2, 1e9, 1e10)
OBSTACLE = find_obstacle()
namespaces = pytest.mark.skipif(OBSTACLE is not None, reason=f"no shaped network namespaces here: {OBSTACLE}")
multi = pytest.mark.multi


@multi
@pytest.mark.parametrize("modelled", [pytest.param(False, marks=namespaces), True], ids=["namespaces", "modelled"])
def test_two_nodes_equal_virtual_and_the_plan(modelled: bool) -> None:
    """ring, direct, allgather and double_ring(2): bit for bit the virtual ranks, and the planned bytes."""
    found = run_nodes(rank_cases.on_nodes, LINKS, modelled=modelled, timeout=150)
    assert [cells for cells, _ in found] == [16] * 4
    # The messages between nodes did go over the shaped link, where there is one.
    assert all((received > 1 << 20) != modelled for _, received in found), found


def left(folder: Path) -> list[str]:
    """Processes that have this folder in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if str(folder) in line:
            found.append(line.replace("\0", " "))
    return found


def gone(folder: Path) -> bool:
    """A killed rank needs a moment."""
    deadline = time.monotonic() + 10
    while left(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left(folder)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """What the network has started; its files are in tmp_path."""
    found: list[subprocess.Popen[bytes]] = []
    start = network._start
    monkeypatch.setattr(network, "_start", lambda *args: found.append(start(*args)) or found[-1])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return found


@multi
@namespaces
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["of 2 exited with status 1", "a bad day on rank one"]),
        ("hang", ["did not end within 15 s", "still ran"]),
    ],
)
def test_nothing_is_left_of_a_failure(
    how: str, words: list[str], started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with pytest.raises(LaunchFailure) as caught:
        run_nodes(rank_cases.fail_behind, LINKS, how, modelled=False, timeout=15 if how == "hang" else 60)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(started) == 4 and all(process.poll() is not None for process in started)
    assert gone(tmp_path), left(tmp_path)
    assert not list(tmp_path.iterdir())


@multi
@namespaces
def test_nodes_die_with_their_parent(tmp_path: Path) -> None:
    """The parent is killed with SIGKILL while its ranks sleep: processes end, and the namespaces with them."""
    script = (
        f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "import rank_cases\n"
        "from ringattn.experiments.bench.network import Links, run_nodes\n"
        "if __name__ == '__main__':\n"
        "    run_nodes(rank_cases.fail_behind, Links(2, 2, 1e9, 1e10), 'hang', modelled=False, timeout=50)\n"
    )
    (tmp_path / "main.py").write_text(script)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "main.py")], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 90
    while not any("about to hang" in log.read_text() for log in tmp_path.glob("*/node_*.log")):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.1)
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent.pid)], capture_output=True, text=True).stdout
    assert len(children.split()) == 4  # two that hold the namespaces, two torchruns
    parent.kill()
    parent.wait()
    assert gone(tmp_path), left(tmp_path)
    for pid in children.split():
        state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
        assert state == "" or state.startswith("Z"), f"process {pid} is left behind in state {state}"


@namespaces
def test_an_interrupt_removes_the_namespaces(started: list[subprocess.Popen[bytes]]) -> None:
    before = os.listdir("/sys/class/net")
    with pytest.raises(KeyboardInterrupt), network.make_namespaces(LINKS) as inside:  # noqa: PT012
        shown = network._run([*inside[0], "tc", "qdisc", "show"])
        assert "dev link0" in shown and "dev lo" in shown and shown.count("tbf") == 2
        raise KeyboardInterrupt
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert os.listdir("/sys/class/net") == before


def test_what_is_impossible_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    find_obstacle.cache_clear()
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    assert find_obstacle() == "tc missing"
    assert "MODELLED" in network.describe_network() and "(tc missing)" in network.describe_network()
    find_obstacle.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(network, "MORTAL", ("sh", "-c", "echo not permitted; exit 1"))
    assert "not permitted" in str(find_obstacle())
    find_obstacle.cache_clear()
    with pytest.raises(InvalidInput, match="nodes=3"), network.make_namespaces(Links(3, 1, 1e9, 1e9)):
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves; its one entry is the time."""
    now = [100.0]
    monkeypatch.setattr(bench_links.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(bench_links.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_links_are_queues(clock: list[float], tmp_path: Path) -> None:
    board = MessageBoard(tmp_path / "board", Links(2, 2, 10.0, 100.0))
    other = MessageBoard(tmp_path / "board", board.links)  # of another process
    for source, target, tag in ((0, 2, 0), (1, 3, 0), (0, 1, 0), (2, 0, 0), (0, 2, 7)):
        board.post(source, target, tag, 1, 20)
    clock[0] = 103.0
    for source, target, tag in ((1, 3, 0), (0, 2, 0), (0, 1, 0), (2, 0, 0)):
        other.post(source, target, tag, 1, 20)
    # A message starts when the second side posts; both ranks of node 0 share its outer link, in that order.
    assert board.arrival(1, 3, 0, 1) == other.arrival(1, 3, 0, 1) == 105.0
    assert other.arrival(0, 2, 0, 1) == 107.0
    assert other.arrival(2, 0, 0, 1) == 105.0  # the way back is another link
    assert other.arrival(0, 1, 0, 1) == pytest.approx(103.2)
    with pytest.raises(AssertionError, match="before both sides"):
        board.arrival(0, 2, 7, 1)
    # A place is free again when both sides have asked.
    for turn in range(2 * SLOTS):
        for side in (board, other):
            side.post(3, 2, 0, turn, 1)
        assert board.arrival(3, 2, 0, turn) == other.arrival(3, 2, 0, turn)


class Silent:
    """A transport of rank 0 of 4 that sends nothing."""

    rank, size = 0, 4

    def __init__(self) -> None:
        self.counters, self.calls, self.agreed = Counters(), count(), {}
        self.waited: list[Any] = []

    def check(self, device: torch.device) -> None: ...

    def post(self, post: Post) -> str:
        return post.label

    def wait(self, ticket: Any) -> None:
        self.waited.append(ticket)

    def gather(self, record: bytes) -> list[bytes]:
        return [record] * 4


def test_only_what_is_left_of_a_delay_is_slept(clock: list[float], tmp_path: Path) -> None:
    links = Links(2, 2, 10.0, 100.0)
    peer, transport = (
        MessageBoard(tmp_path / "board", links),
        DelayedTransport(Silent(), MessageBoard(tmp_path / "board", links)),
    )
    data = torch.zeros(30, dtype=torch.uint8)
    for wanted in (103.0, 106.0):  # equal tags, one after the other
        ticket = transport.post(Post((Message(2, 0, data),), (Message(1, 0, data),), "step"))
        turn = 1 if wanted == 103.0 else 2
        peer.post(0, 2, 0, turn, 30)
        peer.post(1, 0, 0, turn, 30)
        clock[0] += 2.0  # computing
        transport.wait(ticket)
        assert clock[0] == wanted
    ticket = transport.post(Post((), (Message(1, 5, data),), "step"))
    peer.post(1, 0, 5, 1, 30)
    clock[0] += 7.0
    transport.wait(ticket)
    assert clock[0] == 113.0  # nothing was left
    assert transport.inner.waited == ["step"] * 3


def test_free_messages_bring_zeros() -> None:
    data = torch.from_numpy(np.full(8, 255, dtype=np.uint8))
    transport = InstantTransport(Silent())
    transport.wait(transport.post(Post((), (Message(1, 0, data),), "step")))
    assert not data.any() and transport.inner.waited == []
