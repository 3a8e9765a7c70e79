"""Programs end with status 0 and without a word, whether they destroy their process groups or not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANKS, RUNS = 3, 4


@pytest.mark.multi
def test_ranks_end_in_order(start: Callable[..., Any], tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "helpers" / "exits.py"
    done = start([sys.executable, str(script), str(RANKS), str(RUNS), str(tmp_path)], timeout=120)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert len(ends) == RUNS
    for run in ends:
        assert [status for status, _ in run] == [0] * RANKS, run
        assert not any("terminate called" in errors for _, errors in run)
