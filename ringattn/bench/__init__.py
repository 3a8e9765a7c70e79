"""Benchmarks: one runner, and one small file per suite."""

from __future__ import annotations

import difflib

from ..errors import InvalidInput
from . import ring
from .case import Case

SUITES = {"ring": ring.cases}


def get_cases(suite: str, names: list[str] | None = None) -> list[Case]:
    """The cases of a suite, all or those named."""
    if suite not in SUITES:
        raise InvalidInput(f"suite={suite}: unknown; {_near(suite, list(SUITES))}expected one of {', '.join(SUITES)}")
    cases = {case.name: case for case in SUITES[suite]()}
    for name in names or ():
        if name not in cases:
            raise InvalidInput(f"cases={name}: unknown; {_near(name, list(cases))}expected some of {', '.join(cases)}")
    return [cases[name] for name in names] if names else list(cases.values())


def _near(name: str, options: list[str]) -> str:
    near = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {near[0]!r}? " if near else ""
