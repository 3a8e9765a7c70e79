"""Kernel times and machines of tests, as a calibration would have found them."""

from __future__ import annotations

from dataclasses import replace

import ringattn as ra
from ringattn.machine.kernel_times import SHAPES, KernelTimes, TimeGrid

ROWS = (64, 256, 1024)


def times(rate: float = 1e10, overhead: float = 0.0, head_dim: int = 64, **by_shape: float) -> KernelTimes:
    """Kernel times with one rate per shape, forward and backward."""
    grids = []
    for shape in SHAPES:
        keys = (1,) if shape == "triangle" else ROWS
        rates = ((by_shape.get(shape, rate),) * len(keys),) * len(ROWS)
        grids += [TimeGrid(shape, backward, ROWS, keys, rates) for backward in (False, True)]
    return KernelTimes(head_dim, "float32", (overhead, overhead), tuple(grids))


def machine(kernel: KernelTimes | None = None, **values: object) -> ra.Machine:
    return ra.Machine(**{"flops": 1e10, "latency": 0.0, "bandwidth": 1e15, "kernel": kernel, **values})  # type: ignore[arg-type]


def measured_machine() -> ra.Machine:
    """A machine of measured numbers, but for its watts."""
    measured = ("flops", "latency", "bandwidth", "merge", "gamma", "kernel", "residuals")
    kernel = replace(times(3.25e10, 1.5e-5, triangle=2e10), heads=8)
    numbers = {"flops_dtype": "float32", "merge": 1e10, "gamma": 0.03, "ranks_per_node": 2, "shared_nic": True}
    sources = (*((name, "measured") for name in measured), ("watts", "cited"))
    residuals = ((0.1, 0.9), (0.1, 1.0), (0.2, 1.05))
    return machine(kernel, watts=700.0, residuals=residuals, sources=sources, **numbers)
