"""Sphinx configuration: the pages of this folder, their figures, and the API from the docstrings."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from pygments import highlight, lexers
from pygments.formatters import HtmlFormatter
from sphinx import addnodes

import ringattn

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))
import figures  # noqa: E402  # beside this file

project = "ringattn"
author = copyright = "The ringattn authors"
version = release = ringattn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"ringattn {release}"
html_css_files = ["site.css"]
html_static_path = ["_static"]
html_show_sphinx = False
exclude_patterns = ["_build"]
repository = (
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    .get("urls", {})
    .get("Repository")
)
if repository:
    html_theme_options = {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }

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


def show_code(app: Any, document: nodes.document) -> None:
    """Links to files beside the pages lead to a copy to look at, where Sphinx offers a download or finds no page."""
    up, page = "../" * app.env.docname.count("/"), HERE / app.env.docname
    for link in [
        *document.findall(addnodes.download_reference),
        *document.findall(addnodes.pending_xref),
    ]:
        if isinstance(link, addnodes.pending_xref) and link.get("refdomain") != "doc":
            continue
        suffix = "" if isinstance(link, addnodes.download_reference) else ".md"
        target = link["reftarget"] + suffix
        if target.startswith(str(ROOT)):
            source = Path(target)
        else:  # relative to the page, or to the folder of the pages
            source = (
                page.parent / target
                if (page.parent / target).exists()
                else HERE / target.lstrip("/")
            )
        path = source.resolve().relative_to(ROOT)
        if path.parts[0] == "docs":
            continue
        shown = nodes.reference(
            "", "", *link.children, refuri=f"{up}files/{path}.html", internal=True
        )
        link.replace_self(shown)
        write_file(app, path)


def write_file(app: Any, path: Path) -> None:
    """The page of the site to which a link to a file of the repository leads."""
    target = Path(app.outdir, "files", f"{path}.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    own_page = (ROOT / path).with_suffix(".html")
    if own_page.exists():  # results of benchmarks have one
        shutil.copy(own_page, target)
        return
    code = (ROOT / path).read_text()
    if path.suffix == ".md":
        body = (
            MarkdownIt().enable("table").render(re.sub(r"\]\(([\w.-]+\.md)\)", r"](\1.html)", code))
        )
    else:
        lexer = lexers.PythonLexer() if path.suffix == ".py" else lexers.TextLexer()
        body = highlight(code, lexer, HtmlFormatter(noclasses=True))
    style = """body { font: 16px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 60rem; padding: 0 1rem }
        td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left }
        table, pre { display: block; overflow-x: auto }"""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{path}</title>'
    target.write_text(f"<!doctype html>{head}<style>{style}</style><h1>{path}</h1>{body}")


def prepare(app: Any) -> None:
    figures.draw_all(HERE / "_generated")
    for page in ROOT.glob("benchmarks/*.md"):
        write_file(app, page.relative_to(ROOT))


def setup(app: Any) -> None:
    app.connect("builder-inited", prepare)
    app.connect("autodoc-process-docstring", mark_options)
    app.connect("doctree-read", show_code, priority=100)  # before Sphinx collects downloads
