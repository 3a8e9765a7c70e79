"""The command line, and scripts, in a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The fixture `inside`: as `ringattn`, in the process of the test.
Inside = Callable[..., "subprocess.CompletedProcess[str]"]
#: Variables of launchers, which a command of a user does not find.
CLEARED = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")


def ringattn(
    *arguments: str, cwd: Path, script: str = "", site: str = "", timeout: float = 120.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`ringattn ARGUMENTS`, or `python script ARGUMENTS`, in a fork of a process that has imported torch, see conftest.

    The import takes longer than most commands. `started` is for tests of what an import, a variable or a launcher does.
    `site`: a folder of installed packages. `variables`: those of the environment.
    """
    with tempfile.TemporaryDirectory(prefix="ringattn-") as folder:
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_run, args=(script, arguments, cwd, folder, site, variables))
        process.start()
        process.join(timeout)
        process.kill()
        process.join()
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    assert process.exitcode is not None
    return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _run(script: str, arguments: tuple[str, ...], cwd: Path, folder: str, site: str, variables: dict[str, str]) -> None:
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
    runpy.run_path(script, run_name="__main__") if script else main()


def started(
    *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """`ringattn ARGUMENTS` as a user starts it, or by a launcher such as torchrun."""
    command = [sys.executable, *launcher, "-m", "ringattn", *arguments]
    env, pipe = {k: v for k, v in os.environ.items() if k not in CLEARED}, subprocess.PIPE
    return subprocess.run(command, stdout=stdout, stderr=pipe, text=True, cwd=cwd, timeout=120, env=env, check=False)


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
