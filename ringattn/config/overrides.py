"""Overrides of the command line: as Hydra wants them, and refused where they could not be honoured."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInput, did_you_mean
from ..files import STDOUT
from ..transport.launcher import Launch
from .checks import check_mode, of_experiment
from .folders import ConfigFolders, config_folders
from .schema import SCHEMAS, conf_dir, parse_size

#: Groups whose value may also be written out, each with an example.
WRITTEN = {
    "pattern": 'pattern="Causal() & Window(4096)"',
    "layout": '"layout=striped(64)"',
    "schedule": '"schedule=ulysses(4, direct)"',
    "kernel": "kernel=aten_cuda:flash",
}
#: Groups whose options take parameters.
PARAMETERS = ("pattern", "layout", "schedule", "input")
#: Groups that a verb does without, unless they are given.
OPTIONAL = ("experiment", "study")
#: What `stream` leaves without a meaning: one process computes chunk after chunk, in order, and sends nothing.
RINGS = ("transport", "ranks", "layout", "schedule", "machine", "comm_dtype", "rotate", "timeout", "progress")
#: What a file says itself.
FILES = ("tokens", "heads", "kv_heads", "head_dim", "batch", "dtype")
#: What a value of a key is, by the annotation of the key.
KINDS = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "list[int]": "a list of whole numbers",
    "list[str]": "a list of names", "list[Any]": "a list", "dict[str, Any]": "values by key, in braces",
}  # fmt: skip
#: By verb: the key whose value `-` prints JSON, and nothing else, on standard output.
JSON = {"run": "output.report", "plan": "output.path", "simulate": "output.path"}
#: Options: those of ringattn, and of Hydra.
OPTIONS = (
    "--json", "-h", "--help", "--hydra-help", "--version", "-c", "--cfg", "--resolve", "-p", "--package", "-r", "--run", "-m",
    "--multirun", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir",
    "--experimental-rerun", "-i", "--info",
)  # fmt: skip
#: Options that the next argument belongs to.
VALUED = ("-c", "--cfg", "-p", "--package", "-sc", "--shell-completion", "-cp", "--config-path", "-cn", "--config-name", "-cd",
          "--config-dir", "--experimental-rerun")  # fmt: skip
#: Transports whose ranks a launcher may have started.
LAUNCHED = ("gloo", "nccl", "mpi")


def prepare(verb: str, overrides: Sequence[str], launch: Launch | None = None) -> list[str]:
    """The overrides as Hydra wants them: written patterns quoted, unknown keys and options refused with a hint.

    Also refused is what could not be honoured, be it beside other overrides, beside `launch`, or in a sweep.
    """
    folders = config_folders(overrides)
    prepared = [part for override in _as_overrides(verb, overrides) for part in _prepare(verb, override, folders)]
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides if "=" in override)
    if "experiment" in given:
        _check_experiment(verb, given["experiment"], folders)
    _check_used(verb, given, folders)
    _check_needed(verb, given, folders)
    if verb == "run":
        _check_stream(given)
        _check_file(given)
    if verb == "simulate":
        check_mode(given, folders)
        if "tokens" in given and given.get("shard", "null") != "null":
            raise InvalidInput("shard= sets the tokens (shard x ranks); give shard or tokens, not both")
    if launch is not None and launch.kind != "none":
        _check_ranks(given, dict(part.partition("=")[::2] for part in prepared).get("ranks"), launch, folders)
    if swept(overrides):
        _check_sweep(verb, given)
    return prepared


def _as_overrides(verb: str, arguments: Sequence[str]) -> list[str]:
    """The arguments with --json as the override that it stands for. Options that there are not are refused."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("-") and name not in OPTIONS:
            shown = [option for option in OPTIONS if option.startswith("--")]
            raise InvalidInput(
                f"{argument}: unknown option; {did_you_mean(name, shown)}ringattn {verb} --help shows options and keys; values "
                "of keys are written key=value, without dashes"
            )
    if "--json" in arguments and verb not in JSON:
        raise InvalidInput(f"--json: ringattn {verb} prints no JSON; it is for {', '.join(JSON)}")
    return _options_first([f"{JSON[verb]}=-" if argument == "--json" else argument for argument in arguments])


