"""Validation of the timing model: calibrate, or read a machine file, then compare with real Gloo ranks of this machine."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config.checks import check_needs
from ..config.groups import ConfigGroup, OutputGroup, TransportGroup
from ..config.schema import CalibrateConfig, SimulateConfig, parse_size
from ..errors import InvalidInput, LaunchFailure, RingAttentionError, plural
from ..experiments.calibrate.measuring_ranks import MeasuringRanks
from ..experiments.calibrate.noise import sizes_between
from ..experiments.calibrate.passes import Pass, Settings, measure_passes
from ..experiments.calibrate.published import predict_published
from ..experiments.calibrate.validate import (
    LEVEL,
    Errors,
    held_out,
    oversubscription,
    summarise_errors,
    validation_cases,
)
from ..files import STDOUT, check_json, write_json
from ..machine.file import read_machine, read_record
from ..machine.kernel_times import BEYOND
from ..machine.machine import Machine
from ..reporting.console import Number, console, grid, show
from ..text import duration
from ..transport.launcher import detect, run_local
from ..transport.torchdist import TorchDist
from . import calibrate
from .ranks import check_threads


def main(config: SimulateConfig) -> None:
    """Print errors and coverage of held-out passes on every number of `ranks`, and of a published table."""
    _check(config)
    if config.output.path == STDOUT:
        raise InvalidInput(
            "output.path=-: mode=validate prints tables while it measures; give a file, such as output.path=errors.json"
        )
    check_json(config.output.path)
    with tempfile.TemporaryDirectory(prefix="ringattn-") as scratch:
        path = Path(config.machine.path or Path(scratch) / "machine.yaml")
        if config.machine.path is None:
            _rows(config, [parse_size(n, "validate.rows") for n in config.validate.rows])
            calibrate.measure(_calibration(config, path))
        machine, made = read_machine(path), read_record(path).get("made", {})
    if machine.kernel is None or (made.get("transport"), made.get("device")) != ("gloo", "cpu"):
        raise InvalidInput(
            f"machine.path={path}: the validation compares Gloo ranks of this machine with what was calibrated on such; make "
            "the file with ringattn calibrate transport=gloo, or leave machine out to calibrate now"
        )
    rows = _rows(config, machine.kernel.grid("dense", False).rows)
    record: dict[str, Any] = {"kind": "measured", "machine": made, "rows": list(rows), "ranks": []}
    for ranks in config.validate.ranks:
        passes = _on(ranks, rows, machine, made, config)
        found = summarise_errors(passes, machine)
        _show(ranks, passes, machine, found)
        record["ranks"].append({"ranks": ranks, **asdict(found), "passes": [_plain(one) for one in passes]})
    _show_published()
    if config.output.path:
        write_json(config.output.path, record)


def _check(config: SimulateConfig) -> None:
    launch = detect()
    if launch.kind != "none":
        raise InvalidInput(
            f"{launch.kind} started this process: the validation starts its own ranks, several numbers of them; start it alone"
        )
    check_needs("validate", config)
    options = config.validate
    if not options.ranks or min(options.ranks) < 2:
        raise InvalidInput(f"validate.ranks={options.ranks}: expected numbers of ranks >= 2, such as [2,4]")
    check_threads("validate.threads", options.threads)
    if options.repeat < 1:
        raise InvalidInput(f"validate.repeat={options.repeat}: must be at least 1")


def _rows(config: SimulateConfig, calibrated: Sequence[int]) -> list[int]:
    """Rows per rank of the compared passes."""
    given = config.validate.held_out
    rows = held_out(calibrated) if given is None else [parse_size(n, "validate.held_out") for n in given]
    seen = sorted({*rows} & {*calibrated, *sizes_between(calibrated)})
    if seen or not rows:
        raise InvalidInput(
            f"validate.held_out={rows}: {seen or 'nothing'} "
            f"{'were calibrated' if seen else 'to compare'}; give sizes other than {sorted({*calibrated, *sizes_between(calibrated)})}"
        )
    most = int(BEYOND * max(calibrated))
    for n in rows:
        if not 1 <= n <= most:
            raise InvalidInput(
                f"validate.held_out={rows}: {n:,} rows per rank cannot be modelled from calibrated sizes that end at "
                f"{max(calibrated):,}, beyond {BEYOND:g} times which nothing is extrapolated; give 1 .. {most:,}, or calibrate larger "
                "sizes (validate.rows=[...], or rows=[...] of ringattn calibrate)"
            )
    return rows


def _calibration(config: SimulateConfig, path: Path) -> CalibrateConfig:
    """A calibration on the first number of ranks."""
    options = config.validate
    return CalibrateConfig(
        transport=TransportGroup("gloo"), kernel=ConfigGroup("auto"), machine=config.machine, output=OutputGroup(str(path)),
        ranks=options.ranks[0], heads=config.heads, head_dim=config.head_dim, dtype=config.dtype, rows=options.rows,
        widths=options.widths, messages=options.messages, repeat=options.repeat, threads=options.threads,
        timeout=options.timeout,
    )  # fmt: skip


def _on(ranks: int, rows: Sequence[int], machine: Machine, made: dict[str, Any], config: SimulateConfig) -> list[Pass]:
    options, cores = config.validate, os.cpu_count() or 1
    threads = options.threads or made["threads"]
    settings = Settings(made["heads"], made["head_dim"], made["dtype"], made["kernel"], options.repeat)
    slow = oversubscription(ranks, threads, cores, (made["ranks"], made["threads"]))
    console().print(
        f"measuring {plural(len(validation_cases(rows, ranks)), 'kind')} of passes on {plural(ranks, 'rank')}"
    )
    try:
        found: list[list[Pass]] = run_local(
            _rank, ranks, rows, machine, settings, slow, options.timeout, timeout=math.inf,
            group_timeout=options.timeout, threads=threads,
        )  # fmt: skip
    except LaunchFailure as error:
        raise RingAttentionError(str(error)) from None
    return found[0]


def _rank(
    rank: int, rows: Sequence[int], machine: Machine, settings: Settings, slow: float, timeout: float
) -> list[Pass]:
    team = MeasuringRanks(TorchDist(timeout=timeout), torch.device("cpu"))
    return measure_passes(team, validation_cases(rows, team.size), machine, settings, slow)


def _plain(one: Pass) -> dict[str, Any]:
    return {**asdict(one.case), "seconds": list(one.seconds), "modelled": one.modelled}


def _show(ranks: int, passes: list[Pass], machine: Machine, found: Errors) -> None:
    lines = []
    for one in passes:
        inside = machine.interval(one.modelled, LEVEL)
        middle = sorted(one.seconds)[len(one.seconds) // 2]
        lines.append(
            (
                str(one.case), duration(middle), duration(one.modelled), f"{one.modelled / middle - 1:+.1%}",
                f"{duration(inside[0])} .. {duration(inside[1])}" if inside else "not known",
            )
        )  # fmt: skip
    console().print()
    header = ("pass", "measured", "modelled", "error", f"{LEVEL:.0%} interval [modelled]")
    grid(f"{ranks} Gloo ranks", header, lines)
    coverage = "not known: the machine file has too few residuals"
    if found.coverage is not None:
        coverage = f"{found.coverage:.1%} of {plural(found.runs, 'run')}"
    show(f"modelled against measured, {ranks} ranks, {found.passes} held-out passes", [
        Number("signed bias", f"{found.bias:+.1%}", "measured"),
        Number("median absolute error", f"{found.median:.1%}", "measured"),
        Number("P90 absolute error", f"{found.p90:.1%}, largest {found.worst:.1%}", "measured"),
        Number(f"inside the {LEVEL:.0%} interval", coverage, "measured"),
    ])  # fmt: skip


def _show_published() -> None:
    lines = [
        (one.name, f"{one.measured:.1f}", f"{one.modelled:.1f}", f"{one.error:+.1%}") for one in predict_published()
    ]
    console().print()
    title = "published rings of zhuzilin/ring-flash-attention, iterations/s, without a fit; zigzag is an upper bound"
    grid(title, ("8 GPUs, 64k tokens, causal", "measured there", "modelled", "error"), lines)
