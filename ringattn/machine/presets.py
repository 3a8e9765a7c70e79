"""Machines by name, read from presets.yaml beside this module, where each number has its source and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ..errors import InvalidInput
from ..files import load
from ..text import did_you_mean
from .kernel_times import KernelRates
from .machine import Machine

#: The currency of all prices of presets.
CURRENCY = "USD"


class Fact(Struct, frozen=True):
    """A number of a machine, its unit in machine files, its source, and in presets the document or reason.

    A number that was fitted has the `families` of published rows that it is from, and the number `without` them.
    """

    value: bool | int | float
    source: Literal["cited", "fitted", "assumed", "measured"]
    unit: str = ""
    reason: str = ""
    families: tuple[str, ...] = ()
    without: float | None = None


class Preset(Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of a machine, what it is, the dtype of `flops`, and the rates of the kernels of several libraries.

    A plan in another dtype of the same size takes the same `flops`. The first library is the default; without any,
    every call has the rate `flops`.
    """

    values: dict[str, Fact]
    about: str = ""
    flops_dtype: str = "bfloat16"
    kernels: dict[str, dict[str, Fact]] = {}

    def machine(self, name: str, library: str | None = None, *, unseen: str = "") -> Machine:
        """The machine that has these numbers, called `name`, with the kernels of a library; None: of the first.

        `unseen`: a family of published rows; numbers that were fitted to these rows are replaced by those without them.
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
#: The machines of the presets, by name.
MACHINES: dict[str, Machine] = {name: preset.machine(name) for name, preset in PRESETS.items()}


def get_machine(machine: Machine | str | None, device: str = "cpu") -> Machine:
    """The machine itself, the machine of a name in `MACHINES`, or for None the default of a device type.

    A name such as "h100_nvlink_ib/fa2" is that machine with the kernels of another library. Raises InvalidInput where
    there is no such machine.
    """
    if machine is None:
        return MACHINES.get(device, MACHINES["cpu"])
    if isinstance(machine, Machine):
        return machine
    name, named, library = machine.partition("/") if isinstance(machine, str) else ("", "", "")
    if name not in MACHINES:
        raise InvalidInput(
            f"unknown machine {machine!r}; {did_you_mean(name, MACHINES)}expected {', '.join(MACHINES)}, or a "
            "Machine such as ringattn.Machine(flops=5e10, latency=1e-4, bandwidth=1.5e9)"
        )
    return PRESETS[name].machine(name, library) if named else MACHINES[name]
