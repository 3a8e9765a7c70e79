"""The results of a suite as JSON lines: a header, then one line per case, appended once the case is measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...errors import InvalidInput
from ...files import check_readable
from ..pages.journal import Journal, read_journal
from .case import CaseRecord

FORMAT = "ringattn bench 3"


def open_results(folder: Path, header: dict[str, Any], names: list[str]) -> Journal:
    """Open the journal of an interrupted run to continue it; if there is none, begin a new journal.

    A run can continue if its header is the same, apart from the date, and some of the cases `names` are not yet
    measured. A new file has a dated, numbered name.
    """
    host = header["machine"]
    hardware = slug(header["device"] or "") or f"{slug(str(host['cpu']))}_{host['cores']}cores"
    stem = f"{header['suite']}_{hardware}"
    paths = sorted((path for path in folder.glob(f"{stem}_*.jsonl") if _number(path)), key=_number)
    for path in paths:
        found, records = _read(path)
        if _without_date(found) == _without_date(header) and not set(names) <= records.keys():
            return Journal(path, found)
    day = f"{stem}_{host['date'][:10]}"
    number = 1 + max((_number(path) for path in paths if path.stem.startswith(day)), default=0)
    return Journal(folder / f"{day}_{number}.jsonl", header)


def _number(path: Path) -> int:
    """The number in the name of a results file; 0 for any other file."""
    match = re.search(r"_\d{4}-\d\d-\d\d_(\d{1,9})$", path.stem)
    return int(match[1]) if match else 0


def _without_date(header: dict[str, Any]) -> dict[str, Any]:
    return {**header, "machine": {**header["machine"], "date": None}}


def read_results(path: Path, setting: str = "results") -> dict[str, Any]:
    """Read the results of a suite: its header, its "cases", and "mixed", whether the code changed during the run.

    Raises InvalidInput if the file cannot be read or holds no results of a suite. `setting` names the argument that
    gave the path.
    """
    check_readable(path, setting)
    header, records = _read(path)
    cases = list(records.values())
    mixed = any(case.get("source", header["machine"]["source"]) != header["machine"]["source"] for case in cases)
    return {**header, "cases": cases, "mixed": mixed}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, CaseRecord]]:
    """The header, and the records of the cases by name."""
    header, records = read_journal(path)
    if header is None or header.get("format") != FORMAT:
        raise InvalidInput(
            f"{path}: not results of a suite in the format {FORMAT!r}; measure them again with this version, or give a "
            ".jsonl file of its ringattn report"
        )
    return header, records


def slug(name: str) -> str:
    """The name in a form that is safe in file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
