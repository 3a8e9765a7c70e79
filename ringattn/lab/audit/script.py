"""A failing case as a script without this library, for a report, or for `git bisect run`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from textwrap import indent
from typing import Any

from . import kit, models

SCRIPT = """# {feature}, as ringattn audit found it. `python this.py` needs torch and the target alone. Its status
# is 0 if the case is right, 1 if it is wrong, and 125 if the target cannot be imported or refuses it, so that
# `git bisect run python this.py` finds the commit. The case itself is in the last line.
{source}

def load():
{target}
    return {function}


def prepare_case(target, case, device):
{prepare}


if __name__ == "__main__":
    run_script(load, {case!r}, {ranks}, {backend!r}, prepare=prepare_case)
"""


def write_script(
    target: Callable[..., Any], name: str, case: kit.Case, ranks: int, backend: str, model: tuple[str, str] | None
) -> str:
    """A script that tries a case as the audit did: the same inputs, exact results, tolerances, calls and backend.

    `model` has the import statement and the expression that make the model of the case, if it has one.
    """
    module, named, function = name.partition(":")
    imported, source = f"from {module} import {function}", inspect.getsource(kit)
    if not named:
        imported, function = inspect.getsource(inspect.getmodule(target) or inspect), target.__name__
        imported = imported[imported.index("from typing") :].strip()  # after the docstring and the future
    prepare = "return prepare(target, case, device)"
    if model is not None:
        source += re.sub(r"(?m)^from (__future__|\.kit) import .*\n", "", inspect.getsource(models))
        prepare = f"{model[0]}\nreturn Tested(lambda: {model[1]}).prepare(target, case, device)"
    return SCRIPT.format(
        feature=case.feature, source=source, target=indent(imported, "    "), function=function,
        prepare=indent(prepare, "    "), case=case, ranks=ranks, backend=backend,
    )  # fmt: skip
