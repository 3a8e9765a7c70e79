"""Settings that apply only beside others: what a verb refuses because it would have no effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...errors import InvalidInput
from ...files import STDOUT
from ...machine.machine import MACHINE_NUMBERS
from ...transport.launcher import Launch
from .folders import ConfigFolders, chosen_options, is_for_verb, load_config, set_names
from .groups import MachineGroup, StudyGroup
from .schema import SCHEMAS, CalibrateConfig, SimulateConfig, conf_dir, key_names, parse_size

#: A configuration whose settings are checked.
Config = TypeVar("Config", SimulateConfig, CalibrateConfig)
#: Settings of the timing model.
_TIMING_KEYS = ("slow", "slow_links", "stalls", "passes", "solver")
#: Settings of `simulate model=`.
_PIPELINE_KEYS = ("pp", "micro_batches", "interleaved")
_MODEL_KEYS = ("phase", "cp", "dp", "tp", "checkpointing", "sharding", *_PIPELINE_KEYS)
#: The modes of `simulate`, each with the keys that the mode does not read.
MODES: dict[str, tuple[str, ...]] = {
    "timing": ("validate", "numerics"),
    "validate": (
        *("numerics", "study", "shard", "pattern", "layout", "schedule", "ranks", "tokens", "kv_heads", "batch"),
        *("comm_dtype", "rotate", "backward", "seed", "model", *_MODEL_KEYS, *_TIMING_KEYS),
    ),
    "numerics": ("validate", "study", "batch", "model", *_MODEL_KEYS, *_TIMING_KEYS),
    "published": (
        *("validate", "numerics", "study", "shard", "pattern", "layout", "schedule", "ranks", "tokens", "heads"),
        *("kv_heads", "head_dim", "batch", "dtype", "comm_dtype", "rotate", "backward", "seed", "machine"),
        *("model", *_MODEL_KEYS, *_TIMING_KEYS),
    ),
}
#: Keys that `simulate` does not read beside model=, which has sizes and a mask of its own, and in some phases.
PLAN_KEYS = (
    *("mode", "experiment", "validate", "numerics", "shard", "pattern", "ranks", "heads", "kv_heads", "head_dim"),
    *("comm_dtype", "rotate", "backward", "seed", *_TIMING_KEYS),
)
PHASE_KEYS = {
    "prefill": ("checkpointing", "sharding", *_PIPELINE_KEYS),
    "decode": ("checkpointing", "sharding", "layout", "schedule", *_PIPELINE_KEYS),
}
#: Keys that mode=validate does not read beside machine.path: the machine file says what was calibrated.
MACHINE_FILE_KEYS = ("heads", "head_dim", "dtype")
#: Keys that `run` does not read beside `stream`: one process computes chunk after chunk, in order, and sends nothing.
RING_KEYS = ("transport", "ranks", "layout", "schedule", "machine", "comm_dtype", "rotate", "timeout", "progress")
#: Keys that `run` does not read beside input=file: the tensors have these sizes.
INPUT_FILE_KEYS = ("tokens", "heads", "kv_heads", "head_dim", "batch", "dtype")
#: Groups whose options have parameters of their own.
PARAMETER_GROUPS = ("pattern", "layout", "schedule", "input")
#: Transports whose ranks a launcher may have started, and the transports of each verb.
LAUNCHED = ("gloo", "nccl", "mpi")
TRANSPORTS = {"run": (*LAUNCHED, "virtual"), "calibrate": (*LAUNCHED, "none")}
#: The option of a group that a value written in full selects.
CUSTOM = "custom"
#: The default of a setting is the default of its schema.
_SCHEMA_DEFAULT = object()


@dataclass(frozen=True)
class ConditionalSetting(Generic[Config]):
    """A setting that applies only if `applies(config)`.

    `otherwise` completes the error "KEY=VALUE has no meaning ...".
    """

    key: str
    applies: Callable[[Config], bool]
    otherwise: str
    #: The value that counts as not set.
    default: object = _SCHEMA_DEFAULT


def _never(config: object) -> bool:
    return False


#: Numbers of a machine that every calibration measures, and numbers that only a calibration of several ranks measures.
_ALONE = tuple(name for name, number in MACHINE_NUMBERS.items() if number.measured_by == "every")
_LINKS = tuple(name for name, number in MACHINE_NUMBERS.items() if number.measured_by == "ranks")
#: The settings of each mode of `simulate` that apply in some cases only.
SIMULATE_SETTINGS: dict[str, tuple[ConditionalSetting[SimulateConfig], ...]] = {
    "timing": (
        *(
            ConditionalSetting[SimulateConfig](name, lambda config: config.backward, "without backward=true")
            for name in ("rotate", "machine.call_backward", "machine.sweep_backward")
        ),
        ConditionalSetting(
            "seed",
            lambda config: bool(config.machine.made().jitter),
            "without machine.jitter=..., whose samples it draws",
        ),
        ConditionalSetting(
            "machine.checkpoint", lambda config: bool(config.machine.made().mtbf), "without machine.mtbf=..."
        ),
        ConditionalSetting(
            "machine.restart", lambda config: bool(config.machine.made().mtbf), "without machine.mtbf=..."
        ),
        ConditionalSetting("machine.checkpoint", lambda config: bool(config.passes), "without a job: passes=..."),
        ConditionalSetting("machine.restart", lambda config: bool(config.passes), "without a job: passes=..."),
        ConditionalSetting(
            "machine.one_gather",
            lambda config: "allgather" in config.schedule.spec or "auto" in config.schedule.spec,
            "without schedule=allgather, whose messages it joins",
        ),
        ConditionalSetting(
            "machine.extrapolate",
            lambda config: config.machine.made().kernel is not None,
            "without kernel times, which only machine=file brings",
        ),
        *(
            ConditionalSetting[SimulateConfig](name, _never, "without a model, such as model=llama3_8b")
            for name in (*_MODEL_KEYS, "model.path", "machine.peak", "machine.matmul")
        ),
    ),
    "numerics": (
        ConditionalSetting("rotate", lambda config: config.backward, "without backward=true"),
        ConditionalSetting(
            "machine",
            lambda config: "auto" in (config.layout.spec, config.schedule.spec),
            "with mode=numerics, unless layout=auto or schedule=auto choose by it",
            MachineGroup("auto"),
        ),
    ),
    "published": (),
    "validate": (
        *(
            ConditionalSetting[SimulateConfig](
                f"validate.{name}",
                lambda config: config.machine.path is None,
                "beside machine.path=..., whose file says what was calibrated",
            )
            for name in ("rows", "widths", "messages")
        ),
        *(
            ConditionalSetting[SimulateConfig](
                f"machine.{name}", _never, "with mode=validate: the machine is measured, or comes from machine.path"
            )
            for name in (*MACHINE_NUMBERS, "extrapolate")
        ),
        ConditionalSetting(
            "machine.spec",
            lambda config: config.machine.spec in ("auto", "file"),
            "with mode=validate, which measures this machine",
        ),
    ),
}
#: The settings of `calibrate` that apply in some cases only.
CALIBRATE_SETTINGS: tuple[ConditionalSetting[CalibrateConfig], ...] = (
    *(
        ConditionalSetting[CalibrateConfig](
            name, lambda config: config.transport.spec != "none", "with transport=none, which is one process alone"
        )
        for name in ("ranks", "messages", "timeout")
    ),
    *(
        ConditionalSetting[CalibrateConfig](f"machine.{name}", _never, "here: a calibration measures it")
        for name in _ALONE
    ),
    *(
        ConditionalSetting[CalibrateConfig](
            f"machine.{name}",
            lambda config: config.transport.spec == "none",
            "here: a calibration of ranks measures it",
        )
        for name in _LINKS
    ),
    ConditionalSetting("machine.extrapolate", _never, "here: a calibration measures the kernel times"),
)


def check_settings(settings: Sequence[ConditionalSetting[Config]], *configs: Config) -> None:
    """Raise InvalidInput where a setting differs from its default in some configs, and applies in none of them."""
    for setting in settings:
        default = setting.default
        if default is _SCHEMA_DEFAULT:
            default = _value(type(configs[0])(), setting.key)
        values = [value for config in configs if (value := _value(config, setting.key)) != default]
        if values and not any(setting.applies(config) for config in configs if _value(config, setting.key) != default):
            text = f"{setting.key}.*" if is_dataclass(values[0]) else f"{setting.key}={_written(values[0])}"
            raise InvalidInput(f"{text} has no meaning {setting.otherwise}; leave it out")


def refuse_settings_without_study(options: StudyGroup) -> None:
    """Raise InvalidInput where a command sets keys of a study, but no axes, so that it has no study."""
    for key, value in _changed_settings("study", options, StudyGroup()):
        text = str(value).replace("'", "")  # as the command line has it
        raise InvalidInput(
            f"{key}={text} has no meaning without a study; give it axes, such as study.axes.ranks=[8,64], take a "
            "preset with study=NAME, or write several values with -m"
        )


def _changed_settings(prefix: str, options: Any, defaults: Any) -> list[tuple[str, Any]]:
    """(whole key, value) of the fields that differ from their defaults."""
    changed: list[tuple[str, Any]] = []
    for field in fields(defaults):
        key, value, default = f"{prefix}.{field.name}", getattr(options, field.name), getattr(defaults, field.name)
        if is_dataclass(default):
            changed += _changed_settings(key, value, default)
        elif value != default:
            changed.append((key, value))
    return changed


def _value(config: object, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def _written(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "").replace(", ", ",")


def check_overrides(
    verb: str, given: Mapping[str, str], folders: ConfigFolders, *, launch: Launch | None, swept: bool
) -> None:
    """Raise InvalidInput where an override has no effect or cannot be honoured.

    `given` are the values of a command line by key, defaults that somebody typed among them. `launch` says which
    launcher started this process; None where the verb has no ranks. `swept`: each value of a key is a job of its own.
    """
    if "experiment" in given:
        _check_experiment(verb, given["experiment"], folders)
    _check_parameters(verb, given, folders)
    _check_missing(verb, given, folders)
    if verb == "run":
        _check_stream(given)
        _check_input_file(given)
    if verb == "plan":
        _check_machine(verb, given, folders)
    if verb == "simulate":
        _check_mode(given, folders)
        _check_model(given)
        if "tokens" in given and given.get("shard", "null") != "null":
            raise InvalidInput("shard= sets the tokens (shard x ranks); give shard or tokens, not both")
    if verb == "report":
        _check_report(given)
    if launch is not None and launch.kind != "none":
        _check_launched_ranks(given, launch, folders)
    if swept and verb not in ("bench", "report"):  # a suite names the files of its records itself
        _check_sweep(verb, given)


def _check_report(given: Mapping[str, str]) -> None:
    """Refuse settings of a measurement beside stored results, which say themselves what was measured."""
    reads = [key for key in ("compare", "results") if given.get(key, "null") != "null"]
    ignored = [key for key in ("suite", "cases", "repeat", "memory") if key in given]
    if len(reads) == 2:
        raise InvalidInput("compare reads two results and results reads one; give only one of these keys")
    if reads and ignored:
        raise InvalidInput(
            f"{reads[0]} reads stored results and measures nothing, so that {ignored[0]}={given[ignored[0]]} would "
            f"have no effect; leave {ignored[0]} out"
        )


def experiment_value(name: str, key: str, folders: ConfigFolders) -> str | None:
    """The text of the value that an experiment sets a plain key to; None where the experiment does not set the key."""
    value = folders.settings("experiment", name).get(key)
    return None if value is None else str(value)


def stream_conflict(option: str, stream: str) -> InvalidInput:
    """The error of an option of rings that is given beside `stream`."""
    return InvalidInput(
        f"{option} has no meaning with stream={stream}: one process computes chunk after chunk and sends nothing to "
        "others; leave it out (chunk= sets the rows of a chunk)"
    )


def _key_group(key: str) -> str:
    """The first part of a key: machine of machine.bandwidth, and of machine@package."""
    return re.split(r"[./@]", key)[0]


def _check_experiment(verb: str, names: str, folders: ConfigFolders) -> None:
    """Refuse an experiment that sets keys which the verb does not have. An experiment named null sets nothing."""
    for name in names.split(","):
        text, settings = folders.text("experiment", name), folders.settings("experiment", name)
        if not is_for_verb(verb, text, settings):
            unknown = ", ".join(sorted(set_names(settings) - {*key_names(SCHEMAS[verb])}))
            verbs = ", ".join(other for other in SCHEMAS if is_for_verb(other, text, settings))
            raise InvalidInput(
                f"experiment={name} sets {unknown}, which ringattn {verb} does not have; it is for {verbs}"
            )


def _check_parameters(verb: str, given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse parameters of a pattern, a layout, a schedule or an input that the chosen option does not have."""
    for key, value in given.items():
        group, _, name = key.partition(".")
        if group not in PARAMETER_GROUPS or name in ("", "spec") or group not in key_names(SCHEMAS[verb]):
            continue
        if group not in given and {"experiment", "study"} & set(given):
            continue  # the experiment or the study chooses the option
        text = given.get(group) or _default_option(verb, group)
        if "(" in text or ":" in text:
            chosen = [CUSTOM]
        else:
            chosen = text.split(",")
        if not any(name in folders.settings(group, option) for option in chosen):
            takers = [option for option in folders.options(group) if name in folders.settings(group, option)]
            raise InvalidInput(
                f"{key}={value} has no meaning with {group}={text}; {group}s that take {name}: {', '.join(takers)}"
            )


