"""What a run needs beside time: memory of a rank by category, failures and checkpoints of a job, energy and cost. Modelled."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt
from typing import TYPE_CHECKING

from ..dtypes import ITEM_BYTES
from ..errors import InvalidInput
from ..machine.machine import Machine
from ..plan.steps import SUMS, Kind, Part
from ..text import duration
from .forecast import sampled

if TYPE_CHECKING:
    from ..plan.plan import Plan

HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


def most_memory(plan: Plan) -> int:
    """Bytes of one rank in a forward at most: what `memory` finds, but without planning the steps of any rank."""
    block = _block(plan, ("kv",))
    blocks = {"allgather": plan.ranks, "ring": 2, "direct": 2}.get(plan.schedule, 3) if plan.ranks > 1 else 0
    receiving = blocks * block
    if plan.ulysses_size > 1:
        exchanged = (plan.ulysses_size - 1) * max(plan.part_bytes(Part("qkv", 0)), plan.part_bytes(Part("out", 0)))
        receiving = max(receiving, exchanged + block)
    return sum(memory(plan, receiving=receiving).values())


def memory(plan: Plan, *, backward: bool = False, receiving: int | None = None) -> dict[str, int]:
    """Bytes of one rank at the peak of a pass by category, of the rank with the most tokens.

    Measured peaks of dense rings are within a tenth of it (README). Forward: inputs, output, lse, receive buffers and one
    visit's output. Blocks are taken whole, so that plans that send parts of them need less. Backward: what was saved, the
    gradients that come in, gather and go out, the block that the forward kept, messages, one visit's gradients. CPUs
    compute 16-bit inputs in copies of a visit's inputs in fp32, which are not counted. `receiving` are the bytes of the
    receive buffers of a forward, where these are known already.
    """
    item = ITEM_BYTES[plan.dtype]
    wide = max(item, 4)
    rows = max(map(plan.layout.rows, range(plan.ranks))) if plan.ranks <= 4096 else -(-plan.tokens // plan.ranks)
    tokens = plan.batch * rows
    inputs = plan.heads * plan.head_dim + plan.kv_heads * (plan.head_dim + plan.value_dim)
    result = plan.heads * plan.value_dim
    found = {
        "q, k, v": tokens * inputs * item,
        "output": tokens * result * item,
        "lse": tokens * plan.heads * wide,
    }
    if plan.ulysses_size > 1:
        found["q, k, v, output and lse of the team's heads"] = tokens * ((inputs + result) * item + plan.heads * wide)
    if not backward:
        found["receive buffers"] = _receiving(plan, ("kv",), backward) if receiving is None else receiving
        if item != wide and plan.ranks > 1:
            found["sums of the output"] = tokens * result * wide
        found["one visit's output"] = tokens * (result * item + plan.heads * wide)
        return found
    keys = plan.rotates == "keys"
    kinds: tuple[Kind, ...] = ("kv", "grad") if keys else ("q", "row", "dq")
    found["gradient of the output"] = tokens * result * item
    found["sums of dq, dk, dv"] = tokens * inputs * wide
    if item != wide:
        found["dq, dk, dv"] = tokens * inputs * item
    if keys and plan.ranks > 1:
        found["kept block"] = _block(plan, ("kv",))
    found["message buffers"] = _receiving(plan, kinds, backward)
    found["one visit's gradients"] = tokens * inputs * wide
    return found


def _block(plan: Plan, kinds: tuple[Kind, ...]) -> int:
    """Bytes of the message with a whole block of the first rank, which has as many tokens as any but for one."""
    return sum(plan.part_bytes(Part(kind, 0)) for kind in kinds)


def _receiving(plan: Plan, kinds: tuple[Kind, ...], backward: bool) -> int:
    """Bytes of buffers: in a ring and in `direct` as below; elsewhere what sampled ranks receive at once, and one block.

    Two blocks, one that is computed with and sent, and one that comes. In a backward of more than two ranks the gradients
    come and go with them, on more than three ranks in the same messages, but for the first one, which is shorter and leaves
    its two buffers behind; a buffer more holds the gradients of the visit.
    """
    if plan.ranks == 1 or not plan.batch:
        return 0
    if plan.schedule in ("ring", "direct"):
        if not backward:
            return 2 * _block(plan, kinds)
        blocks, sums = (tuple(k for k in kinds if (k in SUMS) is wanted) for wanted in (False, True))
        if plan.ranks == 2:
            return 2 * (_block(plan, sums) if plan.rotates == "keys" else _block(plan, blocks))
        together = 2 * _block(plan, kinds) if plan.ranks > 3 else _block(plan, sums)
        return 2 * _block(plan, blocks) + together + _block(plan, sums)
    most = 0
    for rank in sampled(plan.ranks):
        steps = plan.for_rank(rank).backward if backward else plan.for_rank(rank).forward
        for index in range(len(steps)):
            flying = (hop for i, step in enumerate(steps[: index + 1]) for hop in step.recvs if hop.until >= index >= i)
            most = max(most, sum(plan.part_bytes(part) for hop in flying for part in hop.parts))
    return most + _block(plan, kinds)


def checkpoint_bytes(plan: Plan, *, backward: bool = False) -> int:
    """Bytes that one rank must write to continue a pass later: its sums so far. Forward: out and lse; backward: dq, dk, dv.

    The inputs are taken to be elsewhere already; the number of the step is not counted.
    """
    tokens = plan.batch * -(-plan.tokens // plan.ranks)
    wide = max(ITEM_BYTES[plan.dtype], 4)
    width = plan.heads * (plan.value_dim + 1)
    if backward:
        width = plan.heads * plan.head_dim + plan.kv_heads * (plan.head_dim + plan.value_dim)
    return tokens * width * wide


def young_daly(write: float, mean: float) -> float:
    """Seconds of work between checkpoints that lose least, to first order: sqrt(2 C M) for checkpoints of C seconds and
    M seconds between failures (Young 1974, Daly 2006)."""
    return sqrt(2 * write * mean)


def expected(work: float, interval: float, write: float, restart: float, mean: float) -> float:
    """Expected seconds until `work` seconds are done, with a checkpoint of `write` seconds after each `interval` of them
    but the last: work that is no longer than an interval has no checkpoint.

    Failures come at random, `mean` seconds apart, also while checkpoints are written and while the `restart` seconds
    after a failure pass: M exp(R / M) (exp((tau + C) / M) - 1) for each interval (Daly 2006, equation 13).
    """
    whole = max(0, ceil(work / interval) - 1)
    spans = whole * expm1((interval + write) / mean) + expm1((work - whole * interval) / mean)
    return mean * exp(restart / mean) * spans


@dataclass(frozen=True)
class Failures:
    """Failures of a job: seconds between them over all ranks, seconds that a checkpoint takes and seconds of work between
    two (the whole job where it is so short that none is written), and the expected seconds to the result."""

    mean: float
    write: float
    interval: float
    expected: float
    checkpoints: int


def failures(plan: Plan, machine: Machine, work: float, *, backward: bool = False) -> Failures | None:
    """Those of a job of `work` seconds on all ranks; None where the machine has no mtbf. Raises InvalidInput where it has no rate of
    checkpoints, or where it fails before it can write one."""
    if machine.mtbf is None:
        return None
    if machine.checkpoint is None or machine.restart is None:
        raise InvalidInput(
            "machine: mtbf needs checkpoint (bytes per second that one rank writes) and restart (seconds), from which the "
            "interval follows; try checkpoint=1e9, restart=60"
        )
    mean = machine.mtbf / plan.ranks
    write = checkpoint_bytes(plan, backward=backward) / machine.checkpoint
    if not work:
        return Failures(mean, write, 0.0, 0.0, 0)
    interval = min(young_daly(write, mean), work)
    checkpoints = ceil(work / interval) - 1
    if max(interval + (write if checkpoints else 0.0), machine.restart) > 50 * mean:
        raise InvalidInput(
            f"machine: {plan.ranks:,} ranks fail every {duration(mean)}, long before a checkpoint of {duration(write)} or a "
            f"restart of {duration(machine.restart)} is through: the result is never reached; try a larger mtbf or fewer ranks"
        )
    return Failures(mean, write, interval, expected(work, interval, write, machine.restart, mean), checkpoints)


def energy(machine: Machine, ranks: int, seconds: float) -> float | None:
    """Joules that all ranks draw, busy or not; None where the machine has no watts."""
    return None if machine.watts is None else machine.watts * ranks * seconds


def cost(machine: Machine, ranks: int, seconds: float) -> float | None:
    """The price of all ranks, in the currency of the machine; None where it has none."""
    return None if machine.price is None else machine.price * ranks * seconds / HOUR
