"""ringattn plan: print what a plan computes and sends, counted without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..files import STDOUT, check_json, write_json
from ..machine.presets import get_machine
from ..plan.leaves import count_nodes
from ..plan.plan import Plan
from ..recurrence.runs import STATE_ITEM, plan_states
from ..simulator.reporting.console import (
    Number,
    choice_record,
    describe_sides,
    get_console,
    print_choice,
    print_grid,
    print_numbers,
    print_plain,
)
from ..simulator.timing.auto import count_lookups
from ..text import plural, shorten, size
from .comparison import headlines, print_jobs
from .config.build import plans_from_config
from .config.schema import PlanConfig

#: Count all ranks of a plan with up to SMALL_RANKS ranks; of a larger one only if this takes at most MAX_LOOKUPS tile
#: lookups.
SMALL_RANKS, MAX_LOOKUPS = 64, 1_800_000
#: The most ranks shown in the table, spread evenly over all ranks.
TABLE_RANKS = 16
#: Names of the passes, and whether each is a backward.
DIRECTIONS = {"forward": False, "backward": True}
#: The longest documents on several ranks whose ranks are listed.
SHOWN = 3
TOTALS_LEFT_OUT = "left out: they need the steps of every rank"


def main(config: PlanConfig) -> dict[str, Any]:
    """Print the picture, pairs, imbalance and bytes of a plan, and write them as JSON if a path is given; returns them.

    Several patterns are printed one after the other, with a table at the end; the JSON lists them as "masks".
    """
    config.check()
    path = config.output.path
    check_json(path)
    records = [_show(plan, config) for plan in plans_from_config(config)]
    whole = records[0] if len(records) == 1 else {"masks": records}
    if path != STDOUT:
        print_jobs([({"mask": f"{i}"}, headlines(one)) for i, one in enumerate(records, 1)], "masks [counted]")
    if path is not None:
        write_json(path, whole)
    return whole


def _show(plan: Plan, config: PlanConfig) -> dict[str, Any]:
    """Print a plan and its counts; returns both for JSON."""
    path = config.output.path
    if config.rank is not None:
        listing = plan.listing(config.rank)
        if path != STDOUT:
            print_plain(describe_sides(plan))
            print_plain(str(listing))
        return listing.record
    lookups = count_lookups(plan, plan.ranks // 2) if plan.ranks > SMALL_RANKS else 0
    count = min(plan.ranks, TABLE_RANKS)
    # `lookups` is None if even the steps of one rank take too long to count.
    ranks = [] if lookups is None else _count_ranks(plan, [plan.ranks * i // count for i in range(count)])
    counts_all = lookups is not None and lookups * plan.ranks <= MAX_LOOKUPS
    totals = _count_totals(plan, counts_all)
    if plan.reproducible is not None and counts_all:
        totals["reproducible"] = count_nodes(plan)
    state = config.state_sizes()
    recurrence = None if state is None else _count_recurrence(plan, *state)
    if path != STDOUT:
        _print(plan, ranks, totals, ascii=config.ascii)
        if recurrence is not None:
            sent = f"{size(recurrence['bytes'])}, {plural(recurrence['messages'], 'message')}"
            print_numbers("", [Number(f"{recurrence['way']} of states", f"sends {sent} in each pass", "counted")])
    counted: dict[str, Any] = {
        **({} if plan.q_layout is None else {"forward_rotates": plan.forward_rotates}),
        "rotates": plan.rotates,
        "totals": totals,
        **({} if recurrence is None else {"recurrence": recurrence}),
        "documents": [{"tokens": tokens, "ranks": ranks} for tokens, ranks in plan.documents],
        "totals_left_out": None if counts_all else TOTALS_LEFT_OUT,
    }
    if path is not None:
        counted["ranks"] = _count_ranks(plan, range(plan.ranks)) if counts_all else ranks
    return {**json.loads(plan.to_json()), "counted": counted, "choice": choice_record(plan.choice)}


def _count_recurrence(plan: Plan, heads: int, keys: int, values: int) -> dict[str, Any]:
    """What all ranks send for a gated delta rule over the layout of `plan`, without documents, chosen for GPUs."""
    unit = plan.batch * heads * keys * (keys + values) * STATE_ITEM
    states = plan_states(plan.layout, None, unit, get_machine("cuda"))
    sent = states.messages.values()
    return {"way": states.way, "rounds": len(states.rounds), "bytes": sum(sent), "messages": len(sent)}


def _count_totals(plan: Plan, counts_all: bool) -> dict[str, Any]:
    """The pairs of a plan; with `counts_all`, also its imbalance and the bytes and messages of each pass."""
    totals: dict[str, Any] = {"pairs": plan.pairs(), "dense_pairs": plan.heads * plan.q_tokens * plan.tokens}
    if counts_all:
        totals["imbalance"] = plan.imbalance
        for name, backward in DIRECTIONS.items():
            sent = _count_sent(plan, None, backward)
            totals[name] = {**sent, "full_ring_bytes": plan.full_ring_bytes(backward=backward)}
    return totals


def _count_ranks(plan: Plan, ranks: Sequence[int]) -> list[dict[str, Any]]:
    mean = plan.pairs() / plan.ranks
    return [
        {
            "rank": rank,
            "tokens": plan.layout.rows(rank),
            **({} if plan.q_layout is None else {"queries": plan.q_layout.rows(rank)}),
            "pairs": (pairs := plan.pairs(rank)),
            "imbalance": pairs / mean if mean else 1.0,
            **{name: _count_sent(plan, rank, backward) for name, backward in DIRECTIONS.items()},
        }
        for rank in ranks
    ]


def _count_sent(plan: Plan, rank: int | None, backward: bool) -> dict[str, int]:
    """The bytes and messages sent in a pass by `rank`; by all ranks if it is None."""
    return {"bytes": plan.bytes_sent(rank, backward=backward), "messages": plan.messages(rank, backward=backward)}


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


def _print(plan: Plan, ranks: list[dict[str, Any]], totals: dict[str, Any], *, ascii: bool) -> None:
    """Print the picture, the table of ranks and the totals of a plan."""
    print_plain(describe_sides(plan))
    if ranks:
        print_plain(plan.picture(ascii=ascii))
        rows = []
        for each in ranks:
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
    if "imbalance" in totals:
        numbers.append(Number("imbalance", f"{totals['imbalance']:.4f} (busiest rank / mean)", "counted"))
        for name in DIRECTIONS:
            sent, full_ring, messages = (totals[name][key] for key in ("bytes", "full_ring_bytes", "messages"))
            share = f" = {sent / full_ring:.4f} of a full ring" if full_ring else ""
            numbers.append(Number(f"{name} sends", f"{size(sent)}{share}, {plural(messages, 'message')}", "counted"))
    if (nodes := totals.get("reproducible")) is not None:
        moved = f"{plural(nodes['nodes'], 'node')} of dk and dv sent, {size(nodes['node_bytes'])}"
        found = (
            f"{nodes['leaves']:,} of {plan.reproducible:,} tokens, {plural(nodes['pairs_of_leaves'], 'pair')}; {moved}"
        )
        numbers.append(Number("leaves", found, "counted"))
    numbers += _describe_documents(plan.documents)
    numbers.append(Number("plan hash", plan.hash))
    print_numbers("", numbers if "imbalance" in totals else [*numbers, Number("totals", TOTALS_LEFT_OUT)])
    if plan.choice is not None:
        print_choice(plan.choice)
