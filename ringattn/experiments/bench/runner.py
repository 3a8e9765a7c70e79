"""The one benchmark runner: columns alternate A B C A B C in one run, every raw number is kept."""

from __future__ import annotations

import datetime
import json
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
from ...files import make_folder, write_text
from ...reporting import peak_memory as memory
from ...reporting.provenance import git, source
from ...runtime.memory_pool import memory_pool
from ...transport.base import Transport
from ...transport.launcher import run_local
from . import SUMMARIES, get_cases
from .case import BenchCase, Context, Run
from .network import fabric, run_nodes

Step = Callable[[], float]
#: Seconds that one suite may take before its processes are killed.
TIMEOUT = 3600.0
MIXED = "**The code changed during this run: its cases measured different versions. Run it again.**"


def run_suite(suite: str, names: list[str] | None, repeat: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure a suite; the record that `write` stores. `tell` hears what is under way."""
    results, before = [], machine()
    cases = get_cases(suite, names)
    if any(case.links for case in cases):
        tell(f"behind {fabric()}")
    for case in cases:
        tell(f"{case.name}: {', '.join(column.name for column in case.columns)}")
        if case.links is None:
            raw = run_local(measure, case.ranks, None, suite, case.name, repeat, timeout=TIMEOUT, group_timeout=TIMEOUT)
        else:
            raw = run_nodes(measure, case.links, suite, case.name, repeat, timeout=TIMEOUT, group_timeout=TIMEOUT)
        results.append(summarise(case, raw))
    mixed = before["source"] != machine()["source"]
    record = {
        "suite": suite, "repeat": repeat, "machine": before, "mixed": mixed, "kind": "measured", "cases": results
    }  # fmt: skip
    return {**record, "summary": SUMMARIES[suite](results)} if suite in SUMMARIES else record


def measure(rank: int, transport: Transport | None, suite: str, name: str, repeat: int) -> dict[str, Any]:
    """One rank of a case, in a process of its own: check, warm up, then rounds of every column."""
    (case,) = get_cases(suite, [name])
    context = Context(rank, case.ranks, case.settings, transport)
    repeat = min(repeat, case.rounds or repeat)
    if case.memory is not None:
        return _measure_memory(case, context, repeat)
    runs = {}
    for column in case.columns:
        runs[column.name] = (column.threads, column.make(context))
    first = {column: _once(*run)[1] for column, run in runs.items()}
    errors = case.check(context, first) if case.check else {}
    del first
    return {"times": rounds(runs, repeat), "errors": errors}


def rounds(
    runs: dict[str, tuple[int, Run | None]], repeat: int, step: Step = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every column in every round; the columns take turns within a round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeat):
        for name, run in runs.items():
            times[name].append(_once(*run, step=step)[0])
    return times


def _once(threads: int, run: Run | None, step: Step = time.perf_counter) -> tuple[float, Any]:
    """One run between two barriers, so that the slowest rank counts."""
    torch.set_num_threads(threads)
    _barrier()
    start = step()
    result = run() if run is not None else None
    _barrier()
    return step() - start, result


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _measure_memory(case: BenchCase, context: Context, repeat: int) -> dict[str, Any]:
    """Rise of the resident peak over the state before the inputs exist, run by run.

    A run of a few tokens comes first: it loads libraries and opens connections.
    """
    assert case.memory is not None
    memory.return_freed()
    (column,) = case.columns
    torch.set_num_threads(column.threads)
    small = column.make(replace(context, settings={**context.settings, "tokens": 16 * context.ranks}))
    if small is not None:
        small()
    del small
    rises = []
    for _ in range(repeat):
        _barrier()
        base = memory.resident()
        memory.reset_peak()
        run = column.make(context)
        if run is not None:
            run()
        rises.append(memory.peak() - base)
        del run
        memory_pool().clear()
    return {"bytes": rises, "allowed": case.memory(context), "errors": {}}


def summarise(case: BenchCase, raw: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, spread and ratios of a case from what its ranks measured."""
    summary: dict[str, Any] = {
        "case": case.name,
        "ranks": case.ranks,
        "settings": case.settings,
        "errors": raw[0]["errors"],
        "notes": [*case.notes, *([f"network: {fabric()}"] if case.links else [])],
    }
    if case.links is not None:
        summary["links"] = asdict(case.links)
    if case.memory is not None:
        shares = [max(rank["bytes"]) / rank["allowed"] for rank in raw]
        summary["memory"] = {
            "peak_bytes": [rank["bytes"] for rank in raw],
            "formula_bytes": [rank["allowed"] for rank in raw],
            "ratio": max(shares),
            "limit": case.limit,
            "met": case.limit is None or max(shares) <= case.limit,
        }
        return summary
    # The barriers make a run last equally long on all ranks; rank 0 speaks for them.
    times = raw[0]["times"]
    summary["columns"] = {
        column.name: {"threads": column.threads, "seconds": times[column.name], **_spread(times[column.name])}
        for column in case.columns
    }
    summary["ratios"] = []
    for ratio in case.ratios:
        values = [a / b * ratio.work for a, b in zip(times[ratio.over], times[ratio.under], strict=True)]
        middle = median(values)
        summary["ratios"].append(
            {
                "ratio": ratio.label,
                "rounds": values,
                **_spread(values),
                "target": ratio.target,
                "met": None if ratio.target is None else middle >= ratio.target,
            }
        )
    return {**summary, "summary": case.summary(summary)} if case.summary else summary


def _spread(values: list[float]) -> dict[str, float]:
    middle, least, most = median(values), min(values), max(values)
    return {"median": middle, "min": least, "max": most, "spread": (most - least) / middle}


def machine() -> dict[str, Any]:
    """Hardware, versions and commit: what a number means nothing without."""
    return {
        "cpu": _cpu(),
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


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = dict(re.findall(r"^(model name|model|cpu family)\s*: (.*)$", info.read_text(), re.MULTILINE))
        if "model name" in found:
            return f"{found['model name']} (family {found.get('cpu family')}, model {found.get('model')})"
    return platform.processor() or platform.machine()


def write(record: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Store a record as dated JSON and Markdown; returns both paths."""
    make_folder(folder)
    words = re.sub(r"[^a-z0-9]+", "-", str(record["machine"]["cpu"]).lower()).strip("-")
    stem = f"{record['suite']}_{words}_{record['machine']['cores']}cores_{record['machine']['date'][:10]}"
    number = 1
    while (folder / f"{stem}_{number}.json").exists():
        number += 1
    data, text = (folder / f"{stem}_{number}.{suffix}" for suffix in ("json", "md"))
    write_text(data, json.dumps(record, indent=1) + "\n")
    write_text(text, markdown(record))
    return data, text


def markdown(record: dict[str, Any]) -> str:
    """The record for people. All numbers are measured."""
    m = record["machine"]
    lines = [
        f"# Suite {record['suite']}, {m['date'][:10]}",
        "",
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.1f} GiB; torch {m['torch']}, python {m['python']}, "
        f"ringattn {m['ringattn']} at commit {m['commit']}{' with local changes' if m['dirty'] else ''}; "
        f"{record['repeat']} alternating rounds (fewer of the longest cases) after one warm-up. All numbers are measured; ratios are medians of the "
        "rounds' own ratios, [min .. max].",
        *(["", MIXED] if record["mixed"] else []),
        "",
        "| case | columns: median seconds [min .. max] | ratio | target | met | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows(record):
        lines.append("| " + " | ".join(row) + " |")
    notes = dict.fromkeys(note for case in record["cases"] for note in case["notes"])
    lines += ["", *judged(record)]
    lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, "", "Settings and every raw number are in the JSON file of the same name.", ""])


def judged(record: dict[str, Any]) -> list[str]:
    """What the suite concludes, case by case and as a whole."""
    found = [case for case in record["cases"] if "summary" in case]
    if not found:
        return []
    names = list(found[0]["summary"])
    texts = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in case["summary"].values()] for case in found]
    whole = record["summary"]
    return [
        f"**{whole['summary']}; target >= {whole['target']}: {_yes(whole['met'])}**",
        "",
        "| " + " | ".join(["case", *names]) + " |",
        "|---" * (len(names) + 1) + "|",
        *("| " + " | ".join([case["case"], *text]) + " |" for case, text in zip(found, texts, strict=True)),
    ]


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per ratio: case, columns, ratio, target, met, error."""
    table: list[tuple[str, ...]] = []
    for case in record["cases"]:
        errors = "; ".join(f"{name} {value:.1e}" for name, value in case["errors"].items())
        if "memory" in case:
            found = case["memory"]
            peak, formula = max(map(max, found["peak_bytes"])), max(found["formula_bytes"])
            text = f"peak {peak / 2**20:.1f} MiB, formula {formula / 2**20:.1f} MiB"
            limit = "" if found["limit"] is None else f"<= {found['limit']}"
            table.append((case["case"], text, f"{found['ratio']:.3f}", limit, _yes(found["met"]), errors))
            continue
        text = ", ".join(f"{n} {_show(c, 4)} ({c['threads']} threads)" for n, c in case["columns"].items())
        for ratio in case["ratios"]:
            target = "" if ratio["target"] is None else f">= {ratio['target']}"
            name = f"{ratio['ratio']} = {_show(ratio, 3)}"
            table.append((case["case"], text, name, target, _yes(ratio["met"]), errors))
            text = errors = ""
    return table


def _show(values: dict[str, float], digits: int) -> str:
    return f"{values['median']:.{digits}f} [{values['min']:.{digits}f} .. {values['max']:.{digits}f}]"


def _yes(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "NO"