def _check_missing(verb: str, given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse an option with a parameter that only the user can give, and has not given."""
    for group, value in given.items():
        if group not in PARAMETER_GROUPS or group not in key_names(SCHEMAS[verb]) or "experiment" in given:
            continue
        for option in value.split(","):
            for name, setting in folders.settings(group, option).items() if option != CUSTOM else ():
                if setting == "???" and f"{group}.{name}" not in given:
                    example = re.search(rf"'{group}\.{name}=.*?'", folders.text(group, option))
                    advice = f", such as {example[0]}" if example else ""
                    raise InvalidInput(f"{group}={option} needs {group}.{name}=...{advice}")


def _default_option(verb: str, group: str) -> str:
    """The option of a group that a verb starts from."""
    return chosen_options(load_config(conf_dir() / f"{verb}.yaml"))[group]


def _check_mode(given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse keys that the chosen mode of `simulate` does not read."""
    experiments = given.get("experiment", "null").split(",")
    modes = [mode for name in experiments if (mode := experiment_value(name, "mode", folders)) is not None]
    for mode in given["mode"].split(",") if "mode" in given else modes or ["timing"]:
        for key, value in given.items():
            group = _key_group(key)
            if group in MODES.get(mode, ()):
                takers = " or ".join(other for other, unread in MODES.items() if group not in unread)
                raise InvalidInput(f"{key}={value} has no meaning with mode={mode}; leave it out, or try mode={takers}")
            if mode == "validate" and group in MACHINE_FILE_KEYS and "machine.path" in given:
                raise InvalidInput(
                    f"{key}={value} has no meaning beside machine.path: the machine file sets {group}; leave it out"
                )


def _check_model(given: Mapping[str, str]) -> None:
    """Refuse keys of plans beside a model, and keys that its phase does not read."""
    model, phase = given.get("model", "null"), given.get("phase", "training")
    for key, value in given.items() if model != "null" else ():
        if _key_group(key) in PLAN_KEYS:
            raise InvalidInput(
                f"{key}={value} has no meaning with model={model}, which has sizes and a mask of its own; leave it out "
                "(cp=, dp= and tp= set the ranks)"
            )
        if _key_group(key) in PHASE_KEYS.get(phase, ()):
            raise InvalidInput(f"{key}={value} has no meaning with phase={phase}; leave it out")


def _check_machine(verb: str, given: Mapping[str, str], folders: ConfigFolders) -> None:
    """Refuse numbers of a machine where the layout and the schedule are named: nothing is chosen by them."""
    for group in ("layout", "schedule"):
        for option in (given.get(group) or _default_option(verb, group)).split(","):
            if "auto" in (option, folders.settings(group, option).get("spec")) or "experiment" in given:
                return
    for key, value in given.items():
        if _key_group(key) == "machine":
            raise InvalidInput(
                f"{key}={value} has no meaning for a named layout and schedule: the machine serves to choose; leave it "
                "out, try schedule=auto, or ringattn simulate for times"
            )


def _check_stream(given: Mapping[str, str]) -> None:
    """Refuse keys of rings beside `stream`, their defaults too."""
    stream = given.get("stream", "null")
    for key, value in given.items():
        if stream != "null" and _key_group(key) in RING_KEYS:
            raise stream_conflict(f"{key}={value}", stream)


def _check_input_file(given: Mapping[str, str]) -> None:
    """Refuse sizes beside a file, which has its own."""
    for name in INPUT_FILE_KEYS if given.get("input") == "file" else ():
        if name in given:
            raise InvalidInput(
                f"{name}={given[name]} has no meaning with input=file: the tensors of input.path= have it; leave it out"
            )


def _check_launched_ranks(given: Mapping[str, str], launch: Launch, folders: ConfigFolders) -> None:
    """Refuse a number of ranks other than the number that a launcher started, also where an experiment sets it."""
    if given.get("transport", "gloo") not in LAUNCHED or given.get("stream", "null") != "null":
        return
    started = f"{launch.kind} started {launch.world}, and as many take part"
    if "ranks" not in given:
        for name in given.get("experiment", "null").split(","):
            ranks = experiment_value(name, "ranks", folders)
            if ranks is not None and parse_size(ranks, "ranks") != launch.world:
                raise InvalidInput(
                    f"experiment={name} sets ranks={ranks}: {started}; add ranks={launch.world}, or have {launch.kind} "
                    f"start {ranks}"
                )
    elif given["ranks"] != str(launch.world):
        raise InvalidInput(
            f"ranks={given['ranks']}: {started}; leave ranks out, or have {launch.kind} start another number"
        )


def _check_sweep(verb: str, given: Mapping[str, str]) -> None:
    """Refuse one output file for many jobs."""
    for key in ("output.path", "output.report"):
        path = given.get(key, "machine.yaml" if (verb, key) == ("calibrate", "output.path") else "null")
        if path not in ("null", STDOUT) and "${" not in path:
            numbered = Path(path).with_name(f"{Path(path).stem}_${{hydra:job.num}}{Path(path).suffix}")
            raise InvalidInput(
                f"{key}={path} with -m: every job would replace the output of the one before; let the path name the "
                f"job, such as '{key}={numbered}'"
            )
