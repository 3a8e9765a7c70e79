"""The numbers of a machine that the timing model uses, each with its source. Needs no torch and measures nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, ValidationError, convert

from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput
from ..files import Count, Positive, check_fields, load
from ..text import did_you_mean, duration, rate, shown, size
from .kernel_times import KernelRates, KernelTimes

#: Where a number comes from: a document, a fit to published measurements, a guess, or a measurement.
SOURCES = ("cited", "fitted", "assumed", "measured")
#: Fields that hold many measured numbers. They have a source, as the single numbers do.
TABLES = ("kernel", "kernel_rates", "residuals")
#: The number of residuals that an interval is made from: about as many as a calibration runs passes of one size.
NEAREST_RUNS = 80
#: Numbers that only whole models use.
MODEL_ONLY = ("peak", "matmul", "matmul_fp8", "memory", "host_bandwidth", "in_switch")
#: Fields that a preset's error band does not depend on; one_gather, as published gathers were predicted with it.
BESIDE_BANDS = {*MODEL_ONLY, "watts", "price", "mtbf", "checkpoint", "restart", "sources", "one_gather"}
#: The calibrations that measure a number: "every" calibration, or only a calibration of several "ranks".
MeasuredBy = Literal["every", "ranks"]
#: The smallest number other than 0, and the largest: within these limits, times, bytes and energies of whole jobs stay
#: finite floats.
LEAST, MOST = 1e-30, 1e30


@dataclass(frozen=True, kw_only=True)
class MachineNumber:
    """The description of one number of a machine, such as its bandwidth, as read from numbers.yaml beside this module.

    From these descriptions come the checks of `Machine`, the units in machine files, the command line's keys
    `machine.*` and their help, and the list of effects that a simulation reports as not modelled.
    """

    #: The unit in machine files and in reports.
    unit: str
    #: What the number is, as a noun phrase.
    meaning: str
    #: An allowed value. Its type is the type of the number: float, int or bool.
    example: float | int | bool
    #: Whether 0 is allowed. A negative number never is, and a whole number is at least 1.
    may_be_zero: bool = False
    #: What the model does if the number is None; "" if it only leaves out `effect`, or if None is not allowed.
    default: str = ""
    #: The effect that the model leaves out if the number is None; "" if it leaves out nothing.
    effect: str = ""
    #: The key of `Timeline.exposed` that is not modelled if the number is None; "" if there is no such key.
    cause: str = ""
    #: The calibrations that measure the number; None: the number is not measured.
    measured_by: MeasuredBy | None = None

    @property
    def python_type(self) -> type[float] | type[int] | type[bool]:
        """The type of the number."""
        return type(self.example)

    @property
    def may_be_none(self) -> bool:
        """Whether the number may be None."""
        return bool(self.default or self.effect)

    @property
    def help(self) -> str:
        """Help text: the number's meaning and unit, and what the model assumes if the number is missing."""
        unit = "" if self.python_type is bool else f" [{self.unit}]"
        otherwise = self.default or (f"without it the model leaves out {self.effect}" if self.effect else "")
        return f"{self.meaning}{unit}{otherwise and '; '}{otherwise}"

    @cached_property
    def kind(self) -> Any:
        """The number's type with its allowed range, in the form that msgspec checks."""
        bounded: Any = self.python_type
        if bounded is int:
            bounded = Count
        elif bounded is float:
            bounded = Annotated[float, Meta(ge=self._least, le=MOST)]
        return bounded | None if self.may_be_none else bounded

    def check(self, name: str, value: object) -> None:
        """Raise InvalidInput if `value` is not allowed for the number called `name`."""
        try:
            convert(value, self.kind)
        except ValidationError:
            number = f"a number from {self._least:g} to {MOST:g}"
            words = {bool: "True or False", int: "a whole number >= 1", float: number}
            allowed = words[self.python_type] + (", or None" if self.may_be_none else "")
            example = str(self.example) if self.python_type is bool else f"{self.example:g}"
            raise InvalidInput(
                f"machine: {name}={shown(value)} must be {allowed}; {name} is {self.help}; try {name}={example}"
            ) from None

    def show(self, value: float | bool) -> str:
        """A value with its unit, as text."""
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.unit == "s":
            return duration(value)
        if self.unit == "bytes":
            return size(value)
        if self.unit in ("bytes/s", "flop/s"):
            return rate(value, {"bytes/s": "B/s", "flop/s": "FLOP/s"}[self.unit])
        if isinstance(value, int):
            return f"{value:,} {self.unit.replace('ranks', 'rank') if value == 1 else self.unit}"
        return f"{value:g} {self.unit}"

    @property
    def _least(self) -> float:
        return 0.0 if self.may_be_zero else LEAST


