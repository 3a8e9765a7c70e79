"""What a maintainer does with an audit: tests, known failures, and a bisect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import ringattn
from faulty_rings import FAULTS

from ringattn.lab.audit.kit import Verdict
from ringattn.lab.audit.run import Finding, choose_cases

HELPERS = Path(__file__).parents[2] / "helpers"
BORDER = f"faulty_rings:fault_{[*FAULTS].index('lost border')}"
RING = """
import torch
import torch.distributed as dist


def attend(q, k, v, *, group, causal):
    shards = [[torch.empty_like(x) for _ in range(dist.get_world_size(group))] for x in (k, v)]
    for into, x in zip(shards, (k, v)):
        dist.all_gather(into, x.contiguous(), group=group)
        into[dist.get_rank(group)] = x
    scores = q @ torch.cat(shards[0], 2).mT * q.shape[3] ** -0.5 * {scale}
    place = torch.arange(scores.shape[3])
    seen = place[dist.get_rank(group) * q.shape[2] :][: q.shape[2], None] >= place
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ torch.cat(shards[1], 2)
"""


@pytest.mark.multi
def test_a_bisect_finds_the_planted_commit(tmp_path: Path) -> None:
    """The script of a failure is of one feature, without this library, and knows exact results of its own."""

    def git(*words: str) -> str:
        shown: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *words], cwd=tmp_path, env=environment, **shown).stdout

    environment = {**os.environ, "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    git("init", "-q")
    git("config", "user.email", "nobody@example.org")
    git("config", "user.name", "nobody")
    for number, scale in enumerate(("1", "1.0", "2 / 2", "1.02", "1.020", "51 / 50")):
        (tmp_path / "bisected_ring.py").write_text(RING.format(scale=scale))
        git("add", "bisected_ring.py")
        git("commit", "-q", "-m", f"commit {number}")
    words = ("bisected_ring:attend", "ranks=2", "features=[no gradients]", "output.path=-", "output.scripts=.")
    told = ringattn("audit", *words, cwd=tmp_path, status=1)
    (feature,) = json.loads(told.stdout)["features"]
    assert feature["verdict"]["tensor"] == "out" and "import ringattn" not in (tmp_path / "no_gradients.py").read_text()
    git("bisect", "start", "HEAD", "HEAD~5")
    said = git("bisect", "run", sys.executable, "no_gradients.py")
    assert re.search(r"is the first bad commit[^$]*commit 3\n", said), said


@pytest.mark.multi
def test_known_failures_are_no_news_until_they_are_mended(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("# not ours\ndocuments  # borders\n")
    words = ("audit", BORDER, "ranks=2", "known=known.txt", "output.path=found.json")
    place = {"PYTHONPATH": str(HELPERS)}
    ringattn(*words, "features=[documents,two-way documents]", cwd=tmp_path, status=1, **place)
    (tmp_path / "known.txt").write_text("documents\ntwo-way documents\n")
    ringattn(*words, "features=[documents]", cwd=tmp_path, status=0, **place)
    record = json.loads((tmp_path / "found.json").read_text())
    (one,) = record["features"]
    assert record["format"] == 2 and one["case"]["tokens"] > one["smallest"]["calls"] and one["case"]["calls"] == 2
    words = ("audit", "faulty_rings:attend", *words[2:], "features=[documents]")
    told = ringattn(*words, cwd=tmp_path, status=1, **place)
    assert "documents is a known failure in known.txt, but is right now; take it out" in told.stderr


@pytest.mark.multi
def test_pytest_has_a_test_for_each_feature(tmp_path: Path) -> None:
    """In any order: findings wait for their tests."""
    (tmp_path / "conftest.py").write_text("def pytest_collection_modifyitems(items):\n    items.reverse()\n")
    (tmp_path / "known.txt").write_text("two-way documents\nwindow\n")
    options = ["--ringattn-audit", BORDER, "--ringattn-audit-ranks=2", "--ringattn-audit-known=known.txt"]
    options += ["--ringattn-audit-scripts=scripts", "--junitxml=found.xml", "-q"]
    options += ["-k", "documents or window or softcap"]
    environment = {**os.environ, "PYTHONPATH": str(HELPERS)}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    counted = re.search(r"(\d) failed, (\d) passed, (\d) skipped, \d+ deselected, (\d) xfailed", done.stdout)
    assert counted and done.returncode == 1, done.stdout + done.stderr
    assert counted.groups() == ("2", "2", "2", "1"), done.stdout
    assert "a known failure that is right now" in done.stdout and "wrong: out of rows" in done.stdout
    assert {path.name for path in (tmp_path / "scripts").iterdir()} == {"documents.py", "two_way_documents.py"}
    assert (tmp_path / "found.xml").read_text().count("<testcase") == 7


def test_the_script_of_any_feature_is_a_file_of_its_name(tmp_path: Path) -> None:
    for case in choose_cases(2, None):
        Finding(case, case, [Verdict("wrong")] * 2).save_script(str(tmp_path), "faulty_rings:attend", None)
    assert "one_key_value_head.py" in {path.name for path in tmp_path.iterdir()}
    assert len([*tmp_path.iterdir()]) == len(choose_cases(2, None))