def _options_first(arguments: list[str]) -> list[str]:
    """The same arguments, Hydra's options with their values before all overrides: Hydra takes them nowhere between."""
    options: list[str] = []
    overrides: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        (options if argument.startswith("-") or before in VALUED else overrides).append(argument)
    return [*options, *overrides]


def swept(overrides: Sequence[str]) -> bool:
    """Whether the command line asks for one job per value."""
    return bool({"-m", "--multirun"} & set(overrides))


def refused(verb: str, error: Exception) -> InvalidInput:
    """What Hydra, or OmegaConf under it, finds wrong with the overrides of a verb, in our words where they are known."""
    first = str(error).splitlines()[0]
    merged = re.match(r"Error merging override [+~]*([\w./@-]+)=(.*)", str(error), re.DOTALL)
    if merged is not None:
        key, value = merged.groups()
        kind, _, rest = _kind(SCHEMAS[verb], key).partition(" | ")
        wanted = KINDS.get(kind, "keys of it, such as those that --cfg job shows") + (", or null" if rest else "")
        return InvalidInput(f"{key}={value}: expected {wanted}{_example(SCHEMAS[verb], key)}")
    override = getattr(error, "override", None)  # of what could not be parsed
    if override is not None:
        said = [line for line in str(error).splitlines() if not line.startswith(("See ", "Error parsing"))]
        return InvalidInput(
            f"{override}: cannot be read as key=value ({'; '.join(said)}); close brackets and quotes, and quote for the shell "
            "what has blanks or brackets, such as 'slow={5: 1.3}'"
        )
    cause = error.__cause__ or error.__context__
    while first.endswith("composing config:") and cause is not None:
        first = f"{first.partition(':')[0]}: {str(cause).splitlines()[0]}"
        cause = cause.__cause__
    return InvalidInput(f"{first}; ringattn {verb} --help shows groups and keys, --cfg job --resolve what would run")


def _example(schema: Any, key: str) -> str:
    """The words "; try key=value" with the default of a key, or none."""
    field = _field(schema, key)
    if field is None or dataclasses.is_dataclass(field.default_factory):
        return ""
    found = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = {None: "null", True: "true", False: "false"}.get(found) if isinstance(found, bool | None) else str(found)
    if isinstance(found, list):
        text = f"'{key}=[{','.join(map(str, found))}]'"
    return f"; try {text if isinstance(found, list) else f'{key}={text}'}"


def without_meaning(option: str, stream: str) -> InvalidInput:
    """The error of an option of rings that is given beside `stream`."""
    return InvalidInput(
        f"{option} has no meaning with stream={stream}: one process computes chunk after chunk and sends nothing to "
        "others; leave it out (chunk= says how many rows a chunk has)"
    )


