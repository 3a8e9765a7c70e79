"""Reads input files by a schema, and writes output files completely or not at all."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from msgspec import Meta, ValidationError, convert

from .errors import InvalidInput
from .text import did_you_mean, shorten

T = TypeVar("T")
#: Types of numbers in schemas: a count of at least 1 (a product of a few still fits a float), and finite numbers.
Count = Annotated[int, Meta(ge=1, le=1 << 53)]
Positive = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
#: The largest input file in bytes, and the most values and nested levels of YAML with aliases expanded.
MAX_BYTES, MAX_VALUES, MAX_DEPTH = 1 << 26, 100_000, 32

#: The path that means standard output.
STDOUT = "-"
#: The folder, in the current folder, for outputs without an explicit path: outputs/<verb>/...
OUTPUTS = "outputs"
#: The part of a temporary file's name between its target's name and the random suffix.
TEMPORARY = ".ringattn-"
#: The most bytes of the target's name in a temporary file's name; file systems allow 255 bytes for a name.
NAME_BYTES = 150


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to `path` when the block ends; on an error `path` stays untouched.

    An existing output keeps its mode. Raises InvalidInput if `path` cannot be replaced.
    """
    target = _checked_target(path)
    with _temporary(target) as temporary:
        yield temporary
        try:
            temporary.replace(target)
        except OSError as error:
            raise InvalidInput(
                f"output {target}: cannot be replaced ({error.strerror}); choose another path"
            ) from error


