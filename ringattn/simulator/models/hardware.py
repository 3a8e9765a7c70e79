"""Seconds of matrix products, of memory traffic, and of collectives on a machine: the stated simple models."""

from __future__ import annotations

from math import ceil, log2

from ...dtypes import ITEM_BYTES
from ...errors import InvalidInput
from ...machine.machine import Machine

#: Rows and columns of the tile of the result that one thread block of a matrix product computes.
TILE = 128


def check_dtype(machine: Machine, dtype: str) -> None:
    """Raise InvalidInput where the machine's rates are not those of `dtype`."""
    if dtype not in ITEM_BYTES or ITEM_BYTES[dtype] != ITEM_BYTES[machine.flops_dtype or dtype]:
        raise InvalidInput(
            f"dtype={dtype}: the rates of this machine are those of {machine.flops_dtype}; try "
            f"dtype={machine.flops_dtype}, or a machine with flops= and without flops_dtype"
        )


def memory_bandwidth(machine: Machine) -> float:
    """Bytes/s that kernels read and write: what the kernel rates say, else twice the rate of merging, which is a half.

    Raises InvalidInput where the machine has neither.
    """
    if machine.kernel_rates is not None:
        return machine.kernel_rates.memory
    if machine.merge is None:
        raise InvalidInput(
            "machine: the time of norms and optimiser needs the rate of the memory, for which merge= (bytes/s read and "
            "written) stands; give machine.merge=1e12, or a preset such as h100_nvlink_ib"
        )
    return 2 * machine.merge


def matmul_seconds(
    machine: Machine,
    rows: float,
    columns: float,
    inner: float,
    item: int,
    count: float = 1,
    stored: float | None = None,
) -> float:
    """Seconds of `count` products [rows, inner] x [inner, columns] at once, of operands of `item` bytes.

    `stored` are the bytes of each weight, [inner, columns], in memory; None: `item`.

    The longer of computing, 2 rows columns inner / (rate x fill), and of moving both operands and the result through
    memory. `fill` = n / (n + slots / 4) for n tiles of the result, as for the thread blocks of attention.
    """
    tiles = count * ceil(rows / TILE) * ceil(columns / TILE)
    rates = machine.kernel_rates
    idle = 0.0 if rates is None else rates.slots / 4
    rate = machine.matmul or machine.flops
    computing = 2.0 * count * rows * columns * inner / rate * (1 + idle / max(tiles, 1))
    moved = count * (item * (rows * inner + rows * columns) + (stored or item) * inner * columns)
    return max(computing, moved / memory_bandwidth(machine))


def collective_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Seconds in which each of `ranks` ranks, `stride` apart, gathers `size` bytes of which it has its share.

    A ring moves size x (ranks - 1) / ranks bytes over its slowest link (Thakur, Rabenseifner and Gropp, "Optimization
    of Collective Communication Operations in MPICH", 2005), after log2(ranks) latencies. A reduce-scatter takes as
    long, an all-reduce twice as long. Between nodes the ring uses the cards of all its ranks of a node at once, as
    NCCL's rings do; all other rings of the node share one card where there is only one.
    """
    if ranks == 1:
        return 0.0
    node = machine.ranks_per_node
    inside = max(min(ranks, node // stride), 1) if stride < node else 1
    near = ranks * stride <= node
    latency, bandwidth = machine.rates(near)
    if not near:
        bandwidth *= inside / node if machine.shared_nic else inside
        bandwidth = min(bandwidth, machine.rates(True)[1]) if inside > 1 else bandwidth
    return latency * ceil(log2(ranks)) + size * (ranks - 1) / ranks / bandwidth


def message_seconds(machine: Machine, size: float, stride: int, ranks: int) -> float:
    """Seconds in which each of `ranks` ranks, `stride` apart, sends `size` bytes to the next one; 0 for one rank.

    Between nodes all ranks of a node send at once, over one card where there is only one.
    """
    if ranks == 1:
        return 0.0
    near = ranks * stride <= machine.ranks_per_node
    latency, bandwidth = machine.rates(near)
    return latency + size * (1 if near or not machine.shared_nic else min(stride, machine.ranks_per_node)) / bandwidth
