"""Carries the comparison of a process group: TCP connections between ranks, and a thread that watches them."""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Never, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import CommFailure, InvalidInput
from .comparison import GRACE, Comparison, Event, read_frames
from .launcher import interfaces
from .records import RECORDS, add_hosts

T = TypeVar("T")
#: Seconds that a wait for messages continues after a process has ended: its last messages may still arrive.
LAST_WORDS = 0.5
#: Seconds until an idle connection is probed, seconds between probes, and probes: the only sign of a lost host.
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
#: Seconds between two attempts to connect.
RETRY = 0.05
#: Seconds that closing a group waits for a connection, and for a thread.
PARTING = 1.0
#: The most connections whose secret is awaited, and the most that the system keeps until they are accepted.
PENDING, BACKLOG = 64, 4096
#: Bytes of the secret that shows that a rank belongs to the group, and of what a rank sends first: secret and number.
SECRET, HELLO = 16, 20
#: Why a connection fails.
UNREACHED = (
    "its process has ended, GLOO_SOCKET_IFNAME on one of the hosts names no interface that leads to the other, or a "
    "firewall stands between them"
)
#: The channel of each group, which closes when the group is destroyed.
_channels: WeakKeyDictionary[Any, Channel] = WeakKeyDictionary()


def get_channel(group: Any, timeout: float) -> Channel:
    """The channel on which the ranks of a process group compare calls; the first use creates it.

    That first call is collective, and connects each rank to up to 2 log2 P others.
    """
    if group not in _channels:
        channel = Channel(group, timeout)
        _channels[group] = channel
        finalize(group, channel.close)
    return _channels[group]


def find_channel(group: Any) -> Channel | None:
    """The channel of a process group, if it has one."""
    return _channels.get(group)


def synchronize(*_: object) -> None:
    """Wait until all this rank's deferred calls, in all groups, are known to match on all ranks, or raise."""
    for channel in [*_channels.values()]:
        if not channel.has_raised:
            channel.synchronize()


@cache
def _synchronize_before_steps() -> None:
    """Let every optimizer of torch call `synchronize` before each step, from now on."""
    register_optimizer_step_pre_hook(synchronize)


def _forget() -> None:
    """After a fork: close the inherited sockets, so that peers notice when the real rank ends."""
    for channel in _channels.values():
        channel.is_closed = True
        channel.drop()
    _channels.clear()


os.register_at_fork(after_in_child=_forget)


