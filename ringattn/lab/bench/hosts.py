"""Hosts on one machine: network namespaces with addresses and TCP of their own, joined by links of a given rate."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import Unsupported
from ...transport.launcher import at_end, run_local

#: How the links of a record are made.
NETWORK = "hosts are network namespaces of this machine; Linux (tc) holds the link of each host to its rate"
#: The flag of setns(2) for a network namespace.
CLONE_NEWNET = 0x40000000
#: A token bucket must hold what a link carries between two ticks of the kernel (1 / 250 s), and a segment of 64 KiB:
#: with a quarter of that, links with traffic in both directions carried half of their rate.
TICKS, SEGMENT = 250, 1 << 16


@dataclass(frozen=True)
class Cluster:
    """The size of a simulated cluster: `nodes` hosts with `ranks_per_node` ranks each.

    `bandwidth` is that of each host's link to the other hosts, in bytes per second and direction. Ranks of one host
    reach each other over its loopback interface.
    """

    nodes: int
    ranks_per_node: int
    bandwidth: float

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Hosts:
    """The hosts of a simulated cluster, made by `make_hosts`; host i has a network interface eth0 with `address(i)`."""

    cluster: Cluster
    #: Begins the names of namespaces and links, so that two runs do not meet.
    tag: str
    #: Whether the hosts have IPv6 addresses only.
    ipv6: bool = False

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"fd00:77::{host + 1}" if self.ipv6 else f"10.77.0.{host + 1}"

    def command(self, host: int) -> list[str]:
        """The words to put before a command, so that it runs on `host`."""
        return ["ip", "netns", "exec", f"{self.tag}h{host}"]

    def enter(self, rank: int) -> None:
        """Move this process to the host of a rank, and to the share of the CPU cores that the host has.

        The process must have only one thread.
        """
        host = rank // self.cluster.ranks_per_node
        namespace = os.open(f"/run/netns/{self.tag}h{host}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(namespace)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[host :: self.cluster.nodes] or [cores[host % len(cores)]])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As `run_local`, on ranks of these hosts."""
        return run_local(function, self.cluster.ranks, *args, place=self.enter, **options)

    def set_rate(self, host: int, bandwidth: float) -> None:
        """Let the link of a host carry `bandwidth` bytes per second in each direction."""
        for place in (f"-n {self.tag}h{host} qdisc replace dev eth0", f"qdisc replace dev {self.tag}v{host}"):
            _call("tc", *place.split(), *_shape(bandwidth))

    def hold(self, bandwidth: float) -> None:
        """Let the host of this process send at most `bandwidth` bytes per second, and no more than its link carries."""
        _call("tc", "qdisc", "replace", "dev", "eth0", *_shape(bandwidth))

    def set_link(self, host: int, state: str) -> None:
        """Set the link of a host "up" or "down"."""
        _call("ip", "link", "set", f"{self.tag}v{host}", state)

    def sent_bytes(self, host: int) -> int:
        """The bytes that a host has sent over its link, with headers, as the kernel counts them."""
        return int(Path(f"/sys/class/net/{self.tag}v{host}/statistics/rx_bytes").read_text())


@contextmanager
def make_hosts(cluster: Cluster, *, ipv6: bool = False) -> Iterator[Hosts]:
    """Context manager that simulates a cluster with network namespaces on this machine.

    The hosts and all processes on them end with the block, or with this process. Raises Unsupported without root,
    network namespaces, or the programs `ip` and `tc`.
    """
    hosts = Hosts(cluster, f"ra{secrets.token_hex(3)}", ipv6)
    tag, numbers = hosts.tag, range(cluster.nodes)
    end = "".join(
        f"ip netns pids {tag}h{i} | xargs -r kill -9; ip netns del {tag}h{i}; ip link del {tag}v{i}; " for i in numbers
    )
    with at_end(f"{{ {end} ip link del {tag}br; }} 2>/dev/null"):
        _call("ip", "link", "add", f"{tag}br", "type", "bridge")
        _call("ip", "link", "set", f"{tag}br", "up")
        for i in numbers:
            inside = ["ip", "-n", f"{tag}h{i}"]
            _call("ip", "netns", "add", f"{tag}h{i}")
            _call(*f"ip link add {tag}v{i} type veth peer name eth0 netns {tag}h{i}".split())
            _call(*f"ip link set {tag}v{i} master {tag}br up".split())
            at = [f"{hosts.address(i)}/64", "nodad"] if ipv6 else [f"{hosts.address(i)}/24"]
            _call(*inside, "addr", "add", *at, "dev", "eth0")
            for link in ("eth0", "lo"):
                _call(*inside, "link", "set", link, "up")
            hosts.set_rate(i, cluster.bandwidth)
        yield hosts


def _shape(bandwidth: float) -> list[str]:
    """The words of tc that hold a link to `bandwidth` bytes per second."""
    burst = max(bandwidth / TICKS, SEGMENT) * 1.1
    return f"root tbf rate {bandwidth * 8:.0f}bit burst {burst:.0f} latency 200ms".split()


def _call(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise Unsupported(
            "several emulated hosts on one machine need root, network namespaces, and ip and tc of iproute2: "
            f"{' '.join(command)}: {why.strip()}"
        ) from None
