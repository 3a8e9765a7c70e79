"""Run as a program: ranks that end as the ranks of torchrun do, with or without destroy_process_group.

`python exits.py RANKS RUNS FOLDER` prints statuses and standard errors of all ranks as JSON. The ranks are forks of one
process, which has imported torch once. Each rank ends as a program ends: through the interpreter's shutdown.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import IO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringattn as ra


def work(rank: int, ranks: int, path: str, *, destroy: bool) -> None:
    """A forward and a backward on the world, on a mesh axis and on a group, whose results live to the end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # No TCPStore: a fork cannot join the threads of its parent's store.
    dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
    x = torch.randn(1, 2, 12, 8, requires_grad=True)
    module = ra.nn.RingAttention(ra.Causal(), layout="contiguous", group=mesh["cp"])
    outs = [module(x, x, x)]
    outs += [
        ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", group=group)
        for group in (None, dist.new_group(list(range(ranks))))
    ]
    torch.stack(outs).sum().backward(retain_graph=True)
    KEPT.extend([outs, module])
    if destroy:
        dist.destroy_process_group()


KEPT: list[object] = []


def run(ranks: int, path: str, *, destroy: bool) -> list[tuple[int, str]] | None:
    """The exit status and the standard error of each rank; None in a rank, which then ends."""
    children: list[tuple[int, IO[str]]] = []
    for rank in range(ranks):
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed after the wait)
        if not (child := os.fork()):
            os.dup2(errors.fileno(), 2)
            work(rank, ranks, path, destroy=destroy)
            return None
        children.append((child, errors))
    found = []
    for child, errors in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        errors.seek(0)
        found.append((status, errors.read()))
        errors.close()
    return found


def main() -> None:
    ranks, runs, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    x = torch.zeros(1, 2, 12, 8)
    ra.virtual_attention(x, x, x, ra.Causal(), ranks=ranks)  # import what a call needs
    ends = []
    for number in range(runs):
        found = run(ranks, f"{folder}/{number}", destroy=bool(number % 2))
        if found is None:
            return
        ends.append(found)
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
