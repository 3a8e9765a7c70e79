"""What ranks on several hosts run: module-level functions, importable by a spawned process."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Any

import generations
import pytest
import rank_cases
import torch
import torch.distributed as dist
from rank_pool import told_by, wait_for_files

import ringattn as ra
from ringattn import Causal, Documents, Window
from ringattn.errors import Unsupported
from ringattn.lab.bench.hosts import Cluster, Hosts, make_hosts
from ringattn.transport.torchdist import TorchDist

#: How ranks compare their calls: each way in a group of its own, so that both meet the same fault.
CHECKS = ("now", "deferred")
#: The maximum segment size of TCP on Ethernet, in bytes.
MSS = 1448
DOCUMENTS = [65, 8, 175, 1, 101, 162]


def skip_without_hosts() -> None:
    """Skip a test, with the reason, where no hosts can be made."""
    try:
        with make_hosts(Cluster(2, 1, 1e9)):
            pass
    except Unsupported as error:
        pytest.skip(str(error))


def all_calls(rank: int, hosts: Hosts) -> dict[str, float]:
    """Every schedule over hosts, bit for bit the virtual ranks, and other calls.

    Returns the largest error of shards of documents, of a training step and of decoding; and the bytes that host 0 sent
    over its link, divided by the bytes planned: at least, and without what TCP sent again, at most. (A busy machine
    delivers late or out of order, and TCP takes that for a loss.)
    """
    size, transport = dist.get_world_size(), TorchDist(timeout=30)
    rank_cases.compare_with_virtual(transport, "float32", (4, 2), (Causal(), Window(5, 9)))
    links = link_bytes(rank, hosts, transport).values()
    return {
        "documents": rank_cases.balanced_shards(rank),
        "training": rank_cases.multihead(rank, "ring", "zigzag", "none"),
        "decoding": generations.equals_virtual(rank, [size]),
        "least bytes": min(sent / planned for sent, _, planned in links),
        "most bytes": max((sent - again) / planned for sent, again, planned in links),
    }


def _sent(hosts: Hosts) -> tuple[int, int]:
    """The bytes that host 0 has sent over its link, and those of them that TCP sent again, by the kernel's counts."""
    table = subprocess.check_output([*hosts.command(0), "cat", "/proc/net/snmp"], text=True)
    names, values = (line.split() for line in table.splitlines() if line.startswith("Tcp:"))
    return hosts.sent_bytes(0), MSS * int(values[names.index("RetransSegs")])


def link_bytes(rank: int, hosts: Hosts, transport: TorchDist) -> dict[str, tuple[int, int, int]]:
    """(bytes sent, bytes sent again, see `_sent`; bytes planned) of each call, forward and backward."""
    size, tokens, found = transport.size, sum(DOCUMENTS), {}
    x = torch.randn(1, 32, tokens, 64, generator=torch.Generator().manual_seed(rank))
    inside = range(hosts.cluster.ranks_per_node)
    for schedule in ("ring", "direct", "allgather", f"double_ring({max(2, len(inside))})", "ulysses(2, ring)"):
        for pattern in (Causal(), Causal() & Window(150), Causal() & Documents(DOCUMENTS)):
            layout = ra.make_layout("zigzag", tokens=tokens, ranks=size)
            q, k, v = (layout.shard_tensor(x, rank).clone().requires_grad_() for _ in range(3))
            options: dict[str, Any] = {"layout": layout, "schedule": schedule, "transport": transport}
            ra.ring_attention(q, k, v, pattern, **options)  # the ranks compare this call once
            dist.barrier()
            before = _sent(hosts)
            for _ in range(2):
                ra.ring_attention(q, k, v, pattern, **options).sum().backward()
            dist.barrier()
            plan = ra.make_plan(
                pattern, tokens=tokens, ranks=size, layout=layout, schedule=schedule, heads=32, head_dim=64
            )
            steps = [plan.for_rank(place) for place in inside]
            hops = [
                hop for each in steps for way in (each.forward, each.backward) for step in way for hop in step.sends
            ]
            planned = 2 * sum(plan.part_bytes(part) for hop in hops if hop.peer not in inside for part in hop.parts)
            sent, again = (now - then for now, then in zip(_sent(hosts), before, strict=True))
            found[f"{schedule}, {pattern}"] = sent, again, planned
            dist.barrier()
    return found


