"""Several hosts with networks of their own: right results, bytes over links as planned, and errors that name faults."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import host_cases
import pytest

from ringattn.errors import LaunchFailure
from ringattn.lab.bench.hosts import Cluster, Hosts, make_hosts
from ringattn.transport import launcher

ROOT = Path(__file__).parents[2]
#: Bytes per second of the links: 400 Mbit/s.
RATE = 50e6
#: The longest wait of faulty ranks, in seconds, and how much later they must end.
TIMEOUT, LATE = 3.0, 5.0
pytestmark = [pytest.mark.hosts, pytest.mark.multi]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    host_cases.skip_without_hosts()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test leaves no namespace, no link and no process behind. Other runs may have theirs at the same time."""
    ours: list[str] = []
    monkeypatch.setattr(secrets, "token_hex", lambda size: ours.append(os.urandom(size).hex()) or ours[-1])
    yield
    left = _output("ip", "netns", "list") + _output("ip", "link")
    assert not [tag for tag in ours if f"ra{tag}" in left], left


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (4, 1)])
def test_calls_on_hosts_equal_one_process(nodes: int, ranks: int) -> None:
    with make_hosts(Cluster(nodes, ranks, 4 * RATE)) as hosts:
        for found in hosts.run(host_cases.all_calls, hosts, threads=1, timeout=120):
            assert max(found[name] for name in ("documents", "training", "decoding")) <= 1e-12
            assert 1 <= found["least bytes"] <= found["most bytes"] <= 1.06, found


def _kill(hosts: Hosts, number: int) -> None:
    for process in _output("ip", "netns", "pids", f"{hosts.tag}h1").split():
        os.kill(int(process), number)


def _lose(hosts: Hosts) -> None:
    """A host loses its power: nothing says good-bye."""
    hosts.set_link(1, "down")
    _kill(hosts, signal.SIGKILL)


def _interrupt(hosts: Hosts) -> None:
    hosts.set_link(1, "down")
    Timer(3.0, hosts.set_link, (1, "up")).start()


LOST = "rank ([01]) on node-\\1 does not answer: a process hangs or is stopped, or a host or a network is down"
#: What happens to the second of two hosts; seconds of calls; the longest wait; tokens; what the ranks of the second and
#: of the first host are told.
FAULTS: dict[str, tuple[Callable[[Hosts], Any], float, float, int, str, str]] = {
    "the link is down": (lambda hosts: hosts.set_link(1, "down"), 30, TIMEOUT, 2048, LOST, LOST),
    "the link goes down in a pass": (lambda hosts: hosts.set_link(1, "down"), 30, TIMEOUT, 1 << 15, LOST, LOST),
    # TCP doubles its wait after each retry, so a link that is up again may stay unused for many seconds.
    "the link is down for 3 s": (_interrupt, 5, 30, 2048, "fine", "fine"),
    "the link is slow": (lambda hosts: hosts.set_rate(1, RATE / 100), 1, 20, 2048, "fine", "fine"),
    "the host dies": (_lose, 30, TIMEOUT, 2048, "", LOST),
    "the processes die": (
        partial(_kill, number=signal.SIGKILL),
        30,
        TIMEOUT,
        2048,
        "",
        "rank 1 on node-1 is gone: its process",
    ),
    "the processes stop": (partial(_kill, number=signal.SIGSTOP), 30, TIMEOUT, 2048, "", LOST),
}


def _meet(fault: str, folder: Path) -> dict[int, str]:
    """What each rank was told, after how many seconds."""
    act, seconds, timeout, tokens, *_ = FAULTS[fault]
    for name in ("ready", "go", "told", "done"):
        (folder / name).mkdir(parents=True)
    with make_hosts(Cluster(2, 2, RATE)) as hosts, ThreadPoolExecutor() as pool:
        job = pool.submit(hosts.run, host_cases.suffer, str(folder), timeout, tokens, seconds, threads=1, timeout=60)
        _await(lambda: len(os.listdir(folder / "ready")) == 4 or job.done())
        in_pass = "in a pass" in fault
        if not in_pass:
            act(hosts)
        (folder / "go" / "now").touch()
        if in_pass:
            time.sleep(0.2)
            act(hosts)
        answering = [rank for rank, place in enumerate((5, 5, 4, 4)) if FAULTS[fault][place]]
        _await(lambda: {str(rank) for rank in answering} <= {*os.listdir(folder / "told")})
        (folder / "done" / "now").touch()
        if "stop" in fault:
            _kill(hosts, signal.SIGKILL)
        if len(answering) == 4:
            job.result()
        else:
            with pytest.raises(LaunchFailure, match=r"rank [23] of 4 was killed by SIGKILL"):
                job.result()
    return {rank: (folder / "told" / str(rank)).read_text() for rank in answering}


