"""Benchmarks: one runner, and one small file per suite."""

from __future__ import annotations

from ...errors import InvalidInput, did_you_mean
from . import auto, patterns, ring, schedules, simulate
from .case import BenchCase

SUITES = {"ring": ring.cases, "patterns": patterns.cases, "schedules": schedules.cases, "auto": auto.cases,
          "simulate": simulate.cases}  # fmt: skip
#: What a suite concludes from all of its cases that were measured: "summary" in words, "value", "target", "met".
SUMMARIES = {"auto": auto.share}


def get_cases(suite: str, names: list[str] | None = None) -> list[BenchCase]:
    """The cases of a suite, all or those named."""
    if suite not in SUITES:
        raise InvalidInput(
            f"suite={suite}: unknown; {did_you_mean(suite, list(SUITES))}expected one of {', '.join(SUITES)}"
        )
    cases = {case.name: case for case in SUITES[suite]()}
    for name in names or ():
        if name not in cases:
            raise InvalidInput(
                f"cases={name}: unknown; {did_you_mean(name, list(cases))}expected some of {', '.join(cases)}"
            )
    return [cases[name] for name in names] if names else list(cases.values())
