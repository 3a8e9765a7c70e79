"""Checks of the arguments of `simulate`, before anything is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from ...errors import InvalidInput
from ...plan.plan import Plan
from ...text import did_you_mean
from .solvers import SOLVERS
from .solvers.recurrence import Stall

#: More passes than this are a mistake: even at a microsecond each they would take 30 years.
MOST_PASSES = 10**15


def check_options(
    plan: object, *, backward: object, stalls: object, passes: object, solver: object, seed: object
) -> None:
    """Raise InvalidInput where an argument of `simulate` has a wrong type or an impossible value."""
    if not isinstance(plan, Plan):
        raise InvalidInput(f"simulate: expected a Plan, as make_plan gives it, got {plan!r}")
    choices = ("auto", *SOLVERS)
    if not isinstance(solver, str) or solver not in choices:
        raise InvalidInput(f"solver={solver!r}: {did_you_mean(solver, choices)}expected one of {', '.join(choices)}")
    if not isinstance(backward, bool):
        raise InvalidInput(f"backward={backward!r}: expected True or False")
    if not plan.batch:
        raise InvalidInput("batch=0: without a sequence there is nothing to simulate; try batch=1")
    if passes is not None and (not _is_integer(passes) or not 1 <= passes <= MOST_PASSES):
        shown = "" if _is_integer(passes) and passes > 0 else f"={passes!r}"  # a number may have thousands of digits
        raise InvalidInput(
            f"passes{shown}: expected how often the job makes the pass, from 1 to {MOST_PASSES:.0e}, or None for no job"
        )
    check_seed(seed)
    if isinstance(stalls, str) or not isinstance(stalls, Sequence):
        raise InvalidInput(f"stalls={stalls!r}: expected a list of Stall(rank, step, seconds)")
    for stall in stalls:
        _check_stall(stall, plan.ranks)


def check_seed(seed: object) -> None:
    """Raise InvalidInput where a seed is not an integer that random numbers can start from."""
    if not _is_integer(seed) or seed < 0:
        raise InvalidInput(f"seed={seed!r}: expected an integer >= 0; try seed=0")


def _check_stall(stall: object, ranks: int) -> None:
    if not isinstance(stall, Stall):
        raise InvalidInput(f"stalls: {stall!r} is no Stall(rank, step, seconds)")
    numbers = _is_integer(stall.rank) and _is_integer(stall.step) and isinstance(stall.seconds, int | float)
    if not numbers or not (0 <= stall.rank < ranks and stall.step >= 0 and 0 <= stall.seconds < float("inf")):
        raise InvalidInput(f"{stall}: expected a rank 0 .. {ranks - 1}, a step >= 0 and seconds >= 0")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