def _check_used(verb: str, given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse parameters of a pattern, a layout, a schedule or an input that the chosen option does not take."""
    for key, value in given.items():
        group, _, name = key.partition(".")
        if group not in PARAMETERS or name in ("", "spec") or group not in _names(SCHEMAS[verb]):
            continue
        if group not in given and {"experiment", "study"} & set(given):
            continue  # the experiment or the study chooses
        text = given.get(group) or _default(verb, group)
        chosen = ["custom"] if "(" in text or ":" in text else text.split(",")
        takers = [option for option in folders.options(group) if _takes(folders.text(group, option), name)]
        if not set(chosen) & set(takers):
            raise InvalidInput(
                f"{key}={value} has no meaning with {group}={text}; {group}s that take {name}: {', '.join(takers)}"
            )


def _check_needed(verb: str, given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse an option whose config has a value that only the user can give, and has not given."""
    for group, value in given.items():
        if group not in PARAMETERS or group not in _names(SCHEMAS[verb]):
            continue
        for option in value.split(","):
            if option == "custom":
                continue
            text = folders.text(group, option)
            for name in re.findall(r"^(\w+): *\?\?\?", text, re.MULTILINE):
                if f"{group}.{name}" not in given and "experiment" not in given:
                    example = re.search(rf"'{group}\.{name}=.*?'", text)
                    raise InvalidInput(
                        f"{group}={option} needs {group}.{name}=...{f', such as {example[0]}' if example else ''}"
                    )


def _default(verb: str, group: str) -> str:
    """The option of a group that a verb starts from."""
    text = (conf_dir() / f"{verb}.yaml").read_text(encoding="utf-8")
    found = re.search(rf"^ *- {group}: *(\S+)", text, re.MULTILINE)
    assert found, f"conf/{verb}.yaml names no default of {group}"
    return found[1]


def _takes(text: str, name: str) -> bool:
    """Whether an option's YAML has a parameter."""
    return re.search(rf"^{name}:", text, re.MULTILINE) is not None


def _check_experiment(verb: str, names: str, folders: ConfigFolders) -> None:
    """Refuse an experiment that sets what the verb does not have."""
    for name in names.split(","):
        text = folders.text("experiment", name)  # of null, nothing
        if not takes(verb, text):
            takers = [one for one in SCHEMAS if takes(one, text)]
            unknown = ", ".join(sorted(_set_by(text) - {*_names(SCHEMAS[verb])}))
            raise InvalidInput(
                f"experiment={name} sets {unknown}, which ringattn {verb} does not have; it is for {', '.join(takers)}"
            )


def takes(verb: str, text: str) -> bool:
    """Whether a verb has all keys that an option's YAML sets for it, as an experiment's does; True of other options."""
    if "# @package _global_" not in text:
        return True
    return {"experiment", *_set_by(text)} <= {*_names(SCHEMAS[verb])}


def _set_by(text: str) -> set[str]:
    """The keys and groups that the YAML of an experiment sets."""
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE)) - {"defaults", "hydra"}
    return keys | set(re.findall(r"^ *- override /(\w+)", text, re.MULTILINE)) - {"hydra"}


def _check_stream(given: Mapping[str, str]) -> None:
    """Refuse what is given beside `stream` and cannot be honoured with it, be it the default."""
    stream = given.get("stream", "null")
    for key in given:
        name = re.split(r"[./@]", key)[0]
        if stream != "null" and name in RINGS:
            raise without_meaning(f"{key}={given[key]}", stream)


def _check_file(given: Mapping[str, str]) -> None:
    """Refuse sizes that are given beside a file, which has its own."""
    if given.get("input") != "file":
        return
    for name in FILES:
        if name in given:
            raise InvalidInput(
                f"{name}={given[name]} has no meaning with input=file: the tensors of input.path= say it themselves; leave "
                "it out"
            )


def _check_ranks(given: Mapping[str, str], ranks: str | None, launch: Launch, folders: ConfigFolders) -> None:
    """Refuse a number of ranks that is not the number which a launcher started, be it that of an experiment."""
    if given.get("transport", "gloo") not in LAUNCHED or given.get("stream", "null") != "null":
        return
    for name in given.get("experiment", "null").split(",") if ranks is None else ():
        found = of_experiment(name, "ranks", folders)
        if found is not None and parse_size(found, "ranks") != launch.world:
            raise InvalidInput(
                f"experiment={name} sets ranks={found}: {launch.kind} started {launch.world}, and as many take part; add "
                f"ranks={launch.world}, or have {launch.kind} start {found}"
            )
    if ranks not in (None, str(launch.world)):
        raise InvalidInput(
            f"ranks={ranks}: {launch.kind} started {launch.world}, and as many take part; leave ranks out, or have "
            f"{launch.kind} start another number"
        )


def _check_sweep(verb: str, given: Mapping[str, str]) -> None:
    """Refuse one output file for many jobs. A suite's records are named by themselves."""
    for key in ("output.path", "output.report"):
        path = given.get(key, "machine.yaml" if (verb, key) == ("calibrate", "output.path") else "null")
        if verb != "bench" and path not in ("null", STDOUT) and "${" not in path:
            raise InvalidInput(
                f"{key}={path} with -m: every job would replace the output of the one before; let the path name the job, "
                f"such as '{key}={_numbered(path)}'"
            )


