"""Programs end with status 0 and without a word, whether they destroy their process groups or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = 2
#: `python -c PROGRAM RANK STORE DESTROY`: a forward and a backward on the world, on a mesh axis and on a group, whose
#: results live to the end. A rank ends as a program ends: through the interpreter's shutdown.
PROGRAM = f"""
import sys, torch, torch.distributed as dist, ringattn as ra
from torch.distributed.device_mesh import init_device_mesh
store = dist.FileStore(sys.argv[2], {RANKS})
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size={RANKS})
mesh = init_device_mesh("cpu", (1, {RANKS}), mesh_dim_names=("dp", "cp"))
x = torch.randn(1, 2, 12, 8, requires_grad=True)
module = ra.nn.RingAttention(ra.Causal(), layout="contiguous", group=mesh["cp"])
groups = None, dist.new_group(list(range({RANKS})))
outs = [ra.ring_attention(x, x, x, ra.Causal(), layout="contiguous", group=group) for group in groups]
torch.stack([module(x, x, x), *outs]).sum().backward(retain_graph=True)
if sys.argv[3] == "True":
    dist.destroy_process_group()
"""


@pytest.mark.multi
@pytest.mark.parametrize("destroy", [False, True])
def test_ranks_end_in_order(destroy: bool, tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store"), str(destroy)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    ends = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    assert [status for _, status in ends] == [0] * RANKS, ends
    assert not any("terminate called" in errors for errors, _ in ends)
