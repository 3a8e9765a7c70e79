"""examples/train_lm: a killed rank, a restart, and another number of ranks give the losses of one process."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from command_line import TORCHRUN, ringattn
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("tokens=96", "model.width=32", "model.window=20", "checkpoint_every=2")


def run(folder: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The example in a working folder, small, by Python or, with its options, by torchrun."""
    script = str(ROOT / "examples/train_lm/train.py")
    words = (*launcher, script, *SMALL, *overrides) if launcher else (*SMALL, *overrides)
    return ringattn(
        *words, cwd=folder, script=TORCHRUN if launcher else script, timeout=150, status=None, PYTHONPATH=str(ROOT)
    )


def losses(output: Path) -> list[float]:
    """The losses in the folder of a run: of each step, then of the topics held out."""
    lines = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    return [line[key] for key in ("loss", "held_out") for line in lines if key in line]


@pytest.mark.multi
def test_losses_depend_neither_on_ranks_nor_on_a_restart(tmp_path: Path) -> None:
    launcher = ("--standalone", "--max-restarts=1", "--nproc-per-node=2")
    for done in (
        run(tmp_path, "output=one", "steps=5"),
        run(tmp_path, "output=two", "steps=5", "cp=2", "kill_at=3", launcher=launcher),
    ):
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "two" / "killed").exists()
    whole, continued = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert continued == pytest.approx(whole, rel=1e-5)
    assert len(whole) == 6 and whole[-1] < whole[0] - 0.5  # the topics held out, after 5 steps
    stale = tmp_path / "two" / "unfinished_000009"
    stale.mkdir()
    for overrides, words in (
        (("resume=two", "model.width=64"), "model.width=32"),
        (("resume=two", "steps=5"), "nothing to train, as two has 5"),
        (("output=two", "steps=9"), "continue that with resume=two"),
        (("resume=three",), "resume=three has no checkpoint, such as step_000020"),
        (("log=paper",), "log=paper: expected tensorboard, wandb or null"),
        (("tokens=0",), "tokens=0: expected a whole number >= 1"),
    ):
        other = run(tmp_path, *overrides)  # one process, without torchrun
        assert other.returncode == 1 and other.stderr.startswith("error: ") and words in other.stderr, other.stderr
        assert "measured" not in other.stdout
    assert not stale.exists()


@pytest.mark.multi
def test_a_run_goes_on_where_it_is_asked_to(tmp_path: Path) -> None:
    """A run has a folder of its own. Half a line of a killed run, and lines after its checkpoint, are dropped."""
    done = run(tmp_path, "steps=2", "log=tensorboard")
    (folder,) = (tmp_path / "outputs" / "train_lm").iterdir()
    time.sleep(1.0)  # folders are named by their second
    again = run(tmp_path, "steps=2")
    (other,) = {*(tmp_path / "outputs" / "train_lm").iterdir()} - {folder}
    assert losses(other) == losses(folder)
    shown = EventAccumulator(str(folder)).Reload()
    assert [event.value for name in ("loss", "held_out") for event in shown.Scalars(name)] == pytest.approx(
        losses(folder)
    )
    for one, place in ((done, folder), (again, other)):
        assert f"measured in {place.relative_to(tmp_path)}: " in one.stdout and "of 2 steps" in one.stdout, one.stderr
    with (folder / "losses.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')
    done = run(tmp_path, f"resume={folder.relative_to(tmp_path)}", "steps=3")
    assert done.returncode == 0 and "of 1 steps" in done.stdout, done.stderr
    whole = run(tmp_path, "output=whole", "steps=3")
    assert whole.returncode == 0 and losses(folder)[:3] == losses(tmp_path / "whole")[:3]
    for number in (999_999, 1_000_000):
        (folder / f"step_{number}").mkdir()
    damaged = run(tmp_path, f"resume={folder}", "steps=4")
    assert damaged.returncode == 1 and f"error: {folder / 'step_1000000'} cannot be read" in damaged.stderr
