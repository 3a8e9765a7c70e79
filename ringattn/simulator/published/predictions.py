"""387 published measurements of attention on GPUs, read from the file beside this module, each predicted twice.

The predictions are by the preset alone, and with the kernel rate of the source.

Rows of a family come from one source. What a row does not state is taken from the source's benchmark: hybrid_dcp of one
long document is a ring, and the two methods of MagiAttention gather the keys; these names are in `method`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ...machine.kernel_times import KernelRates
from ...machine.machine import Machine
from ...machine.presets import get_machine
from ...pattern import Causal, Documents, Full, Pattern
from ...plan.plan import Plan
from ...planner import make_plan
from ..progress import Listener
from ..timing.simulation import simulate

#: What each family is, and where it was published (repository, version).
SOURCES = {
    "zhuzilin": "ring-flash-attention's README, batch: github.com/zhuzilin/ring-flash-attention, 8996282",
    "zhuzilin-varlen": "ring-flash-attention's README, varlen: github.com/zhuzilin/ring-flash-attention, 8996282",
    "zhuzilin-old": "ring-flash-attention's README of 2024: github.com/zhuzilin/ring-flash-attention, b00d24d",
    "magi-h100": "bars of MagiAttention's benchmark, +-3 TFLOP/s: github.com/SandAI-org/MagiAttention, 2c64135",
    "usp-a100-nvlink": "an image in USP's README: github.com/feifeibear/long-context-attention, 56118e0",
    "usp-a100-pcie": "an image in USP's README: github.com/feifeibear/long-context-attention, 56118e0",
    "kernel-h100": "TritonBench, flash_attention: github.com/pytorch/benchmark, ff65cb6",
}
#: Lengths of the documents of 8,192 tokens that varlen rows are the mean of; on 8 GPUs they are 8 times as long.
DOCUMENTS = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
#: Tokens of the call on one device that a source compares its rings with.
DEVICE_TOKENS = 8192
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
class Measurement:
    """One row: what was measured on which machine, and in how many seconds per iteration."""

    id: str
    machine: str
    kernel: str
    method: str
    gpus: int
    schedule: str
    layout: str
    pattern: str
    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    #: "fwd", "bwd", or "both".
    passes: str
    seconds: float
    #: The kernel's rate by the same source in TFLOP/s, and the row of that rate, or "device"; None and "": not known.
    kernel_tflops: float | None
    reference: str

    @property
    def family(self) -> str:
        """The family of the row."""
        return self.id.rpartition("-")[0]

    @property
    def directions(self) -> tuple[bool, ...]:
        """The passes as values of `backward`."""
        return {"fwd": (False,), "bwd": (True,), "both": (False, True)}[self.passes]

    @property
    def shard(self) -> int:
        """Tokens of a rank, of all sequences."""
        return self.batch * self.tokens // self.gpus

    def plans(self) -> tuple[Plan, ...]:
        """The plans whose mean time the row gives."""
        return self._plans(self.tokens, self.gpus, self.schedule, self.layout)

    def device_plans(self) -> tuple[Plan, ...]:
        """The same attention on one device, with as many tokens as the source gave it."""
        return self._plans(DEVICE_TOKENS, 1, "ring", "contiguous")

    def device_seconds(self) -> float:
        """Seconds of the call on one device, by the kernel's rate."""
        assert self.kernel_tflops is not None
        plans = self.device_plans()
        flops = 4 * self.head_dim * sum(plan.demand.pairs(0, 0) for plan in plans) * self.batch / len(plans)
        return flops * {"fwd": 1.0, "bwd": 2.5, "both": 3.5}[self.passes] / (self.kernel_tflops * 1e12)

    def _plans(self, tokens: int, ranks: int, schedule: str, layout: str) -> tuple[Plan, ...]:
        patterns: tuple[Pattern, ...] = (Causal() if self.pattern == "causal" else Full(),)
        if self.pattern == "documents":
            scale = tokens // DEVICE_TOKENS
            patterns = tuple(Causal() & Documents([scale * length for length in lengths]) for lengths in DOCUMENTS)
        # Rings between nodes have one rank of each node, so that a double ring is one ring.
        place = tokens, ranks, schedule.replace("double_ring", "ring"), layout
        sizes = self.batch, self.heads, self.kv_heads, self.head_dim
        return tuple(_plan(pattern, *place, *sizes) for pattern in patterns)


@cache
def _plan(pattern: Pattern, tokens: int, ranks: int, schedule: str, layout: str, *sizes: int) -> Plan:
    """A plan in bfloat16; `sizes` are batch, heads, key/value heads and head dim."""
    named: dict[str, Any] = dict(zip(("batch", "heads", "kv_heads", "head_dim"), sizes, strict=True))
    return make_plan(pattern, tokens=tokens, ranks=ranks, schedule=schedule, layout=layout, dtype="bfloat16", **named)


def _read(name: str, text: str) -> Any:
    """The value of a field of a row."""
    if name in ("seconds", "kernel_tflops"):
        return float(text) if text else None
    return int(text) if name in ("gpus", "tokens", "batch", "heads", "kv_heads", "head_dim") else text


def read_measurements() -> list[Measurement]:
    """All rows, in the order of the file."""
    with (Path(__file__).parent / "measurements.csv").open(newline="", encoding="utf-8") as file:
        return [Measurement(**{name: _read(name, text) for name, text in row.items()}) for row in csv.DictReader(file)]


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


def predict_measurements(
    rows: Sequence[Measurement], tell: Listener = lambda done, count, what: None
) -> list[PredictedRow]:
    """The predictions of rows; the rows that give others' kernel rates must be among them. `tell` hears of progress."""
    by_id = {row.id: row for row in rows}
    predictions = []
    for done, row in enumerate(rows):
        tell(done, len(rows), "measurements")
        by_rate = _predict_with_rate(row, by_id.get(row.reference))
        predictions.append(PredictedRow(row, _predict(row, _machine(row)), by_rate))
    return predictions


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
