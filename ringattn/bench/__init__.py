"""Benchmarks: a runner of alternating measurements, and suites that say what is measured.

A new suite is one file: a module in `suites`, or an entry point of the group "ringattn.bench_suites" in any installed
package. Either names a BenchSuite.
"""

from __future__ import annotations

from pkgutil import iter_modules

from ..errors import InvalidInput
from ..registry import Registry
from ..text import did_you_mean
from . import suites
from .case import BenchCase, BenchSuite

#: The suites by name. A suite is imported when it is looked up.
SUITES: Registry[BenchSuite] = Registry(
    "bench_suites",
    {module.name: f"bench.suites.{module.name}:SUITE" for module in iter_modules(suites.__path__)},
)


def get_suite(name: str) -> BenchSuite:
    """The suite of this name. Raises InvalidInput."""
    if name not in SUITES:
        raise InvalidInput(
            f"suite={name}: unknown; {did_you_mean(name, SUITES)}expected one of {', '.join(SUITES)}, or "
            "billion, which is ringattn simulate experiment=billion_tokens"
        )
    return SUITES[name]


def get_cases(suite: str, names: list[str] | None = None) -> list[BenchCase]:
    """All cases of a suite, or the cases of these names. Raises InvalidInput."""
    cases = {case.name: case for case in get_suite(suite).cases()}
    if names is None:
        return [*cases.values()]
    for name in names or ["[]"]:
        if name not in cases:
            raise InvalidInput(f"cases={name}: unknown; {did_you_mean(name, cases)}expected some of {', '.join(cases)}")
    return [cases[name] for name in names]
