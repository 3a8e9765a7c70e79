"""What a suite declares: cases, the columns that each case compares, and ratios of their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .hosts import Cluster, Hosts

#: One run of a column on this rank; returns the rank's result.
Run = Callable[[], Any]
#: The record of a case, as stored in the JSON lines of a suite.
CaseRecord = dict[str, Any]
#: Largest allowed relative error of a result, by dtype; a result with a larger error is wrong and is not timed.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
#: Default heads and head dimension of a case.
HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Context:
    """Where the function of a column runs: its rank, the settings of its case, and its hosts if there are several."""

    rank: int
    ranks: int
    settings: dict[str, Any]
    hosts: Hosts | None = None


@dataclass(frozen=True)
class BenchColumn:
    """One of the functions that a case compares.

    `make(context)` is called once per process and returns the function to time, or None on a rank that only waits for
    the others. `threads` is torch's number of threads during the run. With `weighed=False`, the memory of the column's
    tensors is not measured.
    """

    name: str
    threads: int
    make: Callable[[Context], Run | None]
    weighed: bool = True


@dataclass(frozen=True)
class Ratio:
    """The ratio of two columns' times, `over` divided by `under`; above 1, `under` is faster.

    `target` is the ratio that must be reached, if any. `work` is the counted work of `under` divided by that of `over`;
    the ratio is multiplied by `work`, and then compares rates instead of times.
    """

    over: str
    under: str
    target: float | None = None
    work: float = 1.0

    @property
    def label(self) -> str:
        """The name of the ratio in records."""
        return f"{self.over} / {self.under}" + ("" if self.work == 1.0 else f" x {self.work:.4g}")


@dataclass(frozen=True)
class BenchCase:
    """Several functions (columns) that run in turn on the same `ranks` processes, and the ratios of their times.

    `check(context, results)` compares the results of the columns once, before they are timed; it returns errors by
    name, and raises if a result is wrong. If a case has `formula_bytes`, the peak memory of its one column is measured,
    not its time: the function returns the predicted increase in bytes, and peak / prediction must not exceed `limit`.
    """

    name: str
    ranks: int
    settings: dict[str, Any]
    columns: tuple[BenchColumn, ...]
    ratios: tuple[Ratio, ...] = ()
    check: Callable[[Context, dict[str, Any]], dict[str, float]] | None = None
    formula_bytes: Callable[[Context], int] | None = None
    limit: float | None = None
    #: Upper limit on the rounds, for cases that take minutes.
    rounds: int | None = None
    #: The hosts of the ranks, and their links; None for plain processes on one machine.
    cluster: Cluster | None = None
    #: How the numbers were obtained, for readers of the record.
    notes: tuple[str, ...] = ()
    #: Returns one or more table rows that summarise the record of the case; stored in the record under "summary".
    summarise: Callable[[CaseRecord], dict[str, Any] | list[dict[str, Any]]] | None = None
    #: Replaces the runner's timing, for cases that the host's clock cannot time. Receives the context and the number of
    #: rounds; returns raw numbers like `runner.measure_case`, with "details" for `summarise`. Columns may be missing.
    measure: Callable[[Context, int], dict[str, Any]] | None = None
    #: Called on every rank at the end; what rank 0 returns is stored under "details".
    count: Callable[[Context], dict[str, Any]] | None = None
    #: Seconds after which the processes of the case are killed.
    timeout: float = 3600.0
    #: Rough duration relative to the other cases of the suite.
    weight: float = 1.0
    #: A failure counts as a result (such as the length at which memory runs out), not as a failure of the suite.
    may_fail: bool = False
    #: Name of a shorter case; if it failed, or shows that a call would take too long, this case is skipped.
    after: str | None = None
    #: Exceptions that mean that a column cannot run here. If given, a column that raises one, or whose error reaches
    #: its tolerance, is left out with the reason in "details", and the other columns are still timed.
    lacking: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class BenchSuite:
    """A group of benchmark cases, the conclusion to draw from their results, and texts for the report.

    `conclude` returns a sentence about the records of all measured cases, and whether the target is met (None without a
    target). `check` raises Unsupported, before anything is measured, if the suite cannot run here. `title`, `about` and
    `claim` are for the reader; `claim` is a number of an earlier report and what it had really measured. `bars` is the
    title of the plot and, by legend, the columns of the summaries to show in it; without it, the plot compares ratios,
    or times.
    """

    cases: Callable[[], list[BenchCase]]
    conclude: Callable[[list[CaseRecord]], tuple[str, bool | None]] | None = None
    check: Callable[[], None] | None = None
    title: str = ""
    about: tuple[str, ...] = ()
    claim: tuple[str, str] | None = None
    bars: tuple[str, dict[str, str]] | None = None


def get_summary(record: CaseRecord) -> list[dict[str, Any]]:
    """The table rows that summarise a case; empty without a summary."""
    summary = record.get("summary", [])
    return summary if isinstance(summary, list) else [summary]


def make_settings(
    tokens: int, dtype: str = "float32", *, heads: int = HEADS, head_dim: int = HEAD_DIM, **more: Any
) -> dict[str, Any]:
    """The settings of an attention case with a batch of 1."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": dtype, "tokens": tokens}
    return sizes | more
