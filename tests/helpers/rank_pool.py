"""Ranks that stay from test to test, as a process that imports torch starts slowly, and what calls of ranks raise."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ringattn.errors import LaunchFailure, RingAttentionError
from ringattn.transport.launcher import run_local

T = TypeVar("T")


def serve(rank: int, address: str) -> None:
    """Run what comes. What raises ends this rank, and so all of them, with its traceback."""
    with Client(address) as pipe:
        pipe.send((rank, os.getpid()))
        while True:
            fn, args = pickle.loads(pipe.recv())
            torch.manual_seed(0)  # as in new processes, which all begin alike
            pipe.send(fn(rank, *args))


def told_by(call: Callable[[], Any]) -> str:
    """What a call raised, or "fine"."""
    try:
        call()
    except (RingAttentionError, MemoryError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def has_imported(rank: int, name: str) -> bool:
    return name in sys.modules


def of_first(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, on all ranks: the numbers of one process are computed once, not on every rank."""
    held: list[Any] = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return cast("T", held[0])


def wait_for_files(folder: str, count: int) -> None:
    """Wait until a folder has so many files."""
    while len(os.listdir(folder)) < count:
        time.sleep(0.02)


class Pool:
    """`size` Gloo ranks with one thread each."""

    def __init__(self, size: int) -> None:
        self.failure: LaunchFailure | None = None
        self.pipes: dict[int, Connection] = {}
        self.processes: list[int] = []
        with Listener(family="AF_UNIX", backlog=size) as server:
            # In a thread that lives as long as they do: ranks die with what started them.
            self.thread = Thread(target=self._start, args=(size, server.address), daemon=True)
            self.thread.start()
            for _ in range(size):
                pipe = server.accept()
                rank, process = pipe.recv()
                self.pipes[rank] = pipe
                self.processes.append(process)

    def _start(self, size: int, address: str) -> None:
        try:
            run_local(serve, size, address, timeout=math.inf, group_timeout=60.0, threads=1)
        except LaunchFailure as error:
            self.failure = error

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """fn(rank, *args) on every rank. After an error, which is that of `run_local`, the pool has ended."""
        for pipe in self.pipes.values():
            pipe.send(pickle.dumps((fn, args)))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in self.pipes.items() if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise LaunchFailure(
                    f"{fn.__name__} did not end within {timeout:g} s on ranks {sorted(waiting.values())}"
                )
            for pipe in ready:
                try:
                    results[waiting[pipe]] = pipe.recv()  # type: ignore[index, union-attr]
                except (EOFError, ConnectionResetError):
                    self.thread.join()
                    assert self.failure is not None
                    raise self.failure from None
        return [results[rank] for rank in sorted(results)]

    def kill(self) -> None:
        """End the ranks, where they have not ended, without their destructions of groups, which take seconds."""
        for process in self.processes if self.thread.is_alive() else ():
            os.kill(process, signal.SIGKILL)
        self.thread.join()
        for pipe in self.pipes.values():
            pipe.close()
