"""The arguments of a study: comma lists as axes, and jobs of a launcher."""

from __future__ import annotations

import pytest

from ringattn.cli.config.sweep import as_study, split_commas, split_jobs
from ringattn.errors import InvalidInput


def test_comma_lists_become_axes() -> None:
    assert split_commas("a,(b,c),'d,e',{f: 1, g: 2}") == ["a", "(b,c)", "'d,e'", "{f: 1, g: 2}"]
    assert as_study(["-m", "ranks=1,2", "heads=4", "pattern=Window(1, 2),Full()"]) == [
        "heads=4", "+study.axes={ranks: ['1', '2'], pattern: ['Window(1, 2)', 'Full()']}"
    ]  # fmt: skip
    assert as_study(["-m", "ranks=range(1,4)"]) == ["+study.axes={ranks: ['1', '2', '3']}"]
    other = ["-m", "experiment=validate", "heads=1,2"]
    assert as_study(other) == other
    for wrong, words in (
        (["-m", "ranks=2"], "no key has several values"),
        (["-m", "hydra/sweeper=basic"], "not Hydra jobs"),
        (["-m", "ranks=2,4", "output.path=a,b"], "which has one output.path"),
        (["-m", "study=scaling,memory"], "which has one study;"),
        (["-m", "ranks=2,4", "study.plots=stack,memory"], "write a list in brackets"),
    ):
        with pytest.raises(InvalidInput, match=words):
            as_study(wrong)


def test_jobs_need_a_launcher_and_a_number() -> None:
    settings = "hydra.launcher.n_jobs=2"
    jobs = ["--multirun", "hydra/launcher=joblib", settings, "study.share=0,1"]
    assert split_jobs(["ranks=2,4", "hydra/launcher=joblib", "study.spread=2", settings]) == (
        ["ranks=2,4", "study.spread=2"],
        jobs,
    )
    for wrong, words in (
        (["study.spread=2"], "study.spread: jobs of a study need a launcher and a number of jobs; add hydra/launcher="),
        (["hydra/launcher=joblib"], "hydra/launcher=joblib: jobs .* add study.spread=4"),
        ([settings], f"{settings}: jobs .* add hydra/launcher=joblib"),
        (["study.spread=2", settings], f"{settings}: jobs .* add hydra/launcher=joblib"),
        (["study.spread=0", "hydra/launcher=joblib"], "a number of jobs >= 1"),
    ):
        with pytest.raises(InvalidInput, match=words):
            split_jobs(wrong)
