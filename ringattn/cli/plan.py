"""ringattn plan: counted facts of a plan, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..files import STDOUT, check_json, write_json
from ..plan.plan import Plan
from ..simulator.reporting.console import (
    Number,
    choice_record,
    get_console,
    print_choice,
    print_grid,
    print_numbers,
    print_plain,
)
from ..simulator.timing.metered import count_lookups
from ..text import plural, size
from .config.build import plan_from_config
from .config.schema import PlanConfig

#: Up to this many ranks all ranks are counted; more ranks only where that takes at most so many lookups of tiles.
SMALL_RANKS, MAX_LOOKUPS = 64, 1_500_000
#: The most ranks in the table, spread evenly over all ranks.
TABLE_RANKS = 16
#: Names of the passes, and whether each is a backward.
DIRECTIONS = {"forward": False, "backward": True}
TOTALS_LEFT_OUT = "left out: they need the steps of every rank"


def main(config: PlanConfig) -> None:
    """Print the picture, pairs, imbalance and bytes of a plan; write them as JSON to a path."""
    config.check()
    path = config.output.path
    check_json(path)
    plan = plan_from_config(config)
    lookups = count_lookups(plan, plan.ranks // 2) if plan.ranks > SMALL_RANKS else 0
    if lookups is None:
        counts = PlanCounts(plan, can_count_rank=False, can_count_all=False)
    else:
        counts = PlanCounts(plan, can_count_rank=True, can_count_all=lookups * plan.ranks <= MAX_LOOKUPS)
    if path != STDOUT:
        _print(counts, ascii=config.ascii)
    if path is not None:
        record = {
            **json.loads(plan.to_json()),
            "counted": counts.record(),
            "choice": choice_record(plan.choice),
        }
        write_json(path, record)


@dataclass(frozen=True)
class PlanCounts:
    """A plan, and whether the steps of one rank, and of all ranks, can be counted within seconds."""

    plan: Plan
    can_count_rank: bool
    can_count_all: bool

    @property
    def table_ranks(self) -> list[int]:
        """The ranks of the table."""
        count = min(self.plan.ranks, TABLE_RANKS)
        return [self.plan.ranks * i // count for i in range(count)] if self.can_count_rank else []

    def record(self) -> dict[str, Any]:
        """The counts as plain data: of all ranks where they can be counted, else of the ranks of the table."""
        plan = self.plan
        totals: dict[str, Any] = {"pairs": plan.pairs(), "dense_pairs": plan.heads * plan.tokens**2}
        if self.can_count_all:
            totals["imbalance"] = plan.imbalance
            for name, backward in DIRECTIONS.items():
                sent = _count_sent(plan, None, backward)
                totals[name] = {**sent, "full_ring_bytes": plan.full_ring_bytes(backward=backward)}
        mean_pairs = totals["pairs"] / plan.ranks
        return {
            "rotates": plan.rotates,
            "totals": totals,
            "totals_left_out": None if self.can_count_all else TOTALS_LEFT_OUT,
            "ranks": [
                {
                    "rank": rank,
                    "tokens": plan.layout.rows(rank),
                    "pairs": (pairs := plan.pairs(rank)),
                    "imbalance": pairs / mean_pairs if mean_pairs else 1.0,
                    **{name: _count_sent(plan, rank, backward) for name, backward in DIRECTIONS.items()},
                }
                for rank in (range(plan.ranks) if self.can_count_all else self.table_ranks)
            ],
        }

    def row(self, rank: int) -> tuple[str, ...]:
        """The row of a rank in the table."""
        plan = self.plan
        sent = (size(plan.bytes_sent(rank, backward=backward)) for backward in DIRECTIONS.values())
        return f"rank {rank}", f"{plan.layout.rows(rank):,}", f"{plan.pairs(rank):,}", *sent

    def totals(self) -> list[Number]:
        """The numbers of the whole plan."""
        plan = self.plan
        pairs, dense_pairs = plan.pairs(), plan.heads * plan.tokens**2
        numbers = [
            Number("schedule", f"{plan.schedule}, {plan.rotates} rotate in the backward"),
            Number("pairs", f"{pairs:,} = {pairs / dense_pairs:.4f} of dense" if dense_pairs else "0", "counted"),
        ]
        if self.can_count_all:
            numbers.append(Number("imbalance", f"{plan.imbalance:.4f} (busiest rank / mean)", "counted"))
            for name, backward in DIRECTIONS.items():
                sent, full_ring = plan.bytes_sent(backward=backward), plan.full_ring_bytes(backward=backward)
                share = f" = {sent / full_ring:.4f} of a full ring" if full_ring else ""
                messages = plural(plan.messages(backward=backward), "message")
                numbers.append(Number(f"{name} sends", f"{size(sent)}{share}, {messages}", "counted"))
        numbers.append(Number("plan hash", plan.hash))
        return numbers if self.can_count_all else [*numbers, Number("totals", TOTALS_LEFT_OUT)]


def _count_sent(plan: Plan, rank: int | None, backward: bool) -> dict[str, int]:
    """The bytes and messages that a rank, or all ranks (None), sends in a pass."""
    return {"bytes": plan.bytes_sent(rank, backward=backward), "messages": plan.messages(rank, backward=backward)}


def _print(counts: PlanCounts, *, ascii: bool) -> None:
    """Print the picture, the table of ranks and the totals of a plan."""
    plan, console = counts.plan, get_console()
    console.print(
        f"{plan.pattern!r} over {plural(plan.tokens, 'token')}, {plan.layout.name} on {plural(plan.ranks, 'rank')}",
        highlight=False,
    )
    if counts.can_count_rank:
        print_plain(plan.picture(ascii=ascii), console)
        header = ("[counted]", "tokens", "pairs", "sends forward", "sends backward")
        print_grid("", header, map(counts.row, counts.table_ranks))
    else:
        console.print(
            f"Each of these {plan.ranks:,} ranks has so many steps that they are neither drawn nor counted; try a "
            "pattern that reaches less far, or fewer ranks.",
            highlight=False,
        )
    print_numbers("", counts.totals())
    if plan.choice is not None:
        print_choice(plan.choice)
