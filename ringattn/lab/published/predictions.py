"""Published measurements of attention on GPUs, read from the file beside this module, each predicted three times.

Three predictions: by the preset made without the row's family, by the preset as it is, and by a one-line null model,
all FLOPs at half of the data sheet's peak.

The rows of a family come from one source. What a row does not state is taken from the source's benchmark: hybrid_dcp
with one long document is a ring, and both methods of MagiAttention gather the keys; `method` has these names.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from msgspec import convert

from ...call.planner import make_plan
from ...files import load, read_text
from ...machine.machine import Machine
from ...machine.presets import PRESETS
from ...pattern import Causal, Documents, Full, Pattern
from ...plan.plan import Plan
from ...simulator.progress import Listener
from ...simulator.timing.simulation import simulate

#: What is known of the sources of rows and of training steps.
NOTES: dict[str, Any] = load(Path(__file__).with_name("sources.yaml"), dict[str, Any], "sources")
#: Where each family of rows was published (repository, version), or what is known of a family without rows here.
SOURCES: dict[str, str] = NOTES["families"] | NOTES["elsewhere"]
#: Rows of the file that are not compared.
LEFT_OUT = {row for one in NOTES["left_out"] for row in one["rows"]}
#: varlen rows are means over these splits of 8,192 tokens into documents; on 8 GPUs each document is 8 times as long.
DOCUMENTS = ((8192,), (256, 7392, 544), (4096, 4096), (3104, 3200, 1600, 160, 128))
#: FLOPs of passes relative to a forward.
PRODUCTS = {"fwd": 1.0, "bwd": 2.5, "both": 3.5}
#: Extra steps for exchanging q, k and v one by one instead of all three in one step.
SEPARATE = 2


@dataclass(frozen=True)
class Measurement:
    """A published measurement, one row of measurements.csv: what was measured, where, and its seconds per iteration."""

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

    @property
    def family(self) -> str:
        """The name of the publication; when it is tested, all its rows are left out of the fit."""
        return self.id.rpartition("-")[0]

    @property
    def directions(self) -> tuple[bool, ...]:
        """The measured passes, as values of `backward`: False for a forward, True for a backward."""
        return {"fwd": (False,), "bwd": (True,), "both": (False, True)}[self.passes]

    @property
    def shard(self) -> int:
        """The number of tokens per rank, summed over all sequences."""
        return self.batch * self.tokens // self.gpus

    @property
    def flops(self) -> float:
        """FLOPs per GPU."""
        pairs = fmean(plan.pairs() for plan in self.plans())
        return 4 * self.head_dim * pairs * self.batch * PRODUCTS[self.passes] / self.gpus

    def plans(self) -> tuple[Plan, ...]:
        """The plans of this measurement; its time is the mean over them."""
        patterns: tuple[Pattern, ...] = (Causal() if self.pattern == "causal" else Full(),)
        if self.pattern == "documents":
            scale = self.tokens // sum(DOCUMENTS[0])
            patterns = tuple(Causal() & Documents([scale * length for length in lengths]) for lengths in DOCUMENTS)
        names = ("tokens", "layout", "batch", "heads", "kv_heads", "head_dim")
        sizes: dict[str, Any] = {name: getattr(self, name) for name in names}
        # A double ring over nodes with one rank each is a plain ring.
        sizes |= {"ranks": self.gpus, "schedule": self.schedule.replace("double_ring", "ring"), "dtype": "bfloat16"}
        return tuple(make_plan(pattern, **sizes) for pattern in patterns)


def read_table(name: str, folder: Path = Path(__file__).parent) -> list[dict[str, str]]:
    """The rows of a CSV file, beside this module or in a folder. Raises InvalidInput if it cannot be read."""
    return list(csv.DictReader(read_text(folder / name, name).splitlines()))


def read_measurements() -> list[Measurement]:
    """All rows of measurements.csv except those of `LEFT_OUT`, in order."""
    rows = convert(read_table("measurements.csv"), list[Measurement], strict=False)
    return [row for row in rows if row.id not in LEFT_OUT]


@dataclass(frozen=True)
class PredictedRow:
    """A published measurement, and the seconds that three models predict for it.

    unseen: by the machine preset, fitted without this publication. preset: by the preset as it is. null: by half of the
    GPU's peak rate.
    """

    row: Measurement
    unseen: float
    preset: float
    null: float


def predict_measurements(
    rows: Sequence[Measurement], tell: Listener = lambda done, count, what: None
) -> list[PredictedRow]:
    """Predict the seconds of each measurement; `tell` is a progress callback."""
    predictions = []
    for done, row in enumerate(rows):
        tell(done, len(rows), "measurements")
        unseen, preset = (
            fmean(sum(_pass_seconds(plan, machine, way) for way in row.directions) for plan in row.plans())
            for machine in (_machine(row, row.family), _machine(row, ""))
        )
        null = row.flops / (PRESETS[row.machine].values["peak"].value / 2)
        predictions.append(PredictedRow(row, unseen, preset, null))
    return predictions


def _machine(row: Measurement, unseen: str) -> Machine:
    """The machine of a row: its preset with the source's kernel. Libraries gather keys in one call."""
    machine = PRESETS[row.machine].machine(row.machine, row.kernel, unseen=unseen).changed(one_gather=True)
    # USP exchanges unpacked q, k and v one after another: two more steps for the host than ours.
    more = SEPARATE if row.schedule.startswith("ulysses") and "no_packed" in row.method else 0
    return machine.changed(host_call=(machine.host_call or 0.0) + more * (machine.host or 0.0))


@cache
def _pass_seconds(plan: Plan, machine: Machine, backward: bool) -> float:
    return simulate(plan, machine, backward=backward).seconds
