"""Translates command-line words into Hydra overrides, comma lists into study axes, and Hydra's errors into one line."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from ...errors import InvalidInput
from ...files import STDOUT
from ...machine.machine import MACHINE_NUMBERS
from ...machine.presets import PRESETS
from ...text import did_you_mean, split_commas
from .defaults import conf_dir, read_defaults
from .groups import PARAMETER_GROUPS
from .schema import SCHEMAS, parse_size

if TYPE_CHECKING:
    from omegaconf import DictConfig

#: Groups whose value may be written in full instead of by option name, each with an example.
WRITTEN = {
    "pattern": 'pattern="Causal() & Window(4096)"',
    "layout": '"layout=striped(64)"',
    "schedule": '"schedule=ulysses(4, direct)"',
    "kernel": "kernel=aten_cuda:flash",
}
#: For each verb: the key that, set to `-`, prints only JSON on standard output.
JSON_KEYS = {
    "run": "output.report",
    **dict.fromkeys(("plan", "simulate", "verify", "estimate", "advise", "audit"), "output.path"),
}
#: Matches a whole number in human notation, such as 4096, 1_000, 1e9, 64k or 2GiB.
SIZE = re.compile(r"(?<![\w.])\d[\d._]*(?:e\+?\d+)?(?:[kmgt](?:ib)?)?(?![\w.])", re.IGNORECASE)
#: Factors of the units in which numbers of a machine may be written, by the unit of the number.
UNITS = {
    "s": {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0},
    "bytes/s": {
        prefix + unit: factor * size
        for prefix, factor in {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
        for unit, size in {"B/s": 1.0, "b/s": 0.125, "bit/s": 0.125}.items()
    },
    "flop/s": {f"{prefix}FLOP/s": factor for prefix, factor in {"G": 1e9, "T": 1e12, "P": 1e15}.items()},
}
#: Matches OmegaConf's message for a value of the wrong type; and for each type, what to write instead.
WRONG_TYPE = re.compile(r"Value '(.*?)'(?: of type '\w+')? (?:could not be converted to|is not a valid) (\w+)", re.S)
TYPES = {
    "Integer": "a whole number, such as 8 or 64k",
    "Float": "a number, such as 2.5 (in machine.*, also 400Gb/s or 5us)",
    "bool": "true or false",
}


class _OptionParser(argparse.ArgumentParser):
    """An argument parser that raises InvalidInput instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see ringattn --help and ringattn VERB --help for options and keys")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """A namespace with the verb and its overrides as `words`, Hydra's options as `options`, and our options by name.

    Options may appear anywhere. Raises InvalidInput for an unknown option.
    """
    parser = _OptionParser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    for flag in ("--help", "--version", "--json", "--multirun"):
        parser.add_argument(flag, *{"--help": ["-h"], "--multirun": ["-m"]}.get(flag, []), action="store_true")
    parser.add_argument("--compare", nargs=2)
    parser.add_argument("--shell-completion", "-sc")
    of_hydra = parser.add_argument_group()
    for flag in ("--resolve", "--hydra-help"):
        of_hydra.add_argument(flag, action="store_true")
    of_hydra.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    of_hydra.add_argument("--info", "-i", nargs="?", const="all")
    of_hydra.add_argument("--config-dir", "-cd")
    of_hydra.add_argument("--package", "-p")
    if name := next((word for word in arguments if re.match("-cn|--config-name", word)), None):
        raise InvalidInput(
            f"{name}: each verb has one configuration; put your own settings into FOLDER/experiment/NAME.yaml, and add "
            "--config-dir FOLDER experiment=NAME"
        )
    found, others = parser.parse_known_intermixed_args(arguments)
    if others:
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        flag, _, value = others[0].partition("=")
        place = [*arguments].index(others[0]) + 1
        value = value or next((word for word in arguments[place : place + 1] if word[0] != "-"), "...")
        hint = did_you_mean(flag, flags)
        key = flag.lstrip("-").replace("-", "_")
        hint = "the number of ranks is ranks=...; " if flag in ("-n", "-np", "--np", "--nproc-per-node") else hint
        if any(key in read_defaults(verb) for verb in found.words[:1] if verb in SCHEMAS):
            hint = f"write {key}={value}; "
        raise InvalidInput(f"{others[0]}: unknown option; {hint}settings are written key=value, without dashes")
    values = {action.option_strings[0]: getattr(found, action.dest) for action in of_hydra._group_actions}
    found.options = [x if y is True else f"{x}={y}" for x, y in values.items() if y]
    return found


def prepare(verb: str, overrides: Sequence[str]) -> list[str]:
    """Convert the settings given on the command line to Hydra's syntax. Raises InvalidInput.

    Patterns are quoted, and sizes such as 64k are written in digits. `verb` is the command, such as run.
    """
    for word, value in zip(overrides, [*overrides[1:], "..."], strict=False):
        if "=" not in word and not word.startswith("~"):
            value = "..." if "=" in value else value
            hint = f"try {word}={value}" if word in read_defaults(verb) else f"try {verb} --help"
            raise InvalidInput(f"{word}: settings are written key=value; {hint}")
    return [part for override in overrides for part in _prepare_override(verb, override)]


def _prepare_override(verb: str, override: str) -> list[str]:
    """One override in Hydra's syntax, as one or two overrides. Raises InvalidInput."""
    if override.startswith("~") and not override.startswith("~hydra"):
        raise InvalidInput(f"{override}: a key cannot be deleted; leave it out to get its default")
    match = re.fullmatch(r"(\+{0,2})([\w./@-]+)=(.*)", override, re.DOTALL)
    if match is None or match[2].startswith("hydra"):
        return [override]
    plus, key, value = match.groups()
    if value in ("", "''", '""'):
        raise InvalidInput(f"{key}=: the value is empty; give one, or leave {key} out")
    _check_owner(verb, key, value)
    _check_group(verb, key, value)
    if verb == "study" and key.split(".")[0] in ("axes", "fixed"):
        return [f"++{key}={value}"]  # ++ both overrides what a named study has and adds to it
    if not plus and is_written(key, value):
        return [f"{key}=custom", f"{key}.spec={','.join(map(quote, split_commas(value)))}"]
    if not plus and re.search(r"[/.]", value) and (conf_dir() / key / "file.yaml").is_file():
        return [f"{key}=file", f"{key}.path={quote(value)}"]
    if list[str] in _types(SCHEMAS[verb], key) and re.fullmatch(r"[\w./-]+", value) and value != "null":
        value = f"[{value}]"  # a single name becomes a list
    if key == "documents" and value.endswith(")"):  # a distribution, no function of Hydra
        value = quote(value)
    return [f"{key}={in_digits(SCHEMAS[verb], key, value)}"]  # a + would add a key that nothing reads


