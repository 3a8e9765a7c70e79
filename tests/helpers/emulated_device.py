"""A CUDA device for tests: the real one where RINGATTN_TEST_DEVICE names it, else emulated ops on CPU tensors."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from emulated_ops import EmulatedOps, emulate

from ringattn import kernels
from ringattn.kernels import aten_cuda, cuda_device

#: Set by scripts/gpu; "cpu" emulates.
DEVICE = os.environ.get("RINGATTN_TEST_DEVICE", "cpu")


class EmulatedEvent:
    """In place of torch.cuda.Event: the time of the host."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: EmulatedEvent) -> float:
        return (other.at - self.at) * 1e3


def emulate_ops(monkeypatch: pytest.MonkeyPatch) -> EmulatedOps:
    """`emulate`, and `aten_cuda` is what "auto" takes for CPU tensors."""
    emulated = emulate(monkeypatch, cudnn_rows=cuda_device.CUDNN_ROWS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(aten_cuda.AtenCuda, "missing", classmethod(lambda cls: None))
    monkeypatch.setitem(kernels.AUTO, "cpu", "aten_cuda")
    return emulated


def emulate_device(monkeypatch: pytest.MonkeyPatch) -> EmulatedOps:
    """`emulate_ops`, with stand-ins for the events and the memory of a device of 80 GB."""
    stand_ins: dict[str, Any] = {
        "Event": EmulatedEvent,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "stream": lambda stream: nullcontext(),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return emulate_ops(monkeypatch)
