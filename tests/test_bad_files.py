"""Files of which a part was changed, cut off or replaced: each is read, or refused in one line, and nothing else."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command_line import Refused
from measured import measured_machine

import ringattn as ra
from ringattn.cli.config.defaults import conf_dir, load_config
from ringattn.cli.config.groups import InputGroup
from ringattn.cli.config.schema import RunConfig
from ringattn.cli.inputs import open_source
from ringattn.errors import InvalidInput, RingAttentionError
from ringattn.lab.bench.records import FORMAT, read_results
from ringattn.lab.bench.report import write_index
from ringattn.lab.models.config import load_model
from ringattn.lab.models.inference import decode
from ringattn.lab.models.parallel import Parallel
from ringattn.lab.pages.journal import read_journal, write_line
from ringattn.machine.file import read_machine, write_machine
from ringattn.machine.presets import get_machine
from ringattn.simulator.numerics import numerics

#: Changed files of each loader.
CHANGED = 30
#: The text that stands for values nested 10,000 deep.
DEEP = "nested deep"
VALUES: tuple[Any, ...] = (
    *(None, True, "x", "", -1, 0, 2.5, 10**30, 10**400, 1 << 62, 1e308, 1e-300, math.nan, -math.inf, [], {}, [[]]),
    *([1], {"a": 1}, ["x", None], DEEP, "9" * 400, "\x00", "\ud800"),
)
PLAN = ra.make_plan(ra.Causal(), tokens=256, ranks=4, schedule="ring", layout="balanced(16)")
SMALL = ra.make_plan(ra.Causal(), tokens=16, ranks=2, head_dim=8)
SUMMARY = {"study": "sweep", "date": "2026-11-29", "counts": {"ok": 3, "refused": 0}, "rows": [{"ranks": 2}]}
MODEL = {
    "model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 100, "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2, "attn_logit_softcapping": 50.0,
    "quantization_config": {"quant_method": "fp8"}, "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip


def use_machine(path: Path) -> None:
    found = read_machine(path)
    ra.simulate(PLAN, found, passes=10)
    found.interval(1.0)


def use_model(path: Path) -> None:
    model = load_model(str(path))
    assert model.stored_bytes(2) > 0
    decode(model, get_machine("h100_nvlink_ib"), 1024, Parallel(rows=2))


def use_summary(path: Path) -> None:
    """The line of an index says what is wrong with a study; the others are listed all the same."""
    (folder := path.parent / "study").mkdir(exist_ok=True)
    (folder / "summary.json").write_bytes(path.read_bytes())
    lines = write_index(path.parent)[0].read_text().splitlines()
    for line in (line for line in lines if "results=" in line):
        assert line.startswith("| study | any |") and line.endswith("| [summary.json](study/summary.json) |")
        raise InvalidInput(line)


#: By kind of file: its suffix, and what reads and uses it.
LOADERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "machine": (".yaml", use_machine),
    "model": (".json", use_model),
    "plan": (".json", lambda path: ra.Plan.from_json(path.read_bytes().decode(errors="surrogateescape")).messages(0)),
    "journal": (".jsonl", read_journal),
    "state": (".json", lambda path: numerics(SMALL, state=path, mode="all")),
    "summary": (".json", use_summary),
    "results": (".jsonl", read_results),
    "config": (".yaml", load_config),
    "npz": (".npz", lambda path: open_source(RunConfig(input=InputGroup("file", str(path)))).rows("q", range(2))),
}


def make(kind: str, folder: Path) -> bytes:
    """A file that its loader accepts."""
    path = folder / "whole"
    if kind == "machine":
        write_machine(path, measured_machine(), samples={"unit": "s", "shift": [1.0]})
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, **{name: np.ones((1, 2, 16, 8), np.float32) for name in "qkv"})
    elif kind in ("journal", "results"):
        head = {"format": FORMAT, "machine": {"source": "a"}}
        path.write_bytes(b"".join(map(write_line, (head, {"key": "x", "x": [1.5]}, {"key": "y", "x": {"a": 1}}))))
    elif kind == "state":
        numerics(SMALL, state=path, mode="all")
    else:
        return {
            "summary": json.dumps(SUMMARY).encode(),
            "model": json.dumps(MODEL).encode(),
            "plan": PLAN.to_json().encode(),
            "config": (conf_dir() / "simulate.yaml").read_bytes(),
        }[kind]
    return path.read_bytes()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a value, of long lists those of the first."""
    children = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def change_value(content: Any, source: random.Random) -> Any:
    """A copy in which one value is missing or another, or one key more."""
    content = copy.deepcopy(content)
    *way, last = source.choice([*places(content)])
    at = content
    for key in way:
        at = at[key]
    kind = source.random()
    if kind < 0.25:
        at.pop(last)
    elif kind < 0.35 and isinstance(at, dict):
        at["another"] = source.choice(VALUES)
    else:
        at[last] = source.choice(VALUES)
    return content


