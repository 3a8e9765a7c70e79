"""What a suite says about one measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...transport.base import Transport
from .links import Links

#: One run of a column on this rank; returns its local result.
Run = Callable[[], Any]


@dataclass(frozen=True)
class Context:
    """Where a column is built: one rank of the processes that a case asked for."""

    rank: int
    ranks: int
    settings: dict[str, Any]
    #: Of a case with links: the way through them.
    transport: Transport | None = None


@dataclass(frozen=True)
class BenchColumn:
    """One of the things that a case compares.

    `make(context)` is called once per process and returns the function that is timed, or None where this rank
    has no part in it and waits, blocked, for the others. `threads` is torch's thread count meanwhile.
    """

    name: str
    threads: int
    make: Callable[[Context], Run | None]


@dataclass(frozen=True)
class Ratio:
    """`over` / `under` of two columns' times, larger is better for `under`; `target` is what we promise, or None.

    `work` is the work of `under` in units of that of `over`, counted: with it the ratio is one of rates.
    """

    over: str
    under: str
    target: float | None = None
    work: float = 1.0

    @property
    def label(self) -> str:
        """How the ratio is printed."""
        return f"{self.over} / {self.under}" + ("" if self.work == 1.0 else f" x {self.work:.4g}")


@dataclass(frozen=True)
class BenchCase:
    """Columns that run alternately on the same `ranks` processes, and the ratios of interest.

    `check(context, results)` compares the columns' results once, before the timing, and returns errors by name;
    it raises where one is wrong. `memory(context)` is the number of bytes that the peak of the one column of a
    memory case may rise by: such a case is measured in bytes instead of seconds, and its ratio is peak / bytes.
    """

    name: str
    ranks: int
    settings: dict[str, Any]
    columns: tuple[BenchColumn, ...]
    ratios: tuple[Ratio, ...] = ()
    check: Callable[[Context, dict[str, Any]], dict[str, float]] | None = None
    memory: Callable[[Context], int] | None = None
    limit: float | None = None
    #: At most this many rounds, for cases of minutes.
    rounds: int | None = None
    #: The network between the ranks, where they are not simply processes of one machine.
    links: Links | None = None
    #: What a reader of the numbers must know about how they were found.
    notes: tuple[str, ...] = ()
    #: What a suite concludes from the case as it is stored, kept beside it under "summary".
    summary: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute difference over the largest entry of the truth."""
    return float((found.double() - truth.double()).abs().max() / truth.double().abs().max())
