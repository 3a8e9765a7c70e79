"""Two nodes on one machine, for tests and benchmarks: network namespaces joined by a link of a given rate.

Where the system does not let us make them, the links are modelled instead (`links.Delayed`), and `fabric` says so.
The namespaces have no names: each lives as long as a process in it, all of which die with the process that started
them, and takes its devices with it. So nothing is left behind, however that process ends.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import InvalidInput, LaunchFailure
from ...transport.launcher import run_local, tail, terminable
from ...transport.torchdist import TorchDist
from .links import Board, Delayed, Links

TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
#: Run a command that dies with this process, whatever kills it.
MORTAL = ("setpriv", "--pdeathsig", "KILL")
DEVICE = "link0"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
#: Bytes that may pass a shaped link at once, and that may queue for it; the latter so many that nothing is dropped.
BURST, QUEUE = 72 << 10, 256 << 20
#: net.ipv4.tcp_rmem: little is under way per connection, so that the few bytes by which Gloo asks for a message do not
#: wait behind those of others in our queue, which real switches do not have.
RECEIVE = "4096 65536 131072"
#: Seconds that a command which sets up a namespace may take, and others get to end after one node has failed.
PATIENCE, GRACE = 20.0, 3.0


def fabric() -> str:
    """What `run_nodes` gives, for the record: real namespaces, or a model and why."""
    found = obstacle()
    if found is None:
        return "two network namespaces on this machine, joined by veth, with links shaped by tc tbf"
    return f"MODELLED links, as shaped network namespaces are impossible here ({found}): messages are held back"


@lru_cache(maxsize=1)
def obstacle() -> str | None:
    """Why there can be no shaped namespaces here, or None; found by making some."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    try:
        with namespaces(Links(2, 1, 1e8, 1e9)):
            return None
    except LaunchFailure as error:
        return str(error)


@contextmanager
def namespaces(links: Links) -> Iterator[list[list[str]]]:
    """Two namespaces joined by the outer link; gives the command prefix that runs something in each."""
    if links.nodes != 2:
        raise InvalidInput(
            f"nodes={links.nodes}: a pair of devices joins two nodes; try nodes=2, or the modelled links"
        )
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in ADDRESSES:
            holders.append(_start([*MORTAL, "unshare", "--net", "sleep", "infinity"], subprocess.PIPE))
        for holder in holders:
            _await_namespace(holder)
        inside = [["nsenter", "--target", str(holder.pid), "--net"] for holder in holders]
        other = str(holders[1].pid)
        _do([*inside[0], "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", other])
        for prefix, address in zip(inside, ADDRESSES, strict=True):
            _do([*prefix, "ip", "address", "add", f"{address}/24", "dev", DEVICE])
            _do([*prefix, "sh", "-c", f"echo {RECEIVE} > /proc/sys/net/ipv4/tcp_rmem"])
            # Ranks of a node talk over its loopback: one queue for all, as fast as their own links together.
            for device, rate in ((DEVICE, links.outer), ("lo", links.fast * links.inner)):
                _do([*prefix, "ip", "link", "set", device, "up"])
                shape = ("rate", f"{round(rate * 8)}bit", "burst", str(BURST), "limit", str(QUEUE))
                _do([*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape])
        yield inside
    finally:
        _end(holders)


