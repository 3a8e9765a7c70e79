"""Schedules: from who needs what, the steps of one rank. One schedule per file."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..demand import Demand
from ..errors import InvalidInput, did_you_mean
from ..steps import RankPlan
from .allgather import AllGather
from .direct import Direct
from .double_ring import DoubleRing
from .ring import Ring

#: By name, and whether a number follows in brackets.
SCHEDULES: dict[str, tuple[Callable[..., Ring | Direct | DoubleRing | AllGather], bool]] = {
    "ring": (Ring, False),
    "direct": (Direct, False),
    "allgather": (AllGather, False),
    "double_ring": (DoubleRing, True),
}
FORMS = ("auto", "ring", "direct", "allgather", "double_ring(inner)")


def resolve(name: str, ranks: int | None = None) -> str:
    """The schedule that `name` asks for, in its plain spelling; checked against `ranks` where they are known.

    "auto" stays: `make_plan` chooses.
    """
    if name == "auto":
        return name
    kind, number = _parse(name)
    if number is None:
        return kind
    if ranks is not None and (number < 1 or ranks % number):
        fitting = [str(n) for n in range(2, ranks) if ranks % n == 0][:6] or ["1"]
        raise InvalidInput(
            f"schedule {name!r}: nodes of {number} ranks do not divide {ranks} ranks evenly; "
            f"try {kind}({fitting[0]})" + (f" or one of {', '.join(fitting)}" if len(fitting) > 1 else "")
        )
    return f"{kind}({number})"


def planner(name: str, demand: Demand) -> Callable[[int], RankPlan]:
    """The function that plans a rank by a resolved schedule."""
    kind, number = _parse(name)
    make = SCHEDULES[kind][0]
    return (make(demand) if number is None else make(demand, number)).steps


def _parse(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(?:inner\s*=\s*)?(\d+)\s*\))?\s*", name)
    kind = match[1] if match else name
    if match is None or kind not in SCHEDULES or SCHEDULES[kind][1] != bool(match[2]):
        hint = did_you_mean(kind, [*SCHEDULES, "auto"])
        raise InvalidInput(f"unknown schedule {name!r}; {hint}expected {', '.join(FORMS)}")
    return kind, int(match[2]) if match[2] else None
