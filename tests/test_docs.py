"""README and friends: links exist, commands parse, code runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringattn.config.overrides import prepare

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted(ROOT.glob("*.md"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_python_examples_run() -> None:
    """One after another, as a reader would; those for torchrun and mpirun are only compiled."""
    shared: dict[str, object] = {}
    ran = 0
    for block in blocks("python"):
        code = compile(block, "README.md", "exec")
        if not block.startswith(("# torchrun", "# mpirun")):
            exec(code, shared)
            ran += 1
    assert ran >= 2


def test_commands_parse() -> None:
    commands = [line.split("#")[0] for block in blocks("bash") for line in block.splitlines()]
    commands += re.findall(r"`((?:ringattn|scripts/)[^`]*)`", README)
    seen = 0
    for command in commands:
        words = shlex.split(command)
        if words and words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file()
            words = ["ringattn", "run", *words[1:]] if words[0] == "scripts/run" else []
        if len(words) > 1 and words[0] == "ringattn":
            prepare(words[1], [word for word in words[2:] if "=" in word])
            seen += 1
    assert seen >= 8


def test_the_picture_is_what_the_command_prints() -> None:
    (shown,) = blocks("")[:1]
    command, *lines = shown.strip().splitlines()
    words = shlex.split(command.removeprefix("$ ringattn "))
    done = subprocess.run(
        [sys.executable, "-m", "ringattn", *words], capture_output=True, text=True, timeout=60, check=True
    )
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert printed[: len(lines)] == [line.rstrip() for line in lines]
