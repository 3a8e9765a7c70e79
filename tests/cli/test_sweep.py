"""The arguments of a study: comma lists as axes, and jobs of a launcher."""

from __future__ import annotations

import pytest

from ringattn.cli.config.overrides import split_commas
from ringattn.cli.config.sweep import as_study, split_jobs
from ringattn.errors import InvalidInput


def test_comma_lists_become_axes() -> None:
    assert split_commas("a,(b,c),'d,e',{f: 1, g: 2}") == ["a", "(b,c)", "'d,e'", "{f: 1, g: 2}"]
    assert as_study(["ranks=1,2", "heads=4", "pattern=Window(1, 2),Full()"]) == [
        "heads=4", "+study.axes={ranks: ['1', '2'], pattern: ['Window(1, 2)', 'Full()']}"
    ]  # fmt: skip
    assert as_study(["ranks=range(1,4)"]) == ["+study.axes={ranks: ['1', '2', '3']}"]
    assert as_study(["ranks=2,4", "output.path=a,b"]) == ["output.path=a,b", "+study.axes={ranks: ['2', '4']}"]
    with pytest.raises(InvalidInput, match="no key has several values"):
        as_study(["ranks=2"])


def test_jobs_need_a_launcher_and_a_number() -> None:
    settings = "hydra.launcher.n_jobs=2"
    jobs = ["--multirun", "hydra/launcher=joblib", settings, "study.share=0,1"]
    assert split_jobs(["ranks=2,4", "hydra/launcher=joblib", "study.spread=2", settings]) == (
        ["ranks=2,4", "study.spread=2"],
        jobs,
    )
    for wrong in (
        ["study.spread=2"],
        ["hydra/launcher=joblib"],
        ["study.spread=2", settings],
        ["study.spread=0", "hydra/launcher=joblib"],
    ):
        with pytest.raises(InvalidInput, match="jobs of a study need a launcher and a number of jobs"):
            split_jobs(wrong)
