"""Studies as tests make them, and what they leave in a folder."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

from ringattn.cli.config.groups import LayoutGroup, StudyGroup
from ringattn.cli.config.schema import MachineGroup, SimulateConfig
from ringattn.lab.study.runner import Study
from ringattn.lab.study.space import list_points


def config(**more: Any) -> SimulateConfig:
    base: dict[str, Any] = {
        "layout": LayoutGroup("zigzag"),
        "machine": MachineGroup("h100_nvlink_ib"),
        "tokens": 4096,
        "ranks": 4,
        "heads": 2,
        "study": StudyGroup(plots=[]),
    }
    return SimulateConfig(**{**base, **more})


def study(folder: Path, axes: dict[str, Any], **more: Any) -> Study:
    options = {"name": "test", "plots": [], **more.pop("study", {})}
    if "shard" in axes:
        more = {"tokens": SimulateConfig().tokens, **more}
    made = config(study=StudyGroup(axes=axes, **options), **more)
    return Study(made, list_points(made), folder)


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def text_of(page: Path) -> str:
    """The words of a page, without its tags, a blank between them."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text())).split())
