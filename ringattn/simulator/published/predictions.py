"""Published measurements, each predicted twice: by the preset alone, and with the kernel rate of its source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from ...machine.kernel_times import KernelRates
from ...machine.machine import Machine
from ...machine.presets import get_machine
from ...plan.plan import Plan
from ..timing.simulation import simulate
from .measurements import Measurement

#: Causes of time, each a sum of causes of a timeline.
CAUSES = {
    "kernel": ("imbalance",),
    "network": ("wait for peers", "wait for messages", "interference"),
    "merge": ("merge",),
    "overhead": ("host", "call"),
}
#: Steps of exchanging q, k and v one by one, beyond the one step that exchanges all three.
SEPARATE = 2
#: A source's kernel takes at most this many times as long as the preset's, and at least this part of its time: beyond,
#: the rate that a source gives is that of something else.
SLOWEST, FASTEST = 3.0, 0.7


@dataclass(frozen=True)
class Predicted:
    """The modelled seconds of an iteration, by cause."""

    causes: dict[str, float]

    @property
    def seconds(self) -> float:
        """The sum over all causes."""
        return sum(self.causes.values())


@dataclass(frozen=True)
class PredictedRow:
    """A row, its prediction by the preset alone, and with the source's kernel rate (None: the source gives none)."""

    row: Measurement
    preset: Predicted
    source: Predicted | None

    def error(self, predicted: Predicted) -> float:
        """The relative error of a prediction: positive where the model is too slow."""
        return predicted.seconds / self.row.seconds - 1


def predict_measurements(rows: Sequence[Measurement]) -> list[PredictedRow]:
    """The predictions of rows; the rows that give others' kernel rates must be among them."""
    by_id = {row.id: row for row in rows}
    return [
        PredictedRow(row, _predict(row, _machine(row)), _predict_with_rate(row, by_id.get(row.reference)))
        for row in rows
    ]


def _machine(row: Measurement) -> Machine:
    """The machine of a row: its preset with the kernel that the source names. Libraries gather keys in one call."""
    machine = get_machine(f"{row.machine}/{row.kernel}").changed(one_gather=True)
    if row.gpus == 1:  # kernels alone are timed in a queue that the host fills ahead
        return machine.changed(host=None, host_call=None)
    # USP exchanges q, k and v one after another where they are not packed: two steps more than ours for the host.
    more = SEPARATE if row.schedule.startswith("ulysses") and "no_packed" in row.method else 0
    return machine.changed(host_call=(machine.host_call or 0.0) + more * (machine.host or 0.0))


def _predict(row: Measurement, machine: Machine) -> Predicted:
    return _mean_time(row.plans(), machine, row.directions)


def _predict_with_rate(row: Measurement, reference: Measurement | None) -> Predicted | None:
    """The prediction of a row where the kernel is as fast as in the row's source."""
    if row.kernel_tflops is None:
        return None
    machine = _machine(row)
    assert machine.kernel_rates is not None
    if reference is None:
        alone = machine.changed(host=None, host_call=None)
        known, seconds = _mean_time(row.device_plans(), alone, row.directions), row.device_seconds()
    else:
        # The rate of this row includes its exchanges, which are modelled.
        known, seconds = _predict(reference, machine), reference.seconds
    kernel = known.causes["kernel"]
    others = 0.0 if reference is None else known.causes["network"] + known.causes["merge"]
    factor = min(max((seconds - others) / kernel, FASTEST), SLOWEST)
    return _predict(row, replace(machine, kernel_rates=_slower(machine.kernel_rates, factor)))


def _slower(rates: KernelRates, factor: float) -> KernelRates:
    """The kernel that takes `factor` times as long."""
    forward, backward, memory = (value / factor for value in (rates.forward, rates.backward, rates.memory))
    return replace(rates, forward=forward, backward=backward, memory=memory, launch=rates.launch * factor)


def _mean_time(plans: Iterable[Plan], machine: Machine, directions: tuple[bool, ...]) -> Predicted:
    """The mean time of plans, summed over passes."""
    parts = [_passes(plan, machine, directions) for plan in plans]
    return Predicted({cause: fmean(part[cause] for part in parts) for cause in CAUSES})


@cache
def _passes(plan: Plan, machine: Machine, directions: tuple[bool, ...]) -> dict[str, float]:
    causes = dict.fromkeys(CAUSES, 0.0)
    for backward in directions:
        timeline = simulate(plan, machine, backward=backward)
        for cause, parts in CAUSES.items():
            causes[cause] += sum(timeline.exposed[part] for part in parts)
        causes["kernel"] += timeline.compute
    return causes
