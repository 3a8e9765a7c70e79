"""The page of a report in a real browser: no error, tables that sort, figures, and no wider than a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import BROWSER, probe
from markupsafe import escape

from ringattn.lab.bench import report
from ringattn.lab.bench.report import BenchReport, write_index, write_page, write_site

#: What a reader does, and what the page is then; the answer stands in the title.
PROBE = """
  const table = [...document.querySelectorAll("table")].find(x => x.rows[0].cells[0].textContent === "case");
  const at = [...table.rows[0].cells].findIndex(x => x.textContent === "median");
  const column = () => [...table.rows].slice(1).map(row => row.cells[at].textContent);
  const press = () => table.rows[0].cells[at].querySelector("button").click();
  const before = column(); press(); const up = column(); press(); const down = column();
  const figures = [...document.querySelectorAll("svg")].map(x => x.getBoundingClientRect());
  const shown = figures.filter(x => x.width > 200 && x.height > 100 && x.right <= innerWidth).length;
  const first = getComputedStyle(table.rows[1].cells[0]).position;
  const wide = document.documentElement.scrollWidth, color = getComputedStyle(document.body).backgroundColor;
  const numbers = {shown, figures: figures.length, wide, room: innerWidth};
  document.title = JSON.stringify({before, up, down, color, first, ...numbers});
"""


STORED = sorted((Path(__file__).parents[3] / "benchmarks").glob("*.jsonl"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, BenchReport]]:
    """The folder of the site, with the pages of older results beside it, and the report of each stored result."""
    pytest.importorskip("matplotlib")
    folder, reports = tmp_path_factory.mktemp("site"), {}

    def write(results: Path, target: Path) -> None:
        reports[results] = write_page(results, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_page", write)
        write_site(STORED[0].parent, folder)
    for path in set(STORED) - {*reports}:
        write(path, folder / f"{path.stem}.html")
    return folder, reports


@pytest.fixture(scope="module")
def stored(site: tuple[Path, dict[Path, BenchReport]]) -> dict[Path, str]:
    """The page of each stored result."""
    return {path: (site[0] / f"{path.stem}.html").read_text() for path in STORED}


@pytest.fixture(scope="module")
def page(stored: dict[Path, str]) -> str:
    """The page of a suite with systems, lengths and failures."""
    (text,) = (text for path, text in stored.items() if path.name.startswith("extreme_"))
    return text


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r'(src|href)="(?!data:|#)(?!https?://www\.w3\.org)[^"]*"', page) and "@import" not in page
    assert page.count("<svg") == 2 and 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    assert "What it was." in page


def test_stored_results_have_a_page(site: tuple[Path, dict[Path, BenchReport]], stored: dict[Path, str]) -> None:
    """The conclusion, then plots, then tables, every column last."""
    for path, text in stored.items():
        made = site[1][path]
        assert made.conclusion is not None and text.count("<svg") == len(made.plots) > 0, path
        assert text.index(str(escape(made.conclusion))) < text.index("<svg") < text.index("<table"), path
        if "<h2>every column" in text:
            assert text.index("<h2>every column") == text.rindex("<h2>", 0, text.rindex("<table")), path


def test_legends_are_words(stored: dict[Path, str]) -> None:
    legends = {"loss": ("all logits at once", "by chunks"), "host": ("forward", "backward")}
    for suite, names in legends.items():
        (text,) = (text for path, text in stored.items() if path.name.startswith(f"{suite}_"))
        figure = text[text.index("<svg") : text.index("</svg>")]
        assert all(f">{name}</text>" in figure for name in names) and not re.search(r">\w+_\w+</text>", figure)


def test_the_site_has_every_page(site: tuple[Path, dict[Path, BenchReport]]) -> None:
    folder, _ = site
    links = re.findall(r'href="([^"#]+\.html)"', (folder / "index.html").read_text())
    assert {path.stem for path in STORED} >= {Path(link).stem for link in links} and len(links) > 12
    assert all((folder / link).is_file() for link in links)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(scheme: str, page: str, tmp_path: Path) -> None:
    found = probe(page, PROBE, tmp_path, scheme)
    assert found["up"] == sorted(found["before"], key=lambda x: (x == "", to_seconds(x))) != found["before"]
    assert [x for x in found["down"] if x] == [x for x in found["up"] if x][::-1]
    assert found["shown"] == found["figures"] == 2 and found["wide"] <= found["room"] and found["first"] == "sticky"
    assert found["color"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}[scheme]


def to_seconds(text: str) -> float:
    number, unit = text.split() if text else ("0", "s")
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_the_stored_index_has_the_whole_conclusions_of_suites_and_studies(tmp_path: Path) -> None:
    (folder,) = {path.parent for path in STORED}
    for path in (*STORED, *folder.glob("*/summary.json")):
        copy = tmp_path / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (index,) = write_index(tmp_path)
    text = index.read_text()
    assert text == (folder / "README.md").read_text(), "make it again: ringattn report results=FILE"
    assert "..." not in text.replace("Dilated(...)", "") and "| billion_tokens |" in text
    assert all(len(line) < 700 for line in text.splitlines())


def test_an_index_takes_no_readme_of_others(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert write_index(tmp_path) == [] and (tmp_path / "README.md").read_text() == "mine"
    (tmp_path / "README.md").unlink()
    for _ in range(2):  # its own page it writes again
        assert write_index(tmp_path) == [tmp_path / "README.md"]
