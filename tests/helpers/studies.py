"""Studies as tests make them, and what they leave in a folder."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

from ringattn.lab.study.runner import Study
from ringattn.lab.study.space import list_points
from ringattn.lab.verbs.settings import StudyConfig


def config(axes: dict[str, Any], study: dict[str, Any] | None = None, **fixed: Any) -> StudyConfig:
    """The settings of a study with these axes and options, and with `fixed` keys of its points."""
    options = {"name": "test", "plots": [], **(study or {})}
    varied = {*axes, *(key for entry in options.get("together", ()) for key in entry)}
    base = {"layout": "zigzag", "machine": "h100_nvlink_ib", "tokens": 4096, "ranks": 4, "heads": 2, **fixed}
    if varied & {"shard"} and "tokens" not in fixed:
        del base["tokens"]
    kept = {key: value for key, value in base.items() if key not in varied or key in fixed}
    return StudyConfig(axes=axes, fixed=kept, **options)


def study(folder: Path, axes: dict[str, Any], **more: Any) -> Study:
    made = config(axes, **more)
    return Study(made, list_points(made), folder)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def text_of(page: Path) -> str:
    """The words of a page, without its tags, a blank between them."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text())).split())