@dataclass(frozen=True)
class Machine:
    """The numbers by which the timing model knows a machine. Ranks are numbered node by node.

    `MACHINE_NUMBERS` gives the meaning and the unit of each field, as `ringattn simulate --help machine` prints them.
    If an optional number is None, its effect is not modelled, and the output says so. Raises InvalidInput for values
    out of range.
    """

    flops: float
    latency: float
    bandwidth: float
    ranks_per_node: int = 1
    node_latency: float | None = None
    node_bandwidth: float | None = None
    switch: int | None = None
    shared_nic: bool = False
    cores: int | None = None
    merge: float | None = None
    gamma: float | None = None
    call: float | None = None
    call_backward: float | None = None
    deferred: bool | None = None
    sweep: float | None = None
    sweep_backward: float | None = None
    host: float | None = None
    host_call: float | None = None
    one_gather: bool = False
    peak: float | None = None
    matmul: float | None = None
    matmul_fp8: float | None = None
    in_switch: float | None = None
    memory: float | None = None
    host_bandwidth: float | None = None
    watts: float | None = None
    price: float | None = None
    mtbf: float | None = None
    checkpoint: float | None = None
    restart: float | None = None
    #: Measured kernel times by tile shape. If given, they replace `flops`.
    kernel: KernelTimes | None = None
    #: Modelled rates of the kernel by the size of its calls. If given, they replace `flops`.
    kernel_rates: KernelRates | None = None
    #: The name of the preset that has these numbers; "" for any other machine.
    preset: str = ""
    #: (modelled seconds, measured / modelled seconds) for runs of whole passes at the sizes of a calibration; () if no
    #: pass was measured.
    residuals: tuple[tuple[Positive, Positive], ...] = ()
    #: (field, source) of the numbers that are cited, fitted or measured; all other numbers are assumed.
    sources: tuple[tuple[str, str], ...] = ()
    #: The dtype for which `flops` holds; None: every dtype.
    flops_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, number in MACHINE_NUMBERS.items():
            number.check(name, getattr(self, name))
        check_fields(self, "machine")
        if self.flops_dtype not in (None, *ITEM_BYTES):
            raise InvalidInput(
                f"machine: flops_dtype={self.flops_dtype!r}: {did_you_mean(self.flops_dtype, ITEM_BYTES)}"
                f"expected one of {', '.join(ITEM_BYTES)}, or None"
            )
        with_source = (*MACHINE_NUMBERS, *TABLES)
        for name, source in self.sources:
            if name not in with_source or source not in SOURCES:
                hint = did_you_mean(name, with_source) or did_you_mean(source, SOURCES)
                raise InvalidInput(
                    f"machine: sources has ({name!r}, {source!r}); {hint}expected the name of a number and one of "
                    f"{', '.join(SOURCES)}"
                )

    def source(self, name: str) -> str:
        """The source of a field: cited, fitted (to published measurements), assumed or measured."""
        return dict(self.sources).get(name, "assumed")

    def changed(self, **values: Any) -> Machine:
        """A copy of the machine with the given values changed.

        The new values count as assumed unless `sources` is given. New `flops` hold for every dtype unless `flops_dtype`
        is given, and for every size of call unless `kernel_rates` is given.
        """
        kept_sources = tuple((name, source) for name, source in self.sources if name not in values)
        implied: dict[str, Any] = {
            "sources": kept_sources,
            "preset": self.preset if set(values) <= BESIDE_BANDS else "",
        }
        if "flops" in values:
            implied |= {"flops_dtype": None, "kernel_rates": None}
        return replace(self, **{**implied, **values})

    def interval(self, seconds: float, level: float = 0.9) -> tuple[float, float] | None:
        """The interval that holds a pass's measured time with probability `level`, given its modelled `seconds`.

        None if too few passes were measured. Each end of the interval is a quantile of measured / modelled seconds over
        the NEAREST_RUNS measured passes whose modelled times are closest (on a log scale), because the model's errors
        differ between short and long passes. No distribution of errors is assumed.
        """
        apart = [(abs(math.log(modelled / seconds)), ratio) for modelled, ratio in self.residuals if seconds > 0]
        farthest = sorted(distance for distance, _ in apart)[:NEAREST_RUNS][-1:]
        ratios = sorted(ratio for distance, ratio in apart if [distance] <= farthest)
        # Of n + 1 exchangeable ratios, the new one is among the k smallest with probability k / (n + 1).
        skipped = int((1 - level) / 2 * (len(ratios) + 1) + 1e-9)
        if not skipped:
            return None
        return seconds * ratios[skipped - 1], seconds * ratios[-skipped]

    def node(self, rank: int, ranks: int) -> range:
        """The ranks on the node of `rank`, of `ranks` ranks in total."""
        first = rank - rank % self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, ranks))

    def crowd(self, source: Any, target: Any, ranks: int, group: int = 1) -> Any:
        """How many messages share one link within a node, if every rank sends as far as from `source` to `target`.

        At most `switch` ranks share a link, and at most as many messages as `source` and `target` are ranks apart. The
        result is 1 if links are not shared because the node has no other ranks. Each of the `ranks` ranks stands for
        `group` neighbours. Takes numbers or arrays.
        """
        if self.switch is None or self.switch >= min(self.ranks_per_node, ranks) * group:
            return 1
        apart, first = np.abs(source - target), source // self.ranks_per_node * self.ranks_per_node
        node = np.minimum(self.ranks_per_node, ranks - first)
        return np.clip(np.minimum(apart, node - apart) * group, 1, self.switch)

    def parts_in_turn(self, ranks: int, stride: int = 1) -> int:
        """How many times longer an all-to-all within a node takes than sending one part; ranks are `stride` apart."""
        return sum(int(self.crowd(0, stride * apart, stride * ranks)) for apart in range(1, ranks))

    def link(self, rank: int, peer: int) -> tuple[bool, float, float]:
        """(whether both ranks are on one node, latency [s], bandwidth [bytes/s]) of the link between two ranks."""
        near = rank // self.ranks_per_node == peer // self.ranks_per_node
        return near, *self.rates(near)

    def rates(self, near: bool) -> tuple[float, float]:
        """Latency [s] and bandwidth [bytes/s] of links within a node (`near`), or of links between nodes."""
        if not near:
            return self.latency, self.bandwidth
        latency = self.latency if self.node_latency is None else self.node_latency
        return latency, self.bandwidth if self.node_bandwidth is None else self.node_bandwidth


#: The declarations of all numbers of a machine, by field name.
MACHINE_NUMBERS = load(Path(__file__).with_name("numbers.yaml"), dict[str, MachineNumber], "numbers")