def run_nodes(
    fn: Callable[..., Any], links: Links, *args: Any, timeout: float = 120.0, threads: int | None = 1,
    group_timeout: float | None = None, modelled: bool | None = None,
) -> list[Any]:  # fmt: skip
    """fn(rank, transport, *args) on `links.ranks` new Gloo ranks behind these links; return values in rank order.

    The ranks of real nodes are started by torchrun, one per node; `modelled` asks for one kind of links by name,
    None for real ones where they are possible. `fn` is a function of an importable module. `timeout` (seconds)
    bounds the whole run, `group_timeout` (default: the same) every message in it. Raises LaunchFailure with what the
    ranks said; no process and no namespace is left behind.
    """
    if modelled if modelled is not None else obstacle() is not None:
        with tempfile.TemporaryDirectory(prefix="ringattn-") as scratch:
            rest = (fn, links, str(Path(scratch, "board")), group_timeout or timeout, args)
            return run_local(
                _modelled, links.ranks, *rest, timeout=timeout, group_timeout=group_timeout, threads=threads
            )
    with terminable(), tempfile.TemporaryDirectory(prefix="ringattn-") as scratch, namespaces(links) as inside:
        folder = Path(scratch)
        (folder / "work").write_bytes(pickle.dumps((group_timeout or timeout, threads, pickle.dumps((fn, args)))))
        # Nobody else is in the namespace, so the port stays free until torchrun takes it.
        find = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
        port = _do([*inside[0], sys.executable, "-c", find]).strip()
        env = {"TMPDIR": scratch, "GLOO_SOCKET_IFNAME": DEVICE}  # torchrun does not clean up after itself
        env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        nodes: list[subprocess.Popen[bytes]] = []
        logs = [folder / f"node_{node}.log" for node in range(links.nodes)]
        try:
            for node, prefix in enumerate(inside):
                with logs[node].open("wb") as log:
                    nodes.append(_start([*MORTAL, *prefix, *_torchrun(node, links, port, folder)], log, env))
            _watch(nodes, logs, timeout)
        finally:
            _end(nodes)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(links.ranks)]


def _modelled(
    rank: int, fn: Callable[..., Any], links: Links, board: str, timeout: float, args: tuple[Any, ...]
) -> Any:
    return fn(rank, Delayed(TorchDist(timeout=timeout), Board(Path(board), links)), *args)


def _torchrun(node: int, links: Links, port: str, folder: Path) -> list[str]:
    place = ["--nnodes", str(links.nodes), "--node-rank", str(node), "--nproc-per-node", str(links.inner)]
    head = ["--master-addr", ADDRESSES[0], "--master-port", port, "--local-addr", ADDRESSES[node]]
    rank = ["--no-python", *MORTAL, sys.executable, "-m", "ringattn.experiments.bench.node", str(folder)]
    return [sys.executable, "-m", "torch.distributed.run", *place, *head, *rank]


def _start(command: list[str], output: Any, more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """In a session of its own: a Ctrl-C is for us, who then end it."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(more or {})}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=env
    )


def _await_namespace(holder: subprocess.Popen[bytes]) -> None:
    """Return when the process has left our namespace for its own."""
    ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + PATIENCE
    while holder.poll() is None:
        try:
            if os.readlink(f"/proc/{holder.pid}/ns/net") != ours:
                return
        except OSError:
            continue  # it ends at this moment; poll() will tell
        if time.monotonic() > deadline:
            raise LaunchFailure(f"no network namespace within {PATIENCE:g} s")
        time.sleep(0.005)
    assert holder.stdout is not None
    said = holder.stdout.read().decode(errors="replace").strip()
    raise LaunchFailure(f"unshare --net: {said or f'status {holder.returncode}'}")


def _do(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise LaunchFailure(f"{' '.join(command)}: not done within {PATIENCE:g} s") from None
    if done.returncode:
        words = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
        raise LaunchFailure(f"{' '.join(command[command.index('--net') + 1 :][:6])} ..: {words}")
    return done.stdout


def _watch(nodes: list[subprocess.Popen[bytes]], logs: list[Path], timeout: float) -> None:
    """Return when all nodes have ended well; raise when one has failed, or the time is over."""
    deadline = time.monotonic() + timeout
    failed: list[int] = []
    while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
        bad = [i for i, node in enumerate(nodes) if node.poll()]
        if bad and not failed:
            failed, deadline = bad, min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    failed = failed or [i for i, node in enumerate(nodes) if node.poll()]
    if failed:
        raise LaunchFailure(f"node {failed[0]} of {len(nodes)} exited with status {nodes[failed[0]].returncode}"
                            f"{tail(logs[failed[0]])}")  # fmt: skip
    late = [f"node {i} still ran{tail(logs[i])}" for i, node in enumerate(nodes) if node.poll() is None]
    if late:
        raise LaunchFailure(f"the nodes did not end within {timeout:g} s: " + "\n".join(late))


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill what still runs; the ranks of a node die with it."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
