"""What a rank does, step by step: the messages it posts and the visits it computes meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: "kv" is a block of keys and values in the input dtype; "grad" the dK, dV gathered for a block so far, in fp32
#: (fp64 for fp64 inputs).
Kind = Literal["kv", "grad"]


@dataclass(frozen=True)
class Part:
    """A piece of a message: the K/V block of `owner`, or gradients on their way to `owner`."""

    kind: Kind
    owner: int


@dataclass(frozen=True)
class Hop:
    """One message between this rank and `peer`. `tag` is the same on both sides and unique between two ranks."""

    peer: int
    tag: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Step:
    """Post `sends` and `recvs`, compute the visits (owners of blocks held) while they travel, then wait."""

    sends: tuple[Hop, ...] = ()
    recvs: tuple[Hop, ...] = ()
    visits: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sends or self.recvs or self.visits)


@dataclass(frozen=True)
class RankPlan:
    """The steps of one rank. `kept` are owners of blocks held after the forward that the backward starts from."""

    rank: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[int, ...] = ()
