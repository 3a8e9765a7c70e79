"""ringattn plan: counted facts of a plan, without torch."""

from __future__ import annotations

from pathlib import Path

from ..asked import asked_plan
from ..choice import within_reach
from ..config import PlanConfig
from ..errors import plural
from ..files import check_writable, write_text
from ..plan import Plan
from ..report import Number, console, grid, show, show_choice, size

#: Of up to this many ranks all are counted, and of more where that takes no more than so many lookups of tiles.
ALL_RANKS, LOOKUPS = 64, 1_500_000


def main(config: PlanConfig) -> None:
    """Print the picture, the pairs, the imbalance and the bytes of a plan; write it as JSON where asked."""
    if config.output.path:
        check_writable(Path(config.output.path))
    plan = asked_plan(config)
    if config.output.path:
        write_text(Path(config.output.path), plan.to_json() + "\n")
    lines = console()
    lines.print(
        f"{plan.pattern!r} over {plan.tokens:,} tokens, {plan.layout.name} on {plural(plan.ranks, 'rank')}",
        highlight=False,
    )
    found = within_reach(plan, plan.ranks // 2) if plan.ranks > ALL_RANKS else (plan, 0)
    if found is None:
        lines.print(
            f"One rank of these {plan.ranks:,} has so many steps that they are neither drawn nor counted; a pattern that "
            "reaches less far, or fewer ranks, can be.",
            highlight=False,
        )
    else:
        plan = found[0]
        lines.print(plan.picture(ascii=config.ascii), highlight=False, markup=False, soft_wrap=True)
        _ranks(plan)
    show("", _totals(plan, whole=found is not None and found[1] * plan.ranks <= LOOKUPS))
    if plan.choice is not None:
        show_choice(plan.choice)


def _ranks(plan: Plan) -> None:
    count = min(plan.ranks, 16)
    rows = []
    for rank in (plan.ranks * i // count for i in range(count)):
        forward, backward = plan.bytes_sent(rank), plan.bytes_sent(rank, backward=True)
        rows.append(
            (f"rank {rank}", f"{plan.layout.rows(rank):,}", f"{plan.pairs(rank):,}", size(forward), size(backward))
        )
    grid("", ("[counted]", "tokens", "pairs", "sends forward", "sends backward"), rows)


def _totals(plan: Plan, *, whole: bool) -> list[Number]:
    pairs = plan.pairs()
    full = plan.heads * plan.tokens**2
    numbers = [
        Number("schedule", f"{plan.schedule}, {plan.rotates} rotate in the backward"),
        Number("pairs", f"{pairs:,} = {pairs / full:.4f} of dense" if full else "0", "counted"),
        Number("plan hash", plan.hash),
    ]
    if not whole:
        return [*numbers, Number("totals", "left out: they need the steps of every rank")]
    numbers.insert(2, Number("imbalance", f"{plan.imbalance:.4f} (busiest rank / mean)", "counted"))
    for backward in (False, True):
        sent, full = plan.bytes_sent(backward=backward), plan.full_ring_bytes(backward=backward)
        share = f" = {sent / full:.4f} of a full ring" if full else ""
        name = "backward sends" if backward else "forward sends"
        messages = plan.messages(backward=backward)
        numbers.insert(-1, Number(name, f"{size(sent)}{share}, {messages:,} messages", "counted"))
    return numbers
