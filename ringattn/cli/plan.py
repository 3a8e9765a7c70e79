"""ringattn plan: counted facts of a plan, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config.build import asked_plan
from ..config.schema import PlanConfig
from ..errors import plural
from ..files import STDOUT, check_json, write_json
from ..plan.plan import Plan
from ..reporting.console import Number, choice_data, console, grid, show, show_choice
from ..text import size
from ..timing.metered import count_lookups

#: Of up to this many ranks all are counted, and of more where that takes no more than so many lookups of tiles.
ALL_RANKS, LOOKUPS = 64, 1_500_000
#: Most ranks in the table; they are spread evenly.
SHOWN = 16


def main(config: PlanConfig) -> None:
    """Print the picture, the pairs, the imbalance and the bytes of a plan; write them as JSON where asked."""
    path = config.output.path
    check_json(path)
    plan = asked_plan(config)
    lookups = count_lookups(plan, plan.ranks // 2) if plan.ranks > ALL_RANKS else 0
    counted = _Counted(plan, lookups is not None, lookups is not None and lookups * plan.ranks <= LOOKUPS)
    if path != STDOUT:
        _print(counted, ascii=config.ascii)
    if path:
        written = {**json.loads(plan.to_json()), "counted": counted.data(), "choice": choice_data(plan.choice)}
        write_json(path, written)


@dataclass(frozen=True)
class _Counted:
    """A plan, and what of it can be counted within seconds: `some` ranks, and the `whole` of all ranks."""

    plan: Plan
    some: bool
    whole: bool

    @property
    def shown(self) -> list[int]:
        """The ranks of the table."""
        count = min(self.plan.ranks, SHOWN)
        return [self.plan.ranks * i // count for i in range(count)] if self.some else []

    def data(self) -> dict[str, Any]:
        """The counts as plain data: of every rank where all are counted, of those of the table else."""
        plan = self.plan
        totals: dict[str, Any] = {"pairs": plan.pairs(), "dense_pairs": plan.heads * plan.tokens**2}
        if self.whole:
            totals["imbalance"] = plan.imbalance
            totals |= {name: {**_sent(plan, None, back), "full_ring_bytes": plan.full_ring_bytes(backward=back)}
                       for name, back in DIRECTIONS.items()}  # fmt: skip
        ranks = range(plan.ranks) if self.whole else self.shown
        mean = totals["pairs"] / plan.ranks
        return {
            "rotates": plan.rotates,
            "totals": totals,
            "totals_left_out": None if self.whole else LEFT_OUT,
            "ranks": [
                {
                    "rank": rank,
                    "tokens": plan.layout.rows(rank),
                    "pairs": (pairs := plan.pairs(rank)),
                    "imbalance": pairs / mean if mean else 1.0,
                    **{name: _sent(plan, rank, back) for name, back in DIRECTIONS.items()},
                }
                for rank in ranks
            ],
        }


#: Names of the passes, and whether they are backward.
DIRECTIONS = {"forward": False, "backward": True}
LEFT_OUT = "left out: they need the steps of every rank"


def _sent(plan: Plan, rank: int | None, backward: bool) -> dict[str, int]:
    return {"bytes": plan.bytes_sent(rank, backward=backward), "messages": plan.messages(rank, backward=backward)}


def _print(counted: _Counted, *, ascii: bool) -> None:
    plan, lines = counted.plan, console()
    lines.print(
        f"{plan.pattern!r} over {plan.tokens:,} tokens, {plan.layout.name} on {plural(plan.ranks, 'rank')}",
        highlight=False,
    )
    if counted.some:
        lines.print(plan.picture(ascii=ascii), highlight=False, markup=False, soft_wrap=True)
        grid("", ("[counted]", "tokens", "pairs", "sends forward", "sends backward"), map(_row(plan), counted.shown))
    else:
        lines.print(
            f"One rank of these {plan.ranks:,} has so many steps that they are neither drawn nor counted; a pattern that "
            "reaches less far, or fewer ranks, can be.",
            highlight=False,
        )
    show("", _totals(plan, whole=counted.whole))
    if plan.choice is not None:
        show_choice(plan.choice)


def _row(plan: Plan) -> Callable[[int], tuple[str, ...]]:
    def row(rank: int) -> tuple[str, ...]:
        sent = (size(plan.bytes_sent(rank, backward=backward)) for backward in DIRECTIONS.values())
        return f"rank {rank}", f"{plan.layout.rows(rank):,}", f"{plan.pairs(rank):,}", *sent

    return row


def _totals(plan: Plan, *, whole: bool) -> list[Number]:
    pairs = plan.pairs()
    full = plan.heads * plan.tokens**2
    numbers = [
        Number("schedule", f"{plan.schedule}, {plan.rotates} rotate in the backward"),
        Number("pairs", f"{pairs:,} = {pairs / full:.4f} of dense" if full else "0", "counted"),
        Number("plan hash", plan.hash),
    ]
    if not whole:
        return [*numbers, Number("totals", LEFT_OUT)]
    numbers.insert(2, Number("imbalance", f"{plan.imbalance:.4f} (busiest rank / mean)", "counted"))
    for name, backward in DIRECTIONS.items():
        sent, full = plan.bytes_sent(backward=backward), plan.full_ring_bytes(backward=backward)
        share = f" = {sent / full:.4f} of a full ring" if full else ""
        messages = plan.messages(backward=backward)
        numbers.insert(-1, Number(f"{name} sends", f"{size(sent)}{share}, {messages:,} messages", "counted"))
    return numbers
