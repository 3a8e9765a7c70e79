"""Schedules: from who needs what, the steps of one rank. One schedule per file."""

from __future__ import annotations

from collections.abc import Callable

from ..demand import Demand
from ..errors import InvalidInput, did_you_mean
from ..steps import RankPlan
from . import allgather, ring

SCHEDULES: dict[str, Callable[[Demand, int], RankPlan]] = {
    "ring": ring.rank_plan,
    "allgather": allgather.rank_plan,
}


def resolve(name: str) -> str:
    """The schedule that `name` asks for; "auto" is the ring, which never makes more hops than the all-gather."""
    if name == "auto":
        return "ring"
    if name not in SCHEDULES:
        hint = did_you_mean(name, [*SCHEDULES, "auto"])
        raise InvalidInput(f"unknown schedule {name!r}; {hint}expected auto, {', '.join(SCHEDULES)}")
    return name
