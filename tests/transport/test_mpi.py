"""Real MPI ranks: bitwise equal to virtual ones, byte for byte as planned, and an end of all where one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import group_cases
import pytest
import torch
import yaml
from command_line import ringattn
from group_cases import check_order
from rank_cases import check_told

from ringattn.machine.file import read_machine

Run = Callable[..., Any]
pytestmark = pytest.mark.mpi


#: The cases, each with its number of ranks and its arguments, and their results: one start for all.
CASES: dict[tuple[int, str], tuple[Any, ...]] = {
    (2, "equals_virtual"): ("float64", (3, 1)),
    (2, "errors"): (),
    (2, "passes"): (),
    (3, "equals_virtual"): ("bfloat16", (2, 2)),
    (3, "same_bits"): (),
    (3, "checks"): (),
    (3, "cache"): ([0, 1, 2],),
    (3, "split"): (),
}
RESULTS: dict[tuple[int, str], Any] = {}


@pytest.fixture
def found(mpirun: Run) -> Callable[[int, str], Any]:
    """found(ranks, case): the result of every rank."""

    def result(ranks: int, case: str) -> Any:
        if not RESULTS:
            results = mpirun(3, *((*key, *arguments) for key, arguments in CASES.items()), timeout=120)
            RESULTS.update(zip(CASES, results, strict=True))
        return RESULTS[ranks, case]

    return result


@pytest.mark.parametrize("ranks", [2, 3])
def test_mpi_equals_virtual_and_the_plan(found: Run, ranks: int) -> None:
    assert found(ranks, "equals_virtual") == [8] * ranks


def test_reproducible_ranks_have_the_bits_of_one_process(found: Run) -> None:
    assert found(3, "same_bits") == [[]] * 3


def test_a_cache_has_the_bits_of_virtual_ranks_and_the_messages_of_its_formula(found: Run) -> None:
    for worst, gather, scatter in found(3, "cache"):
        assert worst < 1e-12
        assert (gather, scatter) == ([2, 2 * 6 * 17 * 4], [4, 4 * 6 * 17 * 4 // 3])


def test_every_rank_is_told_before_the_first_message(found: Run) -> None:
    check_told(found(2, "errors"))


def test_records_of_any_length_buffers_that_are_refused_and_tags_above_the_bound(found: Run) -> None:
    assert found(3, "checks") == [[[0, 1, 2], True, [0, 1, 2], 0]] * 3


def test_passes_in_different_order_and_errors_of_signal_handlers(found: Run) -> None:
    orders, errors = zip(*found(2, "passes"), strict=True)
    check_order(list(orders))
    assert errors == ([f"RuntimeError: {group_cases.KILLED}"] * 2, [])


def test_a_part_of_the_world(found: Run) -> None:
    assert found(3, "split") == [True] * 3


@pytest.mark.parametrize("how", ["raises", "dies", "stays away"])
def test_one_lost_rank_ends_the_job(mpirun: Run, how: str, tmp_path: Path) -> None:
    ranks = 3 if how == "stays away" else 2
    # The lost rank would sleep for longer than this: the job does not wait for it.
    done = mpirun(ranks, (ranks, "lost", how, str(tmp_path)), check=False, timeout=45)
    assert done.returncode != 0
    if how == "raises":
        assert "ValueError: a bad day on the last rank" in done.stderr
    if how == "stays away":
        told = [path.read_text() for path in tmp_path.glob("told_*")]
        assert any("of 3: forward step" in text and "rank 2, " in text for text in told), told
        for text in told:
            assert "not done within 3 s or the peer is gone (timeout)" in text
            assert "an earlier message of this transport was lost" in text.splitlines()[-1]
    deadline = time.monotonic() + 30
    pids = [path.read_text() for path in tmp_path.glob("pid_*")]
    assert len(pids) == ranks
    while left := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are left behind"
        time.sleep(0.1)
    mapped = {name for path in tmp_path.glob("mapped_*") for name in path.read_text().split()}
    assert not [name for name in mapped if Path(name).exists()], "MPICH's shared memory"


def _alive(pid: str) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_device_that_is_missing_is_told(tmp_path: Path) -> None:
    words, place = "run transport=mpi transport.gpu_aware=true tokens=64", {"RANK": "0", "SIZE": "1"}
    done = ringattn(words, cwd=tmp_path, status=2, **{f"OMPI_COMM_WORLD_{name}": x for name, x in place.items()})
    assert "Traceback" not in done.stderr
    assert "transport.gpu_aware=true needs a CUDA device, but this rank sees none" in done.stderr


def test_the_command_without_mpirun(inside: Run, tmp_path: Path) -> None:
    done = inside("run", "transport=mpi", "ranks=4", status=2)
    told = "no MPI launcher started this process; start it with mpirun -n 4 ringattn run transport=mpi"
    assert done.returncode == 2 and told in done.stderr


def test_control_c_is_told_in_a_line(mpirun_path: str, tmp_path: Path) -> None:
    """As a terminal does it: SIGINT to the whole process group, while the ranks exchange messages."""
    arguments = ("transport=mpi", "tokens=64", "repeat=1000000", "threads=1", "input=random")
    process = subprocess.Popen(
        [mpirun_path, "-n", "2", sys.executable, "-c", STARTED, "run", *arguments],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 100
        while len(list(tmp_path.glob("measuring_*"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 130
    assert told.count("ringattn: interrupted") == 1 and "Traceback" not in told, told
    assert len(list(tmp_path.glob("outputs/**/.hydra"))) == len(list(tmp_path.glob("outputs/run/*/*"))) == 1


#: ringattn, with a file for every rank that has begun to measure.
STARTED = """
import os
import ringattn.cli.run as command
from ringattn.cli.main import main

