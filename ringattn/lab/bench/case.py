"""What a suite declares: cases, the columns that a case compares, and ratios of their times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...transport.base import Transport
from .links import Links

#: One run of a column on this rank; returns the rank's result.
Run = Callable[[], Any]
#: The record of a case, as the JSON file of a suite holds it.
CaseRecord = dict[str, Any]
#: Most relative error of a result, by dtype; a result with a larger error is wrong, and is not timed.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
#: Heads and head dimension of a case where its suite does not say otherwise.
HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Context:
    """The process that builds a column: one rank of the case's ranks. `transport` is set in cases with links."""

    rank: int
    ranks: int
    settings: dict[str, Any]
    transport: Transport | None = None


@dataclass(frozen=True)
class BenchColumn:
    """One of the things that a case compares.

    `make(context)` is called once per process and returns the function that is timed, or None on a rank that only waits
    for the others. `threads` is torch's thread count during the run. The tensors of a column that is not `weighed` are
    not counted.
    """

    name: str
    threads: int
    make: Callable[[Context], Run | None]
    weighed: bool = True


@dataclass(frozen=True)
class Ratio:
    """Time of column `over` divided by time of column `under`: above 1, `under` is faster.

    `target` is the promised least ratio, if any. `work` is the work of `under` in units of the work of `over`, counted;
    the ratio is multiplied by it, and becomes a ratio of rates.
    """

    over: str
    under: str
    target: float | None = None
    work: float = 1.0

    @property
    def label(self) -> str:
        """The ratio in words."""
        return f"{self.over} / {self.under}" + ("" if self.work == 1.0 else f" x {self.work:.4g}")


@dataclass(frozen=True)
class BenchCase:
    """Columns that run alternately on the same `ranks` processes, and the ratios of their times.

    `check(context, results)` compares the columns' results once, before the timing; it returns errors by name, and
    raises where a result is wrong. A case with `formula_bytes` measures the peak memory of its one column instead of
    its time: the function returns the predicted rise in bytes, and peak / prediction may reach `limit`.
    """

    name: str
    ranks: int
    settings: dict[str, Any]
    columns: tuple[BenchColumn, ...]
    ratios: tuple[Ratio, ...] = ()
    check: Callable[[Context, dict[str, Any]], dict[str, float]] | None = None
    formula_bytes: Callable[[Context], int] | None = None
    limit: float | None = None
    #: Most rounds, for cases that take minutes.
    rounds: int | None = None
    #: The network between the ranks; None: they are processes of one machine.
    links: Links | None = None
    #: How the numbers were obtained, for readers of the record.
    notes: tuple[str, ...] = ()
    #: Concludes from the record of the case: a row of a table, or several, stored in the record under "summary".
    summarise: Callable[[CaseRecord], dict[str, Any] | list[dict[str, Any]]] | None = None
    #: Measures the case, for cases that the clock of the host cannot time. Receives the context and the rounds, and
    #: returns the raw numbers of `runner.measure_case`, with "details" for `summarise`. Columns may be missing.
    measure: Callable[[Context, int], dict[str, Any]] | None = None
    #: Seconds after which the processes of the case are killed.
    timeout: float = 3600.0
    #: About how long the case takes, relative to the other cases of its suite.
    weight: float = 1.0
    #: A failure is a result of the case, such as the length at which memory ends, and not a failure of the suite.
    may_fail: bool = False
    #: A shorter case: where it failed, or shows that a call would take too long, this case is not tried.
    after: str | None = None
    #: Errors that say that a column cannot run here. In a case that has some, such a column, and one whose error is
    #: TOLERANCES or more, is missing, with the reason in "details", and the others are timed.
    lacking: tuple[type[Exception], ...] = ()


@dataclass(frozen=True)
class Claim:
    """A figure of an earlier report, what that figure really was, and what ours is, as a sentence on the records."""

    figure: str
    really: str
    ours: Callable[[list[CaseRecord]], str]


@dataclass(frozen=True)
class BenchSuite:
    """A suite: a function that lists its cases, and what it concludes from the records of all measured cases.

    The conclusion is a sentence, and whether the target is met. `check` receives the folder of the results before
    anything is measured, and raises InvalidInput or Unsupported where the suite cannot run. `title`, `about` and
    `claim` are for readers of the report. `bars` is what its plot compares, in words, and a case's numbers by name;
    without it the plot compares ratios, or times.
    """

    cases: Callable[[], list[BenchCase]]
    conclude: Callable[[list[CaseRecord]], tuple[str, bool]] | None = None
    check: Callable[[Path], None] | None = None
    title: str = ""
    about: tuple[str, ...] = ()
    claim: Claim | None = None
    bars: tuple[str, Callable[[CaseRecord], dict[str, float]]] | None = None


#: A number of a case's record; None where the record does not have it.
Values = Callable[[CaseRecord], float | None]


def make_settings(
    tokens: int, dtype: str = "float32", *, heads: int = HEADS, head_dim: int = HEAD_DIM, **more: Any
) -> dict[str, Any]:
    """The settings of a case of attention with a batch of 1."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "dtype": dtype, "tokens": tokens}
    return sizes | more


def iqr(values: list[float]) -> float:
    """The distance between the quartiles; 0 of a single value."""
    return float(np.subtract(*np.percentile(values, (75, 25))))
