"""Machines: files read back as they were, sources of every number, and intervals of measured passes."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from measured import machine, measured_machine, times

import ringattn as ra
from ringattn.cli.config.groups import MachineGroup
from ringattn.errors import InvalidInput
from ringattn.machine.file import read_machine, write_machine
from ringattn.machine.machine import MACHINE_NUMBERS, SOURCES
from ringattn.machine.presets import PRESETS, get_machine


def test_intervals_are_order_statistics() -> None:
    ninety_nine = machine(residuals=tuple((1.0, float(x)) for x in random.Random(1).sample(range(1, 100), 99)))
    assert ninety_nine.interval(2.0) == (10.0, 190.0)  # 5 of 100 places on each side
    assert ninety_nine.interval(1.0, level=0.98) == (1.0, 99.0)
    assert ninety_nine.interval(1.0, level=0.99) is None, "99 ratios say nothing of 1 in 200"
    assert machine().interval(1.0) is None


def test_intervals_are_those_of_passes_of_about_that_size() -> None:
    """Short passes take 2 to 3 times as long as modelled, long ones as long as modelled; each interval is its own."""
    short = tuple((1e-3 * (1 + i / 200), 2 + i / 119) for i in range(120))
    long = tuple((1.0 + i / 200, 0.99 + i / 6000) for i in range(120))
    found = machine(residuals=short + long)
    low, high = found.interval(1e-3)
    assert 2e-3 <= low < high <= 3e-3
    low, high = found.interval(2.0)
    assert 1.98 <= low < high <= 2.02
    assert machine(residuals=long).interval(2.0) == (low, high)


@pytest.mark.parametrize("seed", [1, 2])
def test_intervals_cover_what_they_promise_whatever_the_law(seed: int) -> None:
    """New draws of a skewed law fall inside as often as promised, over many calibrations."""
    source = random.Random(seed)
    hits = total = 0
    for _ in range(400):
        found = machine(residuals=tuple((1.0, source.lognormvariate(0, 0.8)) for _ in range(60)))
        low, high = found.interval(1.0) or (0, 0)
        for _ in range(20):
            hits, total = hits + (low <= source.lognormvariate(0, 0.8) <= high), total + 1
    assert 0.88 <= hits / total <= 0.93


def test_a_machine_reads_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(path, measured_machine(), made={"cpu": "some"}, samples={"unit": "s", "shift": [1.0]})
    back = read_machine(path)
    assert replace(back, sources=()) == replace(measured_machine(), sources=())
    named = ("flops", "watts", "ranks_per_node", "kernel", "residuals")
    assert all(back.source(name) == measured_machine().source(name) for name in named)
    content = yaml.safe_load(path.read_text())
    assert content["samples"]["shift"] == [1.0]
    for name, entry in content["values"].items():
        assert entry["unit"] and entry["source"] in SOURCES, name
    write_machine(path, machine())
    assert read_machine(path) == machine()
    write_machine(path, machine(times()))
    path.write_text(path.read_text().replace("  heads: null\n", ""))  # of a file that was made before they were kept
    assert read_machine(path).kernel == times()


BOMB = "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
BROKEN: dict[str, tuple[Callable[[str], str], str]] = {
    "a field": (lambda text: text.replace("values:", "value:"), "unknown field value; did you mean 'values'"),
    "a unit": (lambda text: re.sub("unit: bytes(?=/s| per)", "unit: bits", text), "is in 'bits/s'"),
    "a name": (lambda text: text.replace("  latency:", "  latncy:"), "did you mean 'latency'"),
    "the format": (lambda text: text.replace("machine 2", "machine 9"), "format: .*ringattn machine 9"),
    "no YAML": (lambda text: "a: [", "is not valid YAML"),
    "rates": (lambda text: text.replace("overhead:", "overheat:"), "Object missing required field overhead"),
    "ratios": (
        lambda text: text.replace("residuals:", "residuals: {source: measured, values: [abc]}\nsamples:"),
        r"residuals.values\[0\]: Expected array, got str",
    ),
    "a source": (lambda text: text.replace("source: cited", "source: dreamt"), "values.watts.source: .*dreamt"),
    "aliases": (lambda text: "a: &a [x, x]\nb: [*a, *a]\n", "unknown field a"),
    "bomb": (lambda text: f"a0: &a0 [x, x]\n{BOMB}", "aliases expanded"),
    "itself": (lambda text: "a: &a\n  b: *a\n", "aliases expanded"),
    "deep": (lambda text: "a: " + "[" * 5000 + "]" * 5000, "nested more than 32 deep"),
    "deep mappings": (lambda text: "{a: " * 300 + "1" + "}" * 300, "nested more than 32 deep"),
    "large": (lambda text: "a: " + "x" * (1 << 26), "too many for such a file"),
    "many": (lambda text: "a: [" + "x," * 200_000 + "]", "has more than 100,000 values"),
    "twice": (lambda text: text.replace("made:", "made:\n  a: 1\nmade:"), "a key appears twice"),
    "a large number": (lambda text: text.replace("0.03", "1" + "0" * 400), "must be a number from 0 to"),
    "a larger number": (lambda text: text.replace("0.03", "1" + "0" * 5000), "is not valid YAML"),
    "a tag": (lambda text: text.replace("0.03", "!!python/name:os.system"), "is not valid YAML"),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_broken_files_say_what_is_wrong(tmp_path: Path, wrong: str) -> None:
    path, (change, words) = tmp_path / "m.yaml", BROKEN[wrong]
    write_machine(path, measured_machine())
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidInput, match=words):
        read_machine(path)


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(path, measured_machine())
    path.write_text(
        path.read_text().replace("value: 0.03", "value: 3e-2").replace("made: {}", "made: {at: 2026-01-02}")
    )
    assert read_machine(path).gamma == 0.03


def test_missing_files_say_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="make a machine file with ringattn calibrate"):
        read_machine(tmp_path / "none.yaml")


def test_a_file_is_a_machine_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(path, measured_machine())
    assert MachineGroup("file", path=str(path)).made().kernel == measured_machine().kernel
    flagged = MachineGroup("file", path=str(path), extrapolate=True, bandwidth=5.0).made()
    assert flagged.kernel is not None and flagged.kernel.extrapolate and flagged.bandwidth == 5.0
    assert flagged.source("bandwidth") == "assumed" and flagged.source("latency") == "measured"
    assert MachineGroup("file", path=str(path), flops=1e9).made().kernel is None
    for wrong in (MachineGroup("file"), MachineGroup("cpu", path=str(path))):
        with pytest.raises(InvalidInput, match=r"machine=file needs machine\.path=|has no meaning with machine=cpu"):
            wrong.made()


def test_every_machine_by_name_says_where_its_numbers_come_from() -> None:
    for name, preset in PRESETS.items():
        found = get_machine(name)
        assert preset.about
        for field, fact in preset.values.items():
            assert getattr(found, field) == fact.value and found.source(field) == fact.source
            assert len(fact.reason) >= 8, f"{name}: {field}"
            if fact.source == "cited":
                documents = (
                    "data sheet",
                    "systems",
                    "(2024)",
                    "whitepaper",
                    "white paper",
                    "pytorch/ao",
                    "NCCL's own model",
                    "torchtitan",
                    "the same",
                )
                assert any(word in fact.reason for word in documents), fact.reason
        for library, facts in preset.kernels.items():
            chosen = get_machine(f"{name}/{library}").kernel_rates
            assert chosen is not None and chosen.library == library
            assert all(getattr(chosen, field) == fact.value for field, fact in facts.items())
            assert all(len(fact.reason) >= 8 and fact.source in SOURCES for fact in facts.values())
        plan = ra.make_plan(ra.Causal(), tokens=1 << 16, ranks=16, layout="zigzag", schedule="ring", dtype="bfloat16")
        assert 0 < ra.simulate(plan, found).seconds < math.inf


def test_a_number_of_a_machine_is_declared_once() -> None:
    """Fields, keys of the command line, units of files, checks and the list of what is not modelled go by one
    declaration."""
    numbers = {f.name: f for f in dataclasses.fields(ra.Machine) if f.name in MACHINE_NUMBERS}
    hints = typing.get_type_hints(ra.Machine)
    keys = {f.name: f for f in dataclasses.fields(MachineGroup)}
    assert set(keys) == {"spec", "path", "library", "extrapolate", *MACHINE_NUMBERS}
    least = machine()
    for name, number in MACHINE_NUMBERS.items():
        optional = numbers[name].default is None
        assert hints[name] == (number.python_type | None if optional else number.python_type), name
        assert (keys[name].type, keys[name].default) == (f"{number.python_type.__name__} | None", None)
        assert number.may_be_none == optional and number.meaning and number.unit
        assert getattr(replace(least, **{name: number.example}), name) == number.example
        wrong = ["x", -1, *([] if number.may_be_zero or number.python_type is bool else [0])]
        for value in [*wrong, *([] if number.may_be_none else [None])]:
            with pytest.raises(InvalidInput, match=f"machine: {name}={value!r} must be .*; {name} is .*; try {name}="):
                replace(least, **{name: value})
    left_out = {name for name, number in MACHINE_NUMBERS.items() if number.effect}
    plan = ra.make_plan(ra.Causal(), tokens=64, ranks=2, schedule="ring")
    told = " ".join(ra.simulate(plan, least).unmodelled)
    assert left_out == {name for name in MACHINE_NUMBERS if f"(machine.{name})" in told}
