"""The command line in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from warm_python import executable

#: The fixture `inside`: as `ringattn`, in the process of the test.
Inside = Callable[..., "subprocess.CompletedProcess[str]"]


def ringattn(
    *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """`cold`: with all that a process of a user does at its start."""
    command = [sys.executable if cold else executable(), *launcher, "-m", "ringattn", *arguments]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, env=env, check=False)
