"""The help of a verb explains every key, from the comments of the config files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from command_line import ringattn

from ringattn.bench import SUITES
from ringattn.cli.config.folders import config_folders
from ringattn.cli.config.schema import SCHEMAS, conf_dir
from ringattn.cli.config.verb_help import read_heading, read_keys, verb_help

OWN = config_folders(())


def names(schema: type, prefix: str = "") -> set[str]:
    """All keys of a schema, those of nested ones by their whole names."""
    found: set[str] = set()
    for field in dataclasses.fields(schema):
        inner = field.default_factory
        if dataclasses.is_dataclass(inner) and not (conf_dir() / field.name).is_dir():
            found |= names(inner, f"{prefix}{field.name}.")
        elif not (conf_dir() / field.name).is_dir():
            found.add(prefix + field.name)
    return found


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: str(path.relative_to(conf_dir())))
def test_every_key_of_a_config_file_has_a_comment(path: Path) -> None:
    found = list(read_keys(path.read_text()))
    if path.parent.name not in ("experiment", "model", "study") and path.stem not in ("job", "quiet"):
        sections = {key.name.rpartition(".")[0] for key in found}
        bare = {key.name for key in found if not key.comment} - sections - {"spec", "name", "defaults"}
        assert not bare
    assert read_heading(path.read_text()) or path.stem == "custom"


@pytest.mark.parametrize("verb", SCHEMAS)
def test_the_help_names_every_key_and_no_other(verb: str) -> None:
    text = verb_help(verb, OWN, {})
    shown = {line.split("=")[0].strip() for line in text.partition("keys, with their defaults")[2].splitlines()}
    wanted = names(SCHEMAS[verb])
    assert wanted <= shown | {"experiment"}
    groups = {line.split("=")[0] for line in text.splitlines() if line[:1].isalpha() and "=" in line and " | " in line}
    assert groups <= {field.name for field in dataclasses.fields(SCHEMAS[verb])}
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())


def test_the_help_lists_experiments_of_the_verb_and_suites() -> None:
    assert "validate" not in verb_help("run", OWN, {}).partition("experiment=")[2]
    assert "  validate " in verb_help("simulate", OWN, {}).partition("experiment=")[2]
    assert f"suites: {', '.join(SUITES)}" in " ".join(verb_help("bench", OWN, {"suites": list(SUITES)}).split())


def test_the_help_on_the_command_line(tmp_path: Path) -> None:
    done = ringattn("bench", "--help", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith("ringattn bench: ") and "suites: auto, blocksparse, " in done.stdout
    assert not list(tmp_path.iterdir())
