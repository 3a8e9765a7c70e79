"""Peak memory of this process, measured as a peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> bool:
    """Start a new peak from now; False where the system keeps only the peak of the whole life of the process."""
    if not _CLEAR.exists():
        return False
    _CLEAR.write_text("5")
    return True


def resident() -> int:
    """Bytes resident now (Linux), or the peak of the process's life."""
    return _field("VmRSS") if _STATUS.exists() else peak()


def peak() -> int:
    """Largest number of bytes resident since `reset_peak`, or since the start of the process."""
    if _STATUS.exists():
        return _field("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)
