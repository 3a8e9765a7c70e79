"""A published table of rings, predicted from the table's own time of one device. Nothing is fitted.

The README of github.com/zhuzilin/ring-flash-attention (commit 01c8baf): iterations per second of 8 GPUs with 8k tokens
each, bf16, causal, with the heads of Llama 3.1 8B (32 heads of 128, 8 key/value heads), on H800 and A100 nodes with
NVLink. The time of its flash attention call on 8k tokens gives the speed of one device. Messages are assumed to hide
under visits, as they do over NVLink (with the links of the device's preset), and merging to take no time: the
prediction of a balanced ring is an upper bound.
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

RANKS, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 8, 8192, 32, 8, 128
#: (GPU, preset of its links, pass, flash attention on one device, ring, zigzag ring), iterations per second.
TABLE = (
    ("H800", "h100_nvlink_ib", "forward", 591.5, 38.5, 63.0),
    ("H800", "h100_nvlink_ib", "both", 154.7, 10.4, 17.4),
    ("A100", "a100_nvlink_ib", "forward", 373.4, 24.0, 38.2),
    ("A100", "a100_nvlink_ib", "both", 94.7, 6.2, 10.6),
)


@dataclass(frozen=True)
class Published:
    """One ring of the table: measured and modelled iterations per second."""

    name: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.modelled / self.measured - 1


def predict_published() -> Iterator[Published]:
    """Every ring of the table."""
    forward_rates = {gpu: device_rate for gpu, _, direction, device_rate, _, _ in TABLE if direction == "forward"}
    plan = partial(
        make_plan,
        Causal(),
        tokens=RANKS * TOKENS,
        ranks=RANKS,
        schedule="ring",
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
    )
    device_flops = 4 * HEAD_DIM * HEADS * TOKENS * (TOKENS + 1) / 2
    for gpu, preset, direction, device_rate, ring_rate, zigzag_rate in TABLE:
        forward_speed = device_flops * forward_rates[gpu]
        for layout, measured in (("contiguous", ring_rate), ("zigzag", zigzag_rate)):
            seconds = simulate(plan(layout=layout), _machine(preset, forward_speed)).seconds
            if direction == "both":
                backward_speed = BACKWARD * device_flops / (1 / device_rate - 1 / forward_rates[gpu])
                machine = _machine(preset, backward_speed)
                seconds += simulate(plan(layout=layout), machine, backward=True).seconds
            yield Published(f"{gpu} {layout} {direction}", measured, 1 / seconds)


def _machine(preset: str, flops: float) -> Machine:
    """A machine with the links of a preset and this speed, and nothing else."""
    links = get_machine(preset)
    return Machine(
        flops=flops,
        latency=links.latency,
        bandwidth=links.bandwidth,
        ranks_per_node=links.ranks_per_node,
        node_latency=links.node_latency,
        node_bandwidth=links.node_bandwidth,
    )
