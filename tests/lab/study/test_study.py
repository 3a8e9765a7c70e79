"""Studies: points against direct calls, and axes, which are checked before the first point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import Inside, Refused
from omegaconf import OmegaConf
from studies import config, read, study, text_of

import ringattn as ra
from ringattn import InvalidInput
from ringattn.cli.config.defaults import conf_dir
from ringattn.cli.config.overrides import compose
from ringattn.lab.models.config import load_model
from ringattn.lab.models.inference import decode
from ringattn.lab.models.parallel import Parallel
from ringattn.lab.study import runner
from ringattn.lab.study.runner import Study, run
from ringattn.lab.study.space import list_points
from ringattn.lab.verbs.settings import ExecuteGroup, StudyConfig
from ringattn.machine.presets import get_machine


def test_every_row_is_a_direct_call(tmp_path: Path) -> None:
    """Numbers of the CSV are those of ra.simulate on a plan that this test makes itself; rows are in the axes'
    order."""
    machines = {"machine.bandwidth": [1e9, 5e10]}
    axes = {"pattern": ["window", "Full()"], "ranks": [2, 8], **machines, "layout": ["contiguous"]}
    run(study(tmp_path / "s", axes, backward=True, heads=4, slow={1: 1.5}, tokens=512))
    rows = read(tmp_path / "s" / "sweep.csv")
    place = 0
    for pattern in (ra.Causal() & ra.Window(4095), ra.Full()):
        for ranks in (2, 8):
            for bandwidth in (1e9, 5e10):
                row = rows[place]
                plan = ra.make_plan(
                    pattern, tokens=512, ranks=ranks, layout="contiguous", schedule="ring", heads=4, dtype="float32"
                )
                machine = ra.get_machine("h100_nvlink_ib").changed(bandwidth=bandwidth)
                for backward, name in ((False, "forward"), (True, "backward")):
                    found = ra.simulate(plan, machine, backward=backward, slow={1: 1.5})
                    assert float(row[f"{name} time [s]"]) == found.seconds
                    for cause in ("wait for peers", "wait for messages"):
                        assert float(row[f"{name} {cause} [s]"]) == found.exposed[cause]
                    assert float(row[f"{name} rate [tokens/s]"]) == 512 / found.seconds
                    assert int(row[f"{name} bytes [bytes]"]) == plan.bytes_sent(backward=backward)
                    assert int(row[f"{name} memory [bytes per rank]"]) == sum(found.memory.values())
                    assert row[f"{name} solver"] == found.solver
                mask = plan.pattern.mask(512)
                assert int(row["pairs [(query, key, head) pairs]"]) == 4 * int(mask.sum())
                assert (row["point"], row["machine.bandwidth [bytes/s]"]) == (str(place), repr(bandwidth))
                place += 1
    assert place == len(rows)


def test_refused_points_are_rows_with_their_reason(tmp_path: Path) -> None:
    table = run(study(tmp_path, {"heads": [1, 2], "kv_heads": [2]}))
    assert [row["status"] for row in table.rows] == ["refused", "ok"]
    assert "1 query heads cannot share 2" in table.rows[0]["why"] and "forward time" not in table.rows[0]
    report = text_of(tmp_path / "report.html")
    assert "point 0: 1 query heads cannot share 2" in report and "1 of 2 points has numbers, 1 was refused" in report
    with pytest.raises(InvalidInput, match="every point of the study is refused"):
        run(study(tmp_path / "all", {"heads": [1], "kv_heads": [2]}))


@pytest.mark.parametrize(
    ("axes", "tokens", "words"),
    [
        ({"ranks": [2, 0, 8]}, [4096, 4096, 4096], "ranks=0 must be an integer >= 1"),
        ({"tokens": ["1k", 0, "2k"]}, [1024, 0, 2048], "tokens=0: there is nothing to compute"),
        ({"shard": ["1k"], "ranks": [2, 0, 4]}, [2048, 0, 4096], "ranks=0 must be an integer >= 1"),
    ],
)
def test_points_of_nothing_are_rows_with_their_reason(
    axes: dict[str, Any], tokens: list[int], words: str, tmp_path: Path
) -> None:
    """Also where the study executes plans and extrapolates, which look at the sizes of all points."""
    budget = ExecuteGroup(budget=1e-9)
    table = run(study(tmp_path, axes, study={"execute": budget, "extrapolate": "1G"}))
    assert [row["status"] for row in table.rows] == ["ok", "refused", "ok"]
    assert [row["tokens"] for row in table.rows] == tokens and words in table.rows[1]["why"]
    text = text_of(tmp_path / "report.html")
    assert words in text and ("Nothing is extrapolated: this needs" in text) == ("[extrapolated]" not in text)


def test_tokens_that_shards_would_set_are_refused() -> None:
    axes = {"ranks": [2, 4]}
    for axes_of_one, fixed in (
        ({"shard": [512, "1k"]}, {"tokens": 4096}),
        (axes, {"shard": "8k"}),
        ({"tokens": [512, "1k"]}, {"shard": "8k"}),
        ({"tokens": [512, "1k"], "shard": [512]}, {}),
    ):
        with pytest.raises(InvalidInput, match=r"tokens=\d+ has no meaning with shard=.* \(shard=null unsets it\)"):
            list_points(config(axes_of_one, **fixed))
    found = list_points(config(axes, shard="null", tokens=4096))
    assert [one.config.length() for one in found] == [4096, 4096]


def test_a_setting_that_one_point_reads_is_taken(tmp_path: Path) -> None:
    table = run(study(tmp_path, {"backward": [False, True]}, rotate="kv"))
    assert [(row["backward"], "backward time" in row) for row in table.rows] == [(False, False), (True, True)]
    with pytest.raises(InvalidInput, match="rotate=kv has no meaning without backward=true"):
        list_points(config({"ranks": [2, 4]}, rotate="kv"))


def test_axes_are_checked() -> None:
    def made(axes: dict[str, Any], fixed: dict[str, Any] | None = None, **options: Any) -> Any:
        return list_points(config(axes, options, **{"pattern": "window", **(fixed or {})}))

    for axes, words in (
        ({"rank": [1]}, "did you mean 'ranks'"),
        ({"layout": ["zigzg"]}, "did you mean 'zigzag'"),
        ({"machine.bandwith": [1]}, "did you mean 'bandwidth'"),
        ({"ranks": []}, "expected a list"),
        ({"ranks": [1.5]}, "not a whole number"),
        ({"output.path": ["a", "b"]}, "cannot be an axis"),
        ({"pattern.block": [1, 2]}, "no meaning with pattern=Causal"),
        ({"tokens": ["1k", "4k", 1024]}, r"the points 0 and 2 are the same \(tokens=1024\)"),
    ):
        with pytest.raises(InvalidInput, match=words):
            made(axes)
    with pytest.raises(InvalidInput, match="the study varies ranks"):
        made({"ranks": [1, 2]}, {"ranks": 4})
    with pytest.raises(InvalidInput, match="is an axis and in"):
        made({"ranks": [1, 2]}, together=[{"ranks": 4}])
    twice = [{"ranks": 2, "label.name": "a"}, {"ranks": 2, "label.name": "b"}]
    assert len(made({"heads": [1, 2]}, together=twice)) == 4, "labels tell points apart"
    with pytest.raises(InvalidInput, match="the points 0 and 1 are the same"):
        made({}, together=[{"ranks": 2}, {"ranks": 2}])
    found = made({"pattern.left": [7, "2k"], "shard": ["1k"], "machine.bandwidth": ["1e9"], "slow": ["{0: 2.0}", None]})
    assert [one.config.pattern.spec for one in found[::2]] == ["Causal() & Window(7)", "Causal() & Window(2048)"]
    settings = {"pattern.left": 2048, "shard": 1024, "machine.bandwidth": 1e9, "slow": {0: 2.0}}
    assert [one.settings for one in found[2:]] == [settings, {**settings, "slow": None}]
    # Parts of a group that the command line gives hold for every option.
    both = made({"machine": ["cpu", "a100_pcie"]}, {"machine.bandwidth": 7e9})
    assert [one.config.machine.made().bandwidth for one in both] == [7e9, 7e9]
    assert both[1].config.machine.made().ranks_per_node == 4
    paired = made({"heads": [1, 2]}, together=[{"ranks": 2, "label.name": "a"}, {"ranks": 4}])
    assert [(one.config.ranks, one.config.heads, one.labels) for one in paired] == [
        (2, 1, {"name": "a"}), (2, 2, {"name": "a"}), (4, 1, {}), (4, 2, {})
    ]  # fmt: skip


def test_points_of_one_plan_follow_each_other() -> None:
    made = list_points(config({"machine.bandwidth": [1e9, 2e9], "ranks": [2, 4]}))
    assert [point.config.ranks for point in made] == [2, 4, 2, 4]
    assert [point.config.ranks for point in sorted(made, key=lambda point: point.plan_key)] == [2, 2, 4, 4]


@pytest.mark.parametrize("name", sorted(path.stem for path in (conf_dir() / "study").glob("*.yaml")))
def test_presets_have_points_and_plots(name: str) -> None:
    """Each preset composes, its points are made, and its plots are known; nothing is computed."""
    found = OmegaConf.to_object(compose("study", [f"study={name}"]))
    assert isinstance(found, StudyConfig)
    points = list_points(found)
    assert len(points) > 5 and found.name == name
    runner.check_study(found, points)


def test_what_is_known_before_the_first_point_is_said_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No point is done, and nothing is written, where the end of a study would fail."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(runner.evaluation, "evaluate", lambda *_: pytest.fail("a point was done"))
    for options, words in (
        ({"plots": ["stak"]}, "did you mean 'stack'"),
        ({"plots": ["stack", "stack"]}, "stack is listed twice"),
        ({"plots": ["stack"], "x": "rnks"}, "rnks is no axis with several numbers; those are ranks"),
        ({"plots": ["stack"], "x": "ranks", "y": "ranks"}, "x and y are both ranks"),
        ({"plots": ["crossover"]}, "a crossover map needs a second axis"),
        ({"execute": ExecuteGroup(budget=-1.0)}, "expected seconds >= 0"),
        ({"extrapolate": "4k"}, "the study itself has 4,096 tokens; give more"),
    ):
        with pytest.raises(InvalidInput, match=words):
            run(study(tmp_path / "out", {"ranks": [2, 4]}, study=options))
    assert not list(tmp_path.iterdir())


def test_numbers_of_machines_are_axes_of_plots_however_they_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    axes = {"machine.bandwidth": ["1e9", "5e10"], "passes": ["1", "1k"]}
    table = run(study(tmp_path / "s", axes, study={"plots": ["stack"], "x": "machine.bandwidth", "y": "passes"}))
    assert [(row["machine.bandwidth"], row["passes"]) for row in table.rows] == [
        (1e9, 1), (1e9, 1024), (5e10, 1), (5e10, 1024)
    ]  # fmt: skip
    report = text_of(tmp_path / "s" / "report.html")
    assert "h100_nvlink_ib: flops=650 TFLOP/s [assumed]" in report
    assert "bandwidth=1 GB/s .. 50 GB/s, by point" in report
    assert "3: machine.bandwidth=50 GB/s, passes=1,024" in report


def test_nodes_that_do_not_fit_are_refused_as_in_one_simulation(tmp_path: Path, refused: Refused) -> None:
    table = run(study(tmp_path / "s", {"ranks": [6, 8]}, machine="cpu", **{"machine.ranks_per_node": 4}))
    assert [row["status"] for row in table.rows] == ["refused", "ok"]
    told = refused("simulate", "ranks=6", "machine=cpu", "machine.ranks_per_node=4")
    assert told == f"ringattn: {table.rows[0]['why']}\n"


def test_overrides_are_taken_or_refused_in_our_words(tmp_path: Path, inside: Inside, refused: Refused) -> None:
    """A new axis needs no plus, keys of the point are told from those of the study, and a folder in none is refused."""
    for arguments, words in (
        (("plots=[stack]",), "study: no key has several values; write them with commas"),
        (("axes.rank=[8]",), "did you mean 'ranks'"),
        (("rnks=2,4",), "did you mean 'ranks'"),
        (("axes.ranks=8",), "axes.ranks=8: Invalid value assigned: int is not a ListConfig"),
        (("axes.ranks=[2]", "plots=[]", "output.path=no/such"), "the folder no does not exist; make it"),
        (("cp=1,2",), "cp=1: cp is a key of ringattn estimate, not of ringattn simulate"),
        (("of=estimate", "cp=1,2", "ranks=4"), "ranks=4: ranks is a key of ringattn run, plan, simulate, verify"),
        (("of=estimate", "cp=1,2", "extrapolate=1e12"), "extrapolate=1000000000000.0 has no meaning with of=estimate"),
        (("of=run", "ranks=1,2"), "of=run: expected one of simulate, estimate"),
        (("scaling", "ranks=4"), "ranks=4 has no meaning: the study varies ranks; give its values as axes.ranks=[...]"),
        (("scalin",), "study=scalin: no such option; did you mean 'scaling'?"),
    ):
        assert words in refused("study", *arguments)
        assert not list(tmp_path.iterdir())
    for arguments in (("axes.ranks=[2]",), ("+axes.ranks=[4]", "output.path=two")):
        done = inside("study", *arguments, "plots=[]")
        assert "1 point [modelled], 0 refused; " in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"outputs", "two"}


@pytest.mark.parametrize("verb", ["simulate", "estimate", "plan", "verify"])
def test_schedules_by_name_are_jobs_of_every_verb_that_has_them(verb: str, inside: Inside, tmp_path: Path) -> None:
    """An axis of words alone has no plots."""
    words = {"estimate": ("tokens=4k", "cp=2"), "verify": ("tokens=64", "whole=true")}.get(
        verb, ("ranks=4", "tokens=64")
    )
    done = inside(verb, "-m", "schedule=ring,allgather", *words)
    table = done.stdout.rpartition("\npoints [modelled]\n" if verb in ("simulate", "estimate") else "\njobs: ")[2]
    rows = [line.split() for line in table.splitlines()]
    assert [row[0] for row in rows if row[0] in ("ring", "allgather")] == ["ring", "allgather"]


def test_points_of_a_model_are_direct_calls(tmp_path: Path) -> None:
    """A decode by cp and batch: the numbers of `decode`, a reason where the tokens are too few, and every plot."""
    pytest.importorskip("matplotlib")
    axes = {"cp": [2, 16], "batch": [1, 4]}
    fixed = {"phase": "decode", "tokens": 8, "layout": "contiguous", "schedule": "ring"}
    made = StudyConfig("estimate", axes=axes, fixed=fixed, plots=["time", "stack", "memory"], x="batch")
    table = run(Study(made, list_points(made), tmp_path))
    model, machine = load_model("llama3_8b"), get_machine("h100_nvlink_ib")
    for row in table.rows[:2]:
        one = decode(model, machine, 8, Parallel(cp=2, rows=row["batch"]))
        assert row["decode time"] == one.seconds
        assert row["decode memory: keys and values"] == one.memory["keys and values"]
        assert row["decode time: mlp"] == one.parts["mlp"] and row["decode rate"] == row["batch"] / one.seconds
    assert [row["status"] for row in table.rows] == ["ok", "ok", "refused", "refused"]
    text = text_of(tmp_path / "report.html")
    assert "tokens=8 must be a whole number of at least cp=16" in text
    assert "Equal for all points: model=llama3_8b" in text
    assert (tmp_path / "report.html").read_text().count("<svg") == 3
