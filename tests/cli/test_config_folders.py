"""Config groups of a user's own folder, and where outputs go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Inside, Refused, ringattn

from ringattn.cli.config.folders import user_folders
from ringattn.errors import InvalidInput


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of a user, with options of its own in myconf/."""
    for name, text in (
        ("pattern/mine", "spec: Causal() & Window(${.left})\nleft: 7 # keys before the query\n"),
        ("machine/mycluster", "spec: h100_nvlink_ib\nbandwidth: 1.0e+10\n"),
        ("experiment/mine", "# @package _global_\ndefaults:\n  - override /pattern: mine\ntokens: 96\nranks: 3\n"),
    ):
        path = tmp_path / "myconf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("folder", [("--config-dir=myconf",), ("-cd", "myconf"), ("hydra.searchpath=[file://myconf]",)])
def test_options_of_a_users_folder(project: Path, folder: tuple[str, ...], inside: Inside) -> None:
    done = inside("plan", *folder, "experiment=mine", "pattern.left=5", "--json")
    found = json.loads(done.stdout)
    assert (found["pattern"], found["tokens"], found["ranks"]) == ("(Causal() & Window(left=5, right=0))", 96, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("--config-dir", "myconf", "pattern=mne"), "pattern=mne: no such option; did you mean 'mine'?"),
        (("--config-dir", "myconf", "pattern=mine", "pattern.n=3"), "pattern.n=3 has no meaning with pattern=Causal()"),
        (("pattern=mine",), "pattern=mine: no such option; "),
        (("--config-dir", "nowhere", "pattern=mine"), "nowhere: no such folder; give a folder of config groups"),
    ],
)
def test_a_users_options_are_checked_as_ours_are(
    project: Path, refused: Refused, overrides: tuple[str, ...], words: str
) -> None:
    assert words in refused("plan", *overrides)


def test_a_study_over_a_users_options(project: Path, inside: Inside) -> None:
    words = "study --config-dir myconf machine=mycluster,cpu pattern=mine,causal tokens=1k plots=[]"
    done = inside(words)
    assert "4 points [modelled], 0 refused" in done.stdout
    (folder,) = (project / "outputs").iterdir()
    assert folder.name == "study", "all outputs without a path are in outputs/<verb>"


def test_json_and_nothing_else_on_standard_output(tmp_path: Path, inside: Inside) -> None:
    common = ("ranks=2", "tokens=64", "heads=2", "head_dim=8")
    run = ("run", "transport=virtual", "repeat=2", "input=random", "backward=true")
    ran = json.loads(inside(*run, *common, "--json").stdout)
    assert len(ran["passes"]["forward"]["seconds"]) == 2 and ran["error"] < 1e-5
    assert sum(ran["passes"]["backward"]["bytes_sent"]) == ran["passes"]["backward"]["planned_bytes"] > 0
    planned = json.loads(inside("plan", *common, "--json").stdout)
    counted = planned["counted"]
    pairs = sum(rank["pairs"] for rank in counted["ranks"])
    assert pairs == counted["totals"]["pairs"] == ran["pairs"] == 2 * 64 * 65 // 2
    for name in ("forward", "backward"):
        for unit in ("bytes", "messages"):
            assert sum(rank[name][unit] for rank in counted["ranks"]) == counted["totals"][name][unit] > 0
    simulated = json.loads(inside("simulate", *common, "output.path=-").stdout)
    assert simulated["passes"]["forward"]["seconds"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}, "of run, Hydra's record"


@pytest.mark.multi
def test_ranks_write_what_they_print(tmp_path: Path) -> None:
    done = ringattn("run", "ranks=2", "tokens=64", "repeat=1", "output.report=here.json", cwd=tmp_path)
    found = json.loads((tmp_path / "here.json").read_text())
    assert [one["name"] for one in found["processes"]] == ["rank 0", "rank 1"]
    assert f"{found['error']:.2e}" in done.stdout


