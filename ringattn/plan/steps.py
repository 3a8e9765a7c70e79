"""What a rank does, step by step: the messages it posts and the visits it computes meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .row_sets import RowSet, RowSets

#: "kv" is a block of keys and values in the input dtype; "grad" the dK, dV gathered for a block so far, in fp32
#: (fp64 for fp64 inputs). Where queries rotate, "q" is a block of q and dO in the input dtype, "row" the lse and delta
#: of its rows and "dq" the dQ gathered for them so far, both in fp32 or fp64. Between the ranks of a team, for the heads of one of them: "qkv" are q, k and v of `owner`'s
#: rows, "out" their output and lse, and "dout" and "dqkv" the gradients of these.
Kind = Literal["kv", "grad", "q", "row", "dq", "qkv", "out", "dout", "dqkv"]
#: Kinds whose parts arrive and are passed on as they are, and those whose parts are sums that ranks add to.
BLOCKS: tuple[Kind, ...] = ("kv", "q", "row")
SUMS: tuple[Kind, ...] = ("grad", "dq")
#: The order of the parts of a message where its plan lists them; `buffers` says where each of them begins.
ORDER: dict[Kind, int] = {"grad": 0, "dq": 0, "row": 1, "kv": 2, "q": 2}


@dataclass(frozen=True)
class Part:
    """A piece of a message: rows of the block of `owner`, or their gradients on their way to `owner`.

    `cut` says which rows of which key/value heads, or of which query heads where these rotate; None is all of them.
    """

    kind: Kind
    owner: int
    cut: RowSet | None = None


@dataclass(frozen=True)
class Hop:
    """One message between this rank and `peer`. `tag` is the same on both sides and unique between two ranks.

    It may take until the end of the `until`-th step of this rank.
    """

    peer: int
    tag: int
    parts: tuple[Part, ...]
    until: int


@dataclass(frozen=True)
class Step:
    """Post `sends` and `recvs`, compute the visits (to "kv" or "q" parts) while they travel, then wait for what is due."""

    sends: tuple[Hop, ...] = ()
    recvs: tuple[Hop, ...] = ()
    visits: tuple[Part, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sends or self.recvs or self.visits)

    @property
    def posts(self) -> tuple[Batch, ...]:
        """The messages, in batches that are waited for together."""
        ends = sorted({hop.until for hop in (*self.sends, *self.recvs)})
        return tuple(
            Batch(end, *(tuple(hop for hop in hops if hop.until == end) for hops in (self.sends, self.recvs)))
            for end in ends
        )


@dataclass(frozen=True)
class Batch:
    """Messages of a step that may take until the end of step `until`."""

    until: int
    sends: tuple[Hop, ...]
    recvs: tuple[Hop, ...]


@dataclass(frozen=True)
class RankPlan:
    """The steps of one rank. `kept` is what it holds after the forward for the backward to start from."""

    rank: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[Part, ...] = ()


def parts(kind: Kind, owner: int, cuts: RowSets) -> tuple[Part, ...]:
    """The pieces of a message that carry these rows."""
    return tuple(Part(kind, owner, cut) for cut in cuts)