class Channel:
    """One rank's connections to the other ranks of a group, over which ranks compare their calls and exchange records.

    See `comparison`. A thread calls `on_error` when an error becomes known. Errors of other ranks are raised by this
    rank's next call of `announce`, `gather` or `guard`.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = dist.get_rank(group), dist.get_world_size(group), timeout
        self.comparison = Comparison(self.rank, self.size, self._send)
        self.comparison.hosts[self.rank] = socket.gethostname()
        self.on_error: Callable[[], None] = lambda: None
        #: The CUDA device for which NCCL has connected the ranks.
        self.device: torch.device | None = None
        #: Whether an error has been raised on this rank.
        self.has_raised = False
        self._changed = threading.Condition()
        self._waiting = dict.fromkeys(self.comparison.peers, b"")
        #: Peers whose connection accepts no more bytes for now.
        self._blocked: set[int] = set()
        self._incoming = {peer: bytearray() for peer in self.comparison.peers}
        self._sockets = self._connect(PrefixStore("ringattn/channel", group.get_group_store()), timeout)
        self._wake, self._woken = socket.socketpair()
        self._jobs: SimpleQueue[_Job[Any] | None] | None = None
        self.is_closed = False
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    # Events.

    def announce(self, fingerprint: bytes, record: bytes) -> int:
        """Begin a call that is compared while its messages travel; returns its number.

        Raises the error of another rank, if one is known.
        """
        _synchronize_before_steps()
        with self._changed:
            self._raise()
            return self.comparison.announce(Event(fingerprint, record))

    def synchronize(self) -> None:
        """Wait until this rank's deferred calls are known to match on all ranks, or raise their error. Collective.

        Such calls are compared while their messages travel.
        """
        if self.comparison.confirmed < self.comparison.count:
            self.gather(b"", b'{"stage": "synchronize"}', self.timeout)

    def gather(self, record: bytes, label: bytes, timeout: float) -> list[bytes]:
        """The records of all ranks, in rank order. Also completes all earlier deferred comparisons. Collective."""
        with self._changed:
            self._raise()
            number = self.comparison.contribute(record, label)
            records = self._wait(lambda: self.comparison.take(number), timeout)
            if records is None:
                self._part(number, f"{RECORDS}: not done within {timeout:g} s")
            return records

    def guard(self, wait: Callable[[], T]) -> T:
        """Call `wait()`, which blocks, and return its result; if another rank reports an error meanwhile, raise it."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            self._start(self._work)
        job = _Job(wait)
        self._jobs.put(job)
        with self._changed:
            self._wait(lambda: job.done or None, None)
        if isinstance(job.error, CommFailure):
            self.blame(job.error)
        if job.error is not None:
            raise job.error
        return job.result

    def blame(self, error: CommFailure) -> Never:
        """Raise what the ranks report about a message that failed: the peer that it names may itself have waited."""
        with self._changed:
            self._part(self.comparison.count - 1, str(error))

    def _part(self, number: int, why: str) -> Never:
        """Raise an error that shows where all ranks stand, as event `number` does not end: `why` names what is late."""
        self.comparison.part(number, why)
        self._rouse()
        self._wait(lambda: None, 2 * GRACE)
        raise CommFailure(why)

    def fail(self, text: str) -> None:
        """Report to all ranks an exception of this rank, which ends their calls, too."""
        self.has_raised = True
        with self._changed:
            self.comparison.fail(text)

    def _raise(self) -> None:
        error = self.comparison.error
        if error is not None:
            self.has_raised = True
            raise type(error)(*error.args)
        if self.is_closed:
            raise CommFailure("the process group of this call was destroyed; make a new group")

    def _wait(self, answer: Callable[[], T | None], timeout: float | None) -> T | None:
        """Wait until `answer` is not None, and return it; None after the timeout. Raises errors of other ranks."""
        end = None if timeout is None else time.monotonic() + timeout
        mercy: float | None = None
        while (found := answer()) is None:
            now = time.monotonic()
            if self.comparison.error is not None:
                mercy = now + LAST_WORDS * self.comparison.is_loss if mercy is None else mercy
                if now >= mercy:
                    self._raise()
            ends = [x for x in (end, mercy) if x is not None]
            if end is not None and now >= end:
                return None
            self._changed.wait(min(ends) - now if ends else None)
        return found

    # Connections.

    def _connect(self, store: Store, timeout: float) -> dict[int, socket.socket]:
        """Connect to each peer: {peer: socket}. Raises CommFailure that names a missing peer."""
        end = time.monotonic() + timeout
        host, family = _own_address(store)
        secret = secrets.token_bytes(SECRET)
        found: dict[int, socket.socket] = {}
        with socket.create_server((host, 0), family=family, backlog=BACKLOG) as server:
            port = server.getsockname()[1]
            store.set(str(self.rank), f"{host} {port} {secret.hex()} {self.comparison.hosts[self.rank]}")
            for peer in (x for x in reversed(self.comparison.peers) if x > self.rank):
                found[peer] = self._call(store, peer, end)
            self._admit(server, secret, store, found, end)
            if missing := {*self.comparison.peers} - {*found}:
                why = f"it has not connected to {host}:{port} in time; {UNREACHED}"
                raise self._missing(min(missing), why)
        for connection in found.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return found

    def _admit(
        self, server: socket.socket, secret: bytes, store: Store, found: dict[int, socket.socket], end: float
    ) -> None:
        """Add to `found` the peers that connect and show the secret, until all have or the time is `end`.

        Connections are read side by side, so that strangers delay nobody. Of more than PENDING, the oldest is closed: a
        rank that is closed connects again.
        """
        hellos: dict[socket.socket, bytes] = {}
        server.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while {*self.comparison.peers} - {*found} and (seconds := end - time.monotonic()) > 0:
                for key, _ in selector.select(seconds):
                    with suppress(BlockingIOError, ConnectionError):  # it has gone already
                        if key.data is not None:
                            hellos[key.data] += key.data.recv(HELLO - len(hellos[key.data])) or bytes(HELLO)
                            continue
                        connection, _ = server.accept()
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ, connection)
                        if len(hellos) == PENDING:
                            hellos[next(iter(hellos))] = bytes(HELLO)
                        hellos[connection] = b""
                for connection in [x for x, hello in hellos.items() if len(hello) >= HELLO]:
                    selector.unregister(connection)
                    hello = hellos.pop(connection)
                    if secrets.compare_digest(hello[:-4], secret):
                        rank = int.from_bytes(hello[SECRET:], "little")
                        self.comparison.hosts[rank] = store.get(str(rank)).decode().split(" ")[3]
                        with suppress(ConnectionError):  # it connects again
                            connection.sendall(b"+")
                            found[rank] = connection
                    else:
                        connection.close()
        for connection in hellos:
            connection.close()

    def _call(self, store: Store, peer: int, end: float) -> socket.socket:
        """Connect to the server of a peer. Tries again, as the store may still have the address of an older group."""
        why = (
            "it has made no call on this group in time: its process has ended or is late, or another group= was given "
            "there; until the first call of a group, only the timeout shows this"
        )
        while (seconds := end - time.monotonic()) > 0:
            try:
                store.wait([str(peer)], timedelta(seconds=seconds))
            except RuntimeError:  # the store's timeout
                break
            host, port, secret, self.comparison.hosts[peer] = store.get(str(peer)).decode().split(" ")
            try:
                connection = socket.create_connection((host, int(port)), timeout=seconds)
                connection.sendall(bytes.fromhex(secret) + self.rank.to_bytes(4, "little"))
                if connection.recv(1):
                    return connection
                connection.close()
            except OSError as error:
                why = f"no connection to {host}:{port} ({error}); {UNREACHED}"
            time.sleep(RETRY)
        raise self._missing(peer, why)

    def _missing(self, peer: int, why: str) -> CommFailure:
        text = f"rank {self.rank} of {self.size}: {RECORDS}: rank {peer}: {why}"
        return CommFailure(add_hosts(text, self.comparison.hosts))

    def _send(self, peer: int, frame: bytes) -> None:
        """Send as much as the connection accepts now; the thread sends the rest."""
        self._waiting[peer] += frame
        if peer not in self._blocked:
            self._flush(peer)
            if self._waiting[peer]:
                self._blocked.add(peer)
                self._rouse()

    def _flush(self, peer: int) -> None:
        try:
            sent = self._sockets[peer].send(self._waiting[peer])
        except BlockingIOError:
            return
        except OSError:  # the peer is gone, which the thread detects by itself
            sent = len(self._waiting[peer])
        self._waiting[peer] = self._waiting[peer][sent:]

    def _rouse(self) -> None:
        """Wake the thread, which checks what to send and what to wait for."""
        self._wake.send(b".")

    def _serve(self, peer: int, events: int, selector: selectors.BaseSelector) -> None:
        """Send pending bytes to a peer, and read what it has sent."""
        connection = self._sockets[peer]
        if events & selectors.EVENT_WRITE:
            self._flush(peer)
            if not self._waiting[peer]:
                self._blocked.discard(peer)
        key = selector.get_map().get(connection)
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer in self._blocked else 0)
        if key is not None and key.events != wants:
            selector.modify(connection, wants, peer)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            selector.unregister(connection)
            self.comparison.lose(peer)
        self._incoming[peer] += data
        for kind, number, body in read_frames(self._incoming[peer]):
            self.comparison.receive(peer, kind, number, body)

    def _watch(self) -> None:
        """The main loop of the channel's thread, until the channel is closed."""
        told = False
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self.is_closed:
                deadline = self.comparison.deadline
                ready = selector.select(None if deadline is None else max(deadline - time.monotonic(), 0.0))
                with self._changed:
                    for key, events in ready:
                        if key.data is None:
                            self._woken.recv(1 << 12)
                        else:
                            self._serve(key.data, events, selector)
                    for peer in self._blocked:
                        self._serve(peer, 0, selector)
                    self.comparison.tick()
                    if self.comparison.has_news:
                        self.comparison.has_news = False
                        self._changed.notify_all()
                    failed = self.comparison.error is not None
                if failed and not told:
                    told = True
                    self.on_error()
        with self._changed:
            self.drop()

    def _work(self) -> None:
        """The main loop of the thread that waits for messages."""
        assert self._jobs is not None
        while (job := self._jobs.get()) is not None:
            job.run()
            with self._changed:
                self._changed.notify_all()

    def _start(self, work: Callable[[], None]) -> None:
        """Start a daemon thread."""
        self._threads.append(threading.Thread(target=work, name=f"ringattn{work.__name__}", daemon=True))
        self._threads[-1].start()

    def close(self) -> None:
        """Tell the peers that this rank ends, and close the connections."""
        if self.is_closed:
            return
        with self._changed:
            self.is_closed = True
            self.comparison.end()
            end = time.monotonic() + PARTING
            while any(self._waiting.values()) and time.monotonic() < end:
                for peer, waiting in self._waiting.items():
                    if waiting:
                        self._flush(peer)
                time.sleep(0.001)
            self._changed.notify_all()
            self._rouse()
        if self._jobs is not None:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PARTING)

    def drop(self) -> None:
        """Close the connections without telling the peers."""
        for connection in (*self._sockets.values(), self._wake, self._woken):
            connection.close()


class _Job(Generic[T]):
    """A call for another thread to make, and its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call, self.done = call, False
        self.result: T
        self.error: RuntimeError | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except RuntimeError as error:
            self.error = error
        finally:
            del self.call  # and the messages that it waits for: the thread holds its last job until the next one
            self.done = True


def _own_address(store: Store) -> tuple[str, socket.AddressFamily]:
    """(host, family) at which other ranks reach this process: GLOO_SOCKET_IFNAME's, or the interface to the store."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name and sys.platform == "linux":
        return _interface_address(name)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None) or socket.gethostname()  # a FileStore or HashStore has no host
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0], family
    except OSError:
        return "127.0.0.1", socket.AF_INET


def _interface_address(name: str) -> tuple[str, socket.AddressFamily]:
    """The IPv4 address of a network interface, or else its global IPv6 address. Linux only."""
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        raw = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
        return socket.inet_ntoa(raw[20:24]), socket.AF_INET
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, scope, _, interface = line.split()
        if (interface, scope) == (name, "00"):
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), socket.AF_INET6
    raise InvalidInput(
        f"GLOO_SOCKET_IFNAME={name}: this host has no such network interface with an address; it has {interfaces()}"
    )
