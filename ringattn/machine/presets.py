"""Machines by name, read from presets.yaml beside this module, which gives the source and reason of each number."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ..errors import InvalidInput
from ..files import load
from ..text import did_you_mean, shown
from .kernel_times import KernelRates
from .machine import Machine

#: The currency of all prices in presets.
CURRENCY = "USD"


class Fact(Struct, frozen=True):
    """One number of a machine and where it comes from.

    Machine files also give the `unit`; presets give the `reason`: a document or an explanation. For a number that
    published measurements set, `families` are their publications, and `without` is the number made without these.
    """

    value: bool | int | float
    source: Literal["cited", "fitted", "assumed", "measured"]
    unit: str = ""
    reason: str = ""
    families: tuple[str, ...] = ()
    without: int | float | None = None


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine that is known by name: its numbers, a description, and the speeds of several libraries' kernels on it.

    `flops_dtype` is the dtype for which `flops` is given; a plan in another dtype of the same size uses the same
    `flops`. The first library is the default; without any, every call runs at `flops`.
    """

    values: dict[str, Fact]
    about: str = ""
    flops_dtype: str = "bfloat16"
    kernels: dict[str, dict[str, Fact]] = {}

    def tuned(self, library: str) -> dict[str, Fact]:
        """The numbers, with the kernels of `library`, that published measurements set."""
        facts = {**self.values, **self.kernels.get(library, {})}
        return {number: fact for number, fact in facts.items() if fact.families}

    def families(self, library: str) -> tuple[str, ...]:
        """The publications of those measurements."""
        return tuple(dict.fromkeys(name for fact in self.tuned(library).values() for name in fact.families))

    def machine(self, name: str, library: str | None = None, *, unseen: str = "") -> Machine:
        """Make a `Machine` called `name` from this preset, with the kernels of `library` (None: the first library).

        With `unseen`, a family of published measurements, numbers fitted to that family are replaced by those fitted
        without it.
        """

        def value(fact: Fact) -> Any:
            return fact.without if unseen in fact.families else fact.value

        if library is not None and library not in self.kernels:
            raise InvalidInput(
                f"machine {name}/{library}: {did_you_mean(library, self.kernels)}expected one of the kernels "
                f"{', '.join(self.kernels) or '(this machine has none)'}, such as {name}/{next(iter(self.kernels), '')}"
            )
        sources: list[tuple[str, str]] = [
            (name, fact.source) for name, fact in self.values.items() if fact.source != "assumed"
        ]
        rates = None
        for chosen in [*self.kernels][:1] if library is None else [library]:
            facts = self.kernels[chosen]
            rates = KernelRates(chosen, **{name: value(fact) for name, fact in facts.items()})
            sources.append(("kernel_rates", facts["forward"].source))
        return Machine(
            **{name: value(fact) for name, fact in self.values.items()},
            sources=tuple(sources),
            flops_dtype=self.flops_dtype,
            kernel_rates=rates,
            preset=name,
        )


#: Presets by name. `cpu` and `cuda` are the defaults of these device types.
PRESETS = load(Path(__file__).with_suffix(".yaml"), dict[str, Preset], "presets")
#: The publications that set numbers of presets: their own measurements are in sample.
TUNING = frozenset(name for one in PRESETS.values() for lib in ("", *one.kernels) for name in one.families(lib))
#: The machines of the presets, by name.
MACHINES: dict[str, Machine] = {name: preset.machine(name) for name, preset in PRESETS.items()}


def get_machine(machine: Machine | str | None, device: str = "cpu") -> Machine:
    """The machine with the given name; a `Machine` is returned unchanged, and None gives the default for `device`.

    A name such as "h100_nvlink_ib/fa2" selects the kernels of a library on that machine. Raises InvalidInput if there
    is no such machine.
    """
    if machine is None:
        return MACHINES.get(device, MACHINES["cpu"])
    if isinstance(machine, Machine):
        return machine
    name, named, library = machine.partition("/") if isinstance(machine, str) else ("", "", "")
    if name not in MACHINES:
        raise InvalidInput(
            f"unknown machine {shown(machine)}; {did_you_mean(name, MACHINES)}expected {', '.join(MACHINES)}, or a "
            "Machine such as ringattn.Machine(flops=5e10, latency=1e-4, bandwidth=1.5e9)"
        )
    return PRESETS[name].machine(name, library) if named else MACHINES[name]
