"""ringattn calibrate: measure this machine, print its numbers, write a machine file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..bench.runner import describe_host
from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput
from ..files import check_writable
from ..machine.file import write_machine
from ..machine.machine import MACHINE_NUMBERS
from ..simulator.calibrate.measure import Calibration, calibrate
from ..simulator.calibrate.measuring_ranks import MeasuringRanks, Settings
from ..simulator.calibrate.rounds import CalibrationSizes
from ..simulator.reporting.console import Number, format_quantity, get_console, print_grid, print_numbers
from ..text import did_you_mean, duration, plural
from ..transport.base import Transport
from ..transport.launcher import detect
from .config.schema import CalibrateConfig, parse_size
from .ranks import check_ranks, rank_device, start_ranks


def main(config: CalibrateConfig) -> None:
    """Measure, and print where the machine file is."""
    measure(config)
    if detect().rank == 0:
        path = config.output.path
        get_console().print(f"\nwritten {path}; use it with machine=file machine.path={path}", soft_wrap=True)


def measure(config: CalibrateConfig) -> None:
    """Measure on local ranks, on the ranks of a launched job, or with transport=none in this process alone."""
    check(config)
    if config.transport.spec != "none":
        start_ranks(config, measure_on, "calibrate")
        return
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device=cuda: this process sees no CUDA device (ringattn doctor says why); try device=cpu")
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    measure_on(config, None)


def check(config: CalibrateConfig) -> None:
    """Raise the errors of a calibration before minutes are spent on measuring."""
    check_ranks(config, "none")
    _check(config)


def _check(config: CalibrateConfig) -> tuple[CalibrationSizes, Settings, Path]:
    """The sizes and settings of the measurements, and the path of the machine file. Raises InvalidInput."""
    config.check()
    for name, number in (("repeat", config.repeat), ("heads", config.heads), ("head_dim", config.head_dim)):
        if number < 1:
            raise InvalidInput(f"{name}={number}: must be at least 1")
    check_seconds("seconds", config.seconds)
    if config.dtype not in ITEM_BYTES:
        raise InvalidInput(
            f"dtype={config.dtype}: {did_you_mean(config.dtype, ITEM_BYTES)}expected one of {', '.join(ITEM_BYTES)}"
        )
    if config.device not in ("cpu", "cuda"):
        raise InvalidInput(f"device={config.device}: expected cpu or cuda")
    if config.device == "cuda" and config.transport.spec != "none":
        raise InvalidInput(
            f"device=cuda is for transport=none; transport={config.transport.spec} sets the device itself: leave it out"
        )
    if config.output.path is None:
        raise InvalidInput("output.path is missing: the machine file to write, such as output.path=machine.yaml")
    check_writable(Path(config.output.path))
    sizes = CalibrationSizes(
        [parse_size(value, "rows") for value in config.rows],
        [parse_size(value, "widths") for value in config.widths],
        [parse_size(value, "messages") for value in config.messages],
    )
    settings = Settings(config.heads, config.head_dim, config.dtype, config.kernel.spec, config.repeat, config.seconds)
    return sizes, settings, Path(config.output.path)


def check_seconds(name: str, seconds: float) -> None:
    """Raise InvalidInput unless rounds can follow while they end within so many seconds."""
    if not 0 <= seconds < math.inf:
        raise InvalidInput(f"{name}={seconds:g}: expected seconds >= 0; with 0, as many rounds as repeat says")


def measure_on(
    config: CalibrateConfig,
    transport: Transport | None,
    between: Callable[[MeasuringRanks], object] = lambda ranks: None,
) -> None:
    """Measure as one rank, or alone where `transport` is None. Rank 0 prints and writes the machine file.

    `between` is called with the ranks after each round of measurements.
    """
    device = torch.device(config.device) if transport is None else rank_device(config)
    sizes, settings, path = _check(config)
    launch = detect()
    team = MeasuringRanks(transport, device, None if launch.kind == "none" else launch.local_world)
    if team.size % team.ranks_per_node:
        raise InvalidInput(
            f"{team.size} ranks on nodes of {team.ranks_per_node}: links are measured between nodes with equally "
            "many ranks; start the same number of ranks on each node"
        )

    def tell(text: str) -> None:
        if team.rank == 0:
            get_console().print(f"measuring {text}")

    calibration = calibrate(team, settings, sizes, config.machine.made(device.type), tell, between)
    if team.rank == 0:
        made = _describe_run(config, team)
        write_machine(path, calibration.machine, made=made, samples=calibration.samples, fits=calibration.fits)
        _print(calibration)


def _describe_run(config: CalibrateConfig, team: MeasuringRanks) -> dict[str, Any]:
    """Where, when and with which settings a machine was calibrated."""
    return {
        **describe_host(),
        "transport": config.transport.spec,
        "device": team.device.type,
        "ranks": team.size,
        "ranks_per_node": team.ranks_per_node,
        "threads": torch.get_num_threads(),
        **({} if team.pace is None else {"pace": team.pace}),
        "kernel": config.kernel.spec,
        "heads": config.heads,
        "head_dim": config.head_dim,
        "dtype": config.dtype,
        "repeat": config.repeat,
        "seconds": config.seconds,
    }


def _print(calibration: Calibration) -> None:
    """Print the numbers of the machine, the rates of its kernel, and the passes that check the model."""
    machine = calibration.machine
    values = ((name, getattr(machine, name)) for name in MACHINE_NUMBERS)
    print_numbers(
        "",
        [
            Number(name, format_quantity(name, value), machine.source(name))
            for name, value in values
            if value is not None
        ],
    )
    times = machine.kernel
    assert times is not None, "a calibration measures the kernel"
    rows = []
    for grid in times.grids:
        direction = "backward" if grid.backward else "forward"
        for n, rates in zip(grid.rows, grid.rates, strict=True):
            rows.append((f"{grid.shape} {direction}", f"{n:,}", "  ".join(f"{rate:.2e}" for rate in rates)))
        if grid.ragged is not None:
            factors = "  ".join(f"{factor:8.2f}" for factor in grid.ragged)
            rows.append((f"{grid.shape} {direction}", "ragged keys: rate x", factors))
    get_console().print()
    print_grid("useful flop/s of tiles, by keys [measured]", ("tile", "rows", "rates"), rows)
    if not calibration.passes:
        return
    ratios = sorted(ratio for _, ratio in machine.residuals)
    bounds = "not known: fewer than 19 passes"
    if machine.interval(1.0):
        by_length = sorted(modelled for modelled, _ in machine.residuals)
        ends = [(t, machine.interval(t) or (t, t)) for t in dict.fromkeys((by_length[0], by_length[-1]))]
        bounds = ", ".join(f"{low / t:.3f} .. {high / t:.3f} at {duration(t)}" for t, (low, high) in ends)
    counts = f"{plural(len(calibration.passes), 'kind')}, {plural(len(ratios), 'run')}"
    spread = f"{ratios[len(ratios) // 2]:.3f} median, {ratios[0]:.3f} .. {ratios[-1]:.3f}"
    get_console().print()
    print_numbers(
        "",
        [
            Number("passes", counts, "measured"),
            Number("measured / modelled", spread, "measured"),
            Number("  90 % interval", bounds, "measured"),
        ],
    )
    if len(ratios) == len(calibration.passes):
        get_console().print(
            "note: in one round each kind of pass ran once, so that intervals hold the differences between kinds, and "
            "little of the differences between runs; try repeat=5",
            soft_wrap=True,
        )
