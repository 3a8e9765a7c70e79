"""Ranks on two nodes of one machine, for tests and benchmarks: behind real shaped links, or modelled links.

Both kinds of links stay, as each is needed. The measurements of suites "schedules" and "auto" rest on the real links,
network namespaces joined by a device that `tc` slows down: TCP, Gloo's own messages and the processor time of the
network code are in their times, and no model of ours. Making namespaces takes root and Linux tools, which a container
or a laptop often lacks; there `links.DelayedTransport` keeps the suites and their tests running, and `describe_network`
says so in the record.

A namespace has no name: it lives as long as a process in it. All of these processes die with the process that started
them, so nothing is left behind, however that process ends.
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
from .links import DelayedTransport, Links, MessageBoard

TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
#: Runs a command that dies with this process, whatever kills this process.
MORTAL = ("setpriv", "--pdeathsig", "KILL")
DEVICE = "link0"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
#: Bytes that may pass a shaped link at once, and bytes that may queue for it: enough that nothing is dropped.
BURST, QUEUE = 72 << 10, 256 << 20
#: net.ipv4.tcp_rmem. A small receive window keeps few bytes in flight per connection: the short messages by which Gloo
#: asks for data would otherwise wait in our queue behind the data of other connections, which real switches do not do.
RECEIVE_WINDOW = "4096 65536 131072"
#: Most seconds of a command that sets up a namespace, and seconds that the other node may take after one has failed.
SETUP_TIMEOUT, GRACE = 20.0, 3.0
#: Threads of a rank: the ranks of a benchmark share the machine's cores.
THREADS = 1


def describe_network() -> str:
    """The kind of links that `run_nodes` uses here, for the record: real namespaces, or a model and the reason."""
    obstacle = find_obstacle()
    if obstacle is None:
        return "two network namespaces on this machine, joined by veth, with links shaped by tc tbf"
    return f"MODELLED links, as shaped network namespaces are impossible here ({obstacle}): messages are held back"


@lru_cache(maxsize=1)
def find_obstacle() -> str | None:
    """Why shaped namespaces are impossible here, or None; found by making two namespaces."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    try:
        with make_namespaces(Links(2, 1, 1e8, 1e9)):
            return None
    except LaunchFailure as error:
        return str(error)


@contextmanager
def make_namespaces(links: Links) -> Iterator[list[list[str]]]:
    """Two namespaces joined by a shaped link; gives, for each, the command prefix that runs a program inside."""
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
        prefixes = [["nsenter", "--target", str(holder.pid), "--net"] for holder in holders]
        other = str(holders[1].pid)
        _run([*prefixes[0], "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", other])
        for prefix, address in zip(prefixes, ADDRESSES, strict=True):
            _run([*prefix, "ip", "address", "add", f"{address}/24", "dev", DEVICE])
            _run([*prefix, "sh", "-c", f"echo {RECEIVE_WINDOW} > /proc/sys/net/ipv4/tcp_rmem"])
            # The ranks of a node share its loopback device: one queue with the rate of all their links together.
            for device, rate in ((DEVICE, links.bandwidth), ("lo", links.node_bandwidth * links.ranks_per_node)):
                _run([*prefix, "ip", "link", "set", device, "up"])
                shape = ("rate", f"{round(rate * 8)}bit", "burst", str(BURST), "limit", str(QUEUE))
                _run([*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape])
        yield prefixes
    finally:
        _kill(holders)


