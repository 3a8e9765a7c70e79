"""ringattn calibrate: measure this machine, print what was found, write a machine file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..config.checks import check_needs
from ..config.schema import CalibrateConfig, parse_size
from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput, did_you_mean, plural
from ..experiments.bench.runner import describe_host
from ..experiments.calibrate.measure import Calibration, CalibrationSizes, calibrate
from ..experiments.calibrate.measuring_ranks import MeasuringRanks
from ..experiments.calibrate.passes import Settings
from ..files import check_writable
from ..machine.file import write_machine
from ..machine.machine import MACHINE_NUMBERS, Machine
from ..reporting.console import Number, console, grid, quantity, show
from ..transport.base import Transport
from ..transport.launcher import detect
from .ranks import check, device, start

TRANSPORTS = ("gloo", "mpi", "nccl", "none")


def main(config: CalibrateConfig) -> None:
    """Measure, and say where the machine file is."""
    measure(config)
    if detect().rank == 0:
        path = config.output.path
        console().print(f"\nwritten {path}; use it with machine=file machine.path={path}", soft_wrap=True)


def measure(config: CalibrateConfig) -> None:
    """Measure on local ranks, on those of a launched job, or in this process alone (transport=none)."""
    check(config, TRANSPORTS)
    _before(config)
    if config.transport.spec != "none":
        start(config, _worker, "calibrate")
        return
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device=cuda: this process sees no CUDA device (ringattn doctor tells why); try device=cpu")
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    _measure(config, None, torch.device(config.device))


def _before(config: CalibrateConfig) -> tuple[CalibrationSizes, Settings]:
    """What can be wrong is said before minutes are spent on measuring."""
    check_needs("calibrate", config)
    for name in ("repeat", "heads", "head_dim"):
        if getattr(config, name) < 1:
            raise InvalidInput(f"{name}={getattr(config, name)}: must be at least 1")
    if config.dtype not in ITEM_BYTES:
        raise InvalidInput(
            f"dtype={config.dtype}: {did_you_mean(config.dtype, ITEM_BYTES)}expected one of {', '.join(ITEM_BYTES)}"
        )
    if config.device not in ("cpu", "cuda"):
        raise InvalidInput(f"device={config.device}: expected cpu or cuda")
    if config.device == "cuda" and config.transport.spec != "none":
        raise InvalidInput(f"device=cuda is for transport=none; {config.transport.spec} says itself where tensors are")
    if config.output.path is None:
        raise InvalidInput("output.path is missing: the machine file to write, such as output.path=machine.yaml")
    check_writable(Path(config.output.path))
    sizes = CalibrationSizes(*(_sizes(config, name) for name in ("rows", "widths", "messages")))
    return sizes, Settings(config.heads, config.head_dim, config.dtype, config.kernel.spec, config.repeat)


def _sizes(config: CalibrateConfig, name: str) -> Sequence[int]:
    return [parse_size(value, name) for value in getattr(config, name)]


def _worker(config: CalibrateConfig, transport: Transport) -> None:
    _measure(config, transport, device(config))


def _measure(config: CalibrateConfig, transport: Transport | None, where: torch.device) -> None:
    sizes, settings = _before(config)
    launch = detect()
    nodes = None if launch.kind == "none" else launch.local_world
    team = MeasuringRanks(transport, where, nodes)
    if team.size % team.ranks_per_node:
        raise InvalidInput(
            f"{team.size} ranks on nodes of {team.ranks_per_node}: links are measured between nodes with equally many ranks; start as "
            "many on each"
        )
    tell = (lambda text: console().print(f"measuring {text}")) if team.rank == 0 else (lambda text: None)
    found = calibrate(team, settings, sizes, config.machine.made(where.type), tell)
    if team.rank == 0:
        assert config.output.path is not None
        path = Path(config.output.path)
        write_machine(path, found.machine, made=_made(config, team), samples=found.samples, fits=found.fits)
        _show(found, settings.repeat)


def _made(config: CalibrateConfig, team: MeasuringRanks) -> dict[str, Any]:
    """Where, when and with what."""
    return {
        **describe_host(), "transport": config.transport.spec, "device": team.device.type, "ranks": team.size,
        "ranks_per_node": team.ranks_per_node, "threads": torch.get_num_threads(), "kernel": config.kernel.spec,
        "heads": config.heads, "head_dim": config.head_dim, "dtype": config.dtype, "repeat": config.repeat,
    }  # fmt: skip


def _show(found: Calibration, repeat: int) -> None:
    machine = found.machine
    show("", [Number(name, text, machine.source(name)) for name, text in _values(machine)])
    times = machine.kernel
    assert times is not None
    rows = []
    for one in times.grids:
        way = "backward" if one.backward else "forward"
        for n, line in zip(one.rows, one.rates, strict=True):
            rows.append((f"{one.shape} {way}", f"{n:,}", "  ".join(f"{rate:.2e}" for rate in line)))
    console().print()
    grid("useful flop/s of tiles, by keys [measured]", ("tile", "rows", "rates"), rows)
    if found.passes:
        console().print()
        ratios = sorted(machine.residuals)
        inside = machine.interval(1.0)
        text = f"{inside[0]:.3f} .. {inside[1]:.3f}" if inside else "not known: fewer than 19 passes"
        show("", [
            Number("passes", f"{plural(len(found.passes), 'kind')}, {plural(len(ratios), 'run')}", "measured"),
            Number("measured / modelled", f"{ratios[len(ratios) // 2]:.3f} median, {ratios[0]:.3f} .. {ratios[-1]:.3f}",
                   "measured"),
            Number("90 % interval of it", text, "measured"),
        ])  # fmt: skip
        if repeat == 1:
            console().print(
                "note: repeat=1: each kind of pass ran once, so that intervals hold what differs between kinds, and little of what "
                "differs from run to run; try repeat=5",
                soft_wrap=True,
            )


def _values(machine: Machine) -> list[tuple[str, str]]:
    values = ((name, getattr(machine, name)) for name in MACHINE_NUMBERS)
    return [(name, quantity(name, value)) for name, value in values if value is not None]
