"""Studies: points against direct calls, windows against a plain recurrence, resumption after SIGKILL, files that are whole."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ring_oracle import Clock, starts
from test_cli import ringattn

import ringattn as ra
from ringattn import InvalidInput, Machine, Unsupported
from ringattn.config import MachineGroup, SimulateConfig, conf_dir
from ringattn.cut import Cut, cover, covered, minus
from ringattn.groups import ExecuteGroup, LayoutGroup, PatternGroup, ScheduleGroup, StudyGroup, WindowGroup
from ringattn.study import plots, trace
from ringattn.study.executed import wanted
from ringattn.study.journal import Journal
from ringattn.study.runner import Study, run
from ringattn.study.space import in_order, points
from ringattn.study.sweep import as_study, split
from ringattn.timing.window import window

MACHINE = Machine(flops=1e8, alpha=1e-4, beta=2e7, merge=1e8, gamma=0.1)
SWEEP = [
    "-m",
    "pattern=Causal(),Causal() & Window(100)",
    "ranks=2,4,8",
    "tokens=4k,1M",
    "heads=2",
    "study.plots=[stack]",
]


def config(**more: Any) -> SimulateConfig:
    base: dict[str, Any] = {
        "pattern": PatternGroup("Causal()"), "layout": LayoutGroup("zigzag"), "schedule": ScheduleGroup("ring"),
        "machine": MachineGroup("h100_nvlink_ib"), "tokens": 4096, "ranks": 4, "heads": 2, "study": StudyGroup(plots=[]),
    }  # fmt: skip
    return SimulateConfig(**{**base, **more})


def study(folder: Path, axes: dict[str, Any], **more: Any) -> Study:
    options = {"plots": [], **more.pop("study", {})}
    made = config(study=StudyGroup(axes=axes, **options), **more)
    return Study("test", made, points(made), folder)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_row_is_a_direct_call(tmp_path: Path) -> None:
    """Numbers of the CSV are those of ra.simulate on a plan that this test makes itself; rows are in the axes' order."""
    axes = {"pattern": ["window", "Full()"], "ranks": [2, 8], "machine.beta": [1e9, 5e10], "layout": ["contiguous"]}
    run(study(tmp_path / "s", axes, backward=True, heads=4, slow={1: 1.5}, tokens=512))
    rows = read(tmp_path / "s" / "sweep.csv")
    place = 0
    for pattern in (ra.Causal() & ra.Window(4095), ra.Full()):
        for ranks in (2, 8):
            for beta in (1e9, 5e10):
                row = rows[place]
                plan = ra.make_plan(
                    pattern, tokens=512, ranks=ranks, layout="contiguous", schedule="ring", heads=4, dtype="float32"
                )
                machine = ra.timing.get_machine("h100_nvlink_ib").changed(beta=beta)
                for backward, name in ((False, "forward"), (True, "backward")):
                    found = ra.simulate(plan, machine, backward=backward, slow={1: 1.5})
                    assert float(row[f"{name} time [s]"]) == found.seconds
                    assert float(row[f"{name} wait [s]"]) == found.exposed["wait"]
                    assert int(row[f"{name} bytes [bytes]"]) == plan.bytes_sent(backward=backward)
                    assert int(row[f"{name} memory [bytes per rank]"]) == sum(found.memory.values())
                    assert row[f"{name} tier"] == found.tier
                mask = plan.pattern.mask(512)
                assert int(row["pairs [(query, key, head) pairs]"]) == 4 * int(mask.sum())
                assert (row["point"], row["machine.beta [bytes/s]"]) == (str(place), repr(beta))
                place += 1
    assert place == len(rows)


def test_refused_points_are_rows_with_their_reason(tmp_path: Path) -> None:
    table = run(study(tmp_path, {"heads": [1, 2], "kv_heads": [2]}))
    assert [row["status"] for row in table.rows] == ["refused", "ok"]
    assert "1 query heads cannot share 2" in table.rows[0]["why"] and "forward time" not in table.rows[0]
    report = (tmp_path / "report.md").read_text()
    assert "points 0: 1 query heads cannot share 2" in report and "1 of 2 points have numbers, 1 were refused" in report
    with pytest.raises(InvalidInput, match="every point of the study is refused"):
        run(study(tmp_path / "all", {"heads": [1], "kv_heads": [2]}))


