"""examples/train_lm: a killed rank, a restart, and another number of ranks give the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("tokens=96", "model.width=32", "model.window=20", "checkpoint_every=2")


def train(output: Path, ranks: int, *overrides: str) -> list[float]:
    """The losses in the folder of a run after torchrun has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={ranks}", str(ROOT / "examples/train_lm/train.py"), f"output={output}"]
    done = subprocess.run(
        [*command, *SMALL, *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["loss"] for line in (output / "losses.jsonl").read_text().splitlines()]


@pytest.mark.multi
def test_losses_depend_neither_on_ranks_nor_on_a_restart(tmp_path: Path) -> None:
    whole = train(tmp_path / "one", 1, "steps=5")
    continued = train(tmp_path / "two", 2, "steps=5", "cp=2", "kill_at=3")
    assert (tmp_path / "two" / "killed").exists()
    assert continued == pytest.approx(whole, rel=1e-5)
    assert whole[-1] < whole[0] - 0.5
