"""Parts that an installed package adds by entry points: a pattern and a schedule in one file, and errors of such packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = '''
from dataclasses import dataclass

import numpy as np

from ringattn.pattern import Pattern
from ringattn.pattern.tile import make
from ringattn.plan.schedules.direct import DirectSchedule


@dataclass(frozen=True)
class Recent(Pattern):
    """A query sees itself and the key before it."""

    def tiles(self, q, k, heads=range(1)):
        tile = make(heads, q, k, 0, 1)
        if tile is not None:
            yield tile

    def visible(self, q, k, head, tokens):
        return (q - k >= 0) & (q - k <= 1)


class Star(DirectSchedule):
    """DirectSchedule under another name."""
'''
USE = """
import torch, ringattn as ra
q, k, v = (torch.randn(1, 2, 40, 8, dtype=torch.float64) for _ in range(3))
found = ra.virtual_attention(q, k, v, "Recent() | Sinks(2)", ranks=4, schedule="star")
same = ra.attention(q, k, v, ra.Window(1) | ra.Sinks(2))
assert (found - same).abs().max() < 1e-12
plan = ra.make_plan("Recent()", tokens=40, ranks=4, schedule="star")
assert plan.schedule == "star" and ra.Plan.from_json(plan.to_json()) == plan and ra.simulate(plan, "cpu").seconds > 0
try:
    ra.make_plan("Recent()", tokens=40, ranks=4, schedule="stars")
except ra.InvalidInput as error:
    assert "did you mean 'star'" in str(error), error
"""


def offered(folder: Path, points: str) -> dict[str, str]:
    """The environment in which a package offers these entry points."""
    folder.mkdir()
    (folder / "outside.py").write_text(PARTS)
    info = folder / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_an_installed_package_adds_a_pattern_and_a_schedule(tmp_path: Path) -> None:
    points = "[ringattn.patterns]\nRecent = outside:Recent\n[ringattn.schedules]\nstar = outside:Star\n"
    done = subprocess.run(
        [sys.executable, "-c", USE], env=offered(tmp_path / "site", points), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ("Causal = outside:Recent", "the package outside offers patterns 'Causal', a name that is in use"),
        ("Recent = outside:Missing", "the package outside offers patterns 'Recent', which cannot be imported"),
        ("Recent = nowhere:Recent", "No module named 'nowhere'"),
    ],
)
def test_packages_that_cannot_be_used_are_named(tmp_path: Path, points: str, words: str) -> None:
    code = "import ringattn as ra; ra.parse_pattern('Recent()')"
    env = offered(tmp_path / "site", f"[ringattn.patterns]\n{points}\n")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and words in done.stderr.splitlines()[-1], done.stderr


SOLVER = '''
from ringattn.timing.solvers.base import RingSolver, RingTimes
from ringattn.timing.solvers.stencil import solve_stencil


class Twice(RingSolver):
    """The stencil's times, for rings of two ranks."""

    name = "twice"
    needs = "two ranks"

    def solve_ring(self, problem):
        ring = problem.all_ranks()
        return solve_stencil(ring) if ring.ranks == 2 else None
'''
USE_SOLVER = """
import ringattn as ra
two, four = (ra.make_plan(ra.Full(), tokens=64, ranks=ranks, schedule="ring") for ranks in (2, 4))
found = ra.simulate(two, "cpu", solver="twice")
assert found.solver == "twice" and found.seconds == ra.simulate(two, "cpu", solver="stencil").seconds
assert ra.simulate(two, "cpu").solver != "twice"
for call, words in (
    (lambda: ra.simulate(four, "cpu", solver="twice"), "solver=twice needs two ranks, which this plan"),
    (lambda: ra.simulate(two, "cpu", solver="twic"), "did you mean 'twice'"),
):
    try:
        call()
    except ra.RingAttentionError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
"""


def test_an_installed_package_adds_a_solver(tmp_path: Path) -> None:
    env = offered(tmp_path / "site", "[ringattn.solvers]\ntwice = outside:Twice\n")
    (tmp_path / "site" / "outside.py").write_text(SOLVER)
    done = subprocess.run([sys.executable, "-c", USE_SOLVER], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