def test_axes_are_checked() -> None:
    def made(axes: dict[str, Any], overrides: tuple[str, ...] = (), **options: Any) -> Any:
        return points(
            config(study=StudyGroup(axes=axes, **options)), overrides, {"pattern": "window", "layout": "zigzag"}
        )

    for axes, words in (
        ({"rank": [1]}, "did you mean 'ranks'"),
        ({"pattern": ["windo"]}, "did you mean 'window'"),
        ({"machine.bta": [1]}, "did you mean 'beta'"),
        ({"ranks": 4}, "expected a list"),
        ({"ranks": [1.5]}, "not a whole number"),
        ({"backward": ["maybe"]}, "expected true or false"),
        ({"output.path": ["a", "b"]}, "cannot be an axis"),
        ({"shard": [1], "tokens": [2]}, "not both"),
        ({"ranks": [[1]]}, "not a whole number"),
        ({"pattern.block": [1, 2]}, "no meaning with pattern=window"),
        ({"machine.beta": ["fast"]}, "fast"),
    ):
        with pytest.raises(InvalidInput, match=words):
            made(axes)
    with pytest.raises(InvalidInput, match="the study goes through ranks"):
        made({"ranks": [1, 2]}, ("ranks=4",))
    with pytest.raises(InvalidInput, match="is an axis and in"):
        made({"ranks": [1, 2]}, together=[{"ranks": 4}])
    found = made({"pattern.left": [7, 9], "shard": ["1k"], "ranks": ["2"], "slow": ["{0: 2.0}", None]})
    assert [one.config.pattern.spec for one in found[::2]] == ["Causal() & Window(7)", "Causal() & Window(9)"]
    assert [one.config.slow for one in found[:2]] == [{0: 2.0}, None]
    assert {one.config.size() for one in found} == {2048}
    # Parts of a group that the command line gives hold for every option.
    both = made({"machine": ["cpu", "a100_pcie"]}, ("machine.beta=7e9",))
    assert [one.config.machine.made().beta for one in both] == [7e9, 7e9]
    assert both[1].config.machine.made().inner == 4
    paired = made({"heads": [1, 2]}, together=[{"ranks": 2, "label.name": "a"}, {"ranks": 4}])
    assert [(one.config.ranks, one.config.heads, one.labels) for one in paired] == [
        (2, 1, {"name": "a"}), (2, 2, {"name": "a"}), (4, 1, {}), (4, 2, {})
    ]  # fmt: skip


def test_points_of_one_plan_follow_each_other() -> None:
    made = points(config(study=StudyGroup(axes={"machine.beta": [1e9, 2e9], "ranks": [2, 4]})))
    assert [point.config.ranks for point in made] == [2, 4, 2, 4]
    assert [point.config.ranks for point in in_order(made)] == [2, 2, 4, 4]
    assert sorted(point.number for point in in_order(made)) == [0, 1, 2, 3]


def test_comma_lists_become_axes() -> None:
    assert split("a,(b,c),'d,e',{f: 1, g: 2}") == ["a", "(b,c)", "'d,e'", "{f: 1, g: 2}"]
    assert as_study(["-m", "ranks=1,2", "heads=4", "pattern=Window(1, 2),Full()"]) == [
        "heads=4", "+study.axes={ranks: ['1', '2'], pattern: ['Window(1, 2)', 'Full()']}"
    ]  # fmt: skip
    assert as_study(["-m", "ranks=range(1,4)"]) == ["+study.axes={ranks: ['1', '2', '3']}"]
    other = ["-m", "experiment=validate", "heads=1,2"]
    assert as_study(other) == other
    for wrong, words in (
        (["-m", "ranks=2"], "no key has several values"),
        (["-m", "hydra/launcher=joblib"], "one process"),
    ):
        with pytest.raises(InvalidInput, match=words):
            as_study(wrong)


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "study").glob("*.yaml")))
def test_presets_have_points_and_plots(name: str) -> None:
    """Each preset composes, its points are made, and its plots are known; nothing is computed."""
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="simulate_schema", node=SimulateConfig)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        found = OmegaConf.to_object(compose("simulate", [f"study={name}"]))
    assert isinstance(found, SimulateConfig)
    assert len(points(found)) > 5 and found.study.name == name
    plots.check_names(found.study.plots)


