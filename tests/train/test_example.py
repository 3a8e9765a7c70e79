"""examples/train_lm: a killed rank, a restart, and another number of ranks give the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from warm_python import executable

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("tokens=96", "model.width=32", "model.window=20", "checkpoint_every=2")


def run(output: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A run of the example, small, by Python or by a launcher."""
    script = str(ROOT / "examples/train_lm/train.py")
    return subprocess.run(
        [executable(), *launcher, script, f"output={output}", *SMALL, *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def train(output: Path, ranks: int, *overrides: str) -> list[float]:
    """The losses in the folder of a run after torchrun has ended: of each step, then of the topics held out."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=1", f"--nproc-per-node={ranks}")
    done = run(output, *overrides, launcher=launcher)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    return [line[key] for key in ("loss", "held_out") for line in lines if key in line]


@pytest.mark.multi
def test_losses_depend_neither_on_ranks_nor_on_a_restart(tmp_path: Path) -> None:
    whole = train(tmp_path / "one", 1, "steps=5")
    continued = train(tmp_path / "two", 2, "steps=5", "cp=2", "kill_at=3")
    assert (tmp_path / "two" / "killed").exists()
    assert continued == pytest.approx(whole, rel=1e-5)
    assert len(whole) == 6 and whole[-1] < whole[0] - 0.5  # the topics held out, after 5 steps
    stale = tmp_path / "two" / "unfinished_000009"
    stale.mkdir()
    other = run(tmp_path / "two", "model.width=64")  # one process, without torchrun
    assert other.returncode == 1 and not stale.exists()
    assert other.stderr.startswith("error: ") and "model.width=32" in other.stderr, other.stderr
    assert "tokens=0: expected a whole number >= 1" in run(tmp_path / "three", "tokens=0").stderr
    last = max((tmp_path / "one").glob("step_*"))
    (last / ".metadata").unlink()
    damaged = run(tmp_path / "one", "steps=6")
    assert damaged.returncode == 1 and f"error: {last} cannot be read" in damaged.stderr, damaged.stderr
