"""Every page and figure, as a phone and a screen show it: no words on each other, cut, or smaller than 8 pixels."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from browser import BROWSER, LOOK, SMALLEST, WIDTHS, probe_all
from command_line import Inside
from imported import import_file

from ringattn.lab.bench.report import write_site
from ringattn.lab.play.page import render
from ringattn.lab.verbs import advise
from ringattn.lab.verbs.settings import AdviseConfig, AdviseOutputGroup

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs/_build/html"
#: Pages that one browser shows at a time.
TOGETHER = 4
#: Studies with every plot: of many lines, with ties; of several series and machines; and of a model.
STUDIES = {
    "crossover": "crossover",
    "plots": "ranks=2,4,8 tokens=64k,1M pattern=causal,longnet,dilated machine=h100_nvlink_ib,gtx1080_pcie "
    "plots=[stack,efficiency,memory,time,crossover]",
    "decode": "decode axes.cp=[1,2,4]",
}


def find_faults(pages: dict[str, str], folder: Path, name: str, figures: Path | None = None) -> dict[str, list[object]]:
    """What is wrong with each page, by its name and the width of the window; `figures` has the images of the pages."""
    faults: dict[str, list[object]] = {}
    names = list(pages)
    for start in range(0, len(names), TOGETHER):
        shown = [(page, width) for page in names[start : start + TOGETHER] for width in WIDTHS]
        looked = probe_all([(pages[page], width) for page, width in shown], LOOK, folder, name=f"{name}_{start}")
        for (page, width), seen in zip(shown, looked, strict=True):
            wrong = [*seen["found"], *seen["small"]]
            wrong += [f"{seen['wide']} pixels wide"] * (seen["wide"] > seen["room"])
            wrong += [f"{seen['first']} pixels stay in place"] * (seen["first"] >= width / 2)
            wrong += [f"{seen['silent']} images without a text"] * (seen["silent"] > 0)
            for source, shown_width, natural in seen["images"]:
                wrong += [f"{source} does not show"] * (not natural)
                if figures is not None and source.endswith(".svg"):
                    size = shown_width * find_smallest(figures / Path(source).name)
                    wrong += [f"{source} has words of {size:.1f} pixels"] * (size < SMALLEST)
            if wrong:
                faults[f"{page} {width}"] = wrong
    return faults


def find_smallest(figure: Path) -> float:
    """The smallest words of a drawing, in parts of its width; 1 without words."""
    text = figure.read_text()
    width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', text)[0])
    return min(map(float, re.findall(r'font(?:-size)?[:=] ?"?([\d.]+)', text)), default=width) / width


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.timeout(600)
def test_pages_and_figures_can_be_read(inside: Inside, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_site(ROOT / "benchmarks", tmp_path / "benchmarks")
    for name, words in STUDIES.items():
        assert inside("study", *words.split(), f"output.path={name}").returncode == 0
    for name, prices in {"advice": None, "prices": {"h100": 2.5, "a100_nvlink_ib": 0.2}}.items():
        output = AdviseOutputGroup(page=str(tmp_path / f"{name}.html"))
        with contextlib.redirect_stdout(io.StringIO()):
            advise.main(AdviseConfig(tokens="32k", gpus=4, batch=1, prices=prices, output=output))
    figures, play = import_file(ROOT / "docs/figures.py"), import_file(ROOT / "docs/playground.py")
    figures.draw_all(tmp_path / "figures")
    drawn = [*(tmp_path / "figures").glob("*.svg"), *figures.STORED]
    body = "".join(f"<p>{path.read_text()}</p>" for path in drawn)
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in sorted(tmp_path.rglob("*.html"))}
    pages["play"] = render({"answers": play.known_answers(), "words": play.WORDS, "home": "../index.html"})
    faults = find_faults(pages, tmp_path, "pages")
    (seen,) = probe_all([(f"<!doctype html><title></title><body>{body}</body>", 1280)], LOOK, tmp_path, name="figures")
    faults["figures"] = seen["found"]
    # Of README, on a package index or a forge, which shrink figures to the width of a phone less its margins.
    faults["README"] = [path.name for path in figures.STORED if find_smallest(path) * (WIDTHS[0] - 32) < SMALLEST]
    assert len(pages) > 20 and seen["words"] > 100
    assert {"fastest and cheapest" in pages[page] for page in ("advice.html", "prices.html")} == {True, False}
    assert ">ranks=64</text>" in pages["crossover/report.html"], "24 lines are in four panels"
    assert not {name: wrong for name, wrong in faults.items() if wrong}


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.skipif(not (SITE / "searchindex.js").is_file(), reason="needs the pages: scripts/docs")  # the last file
@pytest.mark.timeout(300)
def test_pages_of_the_site_can_be_read(tmp_path: Path) -> None:
    """Those of docs/ and the notebooks, in their place."""
    pages = {}
    for path in sorted([*SITE.glob("*.html"), *SITE.glob("notebooks/*.html")]):
        text = path.read_text()
        assert "reference download" not in text, path
        pages[path.stem] = text.replace("<head>", f'<head><base href="{path.as_uri()}">', 1)
    assert len(pages) > 25
    assert not find_faults(pages, tmp_path, "site", SITE / "_images")