# The window of a pass.


@pytest.mark.parametrize(("slow", "tier"), [({2: 3.0}, "D"), ({2: 3.0}, "F")])
def test_windows_and_traces_are_the_plain_recurrence(slow: dict[int, float], tier: str) -> None:
    """Five ranks, all pairs: the seconds of every event, from formulas written out here."""
    ranks, rows, heads, dim = 5, 16, 2, 8
    schedule = "ring" if tier == "D" else "double_ring(1)"
    plan = ra.make_plan(ra.Full(), tokens=ranks * rows, ranks=ranks, heads=heads, head_dim=dim, schedule=schedule)
    found = window(plan, MACHINE, ranks=range(1, 5), clocks=range(1, 4), slow=slow)
    assert found.tier == tier
    visit = rows * rows * heads * 4 * dim / MACHINE.flops
    merging = 3 * rows * heads * (dim + 1) * 4 / 1e8
    message = 1e-4 + 2 * rows * heads * dim * 4 / MACHINE.beta

    def times(factors: dict[int, float]) -> tuple[list[list[float]], list[Clock]]:
        clocks = []
        for k in range(ranks):
            moving = k < ranks - 1
            busy = []
            for factor in (factors.get(r, 1.0) for r in range(ranks)):
                busy.append(factor * (visit + merging) + 0.1 * moving * min(factor * visit, message))
            clocks.append(Clock(busy, {1: [(message, message - 1e-4)] * ranks} if moving else {}))
        return starts(ranks, clocks), clocks

    expected, clocks = times(slow)
    plain, _ = times({})
    assert found.begun == pytest.approx(np.array([row[1:] for row in expected[1:5]]), rel=1e-12)
    assert found.late == pytest.approx(
        np.array([row[1:] for row in expected[1:5]]) - [r[1:] for r in plain[1:5]], abs=1e-12
    )
    made = trace.events(found, "forward")
    done = [event for event in made if event["ph"] == "X"]
    assert all(event.keys() >= {"ph", "ts", "dur", "pid", "tid", "name"} for event in made)
    for k in range(1, 4):
        for rank in range(1, 5):
            (busy,) = [e for e in done if (e["name"], e["tid"], e["pid"], e["args"]["clock"]) == ("busy", rank, 0, k)]
            assert (busy["ts"], busy["dur"]) == pytest.approx((1e6 * expected[k][rank], 1e6 * clocks[k].busy[rank]))
            waits = [e for e in done if (e["name"], e["tid"], e["args"]["clock"]) == ("wait", rank, k)]
            gap = expected[k + 1][rank] - expected[k][rank] - clocks[k].busy[rank]
            assert sum(e["dur"] for e in waits) == pytest.approx(1e6 * gap, abs=1e-6)
            if tier == "D" and k < 4:
                (sent,) = [e for e in done if e["pid"] == 1 and (e["tid"], e["args"]["clock"]) == (rank, k)]
                target = (rank + 1) % ranks
                assert sent["name"] == f"to rank {target}"
                assert sent["ts"] == pytest.approx(1e6 * max(expected[k][rank], expected[k][target]))
                assert sent["dur"] == pytest.approx(1e6 * message)


def test_windows_that_nobody_knows_are_refused() -> None:
    plan = ra.make_plan(ra.Full(), tokens=64, ranks=4, schedule="ring")
    for ranks, clocks in ((range(0, 5), range(2)), (range(2), range(7, 9)), (range(0), range(2))):
        with pytest.raises(InvalidInput, match="the pass has"):
            window(plan, MACHINE, ranks=ranks, clocks=clocks)
    many = ra.make_plan(ra.Causal(), tokens=1 << 30, ranks=1 << 18, heads=8, layout="zigzag", schedule="ring")
    with pytest.raises(Unsupported):
        window(many, Machine(1e12, 1e-6, 1e12), ranks=range(4), clocks=range(4))


# Interruption.


