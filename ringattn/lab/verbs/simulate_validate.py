"""ringattn simulate mode=validate: the timing model, calibrated or from a machine file, against real Gloo ranks."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...cli.config.groups import ConfigGroup, OutputGroup, TransportGroup, check_least, refuse_stdout
from ...cli.config.schema import SimulateConfig, ValidateGroup, parse_size
from ...cli.ranks import check_ranks, check_threads, start_ranks
from ...errors import InvalidInput
from ...files import Count, Positive, as_kind, check_json, write_json
from ...machine.file import read_calibration
from ...machine.kernel_times import BEYOND
from ...machine.machine import Machine
from ...simulator.reporting.console import get_console, print_grid
from ...text import duration, plural
from ...transport.launcher import detect, run_local
from ...transport.torchdist import TorchDist
from ..calibrate.kernels import find_kernel, make_reference
from ..calibrate.measuring_ranks import MeasuringRanks, Settings
from ..calibrate.passes import (
    LEVEL,
    Pass,
    PassErrors,
    Runs,
    held_out,
    model_passes,
    sizes_between,
    summarise_groups,
    time_pass,
    validation_cases,
)
from . import calibrate
from .settings import CalibrateConfig


def main(config: SimulateConfig) -> None:
    """Print the errors and the coverage of held-out passes for each number of ranks, after a calibration if needed."""
    _check(config)
    with tempfile.TemporaryDirectory(prefix="ringattn-") as scratch:
        path = Path(config.machine.path or Path(scratch) / "machine.yaml")
        if config.machine.path is None:
            # Invalid held-out rows raise before minutes are spent on the calibration.
            _held_out_rows(config, [parse_size(n, "validate.rows") for n in config.validate.rows])
            calibration = _calibration_config(config, path)
            check_ranks(calibration, "none")
            calibrate.check(calibration)
            start_ranks(calibration, calibrate.measure_on, "calibrate")
        machine, made, calibrated = _read(path)
    assert machine.kernel is not None, "checked"
    rows, options = _held_out_rows(config, machine.kernel.grid("dense", False).rows), config.validate
    settings = replace(calibrated, repeat=options.repeat, seconds=options.seconds)
    runs = _measure(rows, settings, options)
    record: dict[str, Any] = {"kind": "measured", "machine": made, "rows": list(rows), "ranks": []}
    for ranks in options.ranks:
        cases, on_node = validation_cases(rows, ranks), machine.changed(ranks_per_node=ranks)
        passes = model_passes(cases, runs[ranks], ranks, on_node, settings)
        groups = summarise_groups(passes, machine, ranks)
        _print(ranks, passes, machine, groups)
        errors = {name: asdict(group) for name, group in groups.items()}
        record["ranks"].append({"ranks": ranks, "errors": errors, "passes": [one.record for one in passes]})
    if config.output.path is not None:
        write_json(config.output.path, record)


@dataclass(frozen=True, kw_only=True)
class Calibrated(Settings):
    """The settings of a calibration, as its machine file holds them."""

    threads: Count
    pace: Positive | None = None


def _read(path: Path) -> tuple[Machine, dict[str, Any], Calibrated]:
    """The machine of a file, and how it was measured. Raises InvalidInput unless calibrated with Gloo on CPUs."""
    machine, made = read_calibration(path)
    if machine.kernel is None or (made.get("transport"), made.get("device")) != ("gloo", "cpu"):
        raise InvalidInput(
            f"machine.path={path}: the validation needs a calibration of Gloo ranks on CPUs; make the file with "
            "ringattn calibrate transport=gloo, or leave machine out to calibrate now"
        )
    return machine, made, as_kind(made, Calibrated, f"{path}: made")


def _check(config: SimulateConfig) -> None:
    """Raise InvalidInput where the settings cannot be used."""
    launch = detect()
    if launch.kind != "none":
        raise InvalidInput(
            f"{launch.kind} started this process, but the validation starts its own ranks; run ringattn without a "
            "launcher"
        )
    options = config.validate
    if not options.ranks or min(options.ranks) < 2:
        raise InvalidInput(f"validate.ranks={options.ranks}: expected numbers of ranks >= 2, such as [2,4]")
    check_threads("validate.threads", options.threads)
    check_least(options, "validate.", repeat=1, seconds=0)
    refuse_stdout("output.path", config.output.path, "mode=validate prints tables; try output.path=errors.json")
    check_json(config.output.path)


def _held_out_rows(config: SimulateConfig, calibrated: Sequence[int]) -> list[int]:
    """The rows per rank of the passes to compare, sizes that were not calibrated. Raises InvalidInput."""
    sizes = config.validate.held_out
    rows = held_out(calibrated) if sizes is None else [parse_size(n, "validate.held_out") for n in sizes]
    known = {*calibrated, *sizes_between(calibrated)}
    measured_rows = sorted({*rows} & known)
    if measured_rows or not rows:
        problem = f"{measured_rows} were calibrated" if measured_rows else "nothing to compare"
        raise InvalidInput(f"validate.held_out={rows}: {problem}; give sizes other than {sorted(known)}")
    max_rows = int(BEYOND * max(calibrated))
    for n in rows:
        if not 1 <= n <= max_rows:
            raise InvalidInput(
                f"validate.held_out={rows}: {n:,} rows per rank cannot be modelled from calibrated sizes up to "
                f"{max(calibrated):,}: nothing is extrapolated beyond {BEYOND:g} times the largest size; give 1 .. "
                f"{max_rows:,}, or calibrate larger sizes (validate.rows=[...], or rows=[...] of ringattn calibrate)"
            )
    return rows


def _calibration_config(config: SimulateConfig, path: Path) -> CalibrateConfig:
    """The configuration of a calibration that writes to `path`, on the first of the numbers of ranks."""
    options = vars(config.validate)
    return CalibrateConfig(
        transport=TransportGroup("gloo"),
        kernel=ConfigGroup("auto"),
        output=OutputGroup(str(path)),
        ranks=config.validate.ranks[0],
        **{name: getattr(config, name) for name in ("machine", "heads", "head_dim", "dtype")},
        **{name: options[name] for name in ("rows", "widths", "messages", "repeat", "seconds", "threads", "timeout")},
    )


def _measure(rows: Sequence[int], settings: Calibrated, options: ValidateGroup) -> dict[int, list[Runs]]:
    """The runs of the held-out passes by number of ranks, on new local ranks with the calibration's threads."""
    count = max(options.ranks)
    each = plural(len(validation_cases(rows, count)), "kind")
    get_console().print(f"measuring {each} of passes on {' and '.join(map(str, options.ranks))} ranks")
    runs: list[dict[int, list[Runs]]] = run_local(
        _measure_rank,
        count,
        *(rows, settings, options),
        timeout=math.inf,
        group_timeout=options.timeout,
        threads=options.threads or settings.threads,
        show=True,
    )
    return runs[0]


