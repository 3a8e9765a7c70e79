"""The present and peak memory of this process, and the free memory of the system, in bytes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import Unsupported

_MEMINFO = Path("/proc/meminfo")
#: The control groups of this process, and where their files are.
_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: Options of glibc's mallopt, and the size in bytes from which freed blocks return to the system.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE = -1, -3, 1 << 17


def reset_peak() -> bool:
    """Reset the peak of resident memory to the current value; False if the system cannot.

    `peak` then reports the peak since the start of the process.
    """
    if not _CLEAR.exists():
        return False
    _CLEAR.write_text("5")
    return True


def return_freed() -> bool:
    """Make the allocator return freed blocks of 128 KiB or more to the system from now on; False if it cannot.

    This is glibc's initial behaviour, but after large blocks are freed it keeps ever larger ones. A second run would
    then reuse the blocks of the first, and would hardly raise the resident memory.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    libc.malloc_trim(0)  # what was freed before
    return all(libc.mallopt(option, _LARGE) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))


def resident() -> int:
    """Bytes resident now (Linux); elsewhere the peak since the start of the process."""
    now = _read(_STATUS, "VmRSS")
    return peak() if now is None else now


def peak() -> int:
    """The largest number of bytes resident since `reset_peak`, or since the start of the process."""
    most = _read(_STATUS, "VmHWM")
    if most is not None:
        return most
    import resource  # missing on Windows, where callers raise before

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def limits() -> Iterator[tuple[int, int]]:
    """Of each control group above this process that limits memory (a container, a Slurm job): (limit, bytes in use).

    File cache that the system would drop first is not in use.
    """
    for line in _GROUPS.read_text().splitlines() if _GROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, most, used, cache = _MOUNT, "memory.max", "memory.current", "inactive_file "
        elif "memory" in controllers.split(","):
            root, most, used = _MOUNT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file "
        else:
            continue
        parts = path.strip("/").split("/")
        for folder in (root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)):
            if (folder / most).exists() and (limit := (folder / most).read_text().strip()) != "max":
                lines = (folder / "memory.stat").read_text().splitlines()
                dropped = sum(int(line.split()[1]) for line in lines if line.startswith(cache))
                yield int(limit), int((folder / used).read_text()) - dropped


def free() -> int | None:
    """Bytes that this process can get now without swapping; None if the system does not report it."""
    unused = _read(_MEMINFO, "MemAvailable")
    return None if unused is None else max(0, min([unused, *(limit - used for limit, used in limits())]))


def available() -> int:
    """The bytes of memory that this process can still get without swapping; raises Unsupported if unknown."""
    free_bytes = free()
    if free_bytes is None:
        raise Unsupported("this system does not report its free memory (/proc/meminfo); give chunk=, a number of rows")
    return free_bytes


def _read(path: Path, name: str) -> int | None:
    """A field of a /proc file in bytes (the file counts KiB); None if the file or the field does not exist."""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None