def _check_owner(verb: str, key: str, value: str) -> None:
    """Raise InvalidInput for a key that only other verbs have."""
    name = key.partition(".")[0]
    owners = [other for other in SCHEMAS if name in read_defaults(other)]
    if owners and verb not in owners:
        *some, last = owners
        of = f"{', '.join(some)} and {last}" if some else last
        hint = did_you_mean(name, read_defaults(verb))
        raise InvalidInput(f"{key}={value}: {hint}{name} is a key of ringattn {of}, not of ringattn {verb}")


def _check_group(verb: str, key: str, value: str) -> None:
    """Raise InvalidInput for a value that Hydra would accept or misread, but that the user cannot have meant."""
    if (names := _fields(SCHEMAS[verb], key)) and not (conf_dir() / key).is_dir():
        hint = f"{key}.path={value}" if "path" in names else f"{key}.{names[0]}=..."
        raise InvalidInput(f"{key}={value}: {key} is a section; set {', '.join(names)} in it, such as {hint}")
    if key in WRITTEN and "(" not in value and re.search(r"[\[&|]", value):
        raise InvalidInput(
            f"{key}={value}: names cannot be combined; write the whole expression, such as {WRITTEN[key]}"
        )
    if re.search(r"\s[\w.]+=", value) and "(" not in value and "{" not in value:
        raise InvalidInput(f"{key}={value}: two settings in one word; give them as two, without quotes around both")


def is_written(group: str, value: str) -> bool:
    """Whether a group's value is an expression or a name from an installed package, not an option of the group."""
    return group in WRITTEN and bool({*"(:"} & {*value} or _installed(group) & {*split_commas(value)})


def _installed(group: str) -> set[str]:
    """Names that installed packages add to a group."""
    return entry_points(group=f"ringattn.{group}s").names