def _numbered(path: str) -> str:
    stem, suffix = Path(path).stem, Path(path).suffix
    return str(Path(path).with_name(f"{stem}_${{hydra:job.num}}{suffix}"))


def _prepare(verb: str, override: str, folders: ConfigFolders) -> list[str]:
    match = re.fullmatch(r"([~+]{0,2})([\w./@-]+)=(.*)", override, re.DOTALL)
    if match is None or match[2].startswith(("hydra", "-")):
        return [override]
    prefix, key, value = match.groups()
    schema = SCHEMAS[verb]
    check_key(verb, schema, key.replace("/", "."))
    if key.startswith("study.axes.") and "~" not in prefix:
        return [f"++{key}={value}"]  # an axis may be new, or one of the study that is taken
    if _kind(schema, key) in ("int", "int | None") and not re.search(r"[(\[{$'\"]", value):
        return [f"{prefix}{key}={','.join(_whole(key, part) for part in value.split(','))}"]
    if _kind(schema, key) in ("float", "float | None") and re.fullmatch(r"([\d.]+[kmgt]?,?)+", value, re.IGNORECASE):
        return [f"{prefix}{key}={','.join(_number(key, part) for part in value.split(','))}"]
    if prefix or not folders.is_group(key) or key not in _names(schema):
        return [override]
    options = folders.options(key)
    if key in WRITTEN and ("(" in value or ":" in value):
        return [f"{key}=custom", f"{key}.spec={value!r}"]
    if value == "null" and key in OPTIONAL:
        return []  # what they are without an override; Hydra takes no null
    for option in value.split(","):
        if option not in options:
            shown = [name for name in options if name != "custom"]
            raise InvalidInput(
                f"{key}={option}: unknown option; {did_you_mean(option, shown)}expected one of {', '.join(shown)}"
            )
    return [override]


def _kind(schema: Any, key: str) -> str:
    """The annotation of a key; nothing of one inside a plain value."""
    found = _field(schema, key)
    return "" if found is None else str(found.type)


def _field(schema: Any, key: str) -> Any:
    """The field of a key; None of one inside a plain value."""
    first, _, rest = key.partition(".")
    found = _names(schema).get(first)
    if found is None or not rest:
        return found
    return _field(found.default_factory, rest) if dataclasses.is_dataclass(found.default_factory) else None


def _whole(key: str, text: str) -> str:
    """A whole number in digits: sizes are understood everywhere."""
    digits = text if text == "null" else re.fullmatch(r"[+-]?\d{1,18}", text)
    return text if digits else str(parse_size(text, key))


def _number(key: str, text: str) -> str:
    """A number in digits, which may have been written as a size."""
    return str(parse_size(text, key)) if text[-1:].isalpha() else text


def check_key(verb: str, schema: type, key: str) -> None:
    """Raise InvalidInput, with a hint, where a verb has no such key."""
    names = _names(schema)
    first, _, rest = key.partition(".")
    if first not in names:
        raise InvalidInput(
            f"unknown key {first!r}; {did_you_mean(first, list(names))}keys of {verb}: {', '.join(names)} "
            f"(ringattn {verb} --cfg job shows their values)"
        )
    ranks_per_node = names[first].default_factory
    while rest and dataclasses.is_dataclass(ranks_per_node):
        part, _, rest = rest.partition(".")
        if part not in _names(ranks_per_node):
            shown = list(_names(ranks_per_node))
            raise InvalidInput(f"unknown key {key!r}; {did_you_mean(part, shown)}keys of {first}: {', '.join(shown)}")
        first, ranks_per_node = f"{first}.{part}", _names(ranks_per_node)[part].default_factory


def _names(schema: Any) -> dict[str, Any]:
    return {f.name: f for f in dataclasses.fields(schema)}