def _measure_rank(
    rank: int, rows: Sequence[int], settings: Calibrated, options: ValidateGroup
) -> dict[int, list[Runs]]:
    """The runs of each pass by number of ranks, measured by one rank in rounds, at the pace of the calibration."""
    device, timeout = torch.device("cpu"), options.timeout
    everyone = MeasuringRanks(TorchDist(timeout=timeout), device)
    groups = {count: dist.new_group(range(count)) for count in options.ranks}  # collective, of all ranks
    teams = {
        count: MeasuringRanks(TorchDist(group, timeout=timeout), device)
        for count, group in groups.items()
        if rank < count
    }
    if settings.pace is not None:
        for team in teams.values():
            team.keep_pace(make_reference(find_kernel(settings, device), settings, device), settings.pace)
    rounds: dict[int, list[Runs]] = {count: [] for count in teams}
    for number in everyone.rounds(settings):
        for count, team in teams.items():
            cases = validation_cases(rows, count)
            rounds[count].append(tuple(time_pass(team, case, settings, warm_up=not number) for case in cases))
    return {count: list(zip(*of_ranks, strict=True)) for count, of_ranks in rounds.items()}


def _print(ranks: int, passes: list[Pass], machine: Machine, groups: dict[str, PassErrors]) -> None:
    """Print a table of the passes, and a table of the errors by group."""
    rows = []
    for one in passes:
        interval, measured = machine.interval(one.modelled, LEVEL), median(one.seconds)
        bounds = " .. ".join(map(duration, interval)) if interval else "not known"
        error = f"{one.modelled / measured - 1:+.0%}"
        rows.append((str(one.case), duration(measured), duration(one.modelled), error, bounds))
    get_console().print()
    print_grid(f"{ranks} Gloo ranks", ("pass", "measured", "modelled", "error", f"{LEVEL:.0%} interval"), rows)
    get_console().print()
    table = []
    for name, e in groups.items():
        unknown = "not known: too few residuals"
        coverage = unknown if e.coverage is None else f"{e.coverage:.1%} of {plural(e.runs, 'run')}"
        table.append((name, str(e.rows), str(e), f"{e.worst:.1%}", coverage))
    columns = ("passes", "number", "median / P90 / mean error", "largest", f"in {LEVEL:.0%} interval")
    print_grid(f"modelled against measured, {ranks} ranks, held-out passes [measured]", columns, table)
