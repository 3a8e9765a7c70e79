"""Pages in a real browser, as a phone shows them, or a screen."""

from __future__ import annotations

import json
import os
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
AROUND = """<!doctype html><title></title><body style="white-space: nowrap"><script>
const found = []; onmessage = told => {{
  found[Array.from(frames).indexOf(told.source)] = JSON.parse(told.data); document.title = JSON.stringify(found);
}};</script>{frames}"""
FRAME = '<iframe src="{name}" width="{width}" height="{HEIGHT}" style="border: 0"></iframe>'
#: In pixels, of a phone and of a screen, and of what a picture shows of a page.
WIDTHS, HEIGHT = (390, 1280), 1600
#: The pictures of all pages go to this folder, if it is set.
PICTURES = Path(folder).resolve() if (folder := os.environ.get("RINGATTN_PICTURES")) else None
#: The smallest words, in pixels.
SMALLEST = 8

#: Of all words of a page as shown: those that lie on each other or beyond the edge of their figure, and those that
#: are too small. Each is a box, turned as it is, less what a scrolling element hides. And the width of the page and of
#: the window, of the cells that stay in place when a table moves, of images, and how many of these have no other text.
LOOK = """
  const found = [], small = [], boxes = [];
  const cut = (r, el) => {
    for (; el && el !== document.documentElement; el = el.parentElement) {
      const style = getComputedStyle(el);
      if (style.overflowX === "visible" || el === document.body) continue;
      const c = el.getBoundingClientRect();
      r = {left: Math.max(r.left, c.left), right: Math.min(r.right, c.right), top: Math.max(r.top, c.top),
        bottom: Math.min(r.bottom, c.bottom)};
    }
    return r;
  };
  const add = (node, corners, size) => {
    const xs = corners.map(p => p.x), ys = corners.map(p => p.y), words = node.textContent.trim().slice(0, 60);
    if (size < SMALLEST - 0.01) small.push(words + " " + size.toFixed(1));
    boxes.push({node, corners, words, left: Math.min(...xs), right: Math.max(...xs), top: Math.min(...ys),
      bottom: Math.max(...ys)});
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const el = node.parentElement, svg = el.ownerSVGElement;
    if (!node.textContent.trim() || !el.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (el.closest("script, style, title, option, textarea")) continue;
    const size = parseFloat(getComputedStyle(el).fontSize);
    if (svg) {
      const text = el.closest("text"), b = text.getBBox(), m = text.getScreenCTM();
      const at = (x, y) => new DOMPoint(x, y).matrixTransform(m);
      add(text, [at(b.x, b.y), at(b.x + b.width, b.y), at(b.x + b.width, b.y + b.height), at(b.x, b.y + b.height)],
        size * Math.hypot(m.a, m.b));
      const box = boxes.at(-1), room = svg.getBoundingClientRect();
      if (box.left < room.left - 1 || box.right > room.right + 1 || box.bottom > room.bottom + 1)
        found.push(box.words + " beyond the edge");
      continue;
    }
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      const r = cut(rect, el);
      if (r.right - r.left < 1 || r.bottom - r.top < 1) continue;
      const at = (x, y) => ({x, y}), {left, right, top, bottom} = r;
      add(node, [at(left, top), at(right, top), at(right, bottom), at(left, bottom)], size);
    }
  }
  // How deep two convex boxes lie in each other: the least over the directions of their sides.
  const depth = (a, b) => Math.min(...[a, b].flatMap(box => [0, 1].map(i => {
    const p = box.corners[i], q = box.corners[i + 1], n = Math.hypot(q.x - p.x, q.y - p.y) || 1;
    const along = o => o.corners.map(c => (c.x * (q.x - p.x) + c.y * (q.y - p.y)) / n);
    const [s, t] = [along(a), along(b)];
    return Math.min(Math.max(...s), Math.max(...t)) - Math.max(Math.min(...s), Math.min(...t));
  })));
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, i) => {
    for (let j = i + 1; j < boxes.length && boxes[j].top < a.bottom; j++) {
      const b = boxes[j];
      if (a.node !== b.node && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && depth(a, b) > 1.5)
        found.push(a.words + " on " + b.words);
    }
  });
  document.title = JSON.stringify({found, small, words: boxes.length, room: innerWidth,
    wide: document.documentElement.scrollWidth,
    first: Math.max(0, ...[...document.querySelectorAll("td:first-child")].map(
      x => getComputedStyle(x).position === "sticky" ? x.offsetWidth : 0)),
    images: [...document.images].map(x => [x.getAttribute("src"), x.width, x.naturalWidth]),
    silent: [...document.images, ...document.querySelectorAll("figure:not(:has(img))")].filter(
      x => !x.alt && !x.ariaLabel).length});
""".replace("SMALLEST", str(SMALLEST))


def probe_all(
    pages: Sequence[tuple[str, int]], script: str, folder: Path, scheme: str = "light", name: str = ""
) -> list[Any]:
    """What `script`, run once a page is loaded, writes into its title as JSON, for each (page, width) in one browser.

    Fails where the console has a line. With a `name`, PICTURES gets a picture of the pages beside each other.
    """
    assert BROWSER is not None
    told = f"<script>addEventListener('load', () => {{{script} parent.postMessage(document.title, '*');}});</script>"
    around, shown = folder / "around.html", []
    for number, (page, width) in enumerate(pages):
        (folder / f"page_{number}.html").write_text(page.replace("</body>", f"{told}</body>"))
        shown.append(FRAME.format(name=f"page_{number}.html", width=width, HEIGHT=HEIGHT))
    around.write_text(AROUND.format(frames="".join(shown)))
    all_widths, picture = sum(width + 8 for _, width in pages), []
    if PICTURES and name:
        PICTURES.mkdir(parents=True, exist_ok=True)
        picture = [f"--screenshot={PICTURES / name}.png"]
    done = subprocess.run(
        [
            *(BROWSER, *QUIET, *picture, f"--window-size={all_widths},{HEIGHT}"),
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
