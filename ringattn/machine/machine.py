"""What the timing model knows of a machine, and where each number comes from. No torch, no measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput, did_you_mean
from .kernel_times import KernelTimes

#: Where a number may come from: a publication or a data sheet, a guess, or a run.
SOURCES = ("cited", "assumed", "measured")
#: Numbers of a machine: what a value must be, and one that is. Those with a default may also be None.
_FIELDS = {
    "flops": ("useful floating-point operations per second, > 0", 5e10),
    "latency": ("seconds >= 0", 1e-4),
    "bandwidth": ("bytes per second, > 0", 1.5e9),
    "node_latency": ("seconds >= 0, or None for latency", 1e-5),
    "node_bandwidth": ("bytes per second, > 0, or None for bandwidth", 1e10),
    "merge": ("bytes per second, > 0, or None: merging is not modelled", 1e10),
    "gamma": ("the part >= 0 of a message's time that it takes from a visit, or None: not modelled", 0.05),
    "jitter": ("standard deviation over mean of a visit's time, >= 0, or None: not modelled", 0.05),
    "call": ("seconds of a call beside its visits and messages, >= 0, or None: not modelled", 1e-3),
    "memory": ("bytes of one rank's memory, > 0, or None: not modelled", 80e9),
    "watts": ("watts of one rank, > 0, or None: not modelled", 700.0),
    "price": ("price of one rank for an hour, >= 0, or None: not modelled", 2.5),
    "mtbf": ("mean seconds between failures of one rank, > 0, or None: not modelled", 2e8),
    "checkpoint": ("bytes per second at which one rank writes a checkpoint, > 0, or None: not modelled", 1e9),
    "restart": ("seconds from a failure to the last checkpoint's state, >= 0, or None: not modelled", 60.0),
}
#: Fields that hold many numbers.
TABLES = ("kernel", "residuals")
#: Numbers that may be 0.
_ZERO = ("latency", "node_latency", "gamma", "jitter", "call", "price", "restart")


@dataclass(frozen=True)
class Machine:
    """What the timing model knows of a machine. Ranks are numbered node by node.

    None stands for an effect that is not modelled, and the output says so.
    """

    #: Useful floating-point operations per second of one rank's attention kernel; pairs that a mask hides do not count.
    flops: float
    #: Seconds that a message takes beside its bytes.
    latency: float
    #: Bytes per second that one rank can send, and receive at the same time, while all others do so too.
    bandwidth: float
    #: Ranks per node; 1: all links are alike.
    ranks_per_node: int = 1
    #: `latency` and `bandwidth` of messages between ranks of one node; None: as between nodes.
    node_latency: float | None = None
    node_bandwidth: float | None = None
    #: Whether the ranks of a node share its way to others, so that `bandwidth` is that of the node.
    shared_nic: bool = False
    #: Bytes per second at which a rank merges the partial result of a visit into what it has: reads and writes together.
    merge: float | None = None
    #: Receive slots beyond the block in use; None: 1, as the executor posts them.
    buffers: int | None = None
    #: A visit takes gamma times the time longer that the longest message of the rank travels during it.
    gamma: float | None = None
    #: Standard deviation over mean of the time of one visit, independent from visit to visit.
    jitter: float | None = None
    #: Seconds that a call takes beside its visits and messages: agreeing on the call, buffers, the program itself.
    call: float | None = None
    #: Bytes of one rank's memory.
    memory: float | None = None
    #: Watts that one rank draws, busy or not.
    watts: float | None = None
    #: Price of one rank for an hour, in any currency.
    price: float | None = None
    #: Mean seconds between failures of one rank.
    mtbf: float | None = None
    #: Bytes per second at which one rank writes its checkpoint, while all others do so too.
    checkpoint: float | None = None
    #: Seconds from a failure until all ranks have the state of the last checkpoint.
    restart: float | None = None
    #: Kernel times by tile shape, which replace `flops` where they are known.
    kernel: KernelTimes | None = None
    #: Measured over modelled times of whole passes, at the sizes of a calibration; empty: none were measured.
    residuals: tuple[float, ...] = ()
    #: (field, source) of numbers that are cited or measured; all others are assumed.
    sources: tuple[tuple[str, str], ...] = ()
    #: The dtype whose `flops` these are; None: that of any plan.
    flops_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, (wanted, example) in _FIELDS.items():
            value = getattr(self, name)
            if value is None and name not in ("flops", "latency", "bandwidth"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name not in _ZERO):
                raise InvalidInput(f"machine: {name}={value!r} must be {wanted}; try {name}={example:g}")
        if isinstance(self.ranks_per_node, bool) or not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1:
            raise InvalidInput(
                f"machine: ranks_per_node={self.ranks_per_node!r} must be a number of ranks per node >= 1; 1 is no nodes"
            )
        if not isinstance(self.shared_nic, bool):
            raise InvalidInput(
                f"machine: shared_nic={self.shared_nic!r} must be True or False; True: one way out for a node"
            )
        slots = self.buffers
        if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < 1):
            raise InvalidInput(
                f"machine: buffers={slots!r} must be a number of receive slots >= 1, or None for 1, as the executor has"
            )
        if not all(math.isfinite(ratio) and ratio > 0 for ratio in self.residuals):
            raise InvalidInput("machine: residuals must be ratios > 0 of measured over modelled times")
        if self.flops_dtype not in (None, *ITEM_BYTES):
            raise InvalidInput(
                f"machine: flops_dtype={self.flops_dtype!r}: {did_you_mean(self.flops_dtype, ITEM_BYTES)}expected one of "
                f"{', '.join(ITEM_BYTES)}, or None"
            )
        for name, label in self.sources:
            if name not in (*machine_fields(), *TABLES) or label not in SOURCES:
                hint = did_you_mean(name, machine_fields()) or did_you_mean(label, SOURCES)
                raise InvalidInput(
                    f"machine: sources has ({name!r}, {label!r}); {hint}expected a field and one of {', '.join(SOURCES)}"
                )

    def source(self, name: str) -> str:
        """Where the value of a field comes from: cited, assumed or measured."""
        return dict(self.sources).get(name, "assumed")

    def changed(self, **values: Any) -> Machine:
        """The machine with other values, which are assumed unless `sources` is among them. Other `flops` are those of any
        dtype unless `flops_dtype` is."""
        kept: dict[str, Any] = {"sources": tuple(pair for pair in self.sources if pair[0] not in values)}
        if "flops" in values:
            kept["flops_dtype"] = None
        return replace(self, **{**kept, **values})

    def interval(self, seconds: float, level: float = 0.9) -> tuple[float, float] | None:
        """Where a measured pass that is modelled to take `seconds` lies with probability `level`; None: not known.

        By order statistics of the residuals, without a law of errors. They are those of the sizes of a calibration.
        """
        ratios = sorted(self.residuals)
        # Of n + 1 exchangeable ratios, the new one is among the k smallest with probability k / (n + 1).
        skipped = int((1 - level) / 2 * (len(ratios) + 1) + 1e-9)
        if not skipped:
            return None
        return seconds * ratios[skipped - 1], seconds * ratios[-skipped]

    def node(self, rank: int, ranks: int) -> range:
        """The ranks of the node of a rank."""
        first = rank - rank % self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, ranks))

    def link(self, rank: int, peer: int) -> tuple[bool, float, float]:
        """Whether two ranks are on one node, and the latency and bandwidth of the link between them."""
        near = rank // self.ranks_per_node == peer // self.ranks_per_node
        return near, *self.rates(near)

    def rates(self, near: bool) -> tuple[float, float]:
        """The latency and bandwidth of links within a node (near) or between nodes."""
        if not near:
            return self.latency, self.bandwidth
        latency = self.latency if self.node_latency is None else self.node_latency
        return latency, self.bandwidth if self.node_bandwidth is None else self.node_bandwidth


def machine_fields() -> tuple[str, ...]:
    """The fields of a machine that hold one number, or one yes or no."""
    return tuple(field.name for field in fields(Machine) if field.name not in ("sources", "flops_dtype", *TABLES))
