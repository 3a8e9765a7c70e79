"""Overrides of the command line: rewritten as Hydra takes them, and refused where they cannot be honoured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import reduce
from importlib import import_module
from operator import or_
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from ...errors import InvalidInput
from ...pattern import PATTERNS
from ...text import did_you_mean
from ...transport.launcher import Launch
from .checks import CUSTOM, TRANSPORTS, check_overrides
from .folders import CONFIG_DIR_OPTIONS, ConfigFolders, config_folders, is_for_verb
from .groups import Size
from .schema import SCHEMAS, key_names, parse_size

#: Groups whose value may also be written in full, each with an example.
WRITTEN = {
    "pattern": 'pattern="Causal() & Window(4096)"',
    "layout": '"layout=striped(64)"',
    "schedule": '"schedule=ulysses(4, direct)"',
    "kernel": "kernel=aten_cuda:flash",
}
#: Groups that have no option unless somebody names one.
OPTIONAL_GROUPS = ("experiment", "model", "study")
#: What an error says that a key takes, by the type of the key.
TYPE_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Size: "a whole number such as 4096 or 64k",
    list[int]: "a list of whole numbers",
    list[str]: "a list of names",
    list[Size]: "a list",
    list[Any]: "a list",
    dict[str, Any]: "values by key, in braces",
}
#: By verb: the key whose value `-` prints JSON, and nothing else, on standard output.
JSON_KEYS = {"run": "output.report", "plan": "output.path", "simulate": "output.path", "advise": "output.path"}
#: What a path is the path of, with an example, by verb and key.
PATHS = {
    ("run", "output.path"): ("a .safetensors file", "out.safetensors"),
    ("run", "output.report"): ("a JSON file", "report.json"),
    ("run", "input.path"): ("a text, or a .safetensors or .npz file", "qkv.safetensors"),
    ("plan", "output.path"): ("a JSON file", "plan.json"),
    ("advise", "output.path"): ("a JSON file", "advice.json"),
    ("advise", "output.page"): ("an HTML file", "advice.html"),
    ("simulate", "output.path"): ("a JSON file, or the folder of a study", "simulated.json"),
    **{(verb, "output.path"): ("a folder", "outputs/bench") for verb in ("bench", "report")},
    ("report", "results"): ("the .jsonl file of a suite", "outputs/bench/standard_1.jsonl"),
    ("calibrate", "output.path"): ("a machine file", "machine.yaml"),
    **{(verb, "model.path"): ("a Hugging Face config", "config.json") for verb in ("simulate", "advise")},
    **{
        (verb, "machine.path"): ("a machine file", "machine.yaml")
        for verb in ("run", "plan", "simulate", "advise", "calibrate")
    },
}
#: Options of Hydra that the next argument belongs to.
VALUED_OPTIONS = (
    *("-c", "--cfg", "-p", "--package", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name"),
    *CONFIG_DIR_OPTIONS,
)
#: All options, of ringattn and of Hydra, but --experimental-rerun, which unpickles a file.
OPTIONS = (
    *("--json", "-h", "--help", "--hydra-help", "--version", "--resolve", "-r", "--run", "-m", "--multirun"),
    *("-i", "--info"),
    *VALUED_OPTIONS,
)


def prepare(verb: str, arguments: Sequence[str], launch: Launch | None = None) -> list[str]:
    """The arguments of a verb as Hydra takes them: patterns quoted, sizes in digits, options before overrides.

    Raises InvalidInput, with a hint, for unknown options, keys and values, and for overrides that cannot be honoured
    beside each other, beside `launch` (None: the verb has no ranks) or in a sweep.
    """
    folders = config_folders(arguments)
    prepared = [
        part for argument in _expand_options(verb, arguments) for part in _prepare_argument(verb, argument, folders)
    ]
    given = _values_by_key(arguments)
    if "ranks" in given:
        given["ranks"] = _values_by_key(prepared)["ranks"]  # in digits, as a launcher counts them
    check_overrides(verb, given, folders, launch=launch, swept=is_sweep(arguments))
    return prepared


def _values_by_key(arguments: Sequence[str]) -> dict[str, str]:
    return dict(argument.lstrip("+~").partition("=")[::2] for argument in arguments if "=" in argument)


def _expand_options(verb: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with --json replaced by its override. Raises InvalidInput for unknown options."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("-") and name not in OPTIONS:
            long_options = [option for option in OPTIONS if option.startswith("--")]
            raise InvalidInput(
                f"{argument}: unknown option; {did_you_mean(name, long_options)}ringattn {verb} --help shows options "
                "and keys; values of keys are written key=value, without dashes"
            )
    if "--json" in arguments and verb not in JSON_KEYS:
        raise InvalidInput(f"--json: ringattn {verb} prints no JSON; it is for {', '.join(JSON_KEYS)}")
    expanded = [f"{JSON_KEYS[verb]}=-" if argument == "--json" else argument for argument in arguments]
    return _put_options_first(expanded)


def _put_options_first(arguments: Sequence[str]) -> list[str]:
    """The arguments with Hydra's options, and their values, before all overrides: Hydra takes no options in between."""
    options: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        (options if argument.startswith("-") or before in VALUED_OPTIONS else overrides).append(argument)
    return [*options, *overrides]


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for one job per value."""
    return bool({"-m", "--multirun"} & set(arguments))


def _prepare_argument(verb: str, argument: str, folders: ConfigFolders) -> list[str]:
    """An argument as Hydra takes it: one override, several, or none. Raises InvalidInput."""
    match = re.fullmatch(r"([~+]{0,2})([\w./@-]+)=(.*)", argument, re.DOTALL)
    if match is None or match[2].startswith(("hydra", "-")):
        return [argument]
    prefix, key, value = match.groups()
    schema = SCHEMAS[verb]
    check_key(verb, schema, key.replace("/", "."))
    if (verb, key) in PATHS and value in ("", "''", '""'):
        kind, example = PATHS[verb, key]
        raise InvalidInput(f"{key}=: the path is empty; give {kind}, such as {key}={example}, or leave {key} out")
    if key.startswith("study.axes.") and "~" not in prefix:
        return [f"++{key}={value}"]  # Hydra's ++ takes axes that the study has, and new axes
    if not prefix and folders.is_group(key) and key in key_names(schema):
        return _prepare_group(verb, key, value, folders)
    return [f"{prefix}{key}={_prepare_value(schema, key, value)}"]


def _prepare_value(schema: type, key: str, value: str) -> str:
    """The value of a key with its sizes in digits; sweeps such as 2,8k too."""
    kind = _without_none(_type_hint(schema, key))
    if kind == list[str] and re.fullmatch(r"[\w./-]+", value) and value != "null":
        return f"[{value}]"  # one name is a list of one
    if kind is int and not re.search(r"[(\[{$'\"]", value):
        return ",".join(_size_in_digits(key, part) for part in value.split(","))
    if kind is float and re.fullmatch(r"([\d.]+[kmgt]?,?)+", value, re.IGNORECASE):
        return ",".join(str(parse_size(part, key)) if part[-1:].isalpha() else part for part in value.split(","))
    return value


def _size_in_digits(key: str, text: str) -> str:
    """A size in digits. null, and numbers that fit 64 bits, are returned as they are written."""
    return text if text == "null" or re.fullmatch(r"[+-]?\d{1,18}", text) else str(parse_size(text, key))


def _prepare_group(verb: str, group: str, value: str, folders: ConfigFolders) -> list[str]:
    """The overrides that choose an option of a group, or that write its value in full. Raises InvalidInput."""
    if group in WRITTEN and ("(" in value or ":" in value):
        return [f"{group}={CUSTOM}", f"{group}.spec={value!r}"]
    if (verb, group) == ("advise", "model"):  # of a model's config file, advise takes the name alone
        return [f"model.spec={value!r}"]
    if value == "null" and group in OPTIONAL_GROUPS:
        return []  # Hydra takes no null, and without an override there is no option
    if re.search(r"[/.]", value) and "file" in folders.options(group):
        return [f"{group}=file", f"{group}.path={value!r}"]
    for option in value.split(","):
        if option not in folders.options(group):
            named = offered_options(verb, group, folders)
            hint = did_you_mean(option, [*named, *_written_names(group)])
            raise InvalidInput(f"{group}={option}: unknown option; {hint}expected one of {', '.join(named)}")
    return [f"{group}={value}"]


def _written_names(group: str) -> list[str]:
    """Names of a group that no config file has: calls of patterns, and the choices of kernels."""
    if group == "pattern":
        return [f"{name}()" for name in PATTERNS]
    # Kernels need torch, which a mistake in another group does not wait for.
    return [*import_module("...kernels", __package__).available()] if group == "kernel" else []


def offered_options(verb: str, group: str, folders: ConfigFolders) -> list[str]:
    """The options of a group that a user of a verb can name: for `help`, completion and errors. Raises InvalidInput."""
    return [
        name
        for name in folders.options(group)
        if name != CUSTOM
        and is_for_verb(verb, folders.text(group, name), folders.settings(group, name))
        and (group != "transport" or name in TRANSPORTS.get(verb, ()))
    ]


def is_offered(verb: str, word: str, folders: ConfigFolders) -> bool:
    """Whether a verb takes a word that Hydra's completion offers, such as `ranks=`, `output.` or `layout=zigzag`."""
    key, _, value = word.partition("=")
    group = key.split(".")[0]
    if group.startswith("hydra"):
        return True
    if group not in key_names(SCHEMAS[verb]):
        return False
    return not (value and folders.is_group(key)) or value in offered_options(verb, key, folders)