def in_digits(schema: Any, key: str, value: str) -> str:
    """`value` with sizes such as 8k and units such as 400Gb/s written in digits; unchanged if `key` takes text."""
    kinds = _types(schema, key)
    if str in kinds or not {int, float} & {*kinds}:
        return value
    number = MACHINE_NUMBERS.get(key.removeprefix("machine."))
    for unit, factor in UNITS.get(number.unit, {}).items() if number else ():
        written = re.compile(rf"(?<![\w.])([\d._]+) ?{unit}(?!\w)")
        value = written.sub(lambda match, factor=factor: repr(float(match[1]) * factor), value)  # type: ignore[misc]
    return SIZE.sub(
        lambda size: size[0] if int not in kinds and size[0][-1].isdigit() else str(parse_size(size[0], key)), value
    )


def _types(schema: Any, key: str) -> tuple[Any, ...]:
    """The types that a key accepts: (int, NoneType) for `int | None`."""
    for name in key.split("."):
        schema = get_type_hints(schema).get(name) if dataclasses.is_dataclass(schema) else None
    return get_args(schema) if isinstance(schema, UnionType) else (schema,)


def _fields(schema: Any, key: str) -> list[str]:
    """The names of the keys in a section; [] if `key` is no section."""
    (kind, *_) = _types(schema, key)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def quote(value: str) -> str:
    """The value in single quotes, replacing any quotes around it."""
    bare = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return "'" + bare.replace("\\", "\\\\").replace("'", "\\'") + "'"


def as_study(verb: str, words: list[str]) -> list[str]:
    """The words of `ringattn study`, or of another `verb` with -m, as overrides of a study's configuration.

    A setting with several comma-separated values, such as ranks=8,64, becomes an axis, another one is fixed, and keys
    of the study itself and of Hydra are unchanged. A first word without = names a study.
    """
    own, axes, fixed = [] if verb == "study" else [f"of={verb}"], dict[str, str](), dict[str, str]()
    for word in words:
        key, is_setting, value = word.lstrip("+").partition("=")
        section, _, axis = key.partition(".")
        if word == words[0] and re.fullmatch(r"\w+", word):
            own.append(f"study={word}")
        elif not is_setting or key.startswith(("~", "hydra")) or section in read_defaults("study"):
            own.append(word)
            if section == "axes" and axis:
                fixed.setdefault(axis, "null")  # an axis replaces what a named study fixes
        elif len(values := _values(word)) > 1:
            axes[key] = f"[{', '.join(map(quote, values))}]"
            fixed.setdefault(key, "null")
        else:
            fixed[key] = quote(value)
    parts = {"fixed": fixed, "axes": axes}
    texts = {name: ", ".join(f"{key}: {text}" for key, text in part.items()) for name, part in parts.items() if part}
    return [*own, *(f"{name}={{{text}}}" for name, text in texts.items())]


def _values(override: str) -> list[str]:
    """The values of a sweep override (a comma list, or a Hydra function such as range(1,4)); [] if not a sweep."""
    parser: Any = import_module("hydra.core.override_parser.overrides_parser").OverridesParser
    try:
        parsed = parser.create().parse_override(override)
    except import_module("hydra.errors").HydraException:  # a pattern or schedule written in full
        return split_commas(override.partition("=")[2])
    return [str(value) for value in parsed.sweep_string_iterator()] if parsed.is_sweep_override() else []


def check_jobs(verb: str, arguments: Sequence[str]) -> None:
    """Check all jobs of `-m` before the first one runs: options, value types, and that no two share an output file.

    Raises InvalidInput or a Hydra error.
    """
    sweeper: Any = import_module("hydra._internal.core_plugins.basic_sweeper").BasicSweeper
    parser: Any = import_module("hydra.core.override_parser.overrides_parser").OverridesParser
    folders = [
        f"hydra.searchpath=[file://{each.partition('=')[2]}]" for each in arguments if each.startswith("--config-dir=")
    ]
    overrides = [*folders, *(each for each in arguments if not each.startswith("--"))]
    (jobs,) = sweeper.split_arguments(parser.create().parse_overrides(overrides), None)
    for job in jobs:
        composed: Any = compose(verb, job)
        check_parameters(composed)
        outputs = import_module("omegaconf").OmegaConf.to_container(composed).get("output", {})
        for key, path in outputs.items() if verb != "report" else ():  # a suite names its own files
            if path not in (None, STDOUT) and "${hydra:" not in path:
                numbered = Path(path).with_name(f"{Path(path).stem}_${{hydra:job.num}}{Path(path).suffix}")
                raise InvalidInput(
                    f"output.{key}={path} with -m: each job would overwrite the previous output; put the job "
                    f"number into the path, such as 'output.{key}={numbered}'"
                )


