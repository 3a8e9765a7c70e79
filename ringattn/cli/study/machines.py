"""The machines of a study's points, and a line of the report for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ...errors import RingAttentionError
from ...machine.machine import MACHINE_NUMBERS, Machine
from ...machine.presets import CURRENCY, MACHINES
from .space import Point


def machines_of(points: Sequence[Point]) -> dict[int, Machine]:
    """The machine of each point by the point's number, without points whose machine is invalid: they are refused."""
    machines: dict[str, Machine | None] = {}
    by_point = {}
    for point in points:
        key = json.dumps(asdict(point.config.machine))
        if key not in machines:
            try:
                machines[key] = point.config.machine.made()
            except RingAttentionError:  # the record of the point has the message
                machines[key] = None
        machine = machines[key]
        if machine is not None:
            by_point[point.number] = machine
    return by_point


def describe_machines(points: Sequence[Point], machines: Mapping[int, Machine]) -> list[str]:
    """A line for each named machine: its numbers with units and sources, and which numbers differ between points."""
    by_name: dict[str, dict[Machine, None]] = {}
    for point in points:
        if point.number in machines:
            by_name.setdefault(point.config.machine.spec, {})[machines[point.number]] = None
    return [f"{name}: {', '.join(_describe_numbers(name, list(variants)))}" for name, variants in by_name.items()]


def _describe_numbers(name: str, variants: Sequence[Machine]) -> list[str]:
    """Texts such as "bandwidth=5e+10 bytes/s [cited]", over all variants of one named machine."""
    preset = MACHINES.get(name)
    texts = []
    for key in MACHINE_NUMBERS:
        by_variant = {machine: value for machine in variants if (value := getattr(machine, key)) not in (None, False)}
        if by_variant:
            values = sorted(set(by_variant.values()))
            sources = sorted({machine.source(key) for machine in by_variant})
            text = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} .. {values[-1]:g}"
            unit = MACHINE_NUMBERS[key].unit
            if key == "price" and preset is not None and values == [preset.price]:
                unit = unit.replace("currency", CURRENCY)
            text = "true" if values[0] is True else f"{text} {unit}"
            differing = ", by point" if len(values) > 1 or len(by_variant) < len(variants) else ""
            texts.append(f"{key}={text}{differing} [{', '.join(sources)}]")
    return texts