def suffer(rank: int, folder: str, timeout: float, tokens: int, seconds: float) -> None:
    """Calls on two hosts of two ranks until one fails, for `seconds` at most. A rank of each host is in each group.

    In each group, the rank on the first host decides which call is the last. If each rank used its own clock, one could
    make a call that the other never joins.

    When all ranks have made a call they write files into `folder`/ready, wait for `folder`/go, and write after how many
    seconds they were told what into `folder`/told.
    """
    socket.gethostname = lambda: f"node-{rank // 2}"  # namespaces of networks share the name of the machine
    groups = [dist.new_group([i, i + 2]) for i in range(2)]
    transport = TorchDist(groups[rank % 2], timeout=timeout)
    q, k, v = (torch.randn(1, 2, 2 * tokens, 64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    layout = ra.make_layout("contiguous", tokens=2 * tokens, ranks=2)
    wanted = layout.shard_tensor(ra.attention(q, k, v, Window(64)), rank // 2)
    mine = [layout.shard_tensor(x, rank // 2) for x in (q, k, v)]

    def attend() -> None:
        # All rows travel, though each rank needs only those beside its own.
        options: dict[str, Any] = {"layout": layout, "schedule": "allgather", "check": CHECKS[rank % 2]}
        out = ra.ring_attention(*mine, Window(64), transport=transport, **options)
        transport.synchronize()
        assert torch.allclose(out, wanted, atol=1e-5)

    attend()
    Path(folder, "ready", str(rank)).touch()
    wait_for_files(f"{folder}/go", 1)
    begun, last = time.monotonic(), Path(folder, f"last_{rank % 2}")
    for call in count():
        if rank < 2 and time.monotonic() - begun > seconds:
            last.write_text(str(call))
        told = told_by(attend)
        if told != "fine" or (last.exists() and last.read_text() == str(call)):
            break
    part = Path(folder, f"part_{rank}")
    part.write_text(f"{time.monotonic() - begun:.1f} {told}")
    os.rename(part, Path(folder, "told", str(rank)))
    wait_for_files(f"{folder}/done", 1)  # a rank that ends is lost, too


def connect(rank: int, how: str) -> tuple[float, str]:
    """The seconds of a first call, and what it was told, where something is wrong with the network of `how`."""
    x = torch.ones(1, 2, 4, 8)
    if how == "firewall":
        if rank:  # the ports that this host opens from now on do not answer
            os.system("sysctl -qw net.ipv4.ip_local_port_range='30000 39999'")
            os.system("ip rule add ipproto tcp sport 30000-39999 blackhole")
        dist.barrier()
    begun = time.monotonic()
    told = told_by(lambda: ra.ring_attention(x, x, x, ra.Full(), layout="contiguous", transport=TorchDist(timeout=2)))
    return time.monotonic() - begun, told


def mute(rank: int, address: str) -> str:
    """What is told of a call during which nothing that rank 1 sends reaches the host with `address`."""
    socket.gethostname = lambda: f"node-{rank}"
    x, transport = torch.ones(1, 2, 4, 8), TorchDist(timeout=3)

    def attend() -> None:
        ra.ring_attention(x, x, x, ra.Full(), layout="contiguous", transport=transport)

    attend()
    dist.barrier()
    if rank == 1:
        subprocess.run(
            f"ip neigh replace {address} lladdr 02:00:00:00:00:01 dev eth0 nud permanent".split(), check=True
        )
    told = told_by(attend)
    time.sleep(1)  # a rank that ends is lost, too
    return told