def check_key(verb: str, schema: type, key: str) -> None:
    """Raise InvalidInput, with a hint, where a verb has no such key."""
    first, _, rest = key.partition(".")
    if first not in key_names(schema):
        names = key_names(schema)
        raise InvalidInput(
            f"unknown key {first!r}; {did_you_mean(first, names)}keys of {verb}: {', '.join(names)} "
            f"(ringattn {verb} --cfg job shows their values)"
        )
    section, kind = first, _type_hint(schema, first)
    while rest and dataclasses.is_dataclass(kind):
        part, _, rest = rest.partition(".")
        names = [one.name for one in dataclasses.fields(kind)]
        if part not in names:
            raise InvalidInput(f"unknown key {key!r}; {did_you_mean(part, names)}keys of {section}: {', '.join(names)}")
        section, kind = f"{section}.{part}", get_type_hints(kind)[part]


def explain_refusal(verb: str, error: Exception) -> InvalidInput:
    """An error of Hydra or OmegaConf about the overrides of a verb, in the words of ringattn where it has words."""
    merged = re.match(r"Error merging override [+~]*([\w./@-]+)=(.*)", str(error), re.DOTALL)
    if merged is not None:
        key, value = merged.groups()
        hint = _type_hint(SCHEMAS[verb], key)
        kind = _without_none(hint)
        words = TYPE_WORDS.get(kind, "keys of the group, such as those that --cfg job shows")
        null = ", or null" if kind != hint else ""
        return InvalidInput(f"{key}={value}: expected {words}{null}{_example(SCHEMAS[verb], key)}")
    override = getattr(error, "override", None)  # Hydra could not parse it
    if override is not None:
        problems = [line for line in str(error).splitlines() if not line.startswith(("See ", "Error parsing"))]
        return InvalidInput(
            f"{override}: cannot be read as key=value ({'; '.join(problems)}); close brackets and quotes, and quote "
            "for the shell what has blanks or brackets, such as 'slow={5: 1.3}'"
        )
    first = str(error).splitlines()[0]
    cause = error.__cause__ or error.__context__
    while first.endswith("composing config:") and cause is not None:
        first = f"{first.partition(':')[0]}: {str(cause).splitlines()[0]}"
        cause = cause.__cause__
    return InvalidInput(
        f"{first}; ringattn {verb} --help shows groups and keys, --cfg job --resolve the configuration that would run"
    )


def _example(schema: type, key: str) -> str:
    """The words "; try key=value" with the default of a key; nothing for a group, or a key within a plain value."""
    default: Any = schema()
    for part in key.split("."):
        default = getattr(default, part, dataclasses.MISSING)
    if default is dataclasses.MISSING or dataclasses.is_dataclass(default):
        return ""
    if isinstance(default, list):
        return f"; try '{key}=[{','.join(map(str, default))}]'"
    words = {None: "null", True: "true", False: "false"}
    return f"; try {key}={words[default] if isinstance(default, bool | None) else default}"


def _type_hint(schema: Any, key: str) -> Any:
    """The type of a key; None for a key within a plain value, such as study.axes.ranks."""
    first, _, rest = key.partition(".")
    hint = get_type_hints(schema).get(first) if dataclasses.is_dataclass(schema) else None
    return _type_hint(hint, rest) if rest else hint


def _without_none(hint: Any) -> Any:
    """A type without its None: int of `int | None`."""
    if not isinstance(hint, UnionType):
        return hint
    return reduce(or_, [kind for kind in get_args(hint) if kind is not NoneType])
