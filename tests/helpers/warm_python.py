"""Processes of tests as forks of one that has imported torch: the import takes longer than most tests.

`executable()` gives a program that does what `python` does. It suits every test of what a process does, and no test of
how Python starts, of limits that a process inherits, or of variables that Python or torch read at their start.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.spawn
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any

#: What the server imports before it forks: nothing that starts a thread, or reads a setting that tests change.
IMPORTED = (
    "torch.distributed.run", "torch.distributed.device_mesh", "hydra", "pytest", "ringattn.nn", "ringattn.cli.main",
    "ringattn.cli.run", "ringattn.cli.calibrate", "torch._dynamo",  # which optimizers import at their first step
)  # fmt: skip
#: What ends the server and removes its files.
ENDS = ExitStack()
#: Above all descriptors that a process of tests has at its start.
HIGH = 200


@cache
def executable() -> str:
    """The path of a program that does what `python` does. Its server ends with this process, or with `ENDS.close()`.

    Python itself where the system has no handles of processes: tests are slower there, and prove the same.
    """
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = ENDS.enter_context(tempfile.TemporaryDirectory(prefix="ringattn-"))
    address, program = Path(folder, "server"), Path(folder, "python")
    client = [sys.executable, "-SE", str(Path(__file__).with_name("warm_client.py")), str(address)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    program.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    command = [sys.executable, __file__, str(listener.fileno()), str(program)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    # At its exit the server's standard input is closed, which ends it.
    ENDS.enter_context(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, pass_fds=[listener.fileno()]
        )
    )
    listener.close()
    return str(program)


def get_context(method: str) -> BaseContext:
    """multiprocessing.get_context, for processes that are such forks."""
    resource_tracker.ensure_running()  # which is no such fork
    multiprocessing.spawn.set_executable(executable())
    return multiprocessing.get_context(method)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each client until standard input ends. In a fork: the job of its client; in the server at its end: None.

    The server kills a fork whose client has ended, and tells a client how its fork ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for clients
    forks: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    while True:
        clients = {client: process for process, client in forks.values()}
        ready, _, _ = select.select([listener, sys.stdin, *forks, *clients], [], [])
        for handle in set(ready) & set(forks):
            process, client = forks.pop(handle)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            with suppress(BrokenPipeError), client:
                client.sendall(status.to_bytes(4, "little", signed=True))
            os.close(handle)
        for client in set(ready) & set(clients):
            if client.fileno() >= 0:  # a client says nothing more: it has ended
                os.kill(clients[client], signal.SIGKILL)
        if sys.stdin in ready:
            for process, _ in forks.values():
                os.kill(process, signal.SIGKILL)
            return None
        if listener in ready:
            client, _ = listener.accept()
            length, files, _, _ = socket.recv_fds(client, 4, 64)
            with client.makefile("rb") as stream:
                text = stream.read(int.from_bytes(length, "little"))
            if not text.endswith(b"}"):  # the client has been killed
                client.close()
                continue
            job: dict[str, Any] = json.loads(text)
            if not (process := os.fork()):
                for other in (listener, client, *clients):
                    other.close()  # here, as their numbers are given to other files
                _take(files, job)
                return job
            for number in files:
                os.close(number)
            with suppress(BrokenPipeError):
                client.sendall(process.to_bytes(4, "little"))
            forks[os.pidfd_open(process)] = process, client


def _take(files: list[int], job: dict[str, Any]) -> None:
    """Give this process the descriptors, the folder, the environment and the signals of the client's process."""
    high = [os.dup2(number, HIGH + place) for place, number in enumerate(files)]
    os.closerange(0, HIGH)
    for number, there in zip(high, job["files"], strict=True):
        os.dup2(number, there)
        os.close(number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in job["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, job["blocked"])


def run(job: dict[str, Any], program: str) -> None:
    """What `python` does with the arguments of the job."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:  # which torch has read before
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    os.getppid = lambda: int(job["parent"])  # that of the client, which ranks compare
    os.environ["PYTHON_EXEC"] = program  # for ranks of torchrun
    multiprocessing.spawn.set_executable(program)
    arguments = list(job["argv"])
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)
    kind = arguments[0]
    sys.argv = arguments[1:] if kind == "-m" else arguments
    first = os.path.dirname(os.path.abspath(kind)) if kind not in ("-m", "-c") else os.getcwd()
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys([first, *named, *sys.path[1:]])
    if kind == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code = sys.argv.pop(1)
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
    else:
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    for name in IMPORTED:
        __import__(name)
    gc.freeze()  # a fork neither looks at what it shares with the others nor copies it
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    if job is not None:
        run(job, sys.argv[2])


if __name__ == "__main__":
    main()