def test_a_torn_line_is_dropped_and_a_changed_study_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    with Journal(path, {"study": "a"}) as journal:
        journal.add("1", {"x": 0.1})
        journal.add("2", {"x": None})
        with pytest.raises(InvalidInput, match="another process"), Journal(path, {"study": "a"}):
            pass
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(b'{"study": "a"}\n'), -7):
        path.write_bytes(whole[:cut])
        with Journal(path, {"study": "a"}) as journal:
            assert list(journal.known) == ["1", "2"][: whole[:cut].count(b"\n") - 1]
            for key, value in (("1", 0.1), ("2", None)):
                if key not in journal.known:
                    journal.add(key, {"x": value})
        assert path.read_bytes() == whole
    with pytest.raises(InvalidInput, match="another study"), Journal(path, {"study": "b"}):
        pass
    path.write_bytes(whole.replace(b'"x"', b'"x', 1))
    with pytest.raises(InvalidInput, match="line 2 is no record"), Journal(path, {"study": "a"}):
        pass


def test_another_study_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(study(tmp_path, {"ranks": [2]}))
    before = (tmp_path / "sweep.csv").read_bytes()
    with pytest.raises(InvalidInput, match="another points; give another"):
        run(study(tmp_path, {"ranks": [2, 4]}))
    assert (tmp_path / "sweep.csv").read_bytes() == before


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(InvalidInput, match="holds files, and none of a study"):
        run(study(tmp_path, {"ranks": [2]}))
    assert files(tmp_path) == {"report.md": b"mine"}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_study_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at random moments, again and again: no point is done twice, and all files are those of a quiet run."""
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "ringattn", "simulate", *SWEEP, "output.path=out"]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for folder in (quiet, killed):
        folder.mkdir()
    begun = time.monotonic()
    subprocess.run(command, cwd=quiet, env=env, check=True, capture_output=True, timeout=100)
    took = time.monotonic() - begun
    chance, kills = random.Random(0), 0
    journal = killed / "out" / "points.jsonl"
    for moment in range(3):
        process = subprocess.Popen(command, cwd=killed, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if moment < 2:  # while points are being done, else at any time
                wanted = 1 + chance.randrange(2, 6) * (moment + 1)
                while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < wanted):
                    time.sleep(0.002)
            else:
                time.sleep(chance.uniform(0.4, 1.0) * took)
        finally:
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    if journal.exists():  # as if the machine had been switched off in the middle of a line
        journal.write_bytes(journal.read_bytes()[:-5])
    subprocess.run(command, cwd=killed, env=env, check=True, capture_output=True, timeout=100)
    assert files(killed / "out") == files(quiet / "out")
    assert len({json.loads(line).get("key") for line in journal.read_text().splitlines()}) == 13
    assert {"stack.svg", "stack.png", "report.html", "sweep.csv", "summary.json"} <= files(quiet / "out").keys()


# Tables and reports of what was executed, and beyond.


def test_budgets_decide_by_assumed_rates_alone(tmp_path: Path) -> None:
    options = ExecuteGroup(budget=100.0)
    for pattern, ranks, how in (
        (ra.Full(), 2, "whole"),
        (ra.Full(), 4096, "rows"),
        (ra.Causal() & ra.Window(100), 1 << 18, "some"),
    ):
        plan = ra.make_plan(pattern, tokens=4096 * ranks, ranks=ranks, schedule="ring")
        order = wanted(plan, options)
        assert (order.how, order.seconds <= 100.0) == (how, True)
        assert order.first >= 0 and order.first + order.count <= max(ranks, order.count)
    # The longest first; what does not fit is said not to be executed, and what fits after it is.
    axes = {"ranks": [256, 512, 1024], "shard": [1024]}
    table = run(study(tmp_path, axes, study={"execute": ExecuteGroup(budget=0.28, rows=2)}))
    assert ["executed how" in row for row in table.rows] == [True, True, False]
    assert "not executed: 2 rows would take about" in table.rows[2]["executed why not"]
    assert {row["executed ledger"] for row in table.rows[:2]} == {"complete"}


def test_the_billion_tokens_quickly(tmp_path: Path) -> None:
    """The experiment on its three smallest sizes: what is executed passes its ledger, the rest is said not to be."""
    pytest.importorskip("matplotlib")
    sizes = "[{tokens: 8192, ranks: 1}, {tokens: 131072, ranks: 32}, {tokens: 1048576, ranks: 256}]"
    axes = ["study.axes.pattern=[full, 'Causal() & Window(255)']", "study.axes.machine=[gtx1080_pcie, h100_nvlink_ib]"]
    done = ringattn(
        "simulate", "experiment=billion_tokens", "study.execute.budget=1", f"study.together={sizes}", "output.path=out", *axes,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "out" / "sweep.csv")
    assert len(rows) == 12
    assert {"complete"} == {row["executed ledger"] for row in rows if row["executed how"]}
    some = [row for row in rows if row["executed how"]]
    assert any("whole" in row["executed how"] for row in some)
    assert all(row["executed how"] or row["executed why not"] for row in rows)
    for row in some:
        assert float(row["executed error"]) <= float(row["executed most allowed"])
    full = [row for row in rows if row["pattern"] == "Full()"]
    assert [int(row["pairs [(query, key, head) pairs]"]) for row in full[:2]] == [8 * 8192**2] * 2
    far = json.loads((tmp_path / "out" / "summary.json").read_text())["extrapolated"]
    h100 = [one for one in far if "h100" in one["series"] and "Full" in one["series"]]
    a, b = (float(full[i]["forward time [s]"]) for i in (3, 5))
    (one,) = h100
    assert one["ranks"] == -(-(10**12) // 4096)
    assert one["seconds"] == pytest.approx(b + (b - a) / (256 - 32) * (one["ranks"] - 256))
    report = (tmp_path / "out" / "report.md").read_text()
    assert "[extrapolated]" in report and "Nothing of this size was executed" in report and "not executed" in report


def test_reports_hold_every_number_with_its_word(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = {
        "plots": ["stack", "efficiency", "memory", "crossover"],
        "window": WindowGroup(point=0, ranks=2, clocks=2),
    }
    axes = {"ranks": [2, 4], "tokens": [4096, 8192], "layout": ["contiguous", "zigzag"]}
    done = study(tmp_path / "a", axes, study=options, slow={1: 2.0})
    table = run(done)
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count("<svg") == 5 and "http://www.w3.org" in page and 'src="' not in page
    for one in table.columns:
        if one.unit in ("s", "bytes", "bytes per rank"):
            assert one.word in ("counted", "modelled", "kind")
    assert "[modelled]" in page and "forward bytes, counted" in page
    best = plots.winners(table, "ranks", "tokens")
    for (ranks, tokens), (name, seconds) in best.items():
        both = {
            layout: ra.simulate(
                ra.make_plan(ra.Causal(), tokens=tokens, ranks=ranks, layout=layout, schedule="ring", heads=2),
                "h100_nvlink_ib", slow={1: 2.0},
            ).seconds
            for layout in ("contiguous", "zigzag")
        }  # fmt: skip
        assert seconds == min(both.values()) and both[name] == seconds
    run(study(tmp_path / "b", axes, study=options, slow={1: 2.0}))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    record = json.loads((tmp_path / "a" / "trace.json").read_text())
    assert record["traceEvents"] and record["otherData"] == {"kind": "modelled"}


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'ringattn\[plot\]'"):
        run(study(tmp_path, {"ranks": [2, 4]}, study={"plots": ["stack"]}))
    assert not list(tmp_path.iterdir())
    run(study(tmp_path, {"ranks": [2, 4]}))


def test_rows_of_step_one_are_counted_and_taken_away_like_sets() -> None:
    """The interval path of `covered` and `minus`, which long blocks need, against sets; short runs included."""
    chance = random.Random(1)
    for _ in range(300):
        rows = chance.randrange(1, 40)

        def some(rows: int = rows) -> list[range]:
            ends = [sorted(chance.sample(range(rows + 1), 2)) for _ in range(chance.randrange(1, 5))]
            return [range(*pair) for pair in ends]

        held, gone = some(), some()
        union = {row for part in held for row in part}
        assert covered(((range(1), part) for part in held), 1, rows) == len(union)
        cuts = [cover(((range(1), part) for part in parts), 1, rows) for parts in (held, gone)]
        left = minus(cuts[0], [cuts[1]], 1, rows)
        members = [
            row for cut in left for part in (cut.of(0) if isinstance(cut, Cut) else [range(rows)]) for row in part
        ]
        assert members == sorted(union - {row for part in gone for row in part})
    assert covered([(range(1), range(0, 1 << 40)), (range(1), range(1 << 39, 1 << 41))], 1, 1 << 42) == 1 << 41
