"""What ranks of this machine listen on, and that nothing which another process has sent can run code."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from command_line import ringattn

import ringattn as package
from ringattn.lab.audit.kit import Case
from ringattn.lab.audit.run import _Rank
from ringattn.transport.records import VALUE, exchange_values, frame

#: Local addresses in /proc/net/tcp and tcp6, in hex, that only this machine reaches: 127.0.0.0/8 and ::1.
LOCAL = re.compile(r"[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F")
SIZES = ("tokens=256", "heads=2", "head_dim=16")
CALIBRATION = (*SIZES[1:], "rows=[16,64]", "widths=[16]", "messages=[256,64k]", "repeat=1", "seconds=0")
VERBS = {
    "run": ("run", "ranks=2", *SIZES, "backward=true", "output.report=report.json"),
    "decode": ("run", "mode=decode", "ranks=2", "context=32", "new=2", *SIZES[1:]),
    "audit": ("audit", "features=[causal]"),
    "calibrate": ("calibrate", *CALIBRATION, "output.path=machine.yaml"),
}


def find_listeners(root: int) -> set[str]:
    """The addresses on which the descendants of a process listen, in hex."""
    found, family, sockets = set(), [root], set[str]()
    for process in family:
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
            if process != root:
                sockets |= {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}
        except OSError:  # it has ended, or a file was closed
            continue
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # of all processes of this machine
        for words in map(str.split, Path(table).read_text().splitlines()):
            if len(words) > 9 and words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].partition(":")[0])
    return found


@pytest.mark.multi
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("verb", VERBS)
def test_local_ranks_listen_on_the_loopback_interface_alone(verb: str, tmp_path: Path) -> None:
    """`ringattn audit` listened on all interfaces."""
    found, done = set[str](), threading.Event()

    def look() -> None:
        while not done.is_set():
            found.update(find_listeners(os.getpid()))
            time.sleep(0.05)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        said = ringattn(*VERBS[verb], cwd=tmp_path, status=None)  # a busy machine may not be calibrated
    finally:
        done.set()
        watcher.join()
    assert found, "ranks connect to each other"
    assert all(LOCAL.fullmatch(address) for address in found), found
    assert verb != "audit" or "audit: causal\n" in said.stderr


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_a_stranger_sends_is_not_run(tmp_path: Path) -> None:
    """A verdict in the store of an audit, and what ranks tell each other in `run`, `calibrate` and `bench`."""
    planted = pickle.dumps(Planted(tmp_path / "run"))
    rank = object.__new__(_Rank)
    rank.rank, rank.ranks, rank.store = 0, 1, dist.HashStore()
    rank.store.set("0/0", planted)
    with pytest.raises(msgspec.DecodeError):
        rank.look(Case("any"), "0", 1.0)
    transport: Any = SimpleNamespace(gather=lambda record, stage: [frame("told", planted, VALUE)])
    with pytest.raises(msgspec.DecodeError):
        exchange_values(transport, "told", 1.0)
    assert not (tmp_path / "run").exists()
    pickle.loads(planted)
    assert (tmp_path / "run").exists(), "the plant works"


#: Calls that unpickle.
UNPICKLING = re.compile(
    r"\bpickle\.loads?\(|Unpickler\(|torch\.load\(|(gather|broadcast|scatter|send|recv)\w*_object(_list)?\(|\bPipe\("
    r"|Queue\(\)|\.(bcast|allgather|alltoall|recv_pyobj)\("
)
#: A new process reads its work from the pipe of what started it; a queue between threads.
ALLOWED = {
    ("integrations/trainer.py", "def gather_object(self, items: list[Any]) -> list[Any]:"),  # MessagePack
    ("transport/launcher.py", "fn, args = pickle.loads(work)  # from the process that started this one, by a pipe"),
    ("transport/channel.py", "self._jobs = SimpleQueue()"),
}


def test_the_package_unpickles_nothing_that_others_send() -> None:
    root, found = Path(package.__file__).parent, set()
    for path in root.rglob("*.py"):
        for line in filter(UNPICKLING.search, path.read_text().splitlines()):
            found.add((str(path.relative_to(root)), line.strip()))
    assert found == ALLOWED
