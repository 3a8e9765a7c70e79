"""What `ringattn run` says of memory: of the device where a device computes, beside the memory of the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringattn.cli import run as run_verb


class CudaRun(run_verb.Run):
    """A run that takes the CPU for a CUDA device once its inputs are there."""

    def open(self) -> None:
        super().open()
        self.device = torch.device("cuda", 0)


def test_the_peak_of_the_device(inside: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The peak is reset after the warm-up, and read after the first timed run."""
    calls: list[str] = []

    def stand_in(name: str, value: int | None) -> None:
        monkeypatch.setattr(torch.cuda, name, lambda device=None: calls.append(name) or value)

    stand_in("synchronize", None)
    stand_in("reset_peak_memory_stats", None)
    stand_in("memory_allocated", 1 << 20)
    stand_in("max_memory_allocated", 3 << 20)
    command = ["run", "transport=virtual", "tokens=16", "repeat=2", "threads=1", "output.report=report.json"]
    told = inside(*command).stdout
    (process,) = json.loads((tmp_path / "report.json").read_text())["processes"]
    assert not calls and process["device_peak_bytes"] is None and "peak memory of the process" in told
    assert process["name"] == "process"

    monkeypatch.setattr(run_verb, "Run", CudaRun)
    told = inside(*command).stdout
    (process,) = json.loads((tmp_path / "report.json").read_text())["processes"]
    assert calls == [
        *("synchronize", "reset_peak_memory_stats", "memory_allocated"),
        *("synchronize", "max_memory_allocated", "synchronize"),
    ]
    assert process["device_peak_bytes"] == 3 << 20 and process["device_start_bytes"] == 1 << 20
    assert process["peak_bytes"] > 3 << 20, "the resident size of this process is another number"
    assert "3.0 MiB allocated at most, 2.0 MiB above" in told
    assert "peak device memory of the process" in told and "peak host memory of the process" in told
