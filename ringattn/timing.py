"""Predicted time of a plan on a machine: floating-point operations, latency and bandwidth. No torch, no measuring.

All numbers that come from here are modelled.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import InvalidInput, did_you_mean

if TYPE_CHECKING:
    from .plan import Plan
    from .steps import Step

#: The backward has five matrix products where the forward has two.
BACKWARD = 2.5
#: At most this many ranks of a plan are looked at, fewer of many: one of P costs O(P) where the pattern is dense.
SAMPLE, FEWEST, PLANNED = 8, 3, 192
#: Fields of a machine: what a value must be, and one that is.
_FIELDS = {
    "flops": ("useful floating-point operations per second, > 0", 5e10),
    "alpha": ("seconds >= 0", 1e-4),
    "beta": ("bytes per second, > 0", 1.5e9),
    "inner_alpha": ("seconds >= 0, or None for alpha", 1e-5),
    "inner_beta": ("bytes per second, > 0, or None for beta", 1e10),
}


@dataclass(frozen=True)
class Machine:
    """What the timing model knows of a machine. Ranks are numbered node by node."""

    #: Useful floating-point operations per second of one rank's attention kernel; pairs that a mask hides do not count.
    flops: float
    #: Seconds that a message takes beside its bytes.
    alpha: float
    #: Bytes per second that one rank can send, and receive at the same time, while all others do so too.
    beta: float
    #: Ranks per node; 1: all links are alike.
    inner: int = 1
    #: `alpha` and `beta` of messages between ranks of one node; None: as between nodes.
    inner_alpha: float | None = None
    inner_beta: float | None = None
    #: Whether the ranks of a node share its way to others, so that `beta` is that of the node.
    shared: bool = False

    def __post_init__(self) -> None:
        for name, (wanted, example) in _FIELDS.items():
            value = getattr(self, name)
            if value is None and name.startswith("inner"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and not name.endswith("alpha")):
                raise InvalidInput(f"machine: {name}={value!r} must be {wanted}; try {name}={example:g}")
        if isinstance(self.inner, bool) or not isinstance(self.inner, int) or self.inner < 1:
            raise InvalidInput(f"machine: inner={self.inner!r} must be a number of ranks per node >= 1; 1 is no nodes")
        if not isinstance(self.shared, bool):
            raise InvalidInput(f"machine: shared={self.shared!r} must be True or False; True: one way out for a node")

    def node(self, rank: int, ranks: int) -> range:
        """The ranks of the node of a rank."""
        first = rank - rank % self.inner
        return range(first, min(first + self.inner, ranks))

    def link(self, rank: int, peer: int) -> tuple[bool, float, float]:
        """Whether two ranks are on one node, and the alpha and beta of the link between them."""
        if rank // self.inner != peer // self.inner:
            return False, self.alpha, self.beta
        alpha = self.alpha if self.inner_alpha is None else self.inner_alpha
        return True, alpha, self.beta if self.inner_beta is None else self.inner_beta


#: By device type.
MACHINES = {
    # Gloo between processes of one host, one thread each. Measured on 2 cores of a virtual x86 server, fp32: a message
    # of 256 bytes took 90 us, one of 16 MiB both ways 11 ms, and a flash call of 2,048 tokens ran at 5e10 flop/s.
    "cpu": Machine(flops=5e10, alpha=1e-4, beta=1.5e9),
    # Assumed, not measured: half of the 989e12 dense bf16 flop/s in the data sheet of an H100 SXM; 10 us for a NCCL
    # message; one 400 Gb/s network card per GPU between nodes of 8, 80 % of the 450 GB/s of NVLink 4 each way inside.
    "cuda": Machine(flops=5e14, alpha=1e-5, beta=5e10, inner=8, inner_alpha=1e-5, inner_beta=3.6e11),
}


def get_machine(machine: Machine | str | None, device: str = "cpu") -> Machine:
    """A machine, that of a name, or the default of a device type."""
    if machine is None:
        return MACHINES.get(device, MACHINES["cpu"])
    if isinstance(machine, Machine):
        return machine
    if machine not in MACHINES:
        raise InvalidInput(
            f"unknown machine {machine!r}; {did_you_mean(machine, MACHINES)}expected {' or '.join(MACHINES)}, or a "
            "Machine such as ringattn.Machine(flops=5e10, alpha=1e-4, beta=1.5e9)"
        )
    return MACHINES[machine]


@dataclass(frozen=True)
class Prediction:
    """Modelled time of one pass of a plan: of the sampled rank that takes longest."""

    seconds: float
    #: Of that rank: its visits alone, and the time in which it only waits for messages.
    compute: float
    exposed: float
    #: The most that a sampled rank sends.
    bytes: int
    messages: int


def predict(plan: Plan, machine: Machine, *, backward: bool = False) -> Prediction:
    """The time of a forward, or of a backward: the sum over a rank's steps of max(visits, messages). Pure.

    Ranks are taken to run in step. Messages of a step follow each other, those sent beside those received and those
    within a node beside those between nodes, where a shared way out takes those of all its ranks; one that may last several steps counts in equal parts against each.
    """
    found = [_one(plan, machine, rank, backward) for rank in sampled(plan.ranks, machine.inner)]
    worst = max(found, key=lambda one: one.seconds)
    most = {"bytes": max(one.bytes for one in found), "messages": max(one.messages for one in found)}
    return Prediction(worst.seconds, worst.compute, worst.exposed, **most)


def sampled(ranks: int, inner: int = 1) -> list[int]:
    """Evenly spaced ranks, the first and the last among them; in nodes of `inner`, first and last ones in turn."""
    count = min(ranks, max(FEWEST, min(SAMPLE, PLANNED // ranks)))
    spaced = [(ranks - 1) * i // max(count - 1, 1) for i in range(count)]
    edges = [rank - rank % inner + (inner - 1) * (i % 2) for i, rank in enumerate(spaced)]
    return sorted({min(rank, ranks - 1) for rank in edges} if inner > 1 else set(spaced))


def _one(plan: Plan, machine: Machine, rank: int, backward: bool) -> Prediction:
    steps = _steps(plan, rank, backward)
    per_pair = plan.batch * 2 * (plan.head_dim + plan.value_dim) * (BACKWARD if backward else 1.0) / machine.flops
    # By step: seconds of its messages, apart by direction and by link.
    moved: defaultdict[int, defaultdict[tuple[str, bool], float]] = defaultdict(lambda: defaultdict(float))
    for other in machine.node(rank, plan.ranks) if machine.shared else (rank,):
        for index, way, near, seconds in _messages(plan, machine, other, backward):
            if other == rank or not near:
                moved[index][way, near] += seconds
    hops = [hop for step in steps for hop in step.sends]
    sent = sum(plan.part_bytes(part) for hop in hops for part in hop.parts)
    seconds = compute = 0.0
    for index, step in enumerate(steps):
        # The visit of an owner may be to several parts of its block.
        busy = per_pair * sum(plan.demand.pairs(rank, owner) for owner in {part.owner for part in step.visits})
        compute += busy
        seconds += max(busy, *moved[index].values(), 0.0)
    return Prediction(seconds, compute, seconds - compute, sent, len(hops))


def _steps(plan: Plan, rank: int, backward: bool) -> tuple[Step, ...]:
    rank_plan = plan.for_rank(rank)
    return rank_plan.backward if backward else rank_plan.forward


def _messages(plan: Plan, machine: Machine, rank: int, backward: bool) -> Iterator[tuple[int, str, bool, float]]:
    """(step, direction, within a node, seconds): the parts of a rank's messages that fall into its steps."""
    for index, step in enumerate(_steps(plan, rank, backward)):
        for way, hops in (("send", step.sends), ("recv", step.recvs)):
            for hop in hops:
                near, alpha, beta = machine.link(rank, hop.peer)
                spanned = range(index, hop.until + 1)
                for i in spanned:
                    yield i, way, near, (alpha + sum(map(plan.part_bytes, hop.parts)) / beta) / len(spanned)