def compose(verb: str, overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration of a command with Hydra; interpolations are not resolved.

    Within a Hydra job, the search path of the job applies. `verb` is the command, such as run.
    """
    hydra = import_module("hydra")
    store_schemas(verb)
    if import_module("hydra.core.global_hydra").GlobalHydra.instance().is_initialized():
        composed: DictConfig = hydra.compose(verb, list(overrides))
        return composed
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose(verb, overrides)


@cache
def store_schemas(*verbs: str) -> None:
    """Register with Hydra the settings classes of these commands (default: all), the machine presets and a resolver.

    The resolver `${ringattn.conf:}` is the folder of ringattn's config groups, for `hydra.searchpath`.
    """
    import_module("omegaconf").OmegaConf.register_new_resolver("ringattn.conf", lambda: str(conf_dir()), replace=True)
    store = import_module("hydra.core.config_store").ConfigStore.instance()
    for verb in verbs or SCHEMAS:
        store.store(name=f"{verb}_schema", node=SCHEMAS[verb])
    for name in PRESETS:
        store.store(group="machine", name=name, node={"spec": name})


def check_parameters(composed: DictConfig) -> None:
    """Raise InvalidInput if a config group lacks a parameter that its option uses, or has one that it does not use."""
    to_container = import_module("omegaconf").OmegaConf.to_container
    for group in PARAMETER_GROUPS:
        values = to_container(composed[group]) if group in composed else {"spec": ""}
        spec = values.pop("spec")
        for name, value in values.items():
            if value is None and f"${{.{name}}}" in spec:
                raise InvalidInput(f"{group}.{name}=... is missing; {spec} needs it")
            listed = name == "weights" and spec.startswith("[")  # weights of a list of patterns
            if value is not None and f"${{.{name}}}" not in spec and not listed:
                raise InvalidInput(f"{group}.{name}={value} has no meaning with {group}={spec}; leave it out")


def explain(verb: str, error: Any) -> InvalidInput:
    """A Hydra or OmegaConf error as a one-line InvalidInput, with a hint for a misspelled key or option."""
    detail = error  # or the first of its causes that names a key
    while detail is not None and not getattr(detail, "full_key", None):
        detail = detail.__cause__ or detail.__context__
    lines = takewhile(str.strip, str(error).splitlines())
    text = " ".join(line for line in lines if not line.startswith((" ", "See ", "To append")))
    wrong, names = None, []
    if detail is not None:
        words = str(detail).splitlines()[0]
        if (match := WRONG_TYPE.match(words)) and match[2] in TYPES:
            return InvalidInput(f"{detail.full_key}={match[1]}: expected {TYPES[match[2]]}")
        text = text if words in text else f"{text.rstrip('.:')}: {words}"
        text = text if detail.full_key in text else f"{detail.full_key}: {text}"
    if getattr(error, "override", None) and str(error.override) not in text:
        text = f"{error.override}: {text}"
    if getattr(error, "options", None):
        group, _, wrong = str(error.missing_cfg_file).rpartition("/")
        text = f"{group}={wrong}: no such option"
        names = sorted(({*error.options} | _installed(group)) - {"custom"})
    elif "not in" in text and dataclasses.is_dataclass(getattr(detail, "object_type", None)):
        wrong, names = detail.key, [field.name for field in dataclasses.fields(detail.object_type)]
        text = f"{detail.full_key}: no such key"
        inside = [f"{group}.{wrong}" for group in PARAMETER_GROUPS if wrong in _fields(SCHEMAS[verb], group)]
        if wrong == detail.full_key and inside:
            return InvalidInput(f"{text}; write {' or '.join(inside)}; ringattn {verb} --help shows groups and keys")
    hint = f"{did_you_mean(wrong, names)}expected one of {', '.join(names)}; " if names else ""
    return InvalidInput(f"{text}; {hint}ringattn {verb} --help shows groups and keys")
