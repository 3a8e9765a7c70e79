"""README and the pages of docs/: links exist, commands parse, code runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringattn.config.overrides import prepare

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
#: What starts a sample that needs several ranks, and is only compiled.
SEVERAL_RANKS = ("# torchrun", "# mpirun")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def with_samples(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", with_samples("python"), ids=name_of)
def test_python_samples_run(page: Path) -> None:
    """The samples of a page run one after another, as a reader would run them."""
    names: dict[str, object] = {}
    for sample in blocks(page, "python"):
        code = compile(sample, str(page), "exec")
        if not sample.startswith(SEVERAL_RANKS):
            exec(code, names)


@pytest.mark.parametrize("page", with_samples("bash"), ids=name_of)
def test_commands_parse(page: Path) -> None:
    commands = [line.split("#")[0] for block in blocks(page, "bash") for line in block.splitlines()]
    commands += re.findall(r"`((?:ringattn|scripts/)[^`]*)`", page.read_text())
    for command in commands:
        words = shlex.split(command)
        if words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()
            words = ["ringattn", "run", *words[1:]] if words[0] == "scripts/run" else []
        if len(words) > 1 and words[0] == "ringattn" and not words[1].startswith(("-", "<")):
            prepare(words[1], [word for word in words[2:] if "=" in word])


def test_there_are_samples() -> None:
    """The tests above look at something: samples are found by their fences."""
    assert len(with_samples("python")) >= 5
    assert len(with_samples("bash")) >= 3


def test_the_picture_is_what_the_command_prints() -> None:
    (shown,) = blocks(ROOT / "README.md", "")[:1]
    command, *lines = shown.strip().splitlines()
    words = shlex.split(command.removeprefix("$ ringattn "))
    done = subprocess.run(
        [sys.executable, "-m", "ringattn", *words], capture_output=True, text=True, timeout=60, check=True
    )
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert printed[: len(lines)] == [line.rstrip() for line in lines]
