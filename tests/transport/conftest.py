"""mpirun for tests: bounded in time, and nothing of it left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
#: The mpirun of this environment first: it belongs to the library that mpi4py loads.
MPIRUN = shutil.which("mpirun", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
MISSING = [name for name, there in (("mpi4py", importlib.util.find_spec("mpi4py")), ("mpirun", MPIRUN)) if not there]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"{' and '.join(MISSING)} missing; try: pip install 'ringattn[mpi]'")
    for item in items:
        if MISSING and item.get_closest_marker("mpi"):
            item.add_marker(skip)


@pytest.fixture
def mpirun_path() -> str:
    """The mpirun that belongs to this environment."""
    return str(MPIRUN)


Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def start() -> Start:
    """start(command, cwd=None, timeout=60, env={}): run it in a session of its own, all of which ends with the test."""

    def run(
        command: Sequence[str], cwd: Path | None = None, timeout: float = 60.0, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "OMPI_", "SLURM_", "MPI_LOCAL"))}
        clean = {k: v for k, v in clean.items() if k not in ("RANK", "WORLD_SIZE", "RINGATTN_RUN_ID")}
        process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpirun takes its ranks with it
            try:
                out, err = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            raise AssertionError(f"{command} still ran after {timeout:g} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    return run


@pytest.fixture
def mpirun(start: Start) -> Callable[..., Any]:
    """mpirun(ranks, case, ...): every rank's result, case by case of mpi_main.py; `check=False`: the whole process.

    A case is its number of ranks, its name and its arguments.
    """

    def run(ranks: int, *cases: Sequence[Any], check: bool = True, timeout: float = 60.0) -> Any:
        paths = [str(HELPERS), os.environ.get("PYTHONPATH", "")]
        command = [str(MPIRUN), "-n", str(ranks), sys.executable, str(HELPERS / "mpi_main.py")]
        done = start(
            [*command, json.dumps(cases)], timeout=timeout, env={"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        )
        if not check:
            return done
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
        assert len(lines) == len(cases)
        return [json.loads(line.removeprefix("RESULTS ")) for line in lines]

    return run
