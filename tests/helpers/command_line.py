"""The command line, and scripts, in a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun

#: The fixtures `inside`, as `ringattn` in the process of the test, and `refused`, the line that such a call ends with.
Inside = Callable[..., "subprocess.CompletedProcess[str]"]
Refused = Callable[..., str]
#: Variables of launchers, which a command of a user does not find.
CLEARED = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
#: torchrun, as a script for `ringattn`.
TORCHRUN = str(torchrun.__file__)


def split(arguments: Sequence[str]) -> list[str]:
    """The words of a command line; one alone is split as a shell does."""
    return shlex.split(arguments[0]) if len(arguments) == 1 else [*arguments]


def ended(
    arguments: Sequence[str], code: int, out: str, err: str, status: int | None
) -> subprocess.CompletedProcess[str]:
    """What a command line printed; fails unless it ended with `status`, if that is not None."""
    assert status in (None, code), (code, out, err)
    return subprocess.CompletedProcess([*arguments], code, out, err)


def ringattn(
    *arguments: str,
    cwd: Path,
    script: str = "",
    site: str = "",
    timeout: float = 120.0,
    status: int | None = 0,
    largest: int = 0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """`ringattn ARGUMENTS`, or `python script ARGUMENTS`, in a fork of a process that has imported torch, see conftest.

    The import takes longer than most commands. `started` is for tests of what an import, a variable or a launcher does.
    `site`: a folder of installed packages. `status`: the one that is expected, None for any. `largest`: as `room`.
    `variables`: those of the environment.
    """
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        context = multiprocessing.get_context("forkserver")
        work = (script, split(arguments), cwd, folder, site, largest, variables)
        process = context.Process(target=_run, args=work)
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert process.exitcode is not None
    return ended(arguments, process.exitcode, out, err, status)


def _run(
    script: str, arguments: list[str], cwd: Path, folder: str, site: str, largest: int, variables: dict[str, str]
) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    for name in CLEARED:
        os.environ.pop(name, None)
    os.environ.update(variables)
    sys.path[:0] = filter(None, [site])
    os.chdir(cwd)
    sys.argv = [script or "ringattn", *arguments]
    from ringattn.cli.main import main
    from ringattn.transport import launcher

    launcher.get_context = lambda method: multiprocessing.get_context("fork")  # type: ignore[assignment]
    with room(largest) if largest else nullcontext():
        runpy.run_path(script, run_name="__main__") if script else main()


def started(
    *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), stdout: Any = subprocess.PIPE, status: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """`ringattn ARGUMENTS` as a user starts it, or by a launcher such as torchrun."""
    command = [sys.executable, *launcher, "-m", "ringattn", *split(arguments)]
    env, pipe = {k: v for k, v in os.environ.items() if k not in CLEARED}, subprocess.PIPE
    done = subprocess.run(command, stdout=stdout, stderr=pipe, text=True, cwd=cwd, timeout=120, env=env, check=False)
    return ended(arguments, done.returncode, done.stdout, done.stderr, status)


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: writing meets an error as on a full disk, at a byte of our choice."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def modules_after(statement: str) -> set[str]:
    """What a statement imports, in a Python process of its own."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.splitlines()[-1].split())
