"""examples/torchtitan on CPU ranks against one process; only where torchtitan is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "training.steps": "3", "training.local_batch_size": "2", "training.mixed_precision_param": "float32",
    "metrics.log_freq": "1", "lr_scheduler.warmup_steps": "1",
}  # fmt: skip


def train(folder: Path, ranks: int, model: str, **options: str) -> list[list[float]]:
    """[loss, gradient norm] of each step."""
    words = [f"--{name}={value}" for name, value in {**OPTIONS, **options, "job.dump_folder": str(folder)}.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, str(ROOT / "tests/helpers/titan_main.py"), model, str(folder / "steps.json"), *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert not done.returncode, done.stderr.decode()[-3000:]
    return json.loads((folder / "steps.json").read_text())


@pytest.mark.multi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "tp"), [("llama3:causal", 1), ("llama3:documents", 2), ("qwen3:documents", 1), ("gpt_oss:documents", 1)]
)
def test_losses_and_gradient_norms_are_those_of_one_process(tmp_path: Path, model: str, tp: int) -> None:
    length = {"training.seq_len": "61" if tp == 1 else "64"}
    degrees = {"parallelism.context_parallel_degree": "2", "parallelism.tensor_parallel_degree": str(tp)}
    alone, found = train(tmp_path, 1, model, **length), train(tmp_path, 2 * tp, model, **length, **degrees)
    assert len(alone) == 3
    for one, other in zip(alone, found, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
