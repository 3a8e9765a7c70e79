"""What `ringattn plan --json` prints: a plan with its counts and, on a named machine, its modelled time and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import Unsupported
from ..machine.machine import Machine
from ..machine.presets import get_machine
from ..plan.choice import choice_record
from ..plan.leaves import count_nodes
from ..plan.plan import Plan
from ..plan.steps import Step
from ..recurrence.runs import STATE_ITEM, plan_states
from ..simulator.timing.auto import count_lookups
from ..simulator.timing.simulation import simulate_passes
from ..simulator.timing.timeline import Timeline
from .config.build import plans_from_config
from .config.groups import default_of
from .config.schema import PlanConfig

#: Count all ranks of a plan with up to SMALL_RANKS ranks; of a larger one only if this takes at most MAX_LOOKUPS tile
#: lookups.
SMALL_RANKS, MAX_LOOKUPS = 64, 1_800_000
#: The most ranks shown in the table, spread evenly over all ranks. Where not all ranks are counted, there are fewer if
#: these would take more than TABLE_LOOKUPS.
TABLE_RANKS, TABLE_LOOKUPS = 16, 200_000
#: Names of the passes, and whether each is a backward.
DIRECTIONS = {"forward": False, "backward": True}
TOTALS_LEFT_OUT = "left out: they need the steps of every rank"
#: Attributes of a timeline that are written to JSON unchanged.
RECORDED = ("solver", "why", "seconds", "compute", "exposed", "memory", "total", "joules", "price")


def count_plans(config: PlanConfig) -> list[tuple[Plan, dict[str, Any]]]:
    """Each plan of a configuration with its record: its counts, or the listing of `config.rank`."""
    config.check()
    machine = config.machine.made(ranks=config.ranks)
    return [(plan, _count(plan, config, machine)) for plan in plans_from_config(config, machine)]


def join_records(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON of `ringattn plan`: the record of its plan, or those of several plans as "masks"."""
    return records[0] if len(records) == 1 else {"masks": records}


def record_pass(timeline: Timeline) -> dict[str, Any]:
    """The numbers of a modelled pass as plain data."""
    return {**{name: getattr(timeline, name) for name in RECORDED}, "traffic": vars(timeline.traffic)}


def _count(plan: Plan, config: PlanConfig, machine: Machine) -> dict[str, Any]:
    if config.rank is not None:
        return plan.listing(config.rank).record
    lookups = count_lookups(plan, plan.ranks // 2) if plan.ranks > SMALL_RANKS else 0
    # `lookups` is None if even the steps of one rank take too long to count.
    counts_all = lookups is not None and lookups * plan.ranks <= MAX_LOOKUPS
    if counts_all:
        listed = plan.ranks
    else:
        listed = 0 if lookups is None else max(min(TABLE_RANKS, TABLE_LOOKUPS // lookups), 1)
    chosen = [plan.ranks * i // listed for i in range(listed)]
    ranks = _count_ranks(plan, chosen, config.steps)
    totals = _count_totals(plan, ranks if counts_all else [])
    if plan.reproducible is not None and counts_all:
        totals["reproducible"] = count_nodes(plan)
    state = config.state_sizes()
    counted = {
        **({} if plan.q_layout is None else {"forward_rotates": plan.forward_rotates}),
        "rotates": plan.rotates,
        "totals": totals,
        **({} if state is None else {"recurrence": _count_recurrence(plan, *state)}),
        "documents": [{"tokens": tokens, "ranks": ranks} for tokens, ranks in plan.documents],
        "totals_left_out": None if counts_all else TOTALS_LEFT_OUT,
        "ranks": ranks,
    }
    timed = {}
    if config.machine != default_of(config, "machine"):  # of a larger plan, only what needs no steps
        modelled = _model(plan, machine, "auto" if counts_all else "stencil") if plan.batch else None
        timed["modelled"] = modelled and {"machine": config.machine.path or config.machine.spec, **modelled}
    return {**json.loads(plan.to_json()), "counted": counted, **timed, "choice": choice_record(plan.choice)}


def _model(plan: Plan, machine: Machine, solver: str) -> dict[str, Any] | None:
    """The modelled time and memory of each pass; None if the solver cannot model the plan."""
    try:
        timelines = simulate_passes(plan, machine, True, {"solver": solver})
    except Unsupported:
        return None
    passes = {timeline.direction: record_pass(timeline) for timeline in timelines}
    return {**passes, "not modelled": timelines[0].unmodelled, "notes": timelines[0].notes}


def _count_recurrence(plan: Plan, heads: int, keys: int, values: int) -> dict[str, Any]:
    """What all ranks send for a gated delta rule over the layout of `plan`, without documents, chosen for GPUs."""
    unit = plan.batch * heads * keys * (keys + values) * STATE_ITEM
    states = plan_states(plan.layout, None, unit, get_machine("cuda"))
    sent = states.messages.values()
    return {"way": states.way, "rounds": len(states.rounds), "bytes": sum(sent), "messages": len(sent)}


def _count_totals(plan: Plan, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pairs of a plan; with the counts of all `ranks`, also its imbalance and what they send in each pass."""
    pairs = plan.pairs()
    totals: dict[str, Any] = {"pairs": pairs, "dense_pairs": plan.heads * plan.q_tokens * plan.tokens}
    if ranks:
        totals["imbalance"] = max(one["pairs"] for one in ranks) * plan.ranks / pairs if pairs else 1.0
        for name, backward in DIRECTIONS.items():
            sent = {unit: sum(one[name][unit] for one in ranks) for unit in ("bytes", "messages")}
            totals[name] = {**sent, "full_ring_bytes": plan.full_ring_bytes(backward=backward)}
    return totals


def _count_ranks(plan: Plan, ranks: Sequence[int], steps: bool) -> list[dict[str, Any]]:
    """The counts of each of `ranks`; with `steps`, also what it computes and sends in each step of the forward."""
    mean = plan.pairs() / plan.ranks
    return [
        {
            "rank": rank,
            "tokens": plan.layout.rows(rank),
            **({} if plan.q_layout is None else {"queries": plan.q_layout.rows(rank)}),
            "pairs": (pairs := plan.pairs(rank)),
            "imbalance": pairs / mean if mean else 1.0,
            **{name: _count_sent(plan, rank, backward) for name, backward in DIRECTIONS.items()},
            **({"steps": [_count_step(plan, rank, step) for step in plan.forward_steps(rank)]} if steps else {}),
        }
        for rank in ranks
    ]


def _count_sent(plan: Plan, rank: int, backward: bool) -> dict[str, int]:
    """The bytes and messages that a rank sends in a pass."""
    return {"bytes": plan.bytes_sent(rank, backward=backward), "messages": plan.messages(rank, backward=backward)}


def _count_step(plan: Plan, rank: int, step: Step) -> dict[str, Any]:
    """[owner, pairs, all pairs] of each block that a rank visits in a step, [peer, bytes] of each message it sends.

    Both ends of a message post it at the same "clock".
    """
    return {
        "clock": step.clock,
        "visits": [[owner, *pairs] for owner, pairs in plan.visited(rank, step).items()],
        "sends": [[hop.peer, sum(map(plan.part_bytes, hop.parts))] for hop in step.sends],
    }
