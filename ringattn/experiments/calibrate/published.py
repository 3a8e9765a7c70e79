"""A published table of rings, predicted from the table's own time of one device. Nothing is fitted.

The README of github.com/zhuzilin/ring-flash-attention (commit 01c8baf): iterations per second of 8 GPUs, 8k tokens each,
bf16, causal, with the heads of Llama 3.1 8B (32 of 128, 8 of them key/value heads), on H800 and A100 nodes with NVLink. The
time of its flash attention call on 8k tokens gives the speed of one device; messages are taken to hide under visits, as
they do over NVLink (their bytes are those of the preset of the device), and merging to take no time, so that a balanced
ring is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ...machine.machine import Machine
from ...machine.presets import get_machine
from ...pattern import Causal
from ...planner import make_plan
from ...timing.forecast import BACKWARD
from ...timing.simulation import simulate

RANKS, TOKENS, HEADS, KV_HEADS, DIM = 8, 8192, 32, 8, 128
#: (GPU, preset of its links, pass, one device's flash attention, ring, zigzag ring), iterations per second.
TABLE = (
    ("H800", "h100_nvlink_ib", "forward", 591.5, 38.5, 63.0),
    ("H800", "h100_nvlink_ib", "both", 154.7, 10.4, 17.4),
    ("A100", "a100_nvlink_ib", "forward", 373.4, 24.0, 38.2),
    ("A100", "a100_nvlink_ib", "both", 94.7, 6.2, 10.6),
)


@dataclass(frozen=True)
class Published:
    """One number of the table, and what the timing model says, in iterations per second."""

    name: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


def published() -> Iterator[Published]:
    """Every ring of the table."""
    forward_flash = {gpu: one for gpu, _, way, one, _, _ in TABLE if way == "forward"}
    plan = partial(
        make_plan, Causal(), tokens=RANKS * TOKENS, ranks=RANKS, schedule="ring", heads=HEADS, kv_heads=KV_HEADS,
        head_dim=DIM, dtype="bfloat16",
    )  # fmt: skip
    flops = 4 * DIM * HEADS * TOKENS * (TOKENS + 1) / 2
    for gpu, preset, way, one, ring, zigzag in TABLE:
        forward = flops * forward_flash[gpu]
        for layout, found in (("contiguous", ring), ("zigzag", zigzag)):
            seconds = simulate(plan(layout=layout), _machine(preset, forward)).seconds
            if way == "both":
                backward = BACKWARD * flops / (1 / one - 1 / forward_flash[gpu])
                seconds += simulate(plan(layout=layout), _machine(preset, backward), backward=True).seconds
            yield Published(f"{gpu} {layout} {way}", found, 1 / seconds)


def _machine(preset: str, flops: float) -> Machine:
    """The links of a preset, and a speed."""
    base = get_machine(preset)
    return Machine(flops=flops, latency=base.latency, bandwidth=base.bandwidth, ranks_per_node=base.ranks_per_node, node_latency=base.node_latency, node_bandwidth=base.node_bandwidth)  # fmt: skip
