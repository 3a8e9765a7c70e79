"""Reports of studies: what was executed by which budget, every number with its word, and what is extrapolated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Inside
from studies import files, read, study, text_of

import ringattn as ra
from ringattn import Unsupported
from ringattn.errors import NumericsFailure
from ringattn.lab.study import plots, report, runner
from ringattn.lab.study.evaluation import plan_execution
from ringattn.lab.study.runner import run
from ringattn.lab.study.tables import Table, show_number
from ringattn.lab.verbs.settings import ExecuteGroup


def test_budgets_decide_by_assumed_rates_alone(tmp_path: Path) -> None:
    options = ExecuteGroup(budget=100.0)
    local = ra.Causal() & ra.Window(100)
    some = range((1 << 17) - 32, (1 << 17) + 32)
    for pattern, ranks, whole in ((ra.Full(), 2, range(2)), (ra.Full(), 4096, None), (local, 1 << 18, some)):
        plan = ra.make_plan(pattern, tokens=4096 * ranks, ranks=ranks, schedule="ring")
        order = plan_execution(plan, options)
        assert order.ranks == whole and order.seconds <= 100.0
    # The longest first; what does not fit is said not to be executed, and what fits after it is.
    axes = {"ranks": [256, 512, 1024], "shard": [1024]}
    table = run(study(tmp_path, axes, study={"execute": ExecuteGroup(budget=0.28, rows=2)}))
    assert ["executed how" in row for row in table.rows] == [True, True, False]
    assert [row["executed turn"] for row in table.rows] == [3, 2, 1]
    why = table.rows[2]["executed why not"]
    assert why.startswith("not executed: 2 rows would take ") and "280 ms of the budget of 280 ms were left at" in why
    assert {row["executed ledger"] for row in table.rows[:2]} == {"complete"}


def test_the_billion_tokens_quickly(inside: Inside, tmp_path: Path) -> None:
    """The experiment on its three smallest sizes: what is executed passes its ledger, the rest is said not to be."""
    pytest.importorskip("matplotlib")
    sizes = "[{tokens: 8192, ranks: 1}, {tokens: 131072, ranks: 32}, {tokens: 1048576, ranks: 256}]"
    axes = ["axes.pattern=[full, 'Causal() & Window(255)']", "axes.machine=[gtx1080_pcie, h100_nvlink_ib]"]
    options = ("execute.budget=1", f"together={sizes}", "output.path=out")
    done = inside("study", "billion_tokens", *options, *axes)
    rows = read(tmp_path / "out" / "sweep.csv")
    assert len(rows) == 12
    assert {"complete"} == {row["executed ledger"] for row in rows if row["executed how"]}
    some = [row for row in rows if row["executed how"]]
    assert any("whole" in row["executed how"] for row in some)
    assert all(row["executed how"] or row["executed why not"] for row in rows)
    for row in some:
        assert float(row["executed error"]) <= float(row["executed most allowed"])
        whole = row["executed how"] == "all ranks, whole"  # with 16 rows of each rank compared
        executed = (int(row[f"executed {name}"]) for name in ("rows [query rows]", "rows compared [query rows]"))
        assert tuple(executed) == ((int(row["tokens [tokens]"]), 16 * int(row["ranks"])) if whole else (16, 16))
    left = [row["executed why not"] for row in sorted(rows, key=lambda row: int(row["executed turn"]))]
    assert all("at its turn" in why for why in left if why)
    full = [row for row in rows if row["pattern"] == "Full()"]
    assert [int(row["pairs [(query, key, head) pairs]"]) for row in full[:2]] == [8 * 8192**2] * 2
    far = json.loads((tmp_path / "out" / "summary.json").read_text())["extrapolated"]
    h100 = [one for one in far if "h100" in one["series"] and "Full" in one["series"]]
    a, b = (float(full[i]["forward time [s]"]) for i in (3, 5))
    (one,) = h100
    assert one["ranks"] == -(-(10**12) // 4096)
    assert one["seconds"] == pytest.approx(b + (b - a) / (256 - 32) * (one["ranks"] - 256))
    text = text_of(tmp_path / "out" / "report.html")
    assert "[extrapolated]" in text and "Nothing of this size was executed" in text and "not executed" in text
    assert "executed in fp64 with 1 head of 8 elements and a batch of 1" in text
    assert "Equal for all points: layout=contiguous, schedule=ring, heads=8, kv_heads=8, head_dim=64, dtype=" in text
    assert "of 12 points have numbers, 0 were refused" in text and "of 6 plans executed [counted]" in done.stdout


def test_reports_hold_every_number_with_its_word(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = {"plots": ["stack", "efficiency", "memory", "crossover"]}
    axes = {"ranks": [2, 4], "tokens": [4096, 8192], "layout": ["contiguous", "zigzag"]}
    done = study(tmp_path / "a", axes, study=options, slow={1: 2.0})
    table = run(done)
    page = (tmp_path / "a" / "report.html").read_text()
    assert '<figure role="img" aria-label="stack: the time by cause, by ranks">' in page
    assert 'aria-label="crossover: what takes the least time, by ranks and tokens"' in page
    assert page.count("<svg") == 4 and "http://www.w3.org" in page and 'src="' not in page
    for one in table.columns:
        if one.unit in ("s", "bytes", "bytes per rank"):
            assert one.word in ("counted", "modelled")
    assert "forward time, modelled" in page and "forward bytes, counted" in page
    assert {one.unit for one in table.columns if one.name.endswith(" cost")} == {"USD"}
    assert "price=2.5 USD / h [assumed]" in page
    best = plots.find_fastest(table, "ranks", "tokens")
    for (ranks, tokens), (name, seconds) in best.items():
        both = {}
        for layout in ("contiguous", "zigzag"):
            plan = ra.make_plan(ra.Causal(), tokens=tokens, ranks=ranks, layout=layout, schedule="ring", heads=2)
            both[layout] = ra.simulate(plan, "h100_nvlink_ib", slow={1: 2.0}).seconds
        assert seconds == min(both.values()) and name == " = ".join(x for x in both if both[x] == seconds)
    run(study(tmp_path / "b", axes, study=options, slow={1: 2.0}))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_series_that_are_equally_fast_share_a_cell() -> None:
    times = {"contiguous": 1.0, "zigzag": 1.0, "striped": 2.0}
    rows = tuple(
        {"status": "ok", "ranks": 2, "tokens": 4, "layout": layout, "forward time": seconds}
        for layout, seconds in times.items()
    )
    table = Table((), rows, ("ranks", "tokens", "layout"), (), ())
    assert plots.find_fastest(table, "ranks", "tokens") == {(2, 4): ("contiguous = zigzag", 1.0)}


def test_reports_escape_labels_and_end_long_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """11 points, of which a report shows 10; what a label holds is text."""
    monkeypatch.setattr(report, "MOST_ROWS", 10)
    together = [{"machine.bandwidth": 1e9 + i, "label.name": "<b> & |"} for i in range(11)]
    run(study(tmp_path / "s", {}, study={"together": together, "name": "<img src=x>"}))
    page = (tmp_path / "s" / "report.html").read_text()
    assert page.count("<td>&lt;b&gt; &amp; |</td>") == 10
    assert "The first 10 of 11 points; sweep.csv holds all points." in page and "<img" not in page
    words = "Study <img src=x> 11 of 11 points have numbers, 0 were refused."
    assert words in text_of(tmp_path / "s" / "report.html")


def test_numbers_have_units() -> None:
    shown = {"tokens": [8192, 65536, 1 << 20, 100], "machine.bandwidth": [1e9, 2.5e10], "forward time": [1.5e-6]}
    assert [show_number(name, x) for name, values in shown.items() for x in values] == [
        *("8k", "64k", "1M", "100", "1 GB/s", "25 GB/s", "1.5 us")
    ]  # fmt: skip


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unsupported, match=r"pip install 'ringattn\[plot\]'"):
        run(study(tmp_path, {"ranks": [2, 4]}, study={"plots": ["stack"]}))
    assert not list(tmp_path.iterdir())
    run(study(tmp_path, {"ranks": [2, 4]}))


def test_wrong_numerics_fail_after_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.evaluation.execute

    def harmed(plan: ra.Plan, *more: Any) -> dict[str, Any]:
        found = real(plan, *more)
        return {**found, "ledger": "NOT COMPLETE"} if plan.ranks == 4 else {**found, "error of lse": float("nan")}

    monkeypatch.setattr(runner.evaluation, "execute", harmed)
    with pytest.raises(NumericsFailure, match="points 0, 1: the executed numerics are wrong"):
        run(study(tmp_path / "s", {"ranks": [2, 4]}, study={"execute": ExecuteGroup(budget=5.0)}))
    assert [row["executed ledger"] for row in read(tmp_path / "s" / "sweep.csv")] == ["complete", "NOT COMPLETE"]
