"""What a user names: the function to audit, and a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ...errors import InvalidInput
from ...text import did_you_mean, first_line
from .kit import ERRORS, Case, accepts, first_words, place_rows
from .models import Tested

#: Targets by name: the modules beside this one.
ADAPTERS = tuple(sorted(path.stem for path in (Path(__file__).parent / "adapters").glob("[a-z]*.py")))
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


def load_target(name: str, model: str | None = None) -> Callable[..., Any]:
    """The function to audit: "module:function", or the name of an adapter. Raises InvalidInput.

    With `model`, the adapter's function for models, else its function for shards.
    """
    module, named, function = name.partition(":")
    if not named:
        if name not in ADAPTERS:
            hint = did_you_mean(name, ADAPTERS)
            raise InvalidInput(f"target={name}: {hint}expected module:function, or one of {', '.join(ADAPTERS)}")
        module, function = f"ringattn.lab.audit.adapters.{name}", "attend" if model is None else "run_model"
    target = find_named(f"target={name}", module, function)
    if not callable(target):
        what = f"{module} has no function {function}" if named else f"{name} has no adapter for models; try ringattn"
        raise InvalidInput(f"target={name}: {what}")
    if "group" not in accepts(target):
        raise InvalidInput(f"target={name}: the function has no argument group; see docs/audit.md for its arguments")
    return target


def check_target(name: str, target: Callable[..., Any], cases: Sequence[Case], ranks: int) -> None:
    """Raise InvalidInput if the `layout` or `dtype` of the audited function is unknown.

    Also if the layout cannot shard the sequences of these cases.
    """
    for key, default, known in (("layout", LAYOUTS[0], LAYOUTS), ("dtype", DTYPES[0], DTYPES)):
        value = getattr(target, key, default)
        if value not in known and not (key == "layout" and callable(value)):
            hint = did_you_mean(str(value), known)
            raise InvalidInput(f"target={name}: {key}={value!r}: {hint}expected one of {', '.join(known)}")
    sizes = {(case.tokens * len(x) // ranks, len(x)) for case in cases for x in case.groups or (range(ranks),)}
    for tokens, many in sizes:
        try:
            rows = torch.cat([place_rows(target, tokens, rank, many) for rank in range(many)]).tolist()
        except ERRORS as error:
            raise InvalidInput(f"target={name}: layout({tokens}, rank, {many}): {first_line(error)}") from None
        if sorted(rows) != [*range(tokens)]:
            raise InvalidInput(f"target={name}: layout({tokens}, rank, {many}) must give each position to one rank")


#: Sizes of a class that is given by its name.
SIZES: dict[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}


def load_model(name: str) -> tuple[Callable[[], Any], str, str]:
    """Find a model by name; returns (function that makes it, import statement, expression).

    The import and the expression make the model in a script. `name` is module:function, a class of transformers (made
    with tiny sizes), or a folder with config.json. Raises InvalidInput.
    """
    module, named, function = name.partition(":")
    find: Any = partial(find_named, f"model={name}", module if named else "transformers")
    imported = f"from {module} import {function} as make" if named else "import transformers as hf"
    if not named and Path(name).exists():
        model, config = find("AutoModelForCausalLM"), find("AutoConfig")
        spelled = f"hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained({name!r}))"
        return lambda: model.from_config(config.from_pretrained(name)), imported, spelled
    kind = find(function if named else name)
    if not callable(kind) or not (named or hasattr(kind, "config_class")):
        hint = did_you_mean(function or name, dir(import_module(module if named else "transformers")))
        words = "expected module:function, a class of models in transformers, or a folder with config.json"
        raise InvalidInput(f"model={name}: {hint}{words}")
    if named:
        return kind, imported, "make()"
    return lambda: kind(kind.config_class(**SIZES)), imported, f"hf.{name}(hf.{name}.config_class(**{SIZES}))"


def check_model(name: str, case: Case) -> None:
    """Raise InvalidInput for a model that one process cannot make, or run on such a case."""
    try:
        Tested(load_model(name)[0]).compute(case, torch.float32)
    except InvalidInput:
        raise
    except ERRORS as error:
        raise InvalidInput(f"model={name}: one process cannot run it: {first_words(error)}") from None


def read_known(path: str | None) -> set[str]:
    """The features in a file of known failures: one a line, # begins a comment. Raises InvalidInput."""
    if path is None:
        return set()
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise InvalidInput(f"known={path}: {error.strerror}") from None
    return {line.partition("#")[0].strip() for line in lines} - {""}
