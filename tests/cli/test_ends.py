"""How the command line ends where it is not let to finish: full disks, readers that are gone, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Inside, ringattn, room, started

from ringattn.errors import InvalidInput, LaunchFailure
from ringattn.files import write_text, writing
from ringattn.transport.launcher import TERMINATED, run_local, terminable

SMALL = ("tokens=64", "heads=2", "head_dim=16", "repeat=1", "threads=1", "input=random")


def test_what_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("from before")
    with room(4096), pytest.raises(InvalidInput, match=r"could not be written \(File too large\).* make room in"):
        write_text(path, "x" * 100_000)
    assert path.read_text() == "from before" and list(tmp_path.iterdir()) == [path]


def test_a_terminal_is_told_at_once_and_a_pipe_is_not() -> None:
    """The line on standard error is gone when the error is printed."""
    command = [sys.executable, "-m", "ringattn", "plan", "ranks=x"]
    end, terminal = os.openpty()
    subprocess.run(command, stderr=terminal, timeout=60, check=False)
    drawn = [part for part in os.read(end, 1000).decode().strip().split("\r") if part]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
    assert drawn[0].strip() == "starting ..." and drawn[-2].isspace() and drawn[-1] == piped.strip()


def test_only_failures_to_write_are_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "x", KeyError):
        raise ZeroDivisionError
    with pytest.raises(InvalidInput, match="could not be written"), writing(tmp_path / "x", KeyError):
        raise KeyError
    assert not list(tmp_path.iterdir())


@pytest.mark.multi
def test_a_disk_that_gets_full(tmp_path: Path) -> None:
    """The output is 1 MiB, and the files that a run needs are less than a tenth of that. Every rank is told."""
    common = ("tokens=2k", "heads=8", "head_dim=16", "repeat=1", "threads=1", "input=random", "sample=0")
    done = ringattn("run", "ranks=2", *common, "output.path=o.safetensors", cwd=tmp_path, largest=200_000, status=2)
    assert "o.safetensors: could not be written (" in done.stderr and "make room in" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "ranks=2"), ""),
        (("simulate", "ranks=2"), ""),
        (("verify", "tokens=64"), ""),
        (("run", "transport=virtual", *SMALL), "cannot write Hydra's record of the job (No such file"),
        (("plan", "-m", "ranks=2,4"), "try another folder, such as hydra.sweep.dir=/tmp/ringattn"),
        (("simulate", "-m", "ranks=2,4"), "output outputs: cannot be made as a folder"),
    ],
    ids=" ".join,
)
def test_folders_that_cannot_be_written(inside: Inside, arguments: tuple[str, ...], words: str) -> None:
    """What writes nothing works there, what would is told in a line. /proc takes no files, not even of root."""
    done = inside(*arguments, cwd=Path("/proc"), status=2 if words else 0)
    assert words in done.stderr and len(done.stderr.splitlines()) <= 1


def test_standard_output_on_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = started("simulate", "ranks=2", cwd=tmp_path, stdout=full, status=2)
    told = "ringattn: cannot write to standard output (No space left on device); free some space there\n"
    assert done.stderr == told


@pytest.mark.multi
@pytest.mark.parametrize(
    "arguments", [("--help",), ("plan", "ranks=4"), ("run", "ranks=2", *SMALL)], ids=lambda arguments: arguments[0]
)
def test_a_reader_that_is_gone(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = started(*arguments, cwd=tmp_path, stdout=write, status=141)
    finally:
        os.close(write)
    assert not done.stderr


@pytest.mark.multi
def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "ringattn", "run", "ranks=2", *SMALL, "repeat=1000000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        deadline = time.monotonic() + 100
        while not list(temporary.glob("ringattn-*/rank_0001.log")):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.terminate()
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, told) == (143, "ringattn: terminated\n")
    assert not list(temporary.glob("ringattn-*"))


def _exit(rank: int, status: int) -> None:
    raise SystemExit(status)


@pytest.mark.multi
def test_the_blamed_ranks_status_is_told() -> None:
    """And SIGTERM is handled only while ranks run."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(LaunchFailure) as caught:
        run_local(_exit, 1, 7, timeout=60)
    assert caught.value.status == 7
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_exit_that_a_finalizer_swallows_comes_again() -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)

    def die() -> None:
        dying = Dying()
        del dying
        time.sleep(30)

    with pytest.raises(SystemExit) as end, terminable():
        die()
    assert end.value.code == TERMINATED
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
