"""`ringattn advise` as a user calls it: its JSON, and its page in a browser of the width of a phone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import BROWSER, probe

from ringattn import InvalidInput
from ringattn.cli.config.groups import MachineGroup
from ringattn.lab.advise.question import make_offers
from ringattn.lab.verbs.advise import main
from ringattn.lab.verbs.settings import AdviseConfig, AdviseOutputGroup

PRICES = {"h100": 2.5, "a100_nvlink_ib": 0.2}
PROBE = """
  const figures = [...document.querySelectorAll("svg")].map(x => x.getBoundingClientRect());
  const shown = figures.filter(x => x.width > 200 && x.height > 100 && x.right <= innerWidth).length;
  const columns = Math.max(...[...document.querySelectorAll("tr")].map(x => x.cells.length));
  const first = document.querySelector("h1 + p").textContent, wide = document.documentElement.scrollWidth;
  document.title = JSON.stringify({shown, figures: figures.length, columns, first, wide, room: innerWidth});
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("advice")
    output = AdviseOutputGroup(str(folder / "advice.json"), str(folder / "advice.html"))
    main(AdviseConfig(tokens="32k", gpus=4, batch=1, prices=PRICES, output=output))
    return folder


def test_the_json_has_every_number(folder: Path) -> None:
    advice = json.loads((folder / "advice.json").read_text())
    assert advice["question"]["machines"] == {"h100_nvlink_ib": 2.5, "a100_nvlink_ib": 0.2}
    assert 1 <= len(advice["best"]) <= 5 and advice["best"][0]["machine"] == "h100_nvlink_ib"
    for one in [*advice["best"], *advice["pareto"]]:
        assert one["cp"] * one["dp"] * one["tp"] * one["pp"] == one["gpus"] and one["why"].startswith("bound by: ")
        assert sum(one["parts"].values()) == pytest.approx(one["step seconds"])
        low, high = one["seconds of 1e9 tokens, band"]
        assert low < one["seconds of 1e9 tokens"] < high
    # The A100 is cheap here, so that the front has a fast and a cheap end.
    assert {one["machine"] for one in advice["pareto"]} == {"h100_nvlink_ib", "a100_nvlink_ib"}
    assert set(advice["counts"]) == {f"{name}, {n} GPUs" for name in advice["question"]["machines"] for n in (4, 2, 1)}
    assert any(line.startswith("Price: ") for line in advice["changes"]) and advice["does not fit"]


def test_the_page_begins_with_the_verdict_and_fits_a_phone(folder: Path) -> None:
    page = (folder / "advice.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)(?!https?://www\.w3\.org)[^"]*"', page)
    advice = json.loads((folder / "advice.json").read_text())
    fits, shown = advice["launched"]["fits"], page.replace(" \\\n  ", " ")  # in lines to be copied
    assert fits == (f"<pre>{advice['launch']}</pre>" in shown) == advice["launch"].startswith("torchrun --nnodes 1 ")
    assert fits != ("which does not fit: train with ringattn.train" in page)
    assert "USD" in page and "USD" in advice["verdict"] and "989 TFLOP/s" in page and "e+14" not in page
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    found = probe(page, PROBE, folder)
    assert found["first"] == json.loads((folder / "advice.json").read_text())["verdict"]
    assert found["shown"] == found["figures"] == 4 and found["columns"] == 6 and found["wide"] <= found["room"]


@pytest.mark.parametrize(
    ("prices", "words"),
    [
        ({"h10": 1.0}, "prices: unknown machine 'h10'"),
        ({"h100": -1}, "prices: h100: -1 is not a price"),
        ([2.5], "expected prices per hour by machine"),
    ],
)
def test_prices_that_are_none_are_refused(prices: object, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make_offers(AdviseConfig(prices=prices))
    with pytest.raises(InvalidInput, match="no meaning beside prices="):
        make_offers(AdviseConfig(prices=PRICES, machine=MachineGroup("a100_pcie")))


def test_a_machine_that_cannot_serve_is_named_beside_those_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    """An A100 has no products in 8 bits."""
    config = AdviseConfig(tokens="4k", gpus=8, batch=4, phase="decode", prices={"h100": 2.5, "a100": 1.2}, fp8="true")
    config.model = "gpt_oss_120b"
    main(config)
    said = " ".join(capsys.readouterr().out.split())
    assert "refused: a100_nvlink_ib: " in said and "decode of gpt_oss_120b" in said and "cheapest" not in said
