"""ringattn plan: print what a plan computes and sends, counted without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..files import STDOUT, check_json, write_json
from ..plan.listing import describe_block
from ..plan.plan import Plan
from ..simulator.reporting.console import (
    Number,
    describe_sides,
    get_console,
    print_choice,
    print_grid,
    print_numbers,
    print_plain,
)
from ..text import duration, plural, shorten, size
from .comparison import headlines, print_jobs
from .config.schema import PlanConfig
from .counts import DIRECTIONS, TABLE_RANKS, TOTALS_LEFT_OUT, count_plans, join_records

#: The longest documents on several ranks whose ranks are listed.
SHOWN = 3


def main(config: PlanConfig) -> dict[str, Any]:
    """Print the picture, pairs, imbalance and bytes of a plan, and write them as JSON if a path is given; returns them.

    Several patterns are printed one after the other, with a table at the end; the JSON lists them as "masks".
    """
    path = config.output.path
    check_json(path)
    plans = count_plans(config)
    if path != STDOUT:
        for plan, record in plans:
            if config.rank is not None:
                print_plain(describe_sides(plan))
                print_plain(str(plan.listing(config.rank)))
            else:
                _print(plan, record, ascii=config.ascii)
        print_jobs([({"mask": f"{i}"}, headlines(one)) for i, (_, one) in enumerate(plans, 1)], "masks [counted]")
    whole = join_records([record for _, record in plans])
    if path is not None:
        write_json(path, whole)
    return whole


def _describe_documents(documents: Sequence[tuple[int, tuple[int, ...]]]) -> list[Number]:
    """How many documents lie on one rank, and which ranks hold the longest of the others."""
    spread = sorted((one for one in documents if len(one[1]) > 1), key=lambda one: -one[0])
    if not documents:
        return []
    lines = [
        f"{tokens:,} tokens on ranks {shorten(', '.join(map(str, ranks)), 40)}" for tokens, ranks in spread[:SHOWN]
    ]
    more = f"; {len(spread) - SHOWN} more on several ranks" if len(spread) > SHOWN else ""
    alone = f"{len(documents) - len(spread)} of {plural(len(documents), 'document')} on one rank"
    return [Number("documents", "; ".join([alone, *lines]) + more, "counted")]


def _print(plan: Plan, record: dict[str, Any], *, ascii: bool) -> None:
    """Print the picture, the table of ranks and the totals of a plan."""
    counted, modelled = record["counted"], record.get("modelled")
    ranks, totals = counted["ranks"], counted["totals"]
    print_plain(describe_sides(plan))
    if ranks:
        print_plain(plan.picture(ascii=ascii))
        rows, count = [], min(len(ranks), TABLE_RANKS)
        for each in (ranks[len(ranks) * i // count] for i in range(count)):
            sent = (size(each[name]["bytes"]) for name in DIRECTIONS)
            rows.append((f"rank {each['rank']}", f"{each['tokens']:,}", f"{each['pairs']:,}", *sent))
        print_grid("", ("[counted]", "tokens", "pairs", "sends forward", "sends backward"), rows)
    else:
        get_console().print(
            f"Each of these {plan.ranks:,} ranks has too many steps to draw or count; try a pattern with a shorter "
            "reach, or fewer ranks.",
            highlight=False,
        )
    forward = "" if plan.q_layout is None else f"{plan.forward_rotates} rotate in the forward, "
    pairs, dense_pairs = totals["pairs"], totals["dense_pairs"]
    numbers = [
        Number("schedule", f"{plan.schedule}, {forward}{plan.rotates} rotate in the backward"),
        Number("pairs", f"{pairs:,} = {pairs / dense_pairs:.4f} of dense" if dense_pairs else "0", "counted"),
    ]
    if plan.block is not None:
        numbers.insert(1, Number("block", f"{describe_block(plan.block)} of each key travels instead of k and v"))
    if "imbalance" in totals:
        numbers.append(Number("imbalance", f"{totals['imbalance']:.4f} (busiest rank / mean)", "counted"))
        for name in DIRECTIONS:
            sent, full_ring, messages = (totals[name][key] for key in ("bytes", "full_ring_bytes", "messages"))
            share = f" = {sent / full_ring:.4f} of a full ring" if full_ring else ""
            numbers.append(Number(f"{name} sends", f"{size(sent)}{share}, {plural(messages, 'message')}", "counted"))
    if (nodes := totals.get("reproducible")) is not None:
        found = (
            f"{nodes['leaves']:,} of {plan.reproducible:,} tokens, {plural(nodes['pairs_of_leaves'], 'pair')}; "
            f"{plural(nodes['nodes'], 'node')} of dk and dv sent, {size(nodes['node_bytes'])}"
        )
        numbers.append(Number("leaves", found, "counted"))
    numbers += _describe_documents(plan.documents)
    if modelled is not None:
        for name in DIRECTIONS:
            took, memory = duration(modelled[name]["seconds"]), size(sum(modelled[name]["memory"].values()))
            on = f"{name} on {modelled['machine']}"
            numbers.append(Number(on, f"{took}, {memory} of memory on a rank", "modelled"))
    numbers.append(Number("plan hash", plan.hash))
    print_numbers("", numbers if "imbalance" in totals else [*numbers, Number("totals", TOTALS_LEFT_OUT)])
    if plan.choice is not None:
        print_choice(plan.choice)
    if (recurrence := counted.get("recurrence")) is not None:
        states = f"{size(recurrence['bytes'])}, {plural(recurrence['messages'], 'message')}"
        print_numbers("", [Number(f"{recurrence['way']} of states", f"sends {states} in each pass", "counted")])
