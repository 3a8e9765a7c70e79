"""ringattn calibrate: measure this machine, print its numbers, write a machine file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ...cli.config.groups import check_choice, check_least
from ...cli.config.schema import parse_size
from ...cli.ranks import check_ranks, rank_device, start_ranks
from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...files import check_writable
from ...machine.file import write_machine
from ...machine.machine import MACHINE_NUMBERS
from ...simulator.reporting.console import Number, announce, format_quantity, get_console, print_grid, print_numbers
from ...text import duration, plural
from ...transport.base import Transport
from ...transport.launcher import detect
from ..bench.runner import describe_host
from ..calibrate.measure import Calibration, calibrate
from ..calibrate.measuring_ranks import MeasuringRanks, Settings
from .settings import CalibrateConfig


def main(config: CalibrateConfig) -> None:
    """Measure the machine, and print the path of the machine file.

    Runs on new local ranks, on the ranks of a launched job, or with transport=none in this process alone.
    """
    check_ranks(config, "none")
    check(config)
    if config.transport.spec != "none":
        start_ranks(config, measure_on, "calibrate")
    else:
        if config.device == "cuda" and not torch.cuda.is_available():
            raise InvalidInput("device=cuda: this process sees no CUDA device (ringattn doctor says why); try cpu")
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        measure_on(config, None)
    if detect().rank == 0:
        path = config.output.path
        get_console().print(f"\nwritten {path}; use it with machine=file machine.path={path}", soft_wrap=True)


def check(config: CalibrateConfig) -> tuple[Settings, Path]:
    """Check the settings before minutes are spent on measuring; returns (settings, path of the machine file).

    Raises InvalidInput.
    """
    config.check()
    check_least(config, repeat=1, heads=1, head_dim=1, seconds=0)
    check_choice("dtype", config.dtype, ITEM_BYTES)
    if config.device != "cpu" and config.transport.spec != "none":
        raise InvalidInput(
            f"device={config.device}: transport={config.transport.spec} is measured on CPUs; give device=cpu, or leave "
            "transport out"
        )
    check_choice("device", config.device, ("cpu", "cuda"))
    if config.output.path is None:
        raise InvalidInput("output.path is missing; give the machine file to write, such as output.path=machine.yaml")
    check_writable(Path(config.output.path))
    values: dict[str, Any] = {x: getattr(config, x) for x in ("heads", "head_dim", "dtype", "repeat", "seconds")}
    values |= {x: tuple(parse_size(y, x) for y in getattr(config, x)) for x in ("rows", "widths", "messages")}
    settings = Settings(**values, kernel=config.kernel.spec)
    settings.check_sizes()
    return settings, Path(config.output.path)


def measure_on(config: CalibrateConfig, transport: Transport | None) -> None:
    """Measure as one rank of `transport`, or alone if it is None.

    Rank 0 prints, and writes the machine file after each round.
    """
    device = torch.device(config.device) if transport is None else rank_device(config)
    settings, path = check(config)
    launch = detect()
    team = MeasuringRanks(transport, device, None if launch.kind == "none" else launch.local_world)
    if team.size % team.ranks_per_node:
        raise InvalidInput(
            f"{team.size} ranks on nodes of {team.ranks_per_node}: links are measured between nodes with equally "
            "many ranks; start the same number of ranks on each node"
        )
    told = announce if team.rank == 0 else lambda text: None
    made = {  # where, when and with which settings
        **describe_host(),
        "transport": config.transport.spec,
        "device": team.device.type,
        "ranks": team.size,
        "ranks_per_node": team.ranks_per_node,
        "threads": torch.get_num_threads(),
        **{name: list(x) if isinstance(x, tuple) else x for name, x in vars(settings).items()},
    }
    for number, fit in enumerate(calibrate(team, settings, config.machine.made(device.type), told), 1):
        if team.rank:
            continue
        try:
            calibration = fit()
        except InvalidInput as error:
            if number < settings.repeat:  # a later round may differ
                told(f"goes on, with nothing to keep yet: {error}")
                continue
            raise
        # After every round, so that an interruption loses one round only.
        made |= {"rounds": number, **({} if team.pace is None else {"pace": team.pace})}
        write_machine(path, calibration.machine, made=made, samples=calibration.samples, fits=calibration.fits)
    if team.rank == 0:
        _print(calibration)


def _print(calibration: Calibration) -> None:
    """Print the numbers of the machine, the rates of its kernel, and the passes that check the model."""
    machine = calibration.machine
    values = {name: value for name in MACHINE_NUMBERS if (value := getattr(machine, name)) is not None}
    print_numbers("", [Number(x, format_quantity(x, value), machine.source(x)) for x, value in values.items()])
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
    texts = {"passes": counts, "measured / modelled": spread, "  90 % interval": bounds}
    print_numbers("", [Number(name, text, "measured") for name, text in texts.items()])
    if len(ratios) == len(calibration.passes):
        text = "note: each kind of pass ran once, so the interval lacks the spread of runs; try repeat=5"
        get_console().print(text, soft_wrap=True)
