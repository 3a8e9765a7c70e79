"""What `simulate` is asked for, checked before anything is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, did_you_mean
from .solvers.recurrence import Stall

if TYPE_CHECKING:
    from ..plan.plan import Plan

#: The solvers of a ring, the cheapest first; E is sampling on top of one of them.
SOLVERS = ("closed_form", "periodic", "perturbation", "stencil")
CHOICES = ("auto", *SOLVERS, "events")
#: More passes than this are a slip of the hand: even of a microsecond each they take 30 years.
PASSES = 10**15


def check(plan: Plan, *, backward: Any, stalls: Any, passes: Any, solver: Any, seed: Any) -> None:
    """Raise InvalidInput where an argument of `simulate` is of another type, or cannot be."""
    if not hasattr(plan, "for_rank") or isinstance(plan, type):  # plans are made of what stands below
        raise InvalidInput(f"simulate: expected a Plan, as make_plan gives it, got {plan!r}")
    if solver not in CHOICES:
        raise InvalidInput(f"solver={solver!r}: {did_you_mean(solver, CHOICES)}expected one of {', '.join(CHOICES)}")
    if not isinstance(backward, bool):
        raise InvalidInput(f"backward={backward!r}: expected True or False")
    if not plan.batch:
        raise InvalidInput("batch=0: without a sequence there is nothing to simulate; try batch=1")
    if passes is not None and (not _whole(passes) or passes < 1):
        raise InvalidInput(
            f"passes={passes!r}: expected how often the pass is made, an integer >= 1, or None: no job is stated"
        )
    if passes is not None and passes > PASSES:
        raise InvalidInput(f"passes: expected how often the pass is made, at most {PASSES:.0e}, and this is more")
    check_seed(seed)
    if isinstance(stalls, str) or not isinstance(stalls, Sequence):
        raise InvalidInput(f"stalls={stalls!r}: expected a list of Stall(rank, step, seconds)")
    for stall in stalls:
        if not isinstance(stall, Stall):
            raise InvalidInput(f"stalls: {stall!r} is no Stall(rank, step, seconds)")
        numbers = _whole(stall.rank) and _whole(stall.step) and isinstance(stall.seconds, int | float)
        if not numbers or not (0 <= stall.rank < plan.ranks and stall.step >= 0 and 0 <= stall.seconds < float("inf")):
            raise InvalidInput(f"{stall}: expected a rank 0 .. {plan.ranks - 1}, a step >= 0 and seconds >= 0")


def check_seed(seed: Any) -> None:
    """Raise InvalidInput where a seed is no whole number that random numbers can be made from."""
    if not _whole(seed) or seed < 0:
        raise InvalidInput(f"seed={seed!r}: expected an integer >= 0; try seed=0")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
