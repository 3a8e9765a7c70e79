"""Whether what a command would execute ends in a sensible time, told before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InvalidInput, plural
from ..plan.plan import Plan
from ..text import duration
from ..timing.metered import count_lookups

#: Seconds that a message or a visit of a virtual rank takes on a CPU core besides its arithmetic, roughly; and of a sampled row's rank,
#: of which only some rows are computed.
EACH, SAMPLED = 3e-4, 5e-5
#: Seconds of these that are not begun: a table of `run` is waited for, a study of numerics may take a night.
WAITED, NIGHT = 1800, 86_400


def check_effort(
    plan: Plan, shown: Iterable[int], count: int, each: float, most: float, advice: str, passes: int = 1
) -> None:
    """Raise InvalidInput where `count` ranks with as many steps as the busiest of the ranks `shown` take longer than `most`.

    Counted are the messages and the visits of the forward, in every one of the `passes`, each `each` seconds long.
    """
    steps = max(_parts(plan, rank) for rank in shown)
    seconds = float(steps) * count * passes * each
    if seconds > most:
        raise InvalidInput(
            f"{plural(count, 'virtual rank')} of this plan have about {steps:,} messages and visits each, which take at least "
            f"{duration(seconds)} at {each * 1e6:g} µs, and more than {duration(most)} is not begun; {advice}"
        )


def _parts(plan: Plan, rank: int) -> int:
    """Messages and visits of a rank in the forward, or the number of ranks where they are too many to be counted."""
    if count_lookups(plan, rank) is None:
        return plan.ranks
    return sum(len(step.sends) + len(step.recvs) + len(step.visits) for step in plan.for_rank(rank).forward)
