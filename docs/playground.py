"""The page of `ringattn play` on the site: some answers come with it, Python in the browser gives all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from ringattn.lab.play.answer import answer
from ringattn.lab.play.page import ADVICE, EXAMPLES, render

ROOT = Path(__file__).resolve().parents[1]
#: Pyodide, whose packages have numpy, PyYAML and msgspec, and the hashes of its files, as its npm package has them.
PYODIDE = "https://cdn.jsdelivr.net/pyodide/v314.0.7/full/"
HASHES = {
    "pyodide.mjs": "sha256-bx1g979Sm+swDw9HmDySHTmCNjZAuiCvDjjv3dvGYQk=",
    "pyodide.asm.mjs": "sha256-983I7OgGeM63EvjmXr5tOoMgOhgMOZhl9JYSoFFpNjU=",
    "pyodide.asm.wasm": "sha256-zDbjyrBP38mmP/E+tS6uK5Eb9GwCXMeygfOUvT3h1eY=",
    "python_stdlib.zip": "sha256-+hlX5XdwaPxPdDf5bYYK4vvpwZcyugbITgBOwW3X3Xo=",
    "pyodide-lock.json": "sha256-XcL8EZEIvBSMdFfchudnW1yH4cr9QgucNMHq73s2wBA=",
}
WORDS = (
    "Only the examples, and the advice first shown, answer here: Python could not be loaded. On your computer, "
    "`ringattn play` answers everything."
)
#: Folders of the package that no answer imports.
UNUSED = {"kernels", "runtime", "inference", "nn", "train", "integrations", "audit", "bench"}
#: What Python runs in the browser; its value is called for each question.
PROGRAM = """
import json
from ringattn.errors import RingAttentionError
from ringattn.lab.play.answer import answer

def reply(verb, settings):
    try:
        return json.dumps({"answer": answer(json.loads(settings), verb)})
    except RingAttentionError as error:
        return json.dumps({"error": str(error)})

reply
"""


def known_answers() -> dict[str, dict[str, Any]]:
    """What the page asks when it opens, for each of its examples: by verb and settings, as its script writes them."""
    asked = [("advise", ADVICE)]
    for example in EXAMPLES.values():
        listing = {**example, "rank": "0"}
        if "double_ring" not in example["schedule"]:  # which asks a machine for its ranks per node
            del listing["machine"]
        asked += [("plan", {**example, "steps": "true"}), ("plan", listing)]
    known = {}
    for verb, settings in asked:
        words = sorted(f"{name}={value}" for name, value in settings.items())
        known[f"{verb}?{'&'.join(words)}"] = answer(settings, verb)
    return known


def write(folder: Path) -> None:
    """Write the page into a folder, and beside it ringattn as an archive for Python in the browser."""
    folder.mkdir(parents=True, exist_ok=True)
    python = {"pyodide": PYODIDE, "hashes": HASHES, "archive": "ringattn.zip", "program": PROGRAM}
    site = {"answers": known_answers(), **python, "words": WORDS, "home": "../index.html"}
    (folder / "index.html").write_text(render(site))
    with ZipFile(folder / "ringattn.zip", "w", ZIP_DEFLATED) as archive:
        for path in sorted(ROOT.glob("ringattn/**/*.*")):
            if path.suffix in (".py", ".yaml") and not {*path.relative_to(ROOT).parts} & UNUSED:
                archive.write(path, path.relative_to(ROOT))
        for path in sorted(ROOT.glob("conf/**/*.yaml")):
            archive.write(path, Path("ringattn") / path.relative_to(ROOT))