def run_nodes(
    function: Callable[..., Any], links: Links, *args: Any, timeout: float = 120.0, modelled: bool | None = None
) -> list[Any]:
    """Return values of function(rank, transport, *args) on `links.ranks` new Gloo ranks behind links, in rank order.

    `modelled` chooses the kind of links; None takes real links where they are possible. Ranks behind real links are
    started by torchrun, one torchrun per node. `function` belongs to an importable module. `timeout` (seconds) bounds
    the whole run and every message. Raises LaunchFailure with the last output of the ranks; no process and no namespace
    is left behind.
    """
    if modelled if modelled is not None else find_obstacle() is not None:
        with tempfile.TemporaryDirectory(prefix="ringattn-") as scratch:
            board = str(Path(scratch, "board"))
            return run_local(
                _run_behind_model, links.ranks, function, links, board, timeout, args, timeout=timeout, threads=THREADS
            )
    with (
        terminable(),
        tempfile.TemporaryDirectory(prefix="ringattn-") as scratch,
        make_namespaces(links) as prefixes,
    ):
        folder = Path(scratch)
        (folder / "work").write_bytes(pickle.dumps((timeout, THREADS, pickle.dumps((function, args)))))
        # No other process is in the namespace, so the port is still free when torchrun takes it.
        find_port = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
        port = _run([*prefixes[0], sys.executable, "-c", find_port]).strip()
        # torchrun leaves files in TMPDIR.
        env = {"TMPDIR": scratch, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": str(THREADS)}
        nodes: list[subprocess.Popen[bytes]] = []
        logs = [folder / f"node_{node}.log" for node in range(links.nodes)]
        try:
            for node, prefix in enumerate(prefixes):
                with logs[node].open("wb") as log:
                    nodes.append(_start([*MORTAL, *prefix, *_torchrun(node, links, port, folder)], log, env))
            _wait_for_nodes(nodes, logs, timeout)
        finally:
            _kill(nodes)
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(links.ranks)]


def _run_behind_model(
    rank: int, function: Callable[..., Any], links: Links, board: str, timeout: float, args: tuple[Any, ...]
) -> Any:
    return function(rank, DelayedTransport(TorchDist(timeout=timeout), MessageBoard(Path(board), links)), *args)


def _torchrun(node: int, links: Links, port: str, folder: Path) -> list[str]:
    """The command that starts the ranks of a node."""
    place = ["--nnodes", str(links.nodes), "--node-rank", str(node), "--nproc-per-node", str(links.ranks_per_node)]
    store = ["--master-addr", ADDRESSES[0], "--master-port", port, "--local-addr", ADDRESSES[node]]
    rank = ["--no-python", *MORTAL, sys.executable, "-m", "ringattn.experiments.bench.node", str(folder)]
    return [sys.executable, "-m", "torch.distributed.run", *place, *store, *rank]


def _start(command: list[str], output: Any, more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: Ctrl-C reaches this process only, which then ends the started one."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(more or {})}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=env
    )


def _await_namespace(holder: subprocess.Popen[bytes]) -> None:
    """Return when the process has left our namespace for its own. Raises LaunchFailure where it does not."""
    ours, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + SETUP_TIMEOUT
    while holder.poll() is None:
        try:
            if os.readlink(f"/proc/{holder.pid}/ns/net") != ours:
                return
        except OSError:
            continue  # the process is ending; poll() tells when it has ended
        if time.monotonic() > deadline:
            raise LaunchFailure(f"no network namespace within {SETUP_TIMEOUT:g} s")
        time.sleep(0.005)
    assert holder.stdout is not None
    output = holder.stdout.read().decode(errors="replace").strip()
    raise LaunchFailure(f"unshare --net: {output or f'status {holder.returncode}'}")


def _run(command: list[str]) -> str:
    """The output of a command. Raises LaunchFailure where the command fails or takes longer than SETUP_TIMEOUT."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SETUP_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise LaunchFailure(f"{' '.join(command)}: not done within {SETUP_TIMEOUT:g} s") from None
    if done.returncode:
        words = (done.stderr.strip() or f"status {done.returncode}").splitlines()[0]
        raise LaunchFailure(f"{' '.join(command[command.index('--net') + 1 :][:6])} ..: {words}")
    return done.stdout


def _wait_for_nodes(nodes: list[subprocess.Popen[bytes]], logs: list[Path], timeout: float) -> None:
    """Return when all nodes have ended with status 0. Raises LaunchFailure where a node fails or the time is over."""
    deadline = time.monotonic() + timeout
    failed: list[int] = []
    while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
        bad = [i for i, node in enumerate(nodes) if node.poll()]
        if bad and not failed:
            failed, deadline = bad, min(deadline, time.monotonic() + GRACE)
        time.sleep(0.02)
    failed = failed or [i for i, node in enumerate(nodes) if node.poll()]
    if failed:
        first = failed[0]
        raise LaunchFailure(
            f"node {first} of {len(nodes)} exited with status {nodes[first].returncode}{tail(logs[first])}"
        )
    running = [f"node {i} still ran{tail(logs[i])}" for i, node in enumerate(nodes) if node.poll() is None]
    if running:
        raise LaunchFailure(f"the nodes did not end within {timeout:g} s: " + "\n".join(running))


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run; the ranks of a node die with its torchrun."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
