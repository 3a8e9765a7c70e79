"""What a user names: the function to audit, and a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ...errors import InvalidInput
from ...files import read_text
from ...text import did_you_mean, first_line
from .kit import ERRORS, Case, accepts, first_words, place_rows
from .models import Tested

#: What the attributes `layout` and `dtype` of a target may be; a layout may also be a function.
LAYOUTS, DTYPES = ("contiguous", "zigzag", "striped"), ("float32", "float64", "bfloat16", "float16")


def find_named(key: str, module: str, name: str) -> Any:
    """Import `module` and return its attribute `name`; None if it has no such attribute.

    Modules in the current folder are found, too. Raises InvalidInput, with a message that begins with `key`, if the
    module cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, SyntaxError) as error:
        lacks = getattr(error, "name", None) or ""
        why, advice = first_line(error), "install it, or run where it can be imported"
        if isinstance(error, ModuleNotFoundError) and lacks and not f"{module}.".startswith(f"{lacks}."):
            why, advice = f"{module} can be found, but needs {lacks}, which cannot", f"install {lacks}"
        raise InvalidInput(f"{key}: {why}; {advice}") from None


def spell_target(name: str, model: str | None = None) -> tuple[str, str]:
    """(module, function) of "module:function", or of "ringattn", this library's function for shards or for models."""
    if name == "ringattn":
        return "ringattn.lab.audit.ours", "attend" if model is None else "run_model"
    module, _, function = name.partition(":")
    return module, function


def load_target(name: str, model: str | None = None) -> Callable[..., Any]:
    """The function to audit, see `spell_target`. Raises InvalidInput."""
    module, function = spell_target(name, model)
    if not module or not function:
        raise InvalidInput(f"target={name}: {did_you_mean(name, ['ringattn'])}expected module:function, or ringattn")
    target = find_named(f"target={name}", module, function)
    if not callable(target):
        raise InvalidInput(f"target={name}: {module} has no function {function}")
    if "group" not in accepts(target):
        raise InvalidInput(f"target={name}: the function has no argument group; see docs/audit.md for its arguments")
    return target


#: Sizes of a class that is given by its name.
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def load_model(name: str) -> tuple[Callable[[], Any], str, str]:
    """Find a model by name; returns (function that makes it, import statement, expression).

    The import and the expression make the model in a script. `name` is module:function, or a class of transformers,
    which is made with tiny sizes. Raises InvalidInput.
    """
    module, named, function = name.partition(":")
    module, function = (module, function) if named else ("transformers", name)
    kind = find_named(f"model={name}", module, function)
    if not callable(kind) or not (named or hasattr(kind, "config_class")):
        hint = did_you_mean(function, dir(import_module(module)))
        raise InvalidInput(f"model={name}: {hint}expected module:function, or a class of models in transformers")
    if named:
        return kind, f"from {module} import {function} as make", "make()"
    made = f"hf.{name}(hf.{name}.config_class(**{SIZES}))"
    return lambda: kind(kind.config_class(**SIZES)), "import transformers as hf", made


def check(name: str, ranks: int, cases: Sequence[Case], model: str | None = None) -> list[Case]:
    """The cases as the audited function takes them. Raises InvalidInput for what no rank can audit.

    That is an unknown `layout` or `dtype` of the function, a layout that does not shard the sequences of these cases,
    and a model that one process cannot make or run.
    """
    target = load_target(name, model)
    for key, known in (("layout", LAYOUTS), ("dtype", DTYPES)):
        value = getattr(target, key, known[0])
        if value not in known and not (key == "layout" and callable(value)):
            hint = did_you_mean(str(value), known)
            raise InvalidInput(f"target={name}: {key}={value!r}: {hint}expected one of {', '.join(known)}")
    for tokens, many in {(part.tokens, len(members)) for case in cases for members, _, part in case.split(ranks)}:
        try:
            rows = torch.cat([place_rows(target, tokens, rank, many) for rank in range(many)]).tolist()
        except ERRORS as error:
            raise InvalidInput(f"target={name}: layout({tokens}, rank, {many}): {first_line(error)}") from None
        if sorted(rows) != [*range(tokens)]:
            raise InvalidInput(f"target={name}: layout({tokens}, rank, {many}) must give each position to one rank")
    if model is not None:
        make = load_model(model)[0]
        try:
            with torch.no_grad():  # a process that has run a backward can start no ranks beside a GPU
                Tested(make).forward(cases[0], torch.float32)
        except ERRORS as error:
            raise InvalidInput(f"model={model}: one process cannot run it: {first_words(error)}") from None
    dtype, takes, tried = getattr(target, "dtype", DTYPES[0]), accepts(target), list[Case]()
    more = {name: x for name, x in (("decay", 0.9), ("taps", (0.5, -1.0, 2.0, 0.25))) if takes.get(name)}
    for case in cases:
        mask = {name: x for name, x in case.mask.items() if name in takes or "offered" not in case.ways}
        mask |= more if "causal" in mask else {}
        tried.append(replace(case, mask=mask, dtype=dtype if case.dtype == DTYPES[0] else case.dtype))
    return tried


def read_known(path: str | None) -> set[str]:
    """The features in a file of known failures: one a line, # begins a comment. Raises InvalidInput."""
    lines = [] if path is None else read_text(Path(path), "known").splitlines()
    return {line.partition("#")[0].strip() for line in lines} - {""}
