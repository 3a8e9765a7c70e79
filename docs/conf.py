"""Sphinx configuration: the pages of this folder, their figures, and the API from the docstrings."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import ringattn
from ringattn.lab.bench.report import write_site

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
import figures  # noqa: E402  # beside this file
import playground  # noqa: E402

project = "ringattn"
author = copyright = "The ringattn authors"
version = release = ringattn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"ringattn {release}"
html_css_files = ["site.css"]
html_static_path = ["_static"]
html_show_sphinx = False
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "force"  # an output that was kept would be that of older code
nb_execution_raise_on_error = True
nb_execution_timeout = 120
copybutton_prompt_text = "$ "

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
nitpicky = False


def mark_options(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the lines "name: what it means" of a docstring, with their indented continuations, into a list."""
    marked, inside = [], False
    for line in lines:
        if re.match(r"[a-z]\w*(, \w+)*: \S", line) and (inside or not marked or not marked[-1]):
            option, text = line.split(": ", 1)
            line, inside = f"- ``{option}``: {text}", True
        elif inside and line.startswith("    "):
            line = line[2:]
        elif inside and line:
            marked, inside = [*marked, ""], False
        marked.append(line)
    lines[:] = [
        re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line.replace("**", r"\*\*")) for line in marked
    ]


def link_files(app: Any, document: nodes.document) -> None:
    """Links to files of the checkout lead to these files, where Sphinx offers a copy to download or finds no page.

    Results of benchmarks lead to their report on the site.
    """
    up, page = "../" * app.env.docname.count("/"), HERE / app.env.docname
    for link in [
        *document.findall(addnodes.download_reference),
        *document.findall(addnodes.pending_xref),
    ]:
        # A page of the site is named without its suffix.
        target = link["reftarget"] + (".md" if link.get("refdomain") == "doc" else "")
        # Relative to the page, to the folder of the pages, or, in README.md, to the checkout; or absolute.
        places = (page.parent / target, HERE / target.lstrip("/"), ROOT / target)
        source = next((place for place in places if place.is_file()), None)
        if source is None:  # an anchor, or a name in the code
            continue
        path = source.resolve().relative_to(ROOT)
        if path.suffix == ".md" and path.parts[0] == "docs":
            continue
        address = Path(os.path.relpath(ROOT, Path(app.outdir, app.env.docname).parent), path)
        if path == Path("benchmarks/README.md"):
            address = Path(up, "benchmarks/index.html")
        elif path.suffix == ".jsonl":
            address = Path(up, "benchmarks", f"{path.stem}.html")
        shown = nodes.reference("", "", *link.children, refuri=str(address), internal=True)
        link.replace_self(shown)


def write_data(app: Any) -> None:
    """Draw the figures, and write the playground, the data of classes and the reports of benchmarks into the site."""
    figures.draw_all(HERE / "_generated")
    static, results = Path(app.outdir, "_static"), Path(app.outdir, "benchmarks")
    static.mkdir(parents=True, exist_ok=True)
    with (HERE / "support_models.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    (static / "support_models_data.js").write_text(f"const CLASSES = {json.dumps(rows)};\n")
    write_site(ROOT / "benchmarks", results)
    playground.write(Path(app.outdir, "playground"))


def setup(app: Any) -> None:
    app.connect("builder-inited", write_data)
    app.connect("autodoc-process-docstring", mark_options)
    app.connect("doctree-read", link_files, priority=100)  # before Sphinx collects downloads
