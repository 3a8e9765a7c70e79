"""The benchmark runner: the columns of a case alternate (A B C A B C) in one run, and every raw number is stored.

Each case runs in its own processes, so that it cannot disturb other cases, may run out of memory, and has its own peak.
Its record is stored as soon as it is measured: an interrupted run with the same code and settings continues there.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import resource
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ... import __version__
from ...errors import LaunchFailure, RingAttentionError
from ...runtime import peak_memory
from ...text import duration
from ...transport.launcher import run_local
from ...transport.records import exchange_values
from ...transport.torchdist import TorchDist
from ..pages.journal import git, source
from . import get_cases
from .case import TOLERANCES, BenchCase, BenchColumn, CaseRecord, Context, Run
from .hosts import NETWORK, Hosts, make_hosts
from .libraries import say_what_lacks
from .records import FORMAT, open_results

#: Exceptions that are recorded as the failure of a case: our errors, lack of memory, a wrong result, and torch's
#: errors, which are RuntimeErrors. Any other exception is a bug and ends the process of the case.
FAILURES = (RingAttentionError, MemoryError, AssertionError, RuntimeError)
#: The message of torch's CPU allocator when it is out of memory; torch has no type for this error.
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"
#: A case is not tried if one call is expected, from the time of a shorter case, to take more seconds than this.
MOST_CALL = 60.0
#: Failures that a rank reports after it has lost another rank, so never the cause.
FOLLOWING = ("CommFailure", "RuntimeError")


def run_suite(
    suite: str, asked: list[str] | None, repeat: int, folder: Path, memory: int | None, tell: Callable[[str], None]
) -> Path:
    """Measure those cases of a suite that have no results in the folder yet; returns the path of the results.

    `asked` names the cases; None: all. Stored results of the same code, settings and machine are continued. `memory` is
    the most bytes that each process may allocate; None: no limit. `tell` receives a line of text before each case.
    """
    cases = get_cases(suite, asked)
    header = make_header(suite, asked, repeat, memory, cases)
    with open_results(folder, header, [case.name for case in cases]) as journal:
        if journal.records:
            tell(f"what {journal.path} lacks, {len(cases) - len(journal.records)} of {len(cases)} cases")
        for number, case in enumerate(cases, 1):
            if case.name in journal.records:
                continue
            left = _estimate(cases, journal.records)
            columns = ", ".join(column.name for column in case.columns)
            tell(f"{case.name} ({number} of {len(cases)}{left}): {columns}")
            start, before = time.perf_counter(), others_seconds()
            record = run_case(case, header, journal.records)
            if "failed" in record:
                tell(f"{case.name} {record['failed']['class']}: {record['failed']['message'].splitlines()[-1]}")
            took: dict[str, Any] = {"took": time.perf_counter() - start, "source": source()}
            if before is not None and (after := others_seconds()) is not None:
                took["others"] = max(after - before, 0.0) / took["took"]
            journal.add(case.name, {**record, **took})
    return journal.path


def others_seconds() -> float | None:
    """Seconds that the cores have worked for others than this process and its ended children; None if nobody counts."""
    counts = Path("/proc/stat")
    if not counts.exists():
        return None
    user, nice, system, _, _, *others = map(int, counts.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def make_header(
    suite: str, asked: list[str] | None, repeat: int, memory: int | None, cases: list[BenchCase]
) -> dict[str, Any]:
    """The first line of the results: the request, the machine and the version of the code."""
    return {
        "format": FORMAT,
        "suite": suite,
        "repeat": repeat,
        "memory": memory,
        "asked": asked,
        "planned": len(cases),
        "device": cases[0].settings.get("device"),
        "machine": describe_host(),
    }


def _estimate(cases: list[BenchCase], done: dict[str, CaseRecord]) -> str:
    """The time left in words, by the weights of the cases; before the first case is done, that a case can be long."""
    weights = sum(case.weight for case in cases if case.name in done)
    took = sum(record.get("took", 0.0) for record in done.values())
    left = sum(case.weight for case in cases if case.name not in done)
    return f", about {duration(took / weights * left)} left" if weights else "; a case can take minutes"


def run_case(case: BenchCase, header: dict[str, Any], done: dict[str, CaseRecord]) -> CaseRecord:
    """The record of a case, measured in new processes; a failed case has the class of its failure."""
    if reason := _why_not(case, header["repeat"], done):
        return summarise_case(case, [_failure("NotTried", reason)])
    work = (header["suite"], case.name, header["repeat"], header["memory"])
    try:
        if case.cluster is None:
            raw = run_local(measure, case.ranks, None, *work, timeout=case.timeout)
        else:
            with make_hosts(case.cluster) as hosts:
                raw = hosts.run(measure, hosts, *work, timeout=case.timeout, threads=1)
    except LaunchFailure as error:
        kind = "Timeout" if error.status is None else "Killed" if error.status < 0 else "Crashed"
        raw = [_failure(kind, str(error))]
    return summarise_case(case, raw)


def _why_not(case: BenchCase, repeat: int, done: dict[str, CaseRecord]) -> str:
    """The reason why a case is not tried, from the result of a shorter case; empty if it is to be tried.

    A call is expected to take at least as long as the fastest round of the shorter case, in proportion to the tokens.
    """
    shorter = done.get(case.after or "")
    if shorter is None:
        return ""
    if "failed" in shorter:
        return f"{case.after} failed: {shorter['failed']['class']}"
    call = shorter["columns"]["forward"]["min"] * case.settings["tokens"] / shorter["settings"]["tokens"]
    if call <= MOST_CALL:
        return ""
    return f"estimated {call * (repeat + 2) / 60:,.0f} minutes: a call would take {duration(call)} (extrapolated)"


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"failed": {"class": kind, "message": message.strip() or kind}, "times": {}, "errors": {}}


def measure(rank: int, hosts: Hosts | None, suite: str, name: str, repeat: int, memory: int | None) -> dict[str, Any]:
    """Measure a case on one rank; returns its numbers, or its failure.

    Runs in a process of its own, which may allocate at most `memory` bytes.
    """
    (case,) = get_cases(suite, [name])
    if memory is not None:
        limit_memory(memory)
    if case.ranks == 1 and dist.is_initialized():
        dist.destroy_process_group()  # factories of the seeds' systems make a ring in any group, even of one rank
    try:
        return measure_case(case, rank, hosts, repeat)
    except FAILURES as error:
        return _failure(classify(error), str(error))


def limit_memory(count: int) -> None:
    """Limit the private memory of this process to `count` bytes; allocations beyond that fail. Linux only."""
    resource.setrlimit(resource.RLIMIT_DATA, (count, count))


def classify(error: Exception) -> str:
    """The class of a failure: WrongResult, OutOfMemory, or the name of our error's or torch's type."""
    if isinstance(error, AssertionError):
        return "WrongResult"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error):
        return "OutOfMemory"
    return type(error).__name__


def measure_case(case: BenchCase, rank: int, hosts: Hosts | None, repeat: int) -> dict[str, Any]:
    """Measure a case on one rank, in `repeat` rounds, or fewer if `case.rounds` says so; returns the raw numbers.

    Usually, all columns run once to warm up and to check their results, then in turn in each round, and then once more
    to measure memory. Returns {"times": seconds by column, "errors": by name, "peaks": bytes by column} and, if the
    case has columns that cannot run here or a `count`, "details" with the reasons by column and what `count` returns.
    For a case with `formula_bytes`, returns {"bytes": by round, "allowed": bytes, "errors": {}}. For a case with
    `measure`, returns its result.
    """
    context = Context(rank, case.ranks, case.settings, hosts)
    repeat, team = min(repeat, case.rounds or repeat), TorchDist() if dist.is_initialized() else None
    if case.measure is not None:
        return case.measure(context, repeat)
    if case.formula_bytes is not None:
        return _measure_memory(case, context, repeat)
    runs: dict[str, tuple[int, Run | None]] = {}
    results: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for column in case.columns:
        run, result, reason = None, None, ""
        torch.set_num_threads(column.threads)
        try:
            run = column.make(context)
            result = run() if run is not None else None
        except case.lacking as error:
            reason = say_what_lacks(error)
        if reason := max(exchange_values(team, "bench", reason), key=len):
            missing[column.name] = reason
        else:
            runs[column.name], results[column.name] = (column.threads, run), result
    errors = case.check(context, results) if case.check else {}
    if case.lacking:
        errors, tolerance = exchange_values(team, "bench", errors)[0], TOLERANCES[case.settings["dtype"]]
        wrong = {name: error for name, error in errors.items() if not error < tolerance}
        missing |= {name: f"wrong: relative error {error:.1e}; not timed" for name, error in wrong.items()}
        runs = {name: run for name, run in runs.items() if name not in wrong}
    del run, result, results
    times = take_turns({name: partial(time_run, *run) for name, run in runs.items()}, repeat)
    weighed = [column for column in case.columns if column.weighed and column.name in runs]
    runs.clear()  # free the inputs, so that they are not counted in the peaks
    peaks = {column.name: weigh(column, context) for column in weighed}
    details = {"missing": missing} if case.lacking else {}
    details |= case.count(context) if case.count else {}
    return {"times": times, "errors": errors, "peaks": peaks, **({"details": details} if details else {})}


class TensorBytes(TorchDispatchMode):
    """Context manager that counts the memory of tensors made in the block: `live` bytes now, `peak` bytes at most.

    `peak` is counted from the last `restart`. A tensor's memory counts once, from the op that returns it until nothing
    refers to it. Memory used only within an op is not counted; the peak of the process includes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True makes torch import its compiler, which takes seconds, only to keep this mode out of graphs

    def restart(self) -> None:
        """Forget the peak so far: count a new one, beginning with the bytes that are alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._add(x.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        # The address of torch's storage object: unique while this storage is alive.
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def weigh(column: BenchColumn, context: Context) -> dict[str, int]:
    """Run a column once more, without timing it; returns its peak memory in bytes.

    "tensors" is the peak of all tensors, inputs included; "process" is how far the process grew beyond its size before
    the inputs were made.
    """
    with TensorBytes():
        torch.zeros(1, device="cpu").add(1)  # loads what the counter needs; must not count as memory of the run
    peak_memory.return_freed()
    torch.set_num_threads(column.threads)
    base = peak_memory.resident()
    with TensorBytes() as tensors:
        run = column.make(context)
        tensors.restart()
        peak_memory.reset_peak()
        _barrier()
        if run is not None:
            run()
        _barrier()
        return {"tensors": tensors.peak, "process": max(peak_memory.peak() - base, 0)}


def take_turns(timers: dict[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """Call each timer once per round, in turn; returns by column the seconds that its timer measured in each round."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeat):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def time_run(threads: int, run: Run | None) -> float:
    """Seconds of one run, between two barriers: they include the wait for the slowest rank."""
    torch.set_num_threads(threads)
    _barrier()
    start = time.perf_counter()
    if run is not None:
        run()
    _barrier()
    return time.perf_counter() - start


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _measure_memory(case: BenchCase, context: Context, repeat: int) -> dict[str, Any]:
    """The rise of peak resident memory over that before the inputs exist, in bytes, for each run.

    A run with a few tokens comes first: it loads libraries and opens connections.
    """
    assert case.formula_bytes is not None
    (column,) = case.columns
    weigh(column, replace(context, settings={**context.settings, "tokens": 16 * context.ranks}))
    rises = [weigh(column, context)["process"] for _ in range(repeat)]
    return {"bytes": rises, "allowed": case.formula_bytes(context), "errors": {}}


