"""Modelled rates of attention kernels: a few numbers of a library on a GPU, from which the time of any tile follows.

A call takes t = launch + pairs (2 (D + Dv) + softmax) passes / (F fill) + bytes / B: the matrix products and the
exponentials of the pairs at the rate F of a full GPU, and beside them each row's operands once at the rate B of the
memory. `fill` is n / (n + tail): n thread blocks of BLOCK rows, and the slots of the GPU that idle before the last
block ends. Hence few rows, few keys, few heads and small heads make a kernel slow, without a table.
"""

from __future__ import annotations

from dataclasses import dataclass

#: FLOPs of a backward over FLOPs of a forward: five matrix products (recomputed scores, dV, dP, dQ, dK) over two.
BACKWARD = 2.5
#: Query rows (in a backward: keys) of one thread block.
BLOCK = 128
#: Operands of a query row that a kernel moves, in elements of 16 bits per column: a forward reads q and writes out; a
#: backward reads q, dout (twice) and out, and clears, reads (in fp32) and writes dq.
FORWARD_TRAFFIC, BACKWARD_TRAFFIC = 2, 9


@dataclass(frozen=True)
class KernelRates:
    """The rates of one library's attention kernel on one GPU, for 16-bit inputs; 32-bit inputs take `wide` as long."""

    #: flash-attn 2, flash-attn 3, cudnn, ...
    library: str
    #: FLOP/s of matrix products and exponentials on a full GPU, in a forward and in a backward.
    forward: float
    backward: float
    #: FLOPs that the exponential of one pair costs beside its matrix products: what makes small heads slow.
    softmax: float
    #: Thread blocks that run on the GPU at the same time.
    slots: int
    #: Bytes/s at which operands are read and written.
    memory: float
    #: Seconds between the starts of two kernels.
    launch: float = 1e-5
    #: Seconds of the small kernels of a ring's visit: slices, casts, and what merging starts.
    visit: float = 0.0
    wide: float = 8.0

    def pair_seconds(self, blocks: float, *, dense: bool, dims: int, backward: bool, item: int = 2) -> float:
        """Seconds of a pair in a call of `blocks` thread blocks, with `dims` = D + Dv columns of `item` bytes.

        Equal thread blocks end together but for the last of a slot, and a block runs faster where others are done. In a
        triangle (not `dense`) the longest blocks are twice as long as the mean.
        """
        tail = self.slots * (0.25 if dense else 1.0)
        rate = (self.backward if backward else self.forward) * blocks / (blocks + tail)
        return (2 * dims + self.softmax) * (BACKWARD if backward else 1.0) / rate * (self.wide if item > 2 else 1.0)

    def start_seconds(self, rows: int, *, dims: int, backward: bool, item: int = 2) -> float:
        """Seconds of starting a call, and of moving the operands of its `rows` over all heads and sequences."""
        traffic = (BACKWARD_TRAFFIC if backward else FORWARD_TRAFFIC) * rows * dims / 2 * item
        return self.launch + traffic / self.memory
