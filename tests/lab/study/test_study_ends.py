"""Studies that are interrupted go on, and folders that cannot be used are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Inside, ringattn, room, started
from studies import files, read, study

from ringattn import InvalidInput
from ringattn.cli.config.schema import SimulateConfig
from ringattn.lab.pages import journal
from ringattn.lab.pages.journal import Journal, read_journal, write_line
from ringattn.lab.study import runner
from ringattn.lab.study.runner import run

SWEEP = ["pattern=Causal(),Causal() & Window(100)", "ranks=2,4,8", "tokens=4k,1M", "heads=2", "plots=[stack]"]


def test_a_torn_line_is_dropped_and_a_changed_study_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    with Journal(path, {"study": "a"}) as journal:
        journal.add("1", {"x": 0.1})
        journal.add("2", {"x": None})
        with pytest.raises(InvalidInput, match="another process"), Journal(path, {"study": "a"}):
            pass
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(write_line({"study": "a"})), -7):
        path.write_bytes(whole[:cut])
        with Journal(path, {"study": "a"}) as journal:
            assert list(journal.records) == ["1", "2"][: whole[:cut].count(b"\n") - 1]
            for key, value in (("1", 0.1), ("2", None)):
                if key not in journal.records:
                    journal.add(key, {"x": value})
        assert path.read_bytes() == whole
    with pytest.raises(InvalidInput, match="this one differs in its name; give"), Journal(path, {"study": "b"}):
        pass
    assert read_journal(path.with_name("none")) == (None, {})
    for broken, words in ((whole.replace(b'"x"', b'"x', 1), "line 2 is damaged; remove"), (b"?\n", "line 1 is not")):
        path.write_bytes(broken := broken + b'{"key": "3", "x')  # the last line is only cut off
        for opened in (read_journal, lambda path: Journal(path, {"study": "a"})):
            with pytest.raises(InvalidInput, match=rf"points\.jsonl: {words}"):
                opened(path)
        assert path.read_bytes() == broken


def test_a_journal_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_open", lambda path, flags: os.open(path, os.O_WRONLY | os.O_CREAT))
    with pytest.raises(InvalidInput, match=r"points\.jsonl: cannot be read \(Bad file descriptor\); give another path"):
        Journal(tmp_path / "points.jsonl", {"study": "a"})


def test_no_file_of_the_user_becomes_a_journal(tmp_path: Path) -> None:
    """Neither the target of a link, nor a file of that name, nor a pipe, which would be read for ever."""
    path, target = tmp_path / "points.jsonl", tmp_path / "precious"
    target.write_text("text without an end of line")
    for make, words in (
        (lambda: path.symlink_to(target), "points.jsonl: cannot be written"),
        (lambda: path.write_text("mine"), "points.jsonl: not the journal"),
        (lambda: path.write_text("mine\nand more"), "line 1 is not from a study"),
        (lambda: os.mkfifo(path), "not an ordinary file"),
    ):
        make()
        before = path.is_file() and path.read_bytes()
        with pytest.raises(InvalidInput, match=words):
            run(study(tmp_path, {"ranks": [2]})) if path.is_file() else Journal(path, {"study": "a"})
        assert (path.is_file() and path.read_bytes()) == before
        path.unlink()
    assert target.read_text() == "text without an end of line"


def test_another_study_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(study(tmp_path, {"ranks": [2]}))
    before = (tmp_path / "sweep.csv").read_bytes()
    with pytest.raises(InvalidInput, match="holds the study 'test', and this one differs in its points; give another"):
        run(study(tmp_path, {"ranks": [2, 4]}))
    assert (tmp_path / "sweep.csv").read_bytes() == before


def test_files_of_the_user_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(InvalidInput, match="holds files, but no study"):
        run(study(tmp_path, {"ranks": [2]}))
    assert files(tmp_path) == {"report.html": b"mine"}


def test_a_killed_study_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL while points are done: no point is done twice, and all files are those of a quiet run."""
    pytest.importorskip("matplotlib")
    arguments = ("study", *SWEEP, "output.path=out")
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for folder in (quiet, killed):
        folder.mkdir()
    ringattn(*arguments, cwd=quiet)
    journal = killed / "out" / "points.jsonl"
    command, nothing = [sys.executable, "-m", "ringattn", *arguments], subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=killed, env=env, stdout=nothing, stderr=nothing)
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.002)
    process.kill()
    process.wait()
    journal.write_bytes(journal.read_bytes()[:-5])  # as if the machine had been switched off in the middle of a line
    ringattn(*arguments, cwd=killed)
    assert files(killed / "out") == files(quiet / "out")
    assert len({json.loads(line).get("key") for line in journal.read_text().splitlines()}) == 13
    assert {"report.html", "sweep.csv", "summary.json"} <= files(quiet / "out").keys()


def test_a_study_that_is_interrupted_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Inside
) -> None:
    """Ctrl-C at the third point: status 130, the folder is named, two points are kept, and the same command ends it."""
    arguments = ("study", "ranks=2,4,8", "tokens=4k", "plots=[]", "output.path=out")
    real, done = runner.evaluation.evaluate, []

    def interrupted(config: SimulateConfig) -> dict[str, Any]:
        done.append(config.ranks)
        if len(done) == 3:
            raise KeyboardInterrupt
        return real(config)

    monkeypatch.setattr(runner.evaluation, "evaluate", interrupted)
    first = inside(*arguments, status=130)
    assert "out holds the finished points; the same command continues from there" in first.stderr
    inside(*arguments)
    assert done == [2, 4, 8, 8] and len(read(tmp_path / "out" / "sweep.csv")) == 3


def test_folders_that_cannot_be_used_are_refused_before_the_first_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.evaluation, "evaluate", lambda *_: pytest.fail("a point was done"))
    (tmp_path / "file").write_text("")
    (tmp_path / "journal" / "points.jsonl").mkdir(parents=True)
    config_there = tmp_path / "config"
    (config_there / "config.yaml").mkdir(parents=True)
    (config_there / "points.jsonl").touch()
    for folder, words in (
        (tmp_path / "file" / "out", "file is not a folder; choose another path"),
        (tmp_path / "none" / "out", "the folder .*none does not exist; make it first"),
        (tmp_path / ("n" * 300) / "out", r"n cannot be used \(File name too long\); choose another path"),
        (tmp_path / "journal", "holds files, but no study"),
        (config_there, "config.yaml: is a folder"),
    ):
        with pytest.raises(InvalidInput, match=words):
            run(study(folder, {"ranks": [2]}))
    with pytest.raises(InvalidInput, match="cannot be written"), Journal(tmp_path / "journal" / "points.jsonl", {}):
        pass
    assert not list((tmp_path / "journal" / "points.jsonl").iterdir())


def test_a_full_disk_ends_a_study_that_goes_on_later(tmp_path: Path) -> None:
    """Files of a process may not grow beyond 4 KiB: the points before that are kept, in whole lines."""
    arguments = ("study", *SWEEP[:-1], "plots=[]", "output.path=out")
    with room(4096):
        full = started(*arguments, cwd=tmp_path, status=2)
    assert "points.jsonl: could not be written" in full.stderr and "run the same command" in full.stderr
    journal = tmp_path / "out" / "points.jsonl"
    kept = journal.read_bytes().splitlines()[:-1]
    assert len(kept) > 1
    ringattn(*arguments, cwd=tmp_path)
    assert journal.read_bytes().splitlines()[: len(kept)] == kept and len(journal.read_bytes().splitlines()) == 13
