"""Answers for a page: what `ringattn plan --json` and `ringattn advise --json` print, without Hydra and torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_type_hints

from msgspec import ValidationError, convert

from ...cli.config.defaults import conf_dir, load_config
from ...cli.config.groups import PARAMETER_GROUPS
from ...cli.config.overrides import TYPES, in_digits, is_written
from ...cli.config.schema import PlanConfig
from ...cli.counts import count_plans, join_records
from ...errors import InvalidInput
from ...files import STDOUT
from ...text import did_you_mean, shorten
from ..advise.advice import advise, record
from ..advise.question import make_question
from ..models.config import MODELS
from ..verbs.settings import AdviseConfig

#: The settings that a page may give, by verb: none of them names a file.
SETTINGS = {
    "plan": (
        *("pattern", "tokens", "ranks", "layout", "schedule", "machine", "heads", "kv_heads", "head_dim", "dtype"),
        *("batch", "rank", "steps"),
    ),
    "advise": ("model", "tokens", "gpus", "machine", "batch", "by"),
}


def answer(settings: Mapping[str, Any], verb: str = "plan") -> dict[str, Any]:
    """What `ringattn VERB key=value ... --json` prints for these settings. Raises the errors of the verb."""
    config = _read(verb, settings)
    config.output.path = STDOUT
    if isinstance(config, AdviseConfig):
        config.check()
        if config.model not in MODELS:  # the command would also read a file
            raise InvalidInput(
                f"model={config.model}: {did_you_mean(config.model, MODELS)}expected one of "
                f"{', '.join(MODELS)}; ringattn advise model=config.json reads any other"
            )
        return record(advise(make_question(config), config.by))
    return join_records([counted for _, counted in count_plans(config)])


def _read(verb: str, settings: Mapping[str, Any]) -> PlanConfig | AdviseConfig:
    """The configuration of a verb, with sizes and the options of groups read as on the command line."""
    if verb not in SETTINGS:
        raise InvalidInput(f"unknown verb {shorten(verb, 40)!r}; expected one of {', '.join(SETTINGS)}")
    schema: type[Any] = AdviseConfig if verb == "advise" else PlanConfig
    kinds, values = get_type_hints(schema), dict[str, Any]()
    for key, value in settings.items():
        if key not in SETTINGS[verb]:
            hint = did_you_mean(key, SETTINGS[verb])
            raise InvalidInput(f"{key}: not a setting of this page; {hint}expected {', '.join(SETTINGS[verb])}")
        text = str(value).strip()
        if not text:
            raise InvalidInput(f"{key}=: the value is empty; give one, or leave {key} out")
        if key in (*PARAMETER_GROUPS, "machine"):
            values[key] = convert({"spec": _spec(key, text)}, kinds[key])
        else:
            try:
                values[key] = convert(in_digits(schema, key, text), kinds[key], strict=False)
            except ValidationError:
                wanted = TYPES["bool" if kinds[key] is bool else "Integer"]
                raise InvalidInput(f"{key}={shorten(text, 40)}: expected {wanted}") from None
    made: PlanConfig | AdviseConfig = schema(**values)
    return made


def _spec(group: str, text: str) -> str:
    """The text that the library parses: what is written, or an option of the group with its own parameters."""
    path = conf_dir() / group / f"{text}.yaml"
    named = group in ("layout", "schedule") and re.fullmatch(r"\w+", text) and not is_written(group, text)
    if not named or not path.is_file():
        return text
    values = load_config(path)
    return re.sub(r"\$\{\.(\w+)\}", lambda named: str(values[named[1]]), str(values["spec"]))
