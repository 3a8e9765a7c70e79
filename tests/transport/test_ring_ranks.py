"""What `scripts/gpu` runs on NCCL, on Gloo in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CLEARED


@pytest.mark.multi
def test_the_program_that_proves_rings_of_ranks() -> None:
    program = str(Path(__file__).parents[1] / "helpers" / "ring_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, "gloo"]
    env = {**{k: v for k, v in os.environ.items() if k not in CLEARED}, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("2 ranks on gloo: ")]
    assert done.returncode == 0 and len(lines) == 4, done.stderr
