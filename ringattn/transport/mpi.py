"""A transport over MPI (mpi4py), for tensors in host memory, or in device memory if the MPI library supports it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import CommFailure, InvalidInput, RingAttentionError, Unsupported
from ..text import first_line
from .base import Counters, Message, Post, check_timeout, describe_loss, sort_by_tag
from .comparison import Comparison, read_frames
from .records import RECORDS

INSTALL = "pip install 'ringattn[mpi]'"
#: MPI moves most bytes while it is polled, so the first BUSY polls run without a pause. Between later polls the rank
#: sleeps SLEEP to LONGEST_SLEEP seconds, which frees the core for the rank that it waits for.
BUSY, SLEEP, LONGEST_SLEEP = 200, 2e-5, 1e-3
#: The most messages that an error names.
NAMED = 8
#: Seconds between the message of a failing rank and the abort: at the abort MPICH's mpirun drops output that it has not
#: read yet.
HEARD = 0.5
#: Seconds that a rank gives each lower rank to report Ctrl-C and end the job. A busy rank may wake up late, and a rank
#: that waits inside MPI for an interrupted rank does not see the signal.
PATIENCE = 10.0


def load() -> Any:
    """The module mpi4py.MPI. The first call starts MPI in this process. Raises Unsupported if MPI is missing."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        reason = first_line(error)
        raise Unsupported(f"the MPI transport needs mpi4py and an MPI library ({reason}); try: {INSTALL}") from error


def _drop_names_of_shared_memory() -> None:
    """Unlink MPICH's shared-memory files, which all ranks have mapped: the files would outlive killed ranks."""
    maps = Path("/proc/self/maps")
    for name in set(re.findall(r"/dev/shm/mpich_shm_\S+$", maps.read_text() if maps.exists() else "", re.MULTILINE)):
        Path(name).unlink(missing_ok=True)


