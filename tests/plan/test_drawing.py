"""Pictures of plans: no wider than they are allowed to be, senders beside their receivers, and what is left out."""

from __future__ import annotations

from functools import cache

import pytest

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.plan.drawing import LEAST, choose_ranks
from ringattn.plan.plan import Plan

PATTERNS = (ra.Causal(), ra.Full(), ra.Window(700), ra.Dilated((2048, 4096), (1, 2), causal=True))


@cache
def make(pattern: ra.Pattern, ranks: int, schedule: str = "ring", heads: int = 1) -> Plan:
    return ra.make_plan(pattern, tokens=1024 * ranks, ranks=ranks, schedule=schedule, heads=heads)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("schedule", ["ring", "direct", "double_ring(4)", "ulysses(4)"])
@pytest.mark.parametrize("width", [LEAST, 80, 120])
def test_a_picture_fits_its_width_and_says_what_is_left_out(pattern: ra.Pattern, schedule: str, width: int) -> None:
    plan = make(pattern, 64, schedule, heads=4)
    lines = plan.picture(width=width).splitlines()
    assert max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)
    text, drawn = "\n".join(lines), sum(line.startswith("rank ") for line in lines)
    assert f"left out: {64 - drawn} of 64 ranks" in text and 4 <= drawn <= 16
    shown = choose_ranks(plan.ranks)
    steps = max(len(plan.for_rank(rank).forward) for rank in shown)
    cells = (width - 10) // 5
    assert (f"of {steps}" in lines[-1] and " ..." in lines[0]) == (steps > cells)
    assert f"s{steps - 1}" in lines[0]  # the last step is drawn


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_senders_are_drawn_beside_their_receivers(pattern: ra.Pattern) -> None:
    plan = make(pattern, 64)
    drawn = set(choose_ranks(plan.ranks))
    pairs = [(rank, hop.peer) for rank in drawn for step in plan.for_rank(rank).forward for hop in step.sends]
    together = {pair for pair in pairs if pair[1] in drawn}
    assert len({rank for pair in together for rank in pair}) >= len(drawn) - 4
    assert {0, 63} <= drawn
    firsts = {(bool(p.forward[0].sends), len(p.forward)) for p in map(plan.for_rank, drawn)}
    assert len(firsts) > 1 or pattern == ra.Full()  # not all of one kind


def test_all_of_few_ranks_are_drawn() -> None:
    plan = make(ra.Causal(), 8)
    text = plan.picture(width=80)
    assert text.count("rank ") == 8 and "left out" not in text
    with pytest.raises(InvalidInput, match="needs at least 32 columns"):
        plan.picture(width=20)


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(ra.Causal(), 64)
    for columns in ("60", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert plan.picture() == plan.picture(width=int(columns))
    monkeypatch.delenv("COLUMNS")
