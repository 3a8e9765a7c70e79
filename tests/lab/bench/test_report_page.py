"""The page of a report in a real browser: no error, tables that sort, figures, and no wider than a phone."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, OVERLAPS, WIDTHS, probe, probe_all

from ringattn.lab.bench.records import read_results
from ringattn.lab.bench.report import BenchReport, write_index
from ringattn.lab.pages.pages import render_page
from ringattn.lab.verbs.report import make_command

#: What a reader does, and what the page is then; the answer stands in the title.
PROBE = """
  const table = [...document.querySelectorAll("table")].find(x => x.rows[0].cells[0].textContent === "case");
  const at = [...table.rows[0].cells].findIndex(x => x.textContent === "median");
  const column = () => [...table.rows].slice(1).map(row => row.cells[at].textContent);
  const press = () => table.rows[0].cells[at].querySelector("button").click();
  const before = column(); press(); const up = column(); press(); const down = column();
  const figures = [...document.querySelectorAll("svg")].map(x => x.getBoundingClientRect());
  const shown = figures.filter(x => x.width > 200 && x.height > 100 && x.right <= innerWidth).length;
  const wide = document.documentElement.scrollWidth, color = getComputedStyle(document.body).backgroundColor;
  document.title = JSON.stringify({before, up, down, shown, figures: figures.length, wide, room: innerWidth, color});
"""


STORED = sorted((Path(__file__).parents[3] / "benchmarks").glob("*.jsonl"))


@pytest.fixture(scope="module")
def page() -> str:
    """The page of a suite with systems, lengths and failures."""
    (path,) = (path for path in STORED if path.name.startswith("extreme_"))
    return path.with_suffix(".html").read_text()


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r'(src|href)="(?!data:|#)(?!https?://www\.w3\.org)[^"]*"', page) and "@import" not in page
    assert page.count("<svg") == 2 and 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    assert "What it was." in page


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name.partition("_")[0])
def test_stored_results_have_their_page(path: Path) -> None:
    """As the code makes it today: the conclusion, then plots, whose files are there, then tables, every column last."""
    pytest.importorskip("matplotlib")
    report = BenchReport(read_results(path), make_command(read_results(path)), path.stem)
    text = path.with_suffix(".md").read_text()
    again = render_page("ringattn.lab.bench", "bench.j2", "markdown", {"report": report})
    assert text == again, f"make it again: ringattn report results={path}"
    plots = re.findall(r"!\[(.+)\]\((.+)\)", text)
    assert report.conclusion is not None and len(plots) == len(report.plots) > 0
    for (title, name), (drawn, svg, file) in zip(plots, report.plots, strict=True):
        stored = path.with_name(name).read_text()
        assert (title, name) == (drawn, file) and 2000 < len(stored) < 60_000
        assert re.findall("<text[^>]*>([^<]*)", stored) == re.findall("<text[^>]*>([^<]*)", svg)
    assert text.index(report.conclusion) < text.index("![") < text.index("\n|")
    if "\n## every column" in text:
        assert text.index("\n## every column") == text.rindex("\n## ", 0, text.rindex("\n|"))


@pytest.fixture(scope="module")
def stored_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Path, int], Any]:
    """What OVERLAPS finds on each page at each width."""
    shown = list(product(STORED, WIDTHS))
    pages = [(path.with_suffix(".html").read_text(), width) for path, width in shown]
    return dict(zip(shown, probe_all(pages, OVERLAPS, tmp_path_factory.mktemp("pages")), strict=True))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name.partition("_")[0])
def test_stored_pages_fit(path: Path, width: int, stored_pages: dict[tuple[Path, int], Any]) -> None:
    seen = stored_pages[path, width]
    assert seen["words"] > 5 and not seen["found"] and not seen["silent"] and seen["wide"] <= seen["room"] == width


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(scheme: str, page: str, tmp_path: Path) -> None:
    found = probe(page, PROBE, tmp_path, scheme)
    assert found["up"] == sorted(found["before"], key=lambda x: (x == "", to_seconds(x))) != found["before"]
    assert [x for x in found["down"] if x] == [x for x in found["up"] if x][::-1]
    assert found["shown"] == found["figures"] == 2 and found["wide"] <= found["room"]
    assert found["color"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}[scheme]


def to_seconds(text: str) -> float:
    number, unit = text.split() if text else ("0", "s")
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_the_stored_index_has_the_whole_conclusions_of_suites_and_studies(tmp_path: Path) -> None:
    (stored,) = {path.parent for path in STORED}
    for path in (*STORED, *stored.glob("*/summary.json")):
        copy = tmp_path / path.relative_to(stored)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (index,) = write_index(tmp_path)
    text = index.read_text()
    assert text == (stored / "README.md").read_text(), "make it again: ringattn report results=FILE"
    assert "..." not in text.replace("Dilated(...)", "") and "| billion_tokens |" in text
    assert all(len(line) < 700 for line in text.splitlines())


def test_an_index_takes_no_readme_of_others(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert write_index(tmp_path) == [] and (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "README.md").unlink()
    for _ in range(2):  # its own page it writes again
        assert write_index(tmp_path) == [tmp_path / "README.md"]
