"""`ringattn play`: its answers are those of the command line, its server keeps to its page, and the page fits."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import BROWSER, LOOK, QUIET, WIDTHS, probe_all
from command_line import Inside
from imported import import_file

from ringattn import InvalidInput
from ringattn.lab.play.answer import answer
from ringattn.lab.play.page import ADVICE, EXAMPLES, render
from ringattn.lab.play.server import PlayServer
from ringattn.text import size

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[PlayServer]:
    with PlayServer() as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield serving
        serving.shutdown()


def ask(server: PlayServer, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    return reply.status, reply.read().decode()


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        ("plan", {**EXAMPLES["Packed"], "steps": "true"}),
        ("plan", {**EXAMPLES["Two nodes"], "rank": "2"}),
        ("plan", {"layout": "striped", "schedule": "auto", "machine": "h100_nvlink_ib", "tokens": "16k", "ranks": "4"}),
        ("advise", {**ADVICE, "tokens": "32k", "gpus": "2", "model": "mistral_7b"}),
    ],
)
def test_an_answer_is_what_the_command_line_prints(verb: str, settings: dict[str, Any], inside: Inside) -> None:
    printed = inside(verb, *(f"{key}={value}" for key, value in settings.items()), "--json").stdout
    assert json.loads(json.dumps(answer(settings, verb))) == json.loads(printed)


def test_the_modelled_part_is_what_simulate_prints(inside: Inside) -> None:
    words = "pattern=causal ranks=4 tokens=16k heads=8 head_dim=64 layout=zigzag schedule=ring machine=h100_nvlink_ib"
    modelled = json.loads(inside("plan", *words.split(), "--json").stdout)["modelled"]
    passes = json.loads(inside("simulate", *words.split(), "backward=true", "--json").stdout)["passes"]
    for name, told in passes.items():
        assert modelled[name] == {key: told[key] for key in modelled[name]}
    shown = inside("plan", *words.split()).stdout
    assert re.search(r"backward on h100_nvlink_ib +[\d.]+ .?s, .* of memory on a rank +\[modelled\]", shown)


def test_the_steps_have_every_byte_and_pair(inside: Inside) -> None:
    found = answer({**EXAMPLES["Window"], "steps": "true"})["counted"]
    for one in found["ranks"]:
        assert sum(n for step in one["steps"] for _, n in step["sends"]) == one["forward"]["bytes"]
        assert sum(pairs for step in one["steps"] for _, pairs, _ in step["visits"]) == one["pairs"]
    assert sum(one["forward"]["bytes"] for one in found["ranks"]) == found["totals"]["forward"]["bytes"]


@pytest.mark.parametrize(
    ("verb", "settings", "words"),
    [
        ("plan", {"pattern": "Causal() & Windw(4)"}, "did you mean 'Window'?"),
        ("plan", {"ranks": "8x"}, "ranks=8x: expected a whole number"),
        ("plan", {"tokens": " "}, "tokens=: the value is empty"),
        ("plan", {"output.path": "x.json"}, "output.path: not a setting of this page"),
        ("plan", {"machine": "file"}, "machine=file needs machine.path"),
        ("advise", {"model": str(ROOT / "config.json")}, "expected one of llama3_8b"),
        ("run", {}, "unknown verb 'run'"),
    ],
)
def test_errors_are_those_of_the_command_line(verb: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)) as raised:
        answer(settings, verb)
    assert "\n" not in str(raised.value)


def test_the_server_has_one_page_and_its_answers(server: PlayServer) -> None:
    own = f"127.0.0.1:{server.server_port}"
    status, page = ask(server, "GET", "/")
    assert status == 200 and page == render() and "null/*given*/" not in page
    question = json.dumps({"verb": "plan", "settings": {"ranks": 2, "tokens": "1k"}})
    status, told = ask(server, "POST", "/answer", question, Origin=f"http://{own}")
    assert status == 200 and json.loads(told) == json.loads(json.dumps(answer({"ranks": 2, "tokens": "1k"})))
    bad = question.replace('"1k"', '"1kk"')
    assert ask(server, "POST", "/answer", bad) == (400, json.dumps({"error": told_by(bad)}))
    for path in ("/index.html", "/../server.py", "//etc/passwd", "/%2e%2e/conf"):
        assert ask(server, "GET", path)[0] == 404
    for body in ("", "{", "[]", '{"verb": "plan", "settings": 3}', "[" * 100_000, "9" * 40):
        assert ask(server, "POST", "/answer", body)[0] == 400


def told_by(question: str) -> str:
    with pytest.raises(InvalidInput) as raised:
        answer(json.loads(question)["settings"])
    return str(raised.value)


def test_other_sites_are_refused(server: PlayServer) -> None:
    """A name of another site that leads to 127.0.0.1, and a request that a page of another site makes."""
    for headers in (
        {"Host": f"evil.example:{server.server_port}"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        for method, path in (("GET", "/"), ("POST", "/answer")):
            assert ask(server, method, path, '{"verb": "plan", "settings": {}}', **headers)[0] == 403
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "GET", "/", Host="localhost:9000")[0] == 200, "a forwarded port"
    with pytest.raises(InvalidInput, match=f"port={server.server_port}: cannot be used"):
        PlayServer(server.server_port)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_figures_of_the_answer(server: PlayServer, tmp_path: Path) -> None:
    """The page of the server, with settings in its address, as a browser without the page's own help shows it."""
    settings = {**EXAMPLES["Window"], "ranks": "4"}
    address = f"{server.url}#{urlencode({'tab': 'plan', **settings, 'rank': '1'})}"
    done = subprocess.run(
        [BROWSER or "", *QUIET, f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    totals = answer(settings)["counted"]["totals"]
    for name in ("forward", "backward"):
        words = f"sent in the {name} [counted]</dt><dd>{size(totals[name]['bytes'])}<small>{totals[name]['messages']} "
        assert words in done.stdout
    assert "<td>kv of 1 to 2" in done.stdout and "ranks=4 layout=contiguous" in done.stdout


#: Opens one view after the other, each from the answers that came with the page, and then asks for one that has to wait
#: for Python, which a page of a file cannot load.
VIEWS = """
  const pause = () => new Promise(done => setTimeout(done, 300)), seen = {wide: [], found: [], error: ""};
  (async () => {
    for (const button of [...document.querySelectorAll("#examples button"), document.getElementById("tab-advise")]) {
      button.click();
      await pause();
      LOOK
      const told = JSON.parse(document.title);
      seen.wide.push(told.wide - told.room);
      seen.found.push(...told.found, ...told.small);
    }
    seen.verdict = document.getElementById("verdict").textContent;
    document.getElementById("tab-plan").click();
    document.forms[0].elements.tokens.value = "32k";
    document.forms[0].oninput();
    for (let i = 0; i < 20 && !seen.error; i++) {
      await pause();
      seen.error = document.getElementById("error").textContent;
    }
    seen.stale = document.getElementById("plan").className;
    parent.postMessage(JSON.stringify(seen), "*");
  })();
  return;
"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_of_the_site_fits_and_says_what_it_cannot_answer(tmp_path: Path) -> None:
    module = import_file(ROOT / "docs/playground.py")
    page = render({"answers": module.known_answers(), "words": module.WORDS, "home": "../index.html"})
    script = VIEWS.replace("LOOK", LOOK)
    for scheme in ("light", "dark"):
        for seen in probe_all([(page, width) for width in WIDTHS], script, tmp_path, scheme, f"play_{scheme}"):
            assert len(seen["wide"]) == len(EXAMPLES) + 1 and max(seen["wide"]) <= 0 and not seen["found"]
            assert seen["verdict"].startswith("Fastest for llama3_8b") and module.WORDS in seen["error"]
            assert seen["stale"] == "stale"
