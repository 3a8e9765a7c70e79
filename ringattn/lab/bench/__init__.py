"""Benchmarks: a runner that alternates the compared calls, and suites that list what to measure."""

from __future__ import annotations

from ...errors import InvalidInput
from ...registry import Registry
from ...text import did_you_mean
from .case import BenchCase, BenchSuite

#: The suites by name, all of them, ours included, from entry points of the group "ringattn.bench_suites".
SUITES: Registry[BenchSuite] = Registry("bench_suites", {})


def get_suite(name: str) -> BenchSuite:
    """The suite with this name. Raises InvalidInput for an unknown name."""
    SUITES.check_installed()
    if name not in SUITES:
        raise InvalidInput(f"suite={name}: unknown; {did_you_mean(name, SUITES)}expected one of {', '.join(SUITES)}")
    return SUITES[name]


def get_cases(suite: str, names: list[str] | None = None) -> list[BenchCase]:
    """All cases of a suite, or those in `names`. Raises InvalidInput for an unknown name."""
    cases = {case.name: case for case in get_suite(suite).cases()}
    if names is None:
        return [*cases.values()]
    for name in names or ["[]"]:
        if name not in cases:
            raise InvalidInput(f"cases={name}: unknown; {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    return [cases[name] for name in names]