def test_faults_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, as most of their time is waiting; ranks 0 and 2 compare calls at once, 1 and 3 meanwhile."""
    monkeypatch.setattr(launcher, "GRACE", 15.0)
    with ThreadPoolExecutor() as pool:
        jobs = {fault: pool.submit(_meet, fault, tmp_path / fault) for fault in FAULTS}
    for fault, job in jobs.items():
        _, _, timeout, _, of_second, of_first = FAULTS[fault]
        for rank, text in job.result().items():
            print(f"{fault}: rank {rank}, check={host_cases.CHECKS[rank % 2]}: {text}")
            seconds, told = text.split(" ", 1)
            assert re.search(of_second if rank > 1 else of_first, told), (fault, text)
            assert float(seconds) < timeout + LATE, (fault, text)


def test_a_loss_between_two_of_three_hosts_is_named() -> None:
    """All three ranks answer, by way of the third host."""
    with make_hosts(Cluster(3, 1, RATE)) as hosts:
        for told in hosts.run(host_cases.mute, hosts.address(2), threads=1, timeout=120):
            assert "CommFailure: what rank 1 on node-1 sends does not reach rank 2 on node-2: a network" in told, told


def _place(hosts: Hosts, how: str, rank: int) -> None:
    hosts.enter(rank)
    if rank and how == "loopback":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("loopback", "GLOO_SOCKET_IFNAME on one of the hosts names no interface that leads to the other"),
        ("firewall", r"no connection to 10.77.0.2:3\d+ \(timed out\)|not connected to 10.77.0.2:3\d+ in time"),
        ("ipv6", "fine"),
    ],
)
def test_networks_that_do_not_connect(how: str, told: str) -> None:
    with make_hosts(Cluster(2, 1, RATE), ipv6=how == "ipv6") as hosts:
        for i in range(2):
            _output(*hosts.command(i), "sysctl", "-qw", "net.ipv4.ip_local_port_range=20000 29999")
        for seconds, text in launcher.run_local(host_cases.connect, 2, how, place=partial(_place, hosts, how)):
            print(f"{how}: {seconds:.1f} s: {text}")
            assert re.search(told, text) and seconds < 2 + LATE, text


JOB = ("tokens=2k", "heads=2", "repeat=1", "backward=true", "timeout=10")


def _start(hosts: Hosts, host: int, command: Sequence[object], folder: Path, **env: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*hosts.command(host), *map(str, command)], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def test_two_torchrun_jobs_at_once(tmp_path: Path) -> None:
    """The launch file, whose rendezvous is static, over IPv6, and c10d over addresses that names do not lead to."""
    with make_hosts(Cluster(2, 2, RATE), ipv6=True) as hosts:
        c10d = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-id", "two"]
        c10d += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"[{hosts.address(0)}]:29502", "--rdzv-conf"]
        jobs = []
        for i in range(2):
            head = f"[{hosts.address(0)}]:29501"
            job = {"NODES": "2", "NODE": str(i), "HEAD": head, "RANKS": "2", "GLOO_SOCKET_IFNAME": "eth0"}
            jobs.append(
                _start(hosts, i, [ROOT / "launch/torchrun.sh", *JOB, "transport=gloo"], tmp_path / str(i), **job)
            )
            more = [f"is_host={i == 0}", "--local-addr", hosts.address(i), "-m", "ringattn", "run", *JOB]
            jobs.append(
                _start(hosts, i, [*c10d, *more, "transport=gloo"], tmp_path / str(i), GLOO_SOCKET_IFNAME="eth0")
            )
        told = [job.communicate(timeout=60)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0] * 4, told
        assert all("as planned" in text for text in told[:2]), told
        assert "on 4 gloo ranks" in told[0] and "on 2 gloo ranks" in told[1]


def test_mpirun_over_hosts(tmp_path: Path) -> None:
    """The launch file, with a stand-in for ssh; MPICH would pass messages between these hosts through memory."""
    if not shutil.which("mpirun", path=str(Path(sys.executable).parent)):
        pytest.skip("mpirun missing; try: pip install 'ringattn[mpi]'")
    with make_hosts(Cluster(2, 1, RATE)) as hosts:
        (tmp_path / "hosts").write_text("".join(f"{hosts.address(i)}:1\n" for i in range(2)))
        ssh = tmp_path / "ssh"
        ssh.write_text(
            f'#!/bin/sh\nhost={hosts.tag}h$((${{2##*.}} - 1)); shift 2\nexec ip netns exec $host sh -c "$*"\n'
        )
        ssh.chmod(0o755)
        place = f"-f {tmp_path}/hosts -launcher ssh -launcher-exec {ssh} -iface eth0"
        env = {"RANKS": "2", "MPIRUN_ARGS": place, "UCX_TLS": "tcp,self"}
        told, _ = _start(hosts, 0, [ROOT / "launch/mpirun.sh", *JOB], tmp_path, **env).communicate(timeout=60)
        assert "on 2 mpi ranks" in told and "as planned" in told, told
        assert hosts.sent_bytes(0) > 1 << 19


def test_a_wrong_interface_is_named_on_every_rank(tmp_path: Path) -> None:
    with make_hosts(Cluster(2, 1, RATE)) as hosts:
        jobs = []
        for i, interface in enumerate(("eth0", "eth9")):
            job = {"RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29501"}
            command = [sys.executable, "-m", "ringattn", "run", "transport=gloo", "timeout=10"]
            jobs.append(_start(hosts, i, command, tmp_path / str(i), **job, GLOO_SOCKET_IFNAME=interface))
        for job in jobs:
            told, _ = job.communicate(timeout=60)
            first = "the first to fail was rank 1, on a host with the interfaces lo, eth0: .* find address for: eth9"
            assert job.returncode and re.search(first, told), told


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _await(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)
