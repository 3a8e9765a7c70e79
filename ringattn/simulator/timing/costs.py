"""Models of costs other than time: memory of a rank, failures and checkpoints of a job."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, expm1, sqrt
from typing import TYPE_CHECKING

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine
from ...plan.steps import SUMS, Kind, Part
from ...text import duration
from .kernel_seconds import timed_ranks

if TYPE_CHECKING:
    from ...layout.regular import Layout
    from ...plan.plan import Plan

SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6
#: Up to this many ranks, the longest shard is searched for; above, shards are assumed to be of equal length.
MOST_COMPARED = 4096
#: The bytes of keys and values that are expanded at once, as in `kernels.expand`; a backward holds three times as many.
EXPANDED, EXPANDED_BACKWARD = 1 << 27, 3
#: A job never finishes if the next checkpoint or a restart takes more than this many mean times between failures.
HOPELESS = 50


def bound_memory(plan: Plan) -> int:
    """A quick upper bound on the bytes that one rank needs in a forward; plans the steps of no rank."""
    block = _block_bytes(plan, ("kv",))
    blocks = {"allgather": plan.ranks, "ring": 2, "direct": 2}.get(plan.schedule, 3) if plan.ranks > 1 else 0
    receiving = blocks * block
    if plan.ulysses_size > 1:
        exchanged = max(plan.part_bytes(Part("qkv", 0)), plan.part_bytes(Part("out", 0)))
        receiving = max(receiving, (plan.ulysses_size - 1) * exchanged + block)
    return sum(memory(plan, receiving=receiving).values())


def memory(plan: Plan, *, backward: bool = False, receiving: int | None = None) -> dict[str, int]:
    """The bytes in use at the peak of a pass, by category, on the rank with the most tokens.

    A forward holds the inputs, output and lse, receive buffers, and the output of one kernel call's block. A backward
    holds what the forward saved, the incoming gradient, accumulators of the gradients, the block that the forward
    saved, message buffers, and the gradients for one block. Blocks count in full, so a plan that sends parts of blocks
    needs less. The fp32 copies that CPUs make of 16-bit inputs are not counted. Measured peaks of dense rings differ
    from the sum of all categories by at most a tenth (docs/measured.md).

    `receiving` is the size of a forward's receive buffers in bytes, if the caller knows it; None: it is computed.
    """
    item = ITEM_BYTES[plan.dtype]
    wide = max(item, 4)  # accumulators and lse are fp32, or fp64 for fp64 inputs
    tokens, keys = (plan.batch * _longest_shard(plan.layout_of(kind)) for kind in ("q", "kv"))
    of_keys = sum(heads * width for heads, width, _ in plan.tensors("kv"))
    inputs = tokens * plan.heads * plan.head_dim + keys * of_keys
    output = plan.heads * plan.value_dim
    sizes = {"q, k, v": inputs * item, "output": tokens * output * item, "lse": tokens * plan.heads * wide}
    if plan.ulysses_size > 1:
        copied = max(plan.ulysses_size - plan.kv_heads, 0) if plan.block is None else plan.ulysses_size - 1
        copies = keys * copied * of_keys // plan.block_heads  # each copy is of one head, or of all of a block
        exchanged = (inputs + copies + tokens * output) * item + tokens * plan.heads * wide
        sizes["q, k, v, output and lse of the Ulysses group's heads"] = exchanged
    if plan.expand_flops:
        made = keys * plan.kv_heads * (plan.head_dim + plan.value_dim) * item
        sizes["expanded rows"] = min(made, EXPANDED) * (EXPANDED_BACKWARD if backward else 1)
    if not backward:
        if receiving is None:
            kinds: tuple[Kind, ...] = ("kv",) if plan.forward_rotates == "kv" else ("query", "part")
            receiving = _buffer_bytes(plan, kinds, backward)
        sizes["receive buffers"] = receiving
        if item != wide and plan.ranks > 1:
            sizes["accumulator of the output"] = tokens * output * wide
        sizes["one visit's output"] = tokens * (output * item + plan.heads * wide)
        return sizes
    keys_rotate = plan.rotates == "kv"
    kinds = ("kv", "grad") if keys_rotate else ("q", "row", "dq")
    sizes["gradient of the output"] = tokens * output * item
    sizes["accumulators of dq, dk, dv"] = inputs * wide
    if keys_rotate and plan.ranks > 1:
        sizes["saved block"] = _block_bytes(plan, ("kv",))
    sizes["message buffers"] = _buffer_bytes(plan, kinds, backward)
    # The results are cast after the last visit, whose gradients are larger.
    sizes["one visit's gradients, then dq, dk, dv"] = inputs * wide
    return sizes


def _longest_shard(layout: Layout) -> int:
    """The rows of the longest shard."""
    if layout.ranks <= MOST_COMPARED:
        return max(map(layout.rows, range(layout.ranks)))
    return -(-layout.tokens // layout.ranks)


def _block_bytes(plan: Plan, kinds: tuple[Kind, ...]) -> int:
    """Bytes of a message with the whole block of rank 0, which is at most one token shorter than the longest shard."""
    return sum(plan.part_bytes(Part(kind, 0)) for kind in kinds)


def _buffer_bytes(plan: Plan, kinds: tuple[Kind, ...], backward: bool) -> int:
    """Bytes of the message buffers of one pass.

    Schedules `ring` and `direct` hold two blocks: the one in use, which is sent on, and the one that arrives. Their
    backward also holds two blocks of gradients. On more than three ranks, gradients share messages with the blocks,
    except in the first message, which is shorter and leaves its two buffers allocated. One more buffer holds the
    gradients of a visit. Every other schedule holds one block plus the most that a sampled rank receives at once.
    """
    if plan.ranks == 1 or not plan.batch:
        return 0
    if plan.schedule not in ("ring", "direct"):
        return _most_received(plan, backward) + _block_bytes(plan, kinds)
    if not backward and plan.forward_rotates == "kv":
        return 2 * _block_bytes(plan, kinds)
    blocks = _block_bytes(plan, tuple(kind for kind in kinds if kind not in SUMS))
    gradients = _block_bytes(plan, tuple(kind for kind in kinds if kind in SUMS))
    if plan.ranks == 2:
        return 2 * (gradients if kinds[0] == "kv" else blocks)
    together = 2 * (blocks + gradients) if plan.ranks > 3 else gradients
    return 2 * blocks + together + gradients


def _most_received(plan: Plan, backward: bool) -> int:
    """The most bytes that any sampled rank receives at the same time."""
    most = 0
    for rank in timed_ranks(plan.ranks):
        steps = plan.for_rank(rank).backward if backward else plan.for_rank(rank).forward
        for index in range(len(steps)):
            posted = (hop for step in steps[: index + 1] for hop in step.recvs)
            under_way = (hop for hop in posted if hop.until >= index)
            most = max(most, sum(plan.part_bytes(part) for hop in under_way for part in hop.parts))
    return most


def checkpoint_bytes(plan: Plan, *, backward: bool = False) -> int:
    """Bytes of one rank's checkpoint of a pass: out and lse of a forward, or dq, dk and dv of a backward.

    Inputs are assumed to be stored elsewhere; the step number is not counted.
    """
    tokens, keys = (-(-count // plan.ranks) for count in (plan.q_tokens, plan.tokens))
    numbers = tokens * plan.heads * (plan.value_dim + 1)
    if backward:
        numbers = tokens * plan.heads * plan.head_dim + keys * plan.kv_heads * (plan.head_dim + plan.value_dim)
    return plan.batch * numbers * max(ITEM_BYTES[plan.dtype], 4)


def young_daly(write: float, mtbf: float) -> float:
    """The best time between checkpoints, in seconds of work: approximately the one that loses the least time.

    The approximation is of first order: sqrt(2 C M) for checkpoints of C = `write` seconds and M = `mtbf` seconds
    between failures (J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly,
    "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006).
    """
    return sqrt(2 * write * mtbf)


def expected_seconds(work: float, interval: float, write: float, restart: float, mtbf: float) -> float:
    """Expected seconds until `work` seconds of work are done, including failures and checkpoints.

    A checkpoint of `write` seconds follows each `interval` seconds of work except the last, so work no longer than an
    interval has no checkpoint. Failures are a Poisson process with a mean of `mtbf` seconds between them, also while a
    checkpoint is written and during the `restart` seconds after a failure. An interval then takes
    M exp(R / M) (exp((tau + C) / M) - 1) seconds with tau = `interval`, C = `write`, R = `restart` and M = `mtbf` (Daly
    2006, equation 13).
    """
    full_intervals = max(0, ceil(work / interval) - 1)
    last = work - full_intervals * interval
    growth = full_intervals * expm1((interval + write) / mtbf) + expm1(last / mtbf)
    return mtbf * exp(restart / mtbf) * growth


@dataclass(frozen=True)
class Failures:
    """Failures and checkpoints of a job. Times in seconds."""

    #: Mean time between two failures, of any rank.
    mean: float
    #: Time of one checkpoint.
    write: float
    #: Work between two checkpoints; all the work if the job is too short for a checkpoint.
    interval: float
    #: Expected time until the result.
    expected: float
    checkpoints: int


def failures(plan: Plan, machine: Machine, work: float, *, backward: bool = False) -> Failures | None:
    """The expected failures of a job that keeps all ranks busy for `work` seconds; None if the machine has no mtbf.

    Raises InvalidInput for an mtbf without checkpoint and restart, or if failures are too frequent to complete a
    checkpoint.
    """
    if machine.mtbf is None:
        return None
    if machine.checkpoint is None or machine.restart is None:
        raise InvalidInput(
            "machine: mtbf needs checkpoint (bytes per second that one rank writes) and restart (seconds), which set "
            "the interval between checkpoints; try checkpoint=1e9, restart=60"
        )
    mtbf = machine.mtbf / plan.ranks
    write = checkpoint_bytes(plan, backward=backward) / machine.checkpoint
    if not work:
        return Failures(mtbf, write, 0.0, 0.0, 0)
    interval = min(young_daly(write, mtbf), work)
    checkpoints = ceil(work / interval) - 1
    if max(interval + (write if checkpoints else 0.0), machine.restart) > HOPELESS * mtbf:
        raise InvalidInput(
            f"machine: {plan.ranks:,} ranks fail every {duration(mtbf)}, long before a checkpoint of {duration(write)} "
            f"or a restart of {duration(machine.restart)} ends, so the job never finishes; try a larger mtbf "
            "or fewer ranks"
        )
    expected = expected_seconds(work, interval, write, machine.restart, mtbf)
    return Failures(mtbf, write, interval, expected, checkpoints)
