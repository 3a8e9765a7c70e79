"""Settings of hypothesis, the order of files, and real ranks for tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

for name in ("COLUMNS", "LINES"):  # set behind os.environ by readline, which pytest imports
    os.unsetenv(name)

# In continuous integration the examples are the same every time; a developer's runs keep looking for new ones.
settings.register_profile(
    "ringattn",
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("ringattn")
# Without a GPU the tests of Triton's kernels need Triton's interpreter, which is chosen when Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

HELPERS = str(Path(__file__).parent / "helpers")
#: Files that take longest. Those come first, so that no process ends long after the other.
SLOW_FILES = (
    *("integrations/test_transformers.py", "runtime/test_deferred.py", "transport/test_mpi.py"),
    *("integrations/test_trainers.py", "integrations/test_generation.py", "test_docs.py", "cli/test_cli.py"),
    *("transport/test_launch.py", "train/test_long_context.py", "runtime/test_matrix.py", "transport/test_launcher.py"),
    *("inference/test_kv_cache.py", "cli/test_ends.py", "seeds/test_seeds.py", "cli/test_bad_input.py"),
    *("transport/test_gloo.py", "test_registry.py", "recurrence/test_layers.py", "transport/test_doors.py"),
    *("recurrence/test_recurrence_faults.py", "lab/audit/test_audit.py", "integrations/test_hybrids.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-xdist, where it is in use, from starting the files with most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look at them again and again, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_runtest_setup() -> None:
    """Tests are small: threads that wait for each other on a busy machine make them fifty times slower, not faster.

    An earlier test may have run a command in this process that set more threads.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> Iterator[None]:
    """Local ranks are forks of a process that has imported torch: the import takes longer than most tests."""
    from ringattn.transport import launcher

    context = multiprocessing.get_context("forkserver")
    ours = ["pytest", "hydra", "torch.distributed.device_mesh", "torch._dynamo", "ringattn.nn", "ringattn.cli.run"]
    # What a first call imports, and what programs of examples import.
    ours += ["ringattn.simulator.timing.auto", "ringattn.kernels.aten_cpu", "torch.distributed.checkpoint.state_dict"]
    # What the collected tests call on ranks, with the libraries of which it is made.
    ours += [path.stem for path in Path(HELPERS).glob("*.py") if path.stem in sys.modules] + ["frozen"]
    context.set_forkserver_preload(ours)
    new_process = context.Process

    def start(*arguments: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            # The server of Python 3.11 looks for our helpers here only, and silently goes on without them.
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (HELPERS, os.environ.get("PYTHONPATH")))))
            forkserver.ensure_running()
        return new_process(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "Process", start)
        patch.setattr(launcher, "get_context", lambda method: context)
        yield


@pytest.fixture
def cold_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local ranks are new processes of Python, as they are for users."""
    from ringattn.transport import launcher

    monkeypatch.setattr(launcher, "get_context", multiprocessing.get_context)


@pytest.fixture
def new_ranks() -> Callable[..., list[Any]]:
    """new_ranks(fn, n, *args, timeout=60): fn(rank, *args) on n new Gloo ranks with one thread each.

    `fn` is a module-level function of an importable test module. A hang is killed; the error carries the stderr
    of the rank that failed.
    """
    from ringattn.transport.launcher import run_local

    def run(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0, **options: Any) -> list[Any]:
        return run_local(fn, n, *args, timeout=timeout, **{"threads": 1, **options})

    return run


@pytest.fixture
def inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """As `ringattn` of the module command_line, in this process, for calls that start no ranks; in tmp_path by default.

    torch has been imported here already.
    """
    from command_line import ended, split
    from hydra._internal.hydra import Hydra

    from ringattn.cli.main import main

    # Hydra composes a configuration twice, first to ask it for the mode, which the words say; it takes most of a call.
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)

    def call(*arguments: str, cwd: Path = tmp_path, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["ringattn", *split(arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        told = capsys.readouterr()
        return ended(arguments, code, told.out, told.err, status)

    return call


@pytest.fixture
def refused(inside: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """As `inside`, for calls that end with status 2 and one line, which is returned."""

    def call(*arguments: str, **options: Any) -> str:
        done = inside(*arguments, status=2, **options)
        assert len(done.stderr.splitlines()) == 1 and not done.stdout, (done.stdout, done.stderr)
        return done.stderr

    return call


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """As `new_ranks`, on ranks that the tests of a module share; for functions that leave their group in order."""
    from rank_pool import Pool

    pools: dict[int, Pool] = {}

    def run(fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0) -> list[Any]:
        if n not in pools or not pools[n].thread.is_alive():
            pools[n] = Pool(n)
        return pools[n].run(fn, *args, timeout=timeout)

    yield run
    for pool in pools.values():
        pool.kill()
