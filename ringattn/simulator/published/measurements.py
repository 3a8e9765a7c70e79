"""387 published measurements of attention on GPUs, read from the file beside this module, and the plans of their rows.

Rows of a family come from one source. What a row does not state is taken from the source's benchmark: hybrid_dcp of one
long document is a ring, and the two methods of MagiAttention gather the keys; these names are in `method`.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...pattern import Causal, Documents, Full, Pattern
from ...plan.plan import Plan
from ...planner import make_plan

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