@contextmanager
def writing(path: Path, *failures: type[Exception]) -> Iterator[Path]:
    """Like `replacing`, for a block that only writes the file: an OSError, such as a full disk, becomes InvalidInput.

    Exceptions of the types `failures` become InvalidInput as well.
    """
    expected: tuple[type[Exception], ...] = (OSError, *failures)
    with replacing(path) as temporary:
        try:
            yield temporary
        except expected as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidInput(
                f"output {path}: could not be written ({reason}), and the partial file was removed; make room in "
                f"{path.parent.absolute()}, or choose another path"
            ) from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file completely or not at all. Raises InvalidInput if it cannot be written."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str, data: object) -> None:
    """Write `data` as JSON to the file `path`, completely or not at all, or to standard output if `path` is "-".

    Infinities and NaN, which JSON cannot represent, become null. Raises InvalidInput if the file cannot be written.
    """
    text = json.dumps(replace_nonfinite(data), indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text(Path(path), text)


def check_json(path: str | None) -> None:
    """Raise InvalidInput if `write_json` could not write to `path`. None and "" mean that nothing will be written."""
    if path and path != STDOUT:
        check_writable(Path(path))


def replace_nonfinite(data: object) -> object:
    """The data of a JSON text, with null for infinities and NaN."""
    if isinstance(data, dict):
        return {name: replace_nonfinite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [replace_nonfinite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def check_writable(path: Path) -> None:
    """Raise InvalidInput if the file `path` cannot be written."""
    with _temporary(_checked_target(path)):  # only by creating a file can we tell that the file system accepts files
        pass


def check_readable(path: Path, name: str) -> None:
    """Raise InvalidInput, naming the setting `name`, unless `path` is an ordinary file that this user can read.

    Pipes and devices are refused without being opened: reading a pipe can block forever, and data that one rank has
    read is lost to the other ranks.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise InvalidInput(f"{name}={path}: {reason}; give the path of a file") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise InvalidInput(f"{name}={path}: is {kind}, not an ordinary file; give the path of a file")
    if not os.access(path, os.R_OK):
        raise InvalidInput(f"{name}={path}: not readable by this user; choose another path")


def load(path: Path, kind: type[T], name: str) -> T:
    """The content of a JSON file (.json) or YAML file, see `decode`; `name` is the setting that gives the path."""
    return decode(read_text(path, name), kind, f"{name}={path}", yaml=path.suffix != ".json")


def read_text(path: Path, name: str) -> str:
    """The text of a file. Raises InvalidInput, naming the setting `name`, if it cannot be read as UTF-8."""
    check_readable(path, name)
    if path.stat().st_size > MAX_BYTES:
        raise InvalidInput(f"{name}={path}: has more than {MAX_BYTES:,} bytes, too many for such a file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{name}={path}: cannot be read as text ({error}); write the file again") from None


def decode(text: str, kind: type[T], source: str, *, yaml: bool = False) -> T:
    """Parse a JSON or YAML text and return its value as `kind`: a dataclass, Struct, TypedDict, list, or the like.

    `kind` is any type that msgspec can convert to. Raises InvalidInput with `source` (where the text comes from), the
    place in the text, and the expected and actual value.
    """
    try:
        data = _load_yaml(text) if yaml else json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise InvalidInput(f"{source}: is not valid {'YAML' if yaml else 'JSON'} ({shorten(problem, 200)})") from None
    return as_kind(data, kind, source)


def as_kind(data: object, kind: type[T], source: str, known: Iterable[str] = ()) -> T:
    """Convert plain data to `kind`, a type that msgspec can convert to.

    Raises InvalidInput as `decode` does; for an unknown key, the message suggests one of `known`.
    """
    try:
        return convert(data, kind)
    except (ValidationError, UnicodeEncodeError) as error:  # half of a surrogate pair is not a character
        raise InvalidInput(f"{source}: {_explain(error, data, known)}; correct the file") from None


def check_fields(value: Any, source: str) -> None:
    """Raise InvalidInput if a field of a dataclass does not match its annotation; the message begins with `source`."""
    for name, kind in _field_types(value.__class__).items():
        try:
            convert(getattr(value, name), kind)
        except ValidationError as error:
            raise InvalidInput(f"{source}: {name}: {_explain(error, getattr(value, name))}; correct it") from None


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name[0] != "_"}


def _explain(error: Exception, data: Any, known: Iterable[str] = ()) -> str:
    """The place of an error, the expected value, and the number or text found there."""
    problem, _, place = str(error).replace("`", "").partition(" - at ")
    path = place.removeprefix("key in ").removeprefix("$").removeprefix(".")
    for key, index in re.findall(r"([^.\[\]]+)(?!\])|\[(\d+|\.\.\.)\]", path):
        data = None if index == "..." else data[int(index) if index else key]
    unknown = re.search(r"unknown field (.*)", problem)
    hint = f"; {did_you_mean(unknown[1], known)}" if unknown else ""
    found = f", got {shorten(repr(data), 60)}" if isinstance(data, str | int | float) and "got" not in problem else ""
    return f"{path}{': ' if path else ''}{problem}{found}{hint}".rstrip("; ")


def _load_yaml(text: str) -> object:
    """Parse a YAML text into numbers, texts, lists and mappings, in time linear in its size. Raises ValueError.

    PyYAML recurses into nested values, and readers of its result copy the value of every alias, so ten lines could fill
    the memory. The structure is therefore checked before anything is built.
    """
    yaml: Any = import_module("yaml")
    loader = _yaml_loader()
    try:
        _check_yaml(yaml, yaml.parse(text, Loader=loader))
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


@cache
def _yaml_loader() -> Any:
    """PyYAML's safe loader, changed to refuse duplicate keys and to read 1e9 as a number."""
    yaml: Any = import_module("yaml")  # PyYAML has no type annotations
    parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(parser):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if len({*map(str, keys)}) < len(keys):
                raise ValueError(f"line {node.start_mark.line + 1}: a key appears twice")
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    # YAML 1.1 requires a point and a sign, as in 1.0e+9
    number = re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, [*"-+0123456789"])
    return Loader


def _check_yaml(yaml: Any, events: Iterable[Any]) -> None:
    """Raise ValueError for more than `MAX_VALUES` values, `MAX_DEPTH` levels, or a value with an explicit tag."""
    counts: dict[str | None, int] = {}  # by anchor: the number of values that an alias expands to
    nested: list[tuple[str | None, int]] = []
    values = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            values += counts.get(event.anchor, MAX_VALUES + 1)  # an alias within its own value expands forever
        elif isinstance(event, yaml.CollectionStartEvent):
            nested.append((event.anchor, values))
            values += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = nested.pop()
            counts[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            counts[event.anchor] = 1
        if values > MAX_VALUES or len(nested) > MAX_DEPTH:
            raise ValueError(
                f"it has more than {MAX_VALUES:,} values with aliases expanded, or is nested more than "
                f"{MAX_DEPTH} deep, too much for such a file"
            )
        if getattr(event, "tag", None):
            raise ValueError(f"line {event.start_mark.line + 1}: the tag {event.tag} is not understood")


def make_folder(path: Path) -> None:
    """Create the folder `path` if it does not exist; its parent is created only inside the folder `OUTPUTS`.

    Raises InvalidInput if the parent does not exist, the folder cannot be created, or this user cannot write to it.
    """
    if not os.path.isdir(path):
        _check_parent(path)
    try:
        path.mkdir(exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"output {path}: cannot be made as a folder ({reason}); choose another path") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidInput(f"output {path}: not writable by this user; choose another path")


def _checked_target(path: Path) -> Path:
    """The file that a write to `path` replaces; for a link, its target. Raises InvalidInput if it is not writable."""
    try:
        mode = path.stat().st_mode  # before `resolve`, which fails on a link that points to itself
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    # A name that is too long, a loop of links, a folder that may not be searched, or a NUL character.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"output {path}: cannot be written ({reason}); choose another path") from None
    target = path.resolve()
    if stat.S_ISDIR(mode):
        raise InvalidInput(f"output {path}: is a folder; give the path of a file")
    if mode and not stat.S_ISREG(mode):
        raise InvalidInput(f"output {path}: is not an ordinary file, so it cannot be replaced; give another path")
    _check_parent(path)
    if mode and not os.access(target, os.W_OK):
        raise InvalidInput(f"output {path}: not writable by this user; choose another path")
    return target


def _check_parent(path: Path) -> None:
    """Raise InvalidInput unless the parent of `path` is a folder; parents in `OUTPUTS` are created."""
    parent = Path(os.path.realpath(path)).parent if os.path.islink(path) else path.parent
    if parent.parts[:1] == (OUTPUTS,):
        make_folder(parent)
        return
    try:
        mode = parent.stat().st_mode
    except FileNotFoundError:
        raise InvalidInput(f"output {path}: the folder {parent} does not exist; make it first") from None
    except (OSError, ValueError) as error:  # perhaps a folder that may not be searched; ValueError: a NUL character
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"output {path}: {parent} cannot be used ({reason}); choose another path") from None
    if not stat.S_ISDIR(mode):
        raise InvalidInput(f"output {path}: {parent} is not a folder; choose another path")


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A new empty file beside `target`, with its mode; removed at the end if it still exists."""
    # Choose the name first, so that a signal between creation and assignment leaves no file behind.
    name = target.name.encode()[:NAME_BYTES].decode(errors="ignore")
    temporary = target.with_name(f".{name}{TEMPORARY}{secrets.token_hex(4)}")
    try:
        try:
            temporary.touch(0o600 if target.exists() else 0o666, exist_ok=False)  # the system applies the umask
            if target.exists():
                shutil.copymode(target, temporary)
        except OSError as error:
            raise InvalidInput(
                f"output {target}: no file can be made in {target.parent} ({error.strerror}); choose another path"
            ) from None
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
