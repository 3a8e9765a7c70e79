"""Pages in a real browser, as a phone shows them, or a screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: As root, too, and without traffic of the browser's own.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: A window cannot be as narrow as a phone, a frame can; the pages tell the window around them what they found.
AROUND = """<!doctype html><title></title><script>const found = []; onmessage = told => {{
  found[Array.from(frames).indexOf(told.source)] = JSON.parse(told.data); document.title = JSON.stringify(found);
}};</script>{frames}"""
FRAME = '<iframe src="{name}" width="{width}" height="900" style="border: 0"></iframe>'
#: In pixels, of a phone and of a screen.
WIDTHS = (390, 1280)

#: Words of figures that lie on each other, or reach beyond an edge; how wide the page is and may be, and the cells that
#: stay in place when a table moves; how many images have no alternative text.
OVERLAPS = """
  const found = [];
  for (const figure of document.querySelectorAll("svg")) {
    const room = figure.getBoundingClientRect();
    const words = [...figure.querySelectorAll("text")].filter(x => x.textContent.trim());
    const boxes = words.map(x => x.getBoundingClientRect());
    boxes.forEach((a, i) => {
      if (a.left < room.left || a.right > room.right || a.bottom > room.bottom) found.push(words[i].textContent);
      boxes.slice(0, i).forEach((b, j) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 4) found.push(words[i].textContent + " on " + words[j].textContent);
      });
    });
  }
  document.title = JSON.stringify({found, words: document.querySelectorAll("text").length, room: innerWidth,
    wide: document.documentElement.scrollWidth,
    first: Math.max(0, ...[...document.querySelectorAll("td:first-child")].map(x => x.offsetWidth)),
    silent: [...document.images, ...document.querySelectorAll("figure")].filter(x => !x.alt && !x.ariaLabel).length});
"""


def probe_all(pages: Sequence[tuple[str, int]], script: str, folder: Path, scheme: str = "light") -> list[Any]:
    """What `script`, run once a page is loaded, writes into its title as JSON, for each (page, width) in one browser.

    Fails where the console has a line.
    """
    assert BROWSER is not None
    told = f"<script>addEventListener('load', () => {{{script} parent.postMessage(document.title, '*');}});</script>"
    around, shown = folder / "around.html", []
    for number, (page, width) in enumerate(pages):
        (folder / f"page_{number}.html").write_text(page.replace("</body>", f"{told}</body>"))
        shown.append(FRAME.format(name=f"page_{number}.html", width=width))
    around.write_text(AROUND.format(frames="".join(shown)))
    widest = max(width for _, width in pages)
    done = subprocess.run(
        [
            *(BROWSER, *QUIET, f"--window-size={widest + 200},1000"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000"),
            *(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", "--dump-dom", around.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    return json.loads(title[1])


def probe(page: str, script: str, folder: Path, scheme: str = "light", width: int = 390) -> dict[str, Any]:
    """`probe_all` of one page."""
    return probe_all([(page, width)], script, folder, scheme)[0]