def change(data: bytes, suffix: str, source: random.Random) -> bytes:
    """A changed file: a value of its content, its end, some bytes, or all of it."""
    kind = source.random()
    if kind < 0.7 and suffix in (".yaml", ".json"):
        loaded = yaml.safe_load(data) if suffix == ".yaml" else json.loads(data)
        changed = change_value(loaded, source)
        text = yaml.safe_dump(changed) if suffix == ".yaml" else json.dumps(changed)
        return text.replace(f'"{DEEP}"', DEEP).replace(DEEP, "[" * 10000 + "]" * 10000).encode()
    if kind < 0.7 and suffix == ".jsonl":
        lines = [json.loads(line) for line in data.splitlines()]
        return "".join(json.dumps(line) + "\n" for line in change_value(lines, source)).encode()
    if kind < 0.8:
        return data[: source.randrange(len(data))]
    if kind < 0.9:
        spoiled = bytearray(data)
        for _ in range(source.choice((1, 3, 20))):
            spoiled[source.randrange(len(spoiled))] = source.randrange(256)
        return bytes(spoiled)
    return source.choice((b"", b"\xff\xfe", b"null", b"[]\n", b"{}\n", b"NaN\n", b"[" * 10000, source.randbytes(300)))


def refusal(use: Callable[[Path], Any], path: Path) -> list[str]:
    """The message of the error that a loader raises on purpose; nothing where it accepts the file."""
    try:
        use(path)
    except RingAttentionError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("kind", LOADERS)
def test_changed_files_are_read_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    suffix, use = LOADERS[kind]
    whole, source, path = make(kind, tmp_path), random.Random(kind), tmp_path / f"x{suffix}"
    path.write_bytes(whole)
    use(path)
    lines = []
    for _ in range(CHANGED):
        path.write_bytes(change(whole, suffix, source))
        lines += refusal(use, path)
    assert 0 < len(lines) <= CHANGED and all(len(line.splitlines()) == 1 for line in lines)


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("machine", {"kernel": {"grids": {0: {"rows": {0: math.nan}}}}}, r"grids\[0\].rows\[0\]: Expected int, got float"),
    ("machine", {"values": {"latency": {"value": "fast"}}}, "values.latency.value: Expected .*got str"),
    ("machine", {"values": {"flops": {"value": 1e-300}}}, "flops=1e-300 must be a number from 1e-30"),
    ("model", {"num_hidden_layers": 1 << 40}, "num_hidden_layers: Expected int <= 65536, got 1099511627776"),
    ("model", {"quantization_config": {"quant_method": []}}, "_config.quant_method: Expected str, got array"),
    ("plan", {"layout": 3}, "layout: Expected str, got int"),
    ("plan", {"partition": {0: {1: "x"}}}, r"partition\[0\]\[1\]: Expected int, got str"),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "put", "words"), WRONG)
def test_the_line_names_the_place_and_what_stands_there(
    kind: str, put: dict[str, Any], words: str, tmp_path: Path
) -> None:
    suffix, use = LOADERS[kind]
    content = yaml.safe_load(make(kind, tmp_path))

    def merge(at: Any, new: dict[Any, Any]) -> None:
        for key, value in new.items():
            if isinstance(value, dict):
                merge(at[key], value)
            else:
                at[key] = value

    merge(content, put)
    path = tmp_path / f"x{suffix}"
    path.write_text(yaml.safe_dump(content) if suffix == ".yaml" else json.dumps(content))
    with pytest.raises(InvalidInput, match=words):
        use(path)


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("machine", ("simulate", "tokens=64", "machine=file", "machine.path=x.yaml")),
        ("model", ("estimate", "model=x.json", "tokens=64")),
        ("results", ("report", "results=x.jsonl")),
    ],
)
def test_a_command_line_ends_in_one_line(kind: str, command: tuple[str, ...], refused: Refused, tmp_path: Path) -> None:
    suffix, _ = LOADERS[kind]
    for wrong in (b"[]\n", b"{" * 10000, make(kind, tmp_path)[:-9].replace(b": ", b": x")):
        (tmp_path / f"x{suffix}").write_bytes(wrong)
        refused(*command)
