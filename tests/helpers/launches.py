"""Printed commands, read by the names that torchtitan, vLLM and SGLang had in their releases on a date."""

from __future__ import annotations

import argparse
import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "lab/advise"
TITAN = json.loads((FOLDER / "torchtitan_names.json").read_text())
SERVERS = {one["name"]: one for one in json.loads((FOLDER / "serving_names.json").read_text())}


def read_torchtitan(line: str) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """(options, flags, options of torchrun) of a command; fails at a name or a value that torchtitan does not know."""
    words = shlex.split(line)
    assert words[-1] in TITAN["subcommands"]
    start = words.index("torchtitan.train") + 1
    assert words[start - 2] == "-m"
    given, flags = dict[str, str](), list[str]()
    for word, after in pairwise(words[start:]):
        if word.startswith("--"):
            given |= {} if after.startswith(("--", "activation")) else {word[2:]: after}
            flags += [word[2:]] if after.startswith(("--", "activation")) else []
    assert given["config"] in TITAN["configs"][given["module"]]
    assert all(TITAN["options"][flag] == "bool" for flag in flags)
    for option in given.keys() - {"config", "module"}:
        kind, value = TITAN["options"][option], given[option]
        assert int(value) >= 0 if kind.startswith("int") else f"'{value}'" in kind or kind.startswith("str"), option
    return given, flags, dict(pairwise(words[:start]))


def read_server(line: str) -> dict[str, Any]:
    """The options of a command of vLLM or SGLang; fails at a name or a value that it does not know."""
    known = next(one for one in SERVERS.values() if line.startswith(one["start"]))
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name, kind in known["options"].items():
        choices = known["choices"].get(name)
        how: dict[str, Any] = {"action": "store_true"} if kind == "bool" else {"type": str if choices else int}
        parser.add_argument(f"--{name}", **how, **({"choices": choices} if choices else {}))
    found = vars(parser.parse_args(shlex.split(line.removeprefix(known["start"]))))
    return {name.replace("_", "-"): value for name, value in found.items() if value not in (None, False)}
