"""An execution that is killed continues from its file, and ends with the numbers of one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from numerics_cases import make

import ringattn as ra
from ringattn.errors import InvalidInput
from ringattn.plan.plan import Plan
from ringattn.simulator.numerics import checkpoint, numerics
from ringattn.simulator.numerics.ledger import AuditingKernel

CASES: tuple[tuple[Plan, dict[str, Any]], ...] = (
    (make(ra.Causal(), layout="zigzag"), {"rows": 7}),
    (make(ra.Dilated((32, 64), (1, 2), causal=True)), {"mode": "all", "backward": True, "together": 2}),
    (make(ra.Full()), {"mode": "all", "together": 3, "ranks": range(1, 7)}),
)


class Killed(BaseException):
    """Stands for the end of the process."""


def count_calls(monkeypatch: pytest.MonkeyPatch, most: int | None = None) -> list[int]:
    """[number of kernel calls so far]; the process ends at call `most`."""
    calls, forward = [0], AuditingKernel.forward

    def counted(self: AuditingKernel, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == most:
            raise Killed
        return forward(self, *given)

    monkeypatch.setattr(AuditingKernel, "forward", counted)
    return calls


def numbers_of(plan: Plan, options: dict[str, Any], state: Path | None = None) -> dict[str, Any]:
    report = numerics(plan, state=state, **options)
    assert report.passed
    return {name: value for name, value in report.counts().items() if name != "seconds"}


@pytest.mark.parametrize(("plan", "options"), CASES, ids=["rows", "ranks, backward", "some ranks"])
def test_a_killed_execution_continues(
    plan: Plan, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)
    with monkeypatch.context() as patch:
        calls = count_calls(patch)
        alone = numbers_of(plan, options)
        every = calls[0]
    for most in (2 * every // 3, every - 1):
        state = tmp_path / f"{most}.json"
        with monkeypatch.context() as patch:
            count_calls(patch, most)
            with pytest.raises(Killed):
                numerics(plan, state=state, **options)
        with monkeypatch.context() as patch:
            calls = count_calls(patch)
            assert numbers_of(plan, options, state) == alone
            assert 0 < calls[0] < every


def test_the_file_lists_each_rank_once(tmp_path: Path) -> None:
    plan, state = make(ra.Dilated((32, 64), (1, 2), causal=True)), tmp_path / "state.json"
    numerics(plan, state=state, mode="all", backward=True, together=2)
    finished = json.loads(state.read_text())["state"]["finished"]
    ranks = [rank for group in finished for first, last in group["ranks"] for rank in range(first, last + 1)]
    assert sorted(ranks) == list(range(plan.ranks))
    assert sum(group["pairs"] for group in finished) == plan.pairs()
    for group in finished:  # another process can check any group
        part = tmp_path / f"{group['ledger']}.json"
        (first, last), *others = group["ranks"]
        assert not others
        numerics(plan, state=part, mode="all", backward=True, ranks=range(first, last + 1))
        assert [each["ledger"] for each in json.loads(part.read_text())["state"]["finished"]] == [group["ledger"]]


def test_the_file_of_another_execution_is_refused(tmp_path: Path) -> None:
    (plan, options), state = CASES[0], tmp_path / "state.json"
    numerics(make(ra.Causal()), state=state, mode="all")
    with pytest.raises(InvalidInput, match="another execution, with another backward and mode and plan"):
        numerics(plan, state=state, **options)
    for text in ("", "[]", '{"state": {}}'):
        state.write_text(text)
        with pytest.raises(InvalidInput, match="not the state of an execution"):
            numerics(plan, state=state, **options)
