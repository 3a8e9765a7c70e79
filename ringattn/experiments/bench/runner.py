"""The benchmark runner: the columns of a case alternate A B C A B C in one run, and every raw number is kept."""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ... import __version__
from ...errors import LaunchFailure
from ...reporting import peak_memory
from ...reporting.provenance import git, source
from ...transport.base import Transport
from ...transport.launcher import run_local
from . import get_cases, get_suite
from .case import BenchCase, CaseRecord, Context, Run
from .links import NETWORK, run_nodes

#: Seconds after which the processes of a case are killed.
TIMEOUT = 3600.0


def run_suite(suite: str, names: list[str] | None, repeat: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure the cases of a suite, or the named ones; returns the record that `records.write_record` stores.

    `tell` receives a line before each case.
    """
    host = describe_host()
    cases = get_cases(suite, names)
    if any(case.links for case in cases):
        tell(f"behind {NETWORK}")
    case_records = []
    for case in cases:
        tell(f"{case.name}: {', '.join(column.name for column in case.columns)}")
        try:
            if case.links is None:
                raw = run_local(measure, case.ranks, None, suite, case.name, repeat, timeout=TIMEOUT)
            else:
                raw = run_nodes(measure, case.links, suite, case.name, repeat, timeout=TIMEOUT)
        except LaunchFailure as error:
            if case.measure is None:
                raise
            tell(f"{case.name} FAILED: {error}")  # the other cases have processes of their own
            raw = [{"times": {}, "errors": {}, "details": {"failed": str(error)}}]
        case_records.append(summarise_case(case, raw))
    record = {
        "suite": suite,
        "repeat": repeat,
        "machine": host,
        "mixed": host["source"] != describe_host()["source"],
        "kind": cases[0].settings.get("kind", "measured"),
        "cases": case_records,
    }
    conclude = get_suite(suite).conclude
    return {**record, "summary": conclude(case_records)} if conclude else record


def measure(rank: int, transport: Transport | None, suite: str, name: str, repeat: int) -> dict[str, Any]:
    """Raw numbers of one rank of a case, in a process of its own."""
    (case,) = get_cases(suite, [name])
    return measure_case(case, rank, transport, repeat)


def measure_case(case: BenchCase, rank: int, transport: Transport | None, repeat: int) -> dict[str, Any]:
    """Raw numbers of one rank: a warm-up, the check of its results, then `repeat` rounds of every column.

    {"times": seconds by column, "errors": by name}, or {"bytes": by round, "allowed": bytes, "errors": {}}.
    """
    context = Context(rank, case.ranks, case.settings, transport)
    repeat = min(repeat, case.rounds or repeat)
    if case.measure is not None:
        return case.measure(context, repeat)
    if case.formula_bytes is not None:
        return _measure_memory(case, context, repeat)
    runs = {}
    for column in case.columns:
        runs[column.name] = (column.threads, column.make(context))
    results = {name: _time_run(*run)[1] for name, run in runs.items()}
    errors = case.check(context, results) if case.check else {}
    del results
    return {"times": time_rounds(runs, repeat), "errors": errors}


def time_rounds(
    runs: dict[str, tuple[int, Run | None]], repeat: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every column in every round, by (threads, run) of each column. Columns alternate within a round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            times[name].append(_time_run(*run, clock=clock)[0])
    return times


def _time_run(threads: int, run: Run | None, clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """(seconds, result) of one run between two barriers, so that the slowest rank counts."""
    torch.set_num_threads(threads)
    _barrier()
    start = clock()
    result = run() if run is not None else None
    _barrier()
    return clock() - start, result


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _measure_memory(case: BenchCase, context: Context, repeat: int) -> dict[str, Any]:
    """The rise of the resident peak over the state before the inputs exist, in bytes, run by run.

    A run of a few tokens comes first: it loads libraries and opens connections.
    """
    assert case.formula_bytes is not None
    peak_memory.return_freed()
    (column,) = case.columns
    torch.set_num_threads(column.threads)
    small = column.make(replace(context, settings={**context.settings, "tokens": 16 * context.ranks}))
    if small is not None:
        small()
    del small
    rises = []
    for _ in range(repeat):
        _barrier()
        base = peak_memory.resident()
        peak_memory.reset_peak()
        run = column.make(context)
        if run is not None:
            run()
        rises.append(peak_memory.peak() - base)
        del run
    return {"bytes": rises, "allowed": case.formula_bytes(context), "errors": {}}


def summarise_case(case: BenchCase, raw: list[dict[str, Any]]) -> CaseRecord:
    """The record of a case: medians, spreads and ratios of the raw numbers of its ranks, with the raw numbers."""
    record: CaseRecord = {
        "case": case.name,
        "ranks": case.ranks,
        "settings": case.settings,
        "errors": raw[0]["errors"],
        "notes": [*case.notes, *([f"network: {NETWORK}"] if case.links else [])],
    }
    if case.links is not None:
        record["links"] = asdict(case.links)
    if case.formula_bytes is not None:
        worst = max(max(rank["bytes"]) / rank["allowed"] for rank in raw)
        record["memory"] = {
            "peak_bytes": [rank["bytes"] for rank in raw],
            "formula_bytes": [rank["allowed"] for rank in raw],
            "ratio": worst,
            "limit": case.limit,
            "met": case.limit is None or worst <= case.limit,
        }
        return record
    # The barriers make a run last equally long on all ranks: the times of rank 0 are those of all ranks.
    times = raw[0]["times"]
    record |= {name: raw[0][name] for name in ("details",) if name in raw[0]}
    record["columns"] = {
        column.name: {"threads": column.threads, "seconds": times[column.name], **_spread(times[column.name])}
        for column in case.columns
        if column.name in times
    }
    record["ratios"] = []
    for ratio in case.ratios:
        if not {ratio.over, ratio.under} <= times.keys():
            continue
        values = [over / under * ratio.work for over, under in zip(times[ratio.over], times[ratio.under], strict=True)]
        met = None if ratio.target is None else median(values) >= ratio.target
        record["ratios"].append(
            {"ratio": ratio.label, "rounds": values, **_spread(values), "target": ratio.target, "met": met}
        )
    return {**record, "summary": case.summarise(record)} if case.summarise else record


def _spread(values: list[float]) -> dict[str, float]:
    middle, least, most = median(values), min(values), max(values)
    return {"median": middle, "min": least, "max": most, "spread": (most - least) / middle}


def describe_host() -> dict[str, Any]:
    """Hardware, versions, commit and date of a measurement."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "ringattn": __version__,
        "commit": git("rev-parse", "--short", "HEAD"),
        "source": source(),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(re.findall(r"^(model name|model|cpu family)\s*: (.*)$", info.read_text(), re.MULTILINE))
        if "model name" in fields:
            return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()
