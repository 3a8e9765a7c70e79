"""The help of a verb has its config files, which explain every key."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Inside

from ringattn.cli.config.defaults import conf_dir
from ringattn.cli.config.folders import fit, heading, verb_help
from ringattn.cli.config.schema import SCHEMAS
from ringattn.lab.bench import SUITES

#: Files whose keys are explained elsewhere.
PRESETS = ("experiment", "study")


def keys(settings: dict[str, Any]) -> set[str]:
    """The last part of every key, those of sections too."""
    return {*settings}.union(*(keys(value) for value in settings.values() if isinstance(value, dict)))


def help_of(verb: str) -> str:
    return (conf_dir() / f"{verb}.yaml").read_text()


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: str(path.relative_to(conf_dir())))
def test_every_key_of_a_config_file_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert next(line for line in lines if not line.startswith("# @package")).startswith("# ")
    if path.parent.name not in PRESETS and path.stem not in ("job", "quiet"):
        bare = [line for line in lines if ": " in line and "#" not in line and "  - " not in line]
        assert all(line.split(":")[0] in ("spec", "name") for line in bare)


@pytest.mark.parametrize("verb", SCHEMAS)
def test_the_help_names_every_key_and_no_other(verb: str) -> None:
    text = verb_help(verb, [], [])
    shown = yaml.safe_load(re.split(r"\n\n(?:groups|suites|options)", text.partition("is section.key)\n")[2])[0])
    schema = dataclasses.asdict(SCHEMAS[verb]())
    groups = {field for field in schema if f" {field}=" in text.partition("\n\ngroups")[2]}
    # A group without options here, such as `output`, is a section of keys.
    wanted = keys({key: value for key, value in schema.items() if key not in (*groups, "experiment")})
    assert keys(shown or {}) == wanted
    assert all((conf_dir() / group).is_dir() for group in groups)


def test_the_help_shows_parameters_experiments_and_folders(tmp_path: Path) -> None:
    (tmp_path / "pattern").mkdir()
    (tmp_path / "pattern" / "mine.yaml").write_text("# My pattern\nspec: Full()\n")
    text = verb_help("plan", ["pattern", "experiment", "machine"], [tmp_path])
    assert "    left: 4095         # keys before the query" in text and "  mine                My pattern" in text
    assert "  window_64k          64k tokens under" in text and "machine.bandwidth=null  # " in text
    assert "custom" not in text


@pytest.mark.parametrize("verb", SCHEMAS)
def test_a_comment_of_several_lines_is_wrapped_as_one(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line breaks off before the width of the terminal, but where another value is explained."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = fit(verb_help(verb, [], [])).splitlines()
    assert max(map(len, lines)) <= 80
    for line, following in pairwise(lines):
        if more := re.match(r" +# (?!\w+: )(\S+)", following):
            assert len(line) + 1 + len(more[1]) > 80, (line, following)


@pytest.mark.parametrize("example", [line for verb in SCHEMAS for line in heading(help_of(verb)) if line[:2] == "  "])
def test_the_examples_of_the_help_can_be_composed(example: str, inside: Inside, tmp_path: Path) -> None:
    _, verb, *arguments = example.split()
    if "-m" in arguments:  # a comma list is composed job by job
        arguments = [word.partition(",")[0] for word in arguments if word != "-m"]
    inside(verb, *arguments, "--cfg", "job")


def test_the_help_on_the_command_line(inside: Inside, tmp_path: Path) -> None:
    done = inside("report", "--help")
    assert not done.stderr
    assert done.stdout.startswith("ringattn report NAME: ") and f"suites: {', '.join(sorted(SUITES))}" in " ".join(
        done.stdout.split()
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        *([verb, "--help"] for verb in SCHEMAS),
        ["--help"],
        ["run", "--help", "machine"],
        ["plan", "ranks=4", "tokens=64k", "layout=auto"],
        ["run", "ranks=2", "tokens=1k", "transport=virtual", "layout=auto"],
        ["simulate", "ranks=64", "tokens=1M", "machine=h100_nvlink_ib"],
        ["advise", "model=llama3_8b", "gpus=4", "tokens=32k"],
    ],
    ids=" ".join,
)
def test_every_line_fits_80_columns(words: list[str], inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = inside(*words).stdout.splitlines()
    assert len(lines) > 5 and not [line for line in lines if len(line) > 80]
    assert len(lines) <= 40 or words[-1] != "--help" or len(words) == 1, "more than a screen"
