"""README and the pages of docs/: links exist, commands parse, code runs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import support

from ringattn.cli.config.overrides import prepare

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
def test_python_samples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a page run one after another, as a reader would run them, and print what the page says."""
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, object] = {}
    for sample, shown in re.findall(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", page.read_text(), re.DOTALL):
        code = compile(sample, str(page), "exec")
        if sample.startswith(SEVERAL_RANKS):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        lines = [line.rstrip() for line in printed.getvalue().splitlines()]
        assert not shown or lines == shown.splitlines()


@pytest.mark.parametrize("notebook", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=name_of)
def test_notebooks_run(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "notebooks are stored without outputs; the build makes them"
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("".join(cell["source"]), str(notebook), "exec"), names)


def test_the_table_of_support_names_tests_that_exist() -> None:
    assert not support.missing_tests()
    assert support.PAGE.read_text() == support.render(), "write the page again: python tests/helpers/support.py"


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