def summarise_case(case: BenchCase, raw: list[dict[str, Any]]) -> CaseRecord:
    """The record of a case: medians, spreads and ratios of the numbers that its ranks measured, and these numbers."""
    record: CaseRecord = {
        "case": case.name,
        "ranks": case.ranks,
        "settings": case.settings,
        "errors": raw[0]["errors"],
        "notes": [*case.notes, *([f"network: {NETWORK}"] if case.cluster else [])],
    }
    if case.cluster is not None:
        record["cluster"] = asdict(case.cluster)
    failures = [rank["failed"] for rank in raw if "failed" in rank]
    if failures:
        causes = [failure for failure in failures if failure["class"] not in FOLLOWING]
        record |= {"failed": (causes or failures)[0], "may_fail": case.may_fail, "columns": {}, "ratios": []}
        return record
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
    # Thanks to the barriers a run lasts equally long on all ranks: the times of rank 0 hold for all.
    times = raw[0]["times"]
    if "details" in raw[0]:
        record["details"] = raw[0]["details"]
    peaks = {  # of all ranks
        name: {kind: max(rank["peaks"][name][kind] for rank in raw) for kind in of_rank}
        for name, of_rank in raw[0].get("peaks", {}).items()
    }
    record["columns"] = {
        column.name: {
            "threads": column.threads,
            "seconds": times[column.name],
            **_spread(times[column.name]),
            **({"peaks": peaks[column.name]} if column.name in peaks else {}),
        }
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
    iqr = float(np.subtract(*np.percentile(values, (75, 25))))  # 0 for a single value
    return {"median": median(values), "min": min(values), "max": max(values), "iqr": iqr}


def describe_host() -> dict[str, Any]:
    """The hardware, versions, commit and date to record with a measurement."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": min([size, *(limit for limit, _ in peak_memory.limits())]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "ringattn": __version__,
        "commit": git("rev-parse", "--short", "HEAD"),
        "source": source(),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(re.findall(r"^(model name|model|cpu family)\s*: (.*)$", info.read_text(), re.MULTILINE))
        if "model name" in fields:
            return f"{fields['model name']} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or platform.machine()
