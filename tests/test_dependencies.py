"""A ring needs torch, numpy and msgspec; the command line and the laboratory bring the rest."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import sys

blocked = {blocked!r}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Block())
import torch
import torch.distributed as dist
import ringattn as ra

x = torch.randn(1, 2, 64, 4, requires_grad=True)
layout = ra.make_layout("zigzag", tokens=64, ranks=1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def attend(**options):
    ra.virtual_attention(x, x, x, "Causal() & Window(9)", ranks=2, **options).sum().backward()
    ra.ring_attention(x, x, x, ra.Causal(), layout=layout, **options).sum().backward()

attend(schedule="ring")
ra.nn.RingAttention(ra.Causal(), ranks=2, schedule="ring")(x, x, x)
blocked.remove("yaml")
attend()
assert "yaml" in sys.modules
dist.destroy_process_group()
"""
#: Hard dependencies that a ring does without. PyYAML reads the numbers of machines, by which `auto` chooses.
OTHERS = {"hydra", "omegaconf", "antlr4", "rich", "jinja2", "safetensors", "matplotlib", "mpi4py", "transformers"}


def test_a_ring_needs_torch_numpy_and_msgspec() -> None:
    script = SCRIPT.format(blocked={*OTHERS, "yaml"})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_is_imported_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {one.partition(">")[0].lower() for one in declared}
    assert names == {"torch", "numpy", "hydra-core", "jinja2", "msgspec", "pyyaml", "rich", "safetensors"}