@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        ("ringattn si", {"simulate", "run"}, set()),
        ("ringattn run layout=", {"layout=zigzag", "layout=striped"}, set()),
        ("ringattn plan ", {"ranks=", "pattern=", "output."}, {"transport=", "study=", "kernel=", "input="}),
    ],
)
def test_completion_answers(
    tmp_path: Path, line: str, wanted: set[str], unwanted: set[str], inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the keys and options that the verb takes, and no others."""
    monkeypatch.setenv("COMP_LINE", line)
    offered = set(inside("-sc", "query=bash").stdout.split())
    assert wanted <= offered and not unwanted & offered


def test_aliases_of_a_users_file_are_read(tmp_path: Path, inside: Inside) -> None:
    (tmp_path / "mine" / "pattern").mkdir(parents=True)
    (tmp_path / "mine" / "pattern" / "odd.yaml").write_text(
        "spec: Dilated(${.segments}, ${.rates})\nsegments: &a [8, 16]\nrates: *a\n"
    )
    arguments = ("--config-dir", "mine", "pattern=odd", "pattern.rates=[1,2]", "ranks=2", "tokens=64", "heads=2")
    done = inside("plan", *arguments)
    assert "Dilated(segments=(8, 16), rates=(1, 2)" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [*a]\n", "has more than 100,000 values"),
        ("a0: &a0 []\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 20)), "has more than 100,"),
        ("spec: [\n", "is not valid YAML (while parsing"),
    ],
)
def test_files_that_nobody_can_mean_are_refused_before_they_are_built(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pattern").mkdir()
    (tmp_path / "pattern" / "odd.yaml").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        user_folders(str(tmp_path), [])
    assert words in str(caught.value) and "odd.yaml" in str(caught.value)


COPY = "{_target_: shutil.copy, src: mine/pattern/mine.yaml, dst: copied}"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("pattern/mine", f"# @package _global_\nhydra: {{callbacks: {{x: {COPY}}}}}\npattern: {{spec: Causal()}}\n"),
        ("pattern/mine", f"# @package hydra.callbacks\nx: {COPY}\n"),
        ("pattern/mine", "defaults: ['own@_global_.hydra.callbacks.x', _self_]\nspec: Causal()\n"),
        ("pattern/mine", "defaults:\n  - override /hydra/job_logging: own\nspec: Causal()\n"),
        ("hydra/job_logging/own", f"x: {COPY}\n"),
    ],
    ids=["key", "package", "defaults", "override", "group"],
)
@pytest.mark.parametrize("folder", ["--config-dir=mine", "hydra.searchpath=[file://mine]"])
def test_no_file_sets_hydra_which_would_run_code(
    refused: Refused, tmp_path: Path, path: str, text: str, folder: str
) -> None:
    for name, content in (("pattern/mine", "spec: Causal()\n"), ("pattern/own", COPY), (path, text)):
        file = tmp_path / "mine" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    told = refused("plan", folder, "pattern=mine", "ranks=2", "tokens=64")
    assert not (tmp_path / "copied").exists() and f"{path}.yaml: a config file cannot configure Hydra" in told


@pytest.mark.parametrize("verb", [(), ("run",)])
def test_completion_installs_for_the_program(tmp_path: Path, verb: tuple[str, ...]) -> None:
    done = ringattn(*verb, "-sc", "install=bash", cwd=tmp_path)
    assert done.stdout.rstrip().endswith("hydra_bash_completion ringattn")


def test_options_may_stand_between_overrides(inside: Inside, project: Path) -> None:
    for words in (
        ("plan", "ranks=2", "schedule=auto", "--config-dir", "myconf", "machine=mycluster"),
        ("--config-dir", "myconf", "plan", "ranks=2", "schedule=auto", "machine=mycluster"),
        ("plan", "ranks=2", "-m", "layout=contiguous,zigzag", "tokens=1k", "-cd", "myconf"),
        ("plan", "ranks=2", "--cfg", "job", "layout=zigzag"),
    ):
        done = inside(*words)
        assert "ring" in done.stdout or "tokens:" in done.stdout
