"""examples/long_context: equal losses on any number of ranks, and a run that goes on on another number."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # noqa: F401 (so that ranks, which are forks, need not import it)
import transformers.models.gemma3.modeling_gemma3  # noqa: F401

import ringattn.integrations.transformers  # noqa: F401

SCRIPT = Path(__file__).resolve().parents[2] / "examples/long_context/train.py"


def train(rank: int, *words: str) -> None:
    """The example on ranks that have a group, and keep it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), "--tokens", "1k", "--every", "2", *words])
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(str(SCRIPT), run_name="__main__")


def losses(folder: Path) -> list[float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line[key] for key in ("loss", "held_out") for line in lines if key in line]


@pytest.mark.multi
def test_losses_depend_neither_on_ranks_nor_on_a_pause(run_ranks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name, ranks, steps in (("whole", 1, 5), ("parts", 2, 3), ("parts", 1, 5)):
        run_ranks(train, ranks, "--steps", str(steps), "--output", str(tmp_path / name), timeout=150)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert len(whole) == 7 and whole[4] < whole[0] - 0.3 and whole[6] < whole[5]
    assert parts == pytest.approx(whole, rel=2e-5)
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {
        "log.jsonl", "log.png", "step_000002", "step_000003", "step_000004", "step_000005"
    }  # fmt: skip
