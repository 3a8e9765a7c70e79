"""Sphinx configuration: the pages of this folder, and the API from the docstrings."""

from __future__ import annotations

import re
from typing import Any

import ringattn

project = "ringattn"
author = "The ringattn authors"
version = release = ringattn.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "ringattn"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Links to files of the repository become downloads; anchors such as #add-a-part are headings.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
# The cache of executed notebooks stays out of the tree of the sources.
nb_execution_cache_path = "_build/.jupyter_cache"

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
    lines[:] = [re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line.replace("**", r"\*\*")) for line in marked]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mark_options)
