"""ringattn verify: its report, its errors, its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Inside
from numerics_cases import PERIOD

from ringattn.cli.config.schema import LayoutGroup, MachineGroup, PatternGroup, ScheduleGroup, VerifyConfig
from ringattn.cli.verify import main
from ringattn.errors import InvalidInput, NumericsFailure


def config(**options: Any) -> VerifyConfig:
    return VerifyConfig(
        PatternGroup("Window(100)"), LayoutGroup("contiguous"), ScheduleGroup("ring"), MachineGroup("auto"),
        tokens="64k", ranks=2048, head_dim=8, heads=1, **{"period": PERIOD, **options},
    )  # fmt: skip


def test_the_command_reports_and_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main(config(whole=True, first=100, count=30))
    assert "complete: " in capsys.readouterr().out
    for options, words in (
        ({"whole": True, "first": 2048}, "expected ranks among"),
        ({"whole": True, "spread": 3}, "spread=3 has no meaning with whole=true"),
        ({"count": 3}, "count=3 has no meaning without whole=true"),
        ({"backward": True}, "backward=True has no meaning without whole=true"),
        ({"rows": 0}, "at least one row"),
        ({"threads": 0}, "threads=0"),
    ):
        with pytest.raises(InvalidInput, match=words):
            main(config(**options))
    monkeypatch.setattr("ringattn.simulator.numerics.sampled.TOLERANCE", 0.0)
    with pytest.raises(NumericsFailure, match="caught by the numbers"):
        main(config(rows=4))


def test_the_command_line(inside: Inside, tmp_path: Path) -> None:
    shape = ("tokens=1k", "ranks=16", "heads=1", "head_dim=8", "pattern=Causal()", "period=37")
    done = inside("verify", *shape, "rows=[5,100,1023]", "output.path=found.json")
    for words in ("3 of 1,024 query rows", "complete: ", "[measured]", "[counted]", "peak memory"):
        assert words in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["pairs"] == 6 + 101 + 1024 and found["accurate"] and found["complete"]
    assert (found["words"]["error"], found["words"]["ledger"]) == ("measured", "counted")
    assert found["plan"]["dtype"] == "float64" and 0 < found["error"] < 1e-11
    sides = ("q_tokens=1k", "q_first=3k", "heads=1", "head_dim=8", "tokens=4k", "ranks=16", "period=37")
    for more, words in (  # a sample waits for keys, whatever is faster
        (("rows=3",), ("3 of 1,024 query rows", "1,024 query tokens, shifted(contiguous, 3072)")),
        (("whole=true", "rotate=q"), (" messages, planned ", "256 of 1,024 query rows")),
    ):
        done = inside("verify", *sides, *more)
        assert all(word in done.stdout for word in words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.json"]
