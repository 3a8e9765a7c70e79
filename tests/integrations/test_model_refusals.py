"""Refusals of parallelized models leave everything usable; what the first comparison finds, and what it cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import refusal_cases

from ringattn import integrations

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.multi
def test_the_page_says_what_the_first_comparison_finds(run_ranks: Any) -> None:
    page = (ROOT / "docs/models.md").read_text()
    table = dict(re.findall(r"^\| (a .*?|BatchNorm .*?|experts .*?) \| (found|not found)", page, re.M))
    assert list(table) == list(refusal_cases.FAULTS)
    for found in run_ranks(refusal_cases.faults, 2, timeout=120):
        assert found == {name: word.replace("not found", "fine") for name, word in table.items()}


@pytest.mark.multi
def test_a_refusal_is_one_line_on_all_ranks_and_the_next_call_is_right(run_ranks: Any) -> None:
    """`count=100` was run by hand."""
    one, two = run_ranks(refusal_cases.refusals, 2, 16, timeout=120)
    assert one == two and sum(one.values()) == 16


@pytest.mark.multi
def test_what_one_process_computes_is_served(run_ranks: Any) -> None:
    for found in run_ranks(refusal_cases.served, 2, timeout=120):
        assert max(found.values()) < 1e-5, found


def test_release_candidates_have_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, fine in (("5.24.0rc1", True), ("5.25rc1", False), ("6rc2+cpu", False), ("5.24.0.dev0+cpu", True)):
        monkeypatch.setattr(integrations, "version", lambda name, found=found: found)
        if fine:
            integrations.check_release("transformers")
        else:
            with pytest.raises(integrations.Unsupported, match="is newer than"):
                integrations.check_release("transformers")
