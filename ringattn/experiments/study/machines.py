"""The machines of a study's points, and what its report says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ...errors import RingAttentionError
from ...machine.machine import MACHINE_NUMBERS, Machine
from ...machine.presets import CURRENCY, MACHINES
from .space import Point


def machines_of(points: Sequence[Point]) -> dict[int, Machine]:
    """The machine of each point by its number, each made once; none where it cannot be, whose points are refused."""
    made: dict[str, Machine | None] = {}
    found = {}
    for point in points:
        key = json.dumps(asdict(point.config.machine))
        if key not in made:
            try:
                made[key] = point.config.machine.made()
            except RingAttentionError:  # which the points say
                made[key] = None
        machine = made[key]
        if machine is not None:
            found[point.number] = machine
    return found


def described(points: Sequence[Point], made: Mapping[int, Machine]) -> list[str]:
    """A line for each machine that is named: its numbers, each with unit and source, and which differ from point to point."""
    named: dict[str, dict[Machine, None]] = {}
    for point in points:
        if point.number in made:
            named.setdefault(point.config.machine.spec, {})[made[point.number]] = None
    return [f"{name}: {', '.join(_numbers(name, list(some)))}" for name, some in named.items()]


def _numbers(name: str, some: Sequence[Machine]) -> list[str]:
    preset = MACHINES.get(name)
    found = []
    for key in MACHINE_NUMBERS:
        given = {one: value for one in some if (value := getattr(one, key)) not in (None, False)}
        if given:
            values, sources = sorted(set(given.values())), sorted({one.source(key) for one in given})
            text = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} .. {values[-1]:g}"
            unit = MACHINE_NUMBERS[key].unit
            if key == "price" and preset is not None and values == [preset.price]:
                unit = unit.replace("currency", CURRENCY)
            text = "true" if values[0] is True else f"{text} {unit}"
            differ = ", by point" if len(values) > 1 or len(given) < len(some) else ""
            found.append(f"{key}={text}{differ} [{', '.join(sources)}]")
    return found