before = command.RankRun.measure

def measure(self):
    open(f"measuring_{self.rank}", "w").close()
    return before(self)

command.RankRun.measure = measure
main()
"""


def test_ranks_of_another_mpi_are_told_so(tmp_path: Path) -> None:
    """The environment speaks of two ranks, and MPI, started by itself, is alone."""
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = ringattn("run transport=mpi tokens=64", cwd=tmp_path, status=2, **place)
    assert "openmpi started 2 processes, but MPI sees 1:" in done.stderr


#: ringattn, one call after the other, as imports take long.
CALLS = """
import sys
from ringattn.cli.main import main

for words in sys.argv[1:]:
    sys.argv = ["ringattn", *words.split()]
    main()
"""
CALIBRATE = (
    "calibrate transport=mpi rows=[16,64] widths=[8] messages=[256,1M] repeat=2 heads=2 head_dim=16 threads=1 "
    "output.path=m.yaml"
)
WRONG = "run transport=mpi tokens=64 output.path=no/such/x.safetensors"


def test_commands_of_two_ranks(start: Run, mpirun_path: str, tmp_path: Path) -> None:
    """A sweep, of which only rank 0 writes, and what the other ranks give Hydra to write to is gone. One file from both
    ranks of calibrate, with links and passes in it. One rank speaks for all in doctor. A wrong folder is told."""
    (scratch := tmp_path / "scratch").mkdir()
    words = ("run -m transport=mpi tokens=64 heads=1 repeat=1 layout=zigzag,striped", "doctor", CALIBRATE, WRONG)
    command = [mpirun_path, "-n", "2", sys.executable, "-c", CALLS, *words]
    done = start(command, cwd=tmp_path, env={"TMPDIR": str(scratch), "COLUMNS": "200"}, timeout=120)
    assert done.returncode and "the folder no/such does not exist" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.count("forward time") == 2
    assert len(list(tmp_path.glob("**/multirun.yaml"))) == 1
    assert len(list(tmp_path.glob("**/.hydra"))) == 3
    assert not [path for path in scratch.iterdir() if path.name.startswith("ringattn-")]
    record, machine = yaml.safe_load((tmp_path / "m.yaml").read_text()), read_machine(tmp_path / "m.yaml")
    assert record["made"]["transport"] == "mpi" and record["made"]["ranks"] == 2
    assert machine.source("bandwidth") == "measured" and len(machine.residuals) == 8 * 2
    assert done.stdout.count("written") == 1
    assert done.stdout.count("ringattn doctor") == 1
    assert "mpich, rank 0 of 2" in done.stdout or "openmpi, rank 0 of 2" in done.stdout
    (library,) = (line for line in done.stdout.splitlines() if line.startswith("mpi library"))
    (where,) = (line for line in done.stdout.splitlines() if line.startswith("mpirun"))
    assert "Version" in library or "MPI" in library.removeprefix("mpi library")
    assert os.access(where.split()[1].rstrip(","), os.X_OK)


def test_one_rank_speaks_for_all(inside: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank in "10":
        monkeypatch.setenv("PMI_RANK", rank)
        done = inside("plan", "tokens=1k", f"output.path={rank}.json")
        assert ("Causal()" in done.stdout) == (tmp_path / f"{rank}.json").is_file() == (rank == "0")
