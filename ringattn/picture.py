"""Draw a plan as text: rank x step, from the true steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan

MAX_ROWS = 16
MAX_STEPS = 32


def draw_plan(plan: Plan, *, ascii: bool) -> str:
    """One line per rank (16 at most, evenly spaced), one cell per step (32 at most).

    A cell shows the share of the step's pairs that are computed, of all pairs of the visited blocks; a second
    mark says whether the rank sends meanwhile.
    """
    marks = ".-+#" if ascii else "·░▓█"
    arrow = ">" if ascii else "→"
    count = min(plan.ranks, MAX_ROWS)
    ranks = [plan.ranks * i // count for i in range(count)]
    plans = [plan.for_rank(rank) for rank in ranks]
    width = min(max(len(p.forward) for p in plans), MAX_STEPS)
    cut = any(len(p.forward) > MAX_STEPS for p in plans)
    lines = ["          " + "".join(f" s{step:<3}" for step in range(width)) + (" ..." if cut else "")]
    for rank, rank_plan in zip(ranks, plans, strict=True):
        cells = ""
        inner, place = plan.member(rank)
        for step in rank_plan.forward[:width]:
            rows = inner.layout.rows(place)
            owners = {part.owner for part in step.visits}
            whole = sum(rows * inner.layout.rows(owner) for owner in owners) * inner.heads
            pairs = sum(inner.demand.pairs(place, owner) for owner in owners)
            level = 0 if not pairs else 3 if pairs >= whole else 2 if 2 * pairs >= whole else 1
            cells += " " + marks[level] * 2 + (arrow if step.sends else " ") + " "
        lines.append(f"rank {rank:<5}" + cells.rstrip())
    legend = f"{marks[3]} all pairs of the visit  {marks[2]} half or more  {marks[1]} less  {marks[0]} none"
    return "\n".join([*lines, f"{legend}  {arrow} sends a block meanwhile"])
