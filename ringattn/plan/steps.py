"""What a rank does, step by step: the messages that it posts, and the visits that it computes meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .row_sets import ALL_ROWS, AllRows, RowSet, RowSets

#: What a part of a message holds. "Sums" are in fp32, in fp64 for fp64 inputs.
#: - "kv": keys and values of a block, in the input dtype; "grad": the sums of dK and dV of a block so far.
#: - Where queries travel, "q": q and dO of a block, in the input dtype; "row": lse and delta of its rows, as sums
#:   (delta itself or, so that receivers need less work, the factor of `kernels.pad.times_unit` that stands for delta);
#:   "dq": the sums of dQ so far.
#: - Inside a Ulysses group, for the heads of one rank, "qkv": q, k and v of the rows of `owner`; "out": output and lse
#:   of these rows; "dout" and "dqkv": the gradients of "out" and "qkv".
Kind = Literal["kv", "grad", "q", "row", "dq", "qkv", "out", "dout", "dqkv"]
#: Parts of these kinds are passed on as they arrived.
BLOCKS: tuple[Kind, ...] = ("kv", "q", "row")
#: Parts of these kinds are sums, to which ranks add.
SUMS: tuple[Kind, ...] = ("grad", "dq")
#: The order in which a plan lists the parts of a message; `runtime.message_buffers` places them in the message.
ORDER: dict[Kind, int] = {"grad": 0, "dq": 0, "row": 1, "kv": 2, "q": 2}


class Part(NamedTuple):
    """A part of a message: rows of the block of `owner`, or gradients of these rows on their way to `owner`.

    `row_set` says which rows of which heads: key/value heads, or query heads where queries travel.
    """

    kind: Kind
    owner: int
    row_set: RowSet | AllRows = ALL_ROWS


class Hop(NamedTuple):
    """One message between this rank and `peer`, in flight until the end of step `until` of this rank.

    `tag` is the same on both sides, and unique among the messages from one rank to another.
    """

    peer: int
    tag: int
    parts: tuple[Part, ...]
    until: int


@dataclass(frozen=True)
class Step:
    """Post `sends` and `recvs`, compute the visits (to "kv" or "q" parts) meanwhile, then wait for the due messages.

    `clock` ascends with the steps of a rank. Both ends of a message post it at the same clock, so that steps of several
    ranks can be set side by side although a rank leaves out the steps at which it does nothing.
    """

    sends: tuple[Hop, ...] = ()
    recvs: tuple[Hop, ...] = ()
    visits: tuple[Part, ...] = ()
    clock: int = 0

    def __bool__(self) -> bool:
        return bool(self.sends or self.recvs or self.visits)

    @property
    def posts(self) -> list[tuple[int, tuple[Hop, ...], tuple[Hop, ...]]]:
        """(`Hop.until`, sends, receives) of the messages that are posted, and waited for, together."""

        def due(hops: tuple[Hop, ...], end: int) -> tuple[Hop, ...]:
            return tuple([hop for hop in hops if hop.until == end])

        ends = sorted({hop.until for hop in (*self.sends, *self.recvs)})
        return [(end, due(self.sends, end), due(self.recvs, end)) for end in ends]


@dataclass(frozen=True)
class RankPlan:
    """The steps of one rank. `kept` are the parts that the rank keeps from the forward for its backward."""

    rank: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """About how many bytes the steps take, for `cache.estimate_bytes`. The demand counts the row sets."""
        steps = (*self.forward, *self.backward)
        parts = sum(len(step.visits) for step in steps)
        return 600 * len(steps) + 800 * (parts + sum(1 + len(hop.parts) for s in steps for hop in s.sends + s.recvs))


def make_parts(kind: Kind, owner: int, row_sets: RowSets) -> tuple[Part, ...]:
    """One part per row set of the block of `owner`."""
    return tuple([Part(kind, owner, row_set) for row_set in row_sets])