class Mpi:
    """A transport over MPI: one rank of a communicator, by default `MPI.COMM_WORLD`. Constructing it is collective.

    Messages travel in a duplicate of `comm`, separate from the program's own messages; call the constructor once.
    `timeout` (seconds) bounds every wait. The default is 30 minutes, as for torch's process groups: a rank that writes
    a checkpoint may be minutes late. `gpu_aware=True` passes CUDA tensors to an MPI library built for CUDA (by
    __cuda_array_interface__; not measured yet); otherwise tensors must be on the CPU. An exception on one rank leaves
    the other ranks waiting in MPI_Finalize: start programs with `mpirun -n 4 python -m mpi4py program.py`, or wrap them
    in `AbortOnError`.
    """

    def __init__(self, comm: Any = None, *, timeout: float = 1800.0, gpu_aware: bool = False) -> None:
        self._mpi = load()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, self._mpi.Intracomm) or comm == self._mpi.COMM_NULL:
            raise InvalidInput(
                f"comm={comm!r} is not an intra-communicator that this process belongs to; pass an intra-communicator, "
                "such as MPI.COMM_WORLD or MPI.COMM_WORLD.Split(color), on its members only"
            )
        check_timeout(timeout)
        self.rank, self.size = int(comm.Get_rank()), int(comm.Get_size())
        self.timeout, self.gpu_aware, self.counters = timeout, gpu_aware, Counters()
        self._comparison, self._record_sends = Comparison(self.rank, self.size, self._send), list[Any]()
        # Requests hold their buffers. Open requests are kept even after an error, so that memory to which MPI may still
        # write is not reused.
        self._open_requests: dict[int, list[Any]] = {}
        self._lost = False
        self._comm, request = comm.Idup()
        self._finish([request], ["the other ranks of the communicator"])
        if self.size == self._mpi.COMM_WORLD.Get_size():
            _drop_names_of_shared_memory()
        self._tags = int(self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB))  # the last tag is for records

    def defers(self, check: str | None) -> bool:
        """False: no thread watches MPI. Raises Unsupported for check="deferred"."""
        if check == "deferred":
            raise Unsupported(
                "check='deferred' needs a process group; over MPI, ranks compare before each call; use check='now'"
            )
        return False

    @property
    def events(self) -> int:
        """The number of exchanges so far, equal on all ranks."""
        return self._comparison.count

    def announce(self, record: bytes) -> int:
        """Raises NotImplementedError: over MPI, calls cannot be compared while their messages travel, see `defers`."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Do nothing: ranks compare every call before its messages."""

    def fail(self, text: str) -> None:
        """Do nothing: over MPI, `AbortOnError` ends the other ranks of a job."""

    def check(self, device: torch.device) -> None:
        """Raise InvalidInput or Unsupported if this transport does not carry tensors of `device`."""
        if device.type == "cpu":
            return
        if device.type != "cuda" or not self.gpu_aware:
            raise InvalidInput(
                f"tensors are on {device}, and MPI carries only host memory; move them to the cpu, use NCCL, or pass "
                "Mpi(gpu_aware=True) for CUDA tensors if the MPI library was built for CUDA"
            )
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise Unsupported(
                "CUDA tensors need MPI with MPI_THREAD_SERIALIZED, as autograd runs their backward on a separate "
                "thread; leave mpi4py.rc.thread_level alone"
            )

    def post(self, post: Post) -> tuple[list[Any], list[str]]:
        """Start the messages of a step; returns (MPI's requests, their names for errors)."""
        self._check_usable()
        # In tag order, the same on both sides of a pair: messages whose tags are equal modulo MPI's largest tag match
        # in the order of their posts.
        order = [("receive from", self._comm.Irecv, m, self._buffer(m, post.label)) for m in sort_by_tag(post.recvs)]
        order += [("send to", self._comm.Isend, m, self._buffer(m, post.label)) for m in sort_by_tag(post.sends)]
        self.counters.add(post)
        requests: list[Any] = []
        names: list[str] = []
        self._open_requests[id(requests)] = requests
        for verb, start, m, buffer in order:
            names.append(f"{post.label}: {verb} rank {m.peer}, {m.data.numel():,} bytes")
            try:
                requests.append(start([buffer, self._mpi.BYTE], m.peer, m.tag % self._tags))
            except self._mpi.Exception as error:
                raise self._failure(names[-1:], str(error)) from error
        return requests, names

    def wait(self, ticket: tuple[list[Any], list[str]]) -> None:
        """Wait for the messages of a ticket. Raises CommFailure after the timeout."""
        self._finish(*ticket)

    def gather(self, record: bytes, stage: str = "exchange") -> list[bytes]:
        """Every rank's record, in rank order. Collective. The messages are the frames of `comparison`."""
        self._check_usable()
        try:
            number = self._comparison.contribute(record, stage.encode())
            while (records := self._comparison.take(number)) is None:
                self._receive(number)
        except self._mpi.Exception as error:
            raise self._failure([RECORDS], str(error)) from error
        sends, self._record_sends = self._record_sends, []
        self._finish(sends, [f"{RECORDS}: send"] * len(sends))
        return records

    def _send(self, peer: int, frame: bytes) -> None:
        self._record_sends.append(self._comm.Isend([frame, self._mpi.BYTE], peer, self._tags))

    def _receive(self, number: int) -> None:
        """Receive one frame, of this exchange or of an earlier one that an exception interrupted on this rank."""
        status = self._mpi.Status()
        message = self._poll(
            lambda: self._comm.Improbe(self._mpi.ANY_SOURCE, self._tags, status),
            lambda: [f"{RECORDS}: receive from rank {self._comparison.next_sender(number)}, or one that it waits for"],
        )
        data = bytearray(status.Get_count(self._mpi.BYTE))
        message.Recv([data, self._mpi.BYTE])
        for kind, of, body in read_frames(data):
            self._comparison.receive(status.Get_source(), kind, of, body)

    def _buffer(self, message: Message, label: str) -> Any:
        """The memory of a message in a form for mpi4py, without a copy."""
        data = message.data
        if data.dtype != torch.uint8 or not data.is_contiguous():
            # mpi4py would take a transposed tensor for a Fortran array and send its elements in another order.
            raise InvalidInput(
                f"{label}: a message is a contiguous uint8 tensor, got {data.dtype} of shape {tuple(data.shape)} with "
                f"strides {data.stride()}; pass x.contiguous().view(torch.uint8)"
            )
        if data.device.type == "cpu":
            return data.numpy()
        self.check(data.device)
        torch.cuda.current_stream(data.device).synchronize()  # MPI ignores CUDA streams
        return data

    def _finish(self, requests: list[Any], names: list[str]) -> None:
        """Wait until all requests are done. After the timeout, raise CommFailure with the `names` of late requests."""
        self._check_usable()
        self._open_requests[id(requests)] = requests
        late = lambda: [name for name, r in zip(names, requests, strict=True) if not r.Test()]  # noqa: E731
        try:
            self._poll(lambda: self._mpi.Request.Testall(requests), late)
        except self._mpi.Exception as error:
            raise self._failure(names, str(error)) from error
        del self._open_requests[id(requests)]

    def _poll(self, ask: Callable[[], Any], late: Callable[[], list[str]]) -> Any:
        """Poll `ask` for its first true answer. Raises CommFailure after the timeout if messages are `late`."""
        deadline, polls = time.monotonic() + self.timeout, 0
        while not (answer := ask()):
            polls += 1
            if polls > BUSY:
                if time.monotonic() > deadline and (names := late()):
                    raise self._failure(names, "timeout")
                time.sleep(min(SLEEP * (polls - BUSY), LONGEST_SLEEP))
        return answer

    def _failure(self, names: list[str], reason: str) -> CommFailure:
        self._lost = True
        names = names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"]
        return CommFailure(describe_loss(self, "; ".join(names), self.timeout, reason.splitlines()[0]))

    def _check_usable(self) -> None:
        """Raise CommFailure if a message was lost."""
        if self._lost:
            raise CommFailure(
                f"rank {self.rank} of {self.size}: an earlier message of this transport was lost, and a later message "
                "could be taken for the lost message; end the job, or make a new Mpi() on all ranks"
            )


class AbortOnError:
    """A context that, if its block raises an exception, prints it and ends all ranks of the job.

    Without it, such a rank would hang in MPI_Finalize at the interpreter's exit, and the ranks that wait for its
    messages would wait forever.
    """

    def __enter__(self) -> AbortOnError:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        world, is_ours = load().COMM_WORLD, isinstance(error, RingAttentionError)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # mpirun sends a second SIGINT
            time.sleep(PATIENCE * world.Get_rank())
            sys.stderr.write("ringattn: interrupted\n")
            sys.stderr.flush()
            time.sleep(HEARD)
            world.Abort(130)
            os._exit(130)  # Abort may return before the job has ended
        if is_ours:
            sys.stderr.write(f"ringattn: rank {world.Get_rank()}: {error}\n")
        if not is_ours or os.environ.get("RINGATTN_TRACEBACK") == "1":
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(HEARD)
        world.Abort(2 if is_ours else 1)
