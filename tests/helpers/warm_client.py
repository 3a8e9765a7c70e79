"""`python -SE warm_client.py ADDRESS ARGUMENTS`: as `python ARGUMENTS`, by a fork of the server in warm_python.py.

This process stands for the fork: signals go on to the fork, the fork ends with this process, and this process ends as
the fork does. Without torch and without site-packages it starts in a few milliseconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        job = {
            "argv": sys.argv[2:],
            "cwd": os.getcwd(),
            "env": dict(os.environ),
            "files": files,
            "parent": os.getppid(),
            "blocked": list(before),
            "ignored": ignored,
        }
        text = json.dumps(job).encode()
        socket.send_fds(server, [len(text).to_bytes(4, "little")], files)
        server.sendall(text)
        process = _receive(server)
        for number in set(FORWARDED) - set(ignored):
            signal.signal(number, lambda number, frame: os.kill(process, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = _receive(server)
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


def _receive(server: socket.socket) -> int:
    number = server.recv(4)
    if not number:
        raise SystemExit("the server of warm_python.py has ended")
    return int.from_bytes(number, "little", signed=True)


def _is_open(number: int) -> bool:
    """False for the descriptor with which the folder of descriptors was read."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
