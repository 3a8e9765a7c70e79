"""Batched ranks: ranks whose plans differ only by a shift run together as one program.

Their queries, keys and values are stacked along the batch dimension: one kernel call serves all of them, and a message
is a batch of messages, one per rank. The transport in this file delivers each rank's message to its receiver, which
may be in another batch. The executor runs the steps, buffers, merges and gradients as usual, and thousands of ranks
take no more calls than a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from ...errors import InvalidInput
from ...plan.plan import Plan
from ...plan.steps import OF_KEYS, Hop, Part, Step
from ...runtime.buffers import message_views
from ...transport.base import Message, Post, Program
from ...transport.virtual import WATCHED, in_turns

T = TypeVar("T")
#: Stands for the batch of ranks that are not executed.
OUTSIDE = -1


@dataclass(frozen=True)
class BatchedRanks:
    """Ranks, ascending, whose plans differ only in rank numbers, so that one program runs all of them as a batch."""

    whole: Plan
    ranks: tuple[int, ...]

    @property
    def first(self) -> int:
        return self.ranks[0]

    @cached_property
    def plan(self) -> Plan:
        """The plan with one batch element for each rank; reuses what is cached about the keys that ranks need."""
        rotate = f"{self.whole.forward_rotates}, {self.whole.rotates}"  # "auto" might choose otherwise in the copy
        plan = replace(self.whole, batch=len(self.ranks), rotate=rotate)
        plan.demand.share_answers(self.whole.demand)
        return plan


def shape(plan: Plan, rank: int, *, backward: bool) -> object:
    """A value that is equal for two ranks iff one program can run both.

    It contains the rank's steps and computations, with other ranks numbered relative to it.
    """
    size, mine = plan.ranks, plan.for_rank(rank)

    def away(part: Part) -> object:
        return part.kind, (part.owner - rank) % size, part.row_set, plan.layout_of(part.kind).rows(part.owner)

    def hops(found: tuple[Hop, ...]) -> object:
        return tuple(((h.peer - rank) % size, h.tag, h.until, tuple(map(away, h.parts))) for h in found)

    def visit(part: Part) -> object:
        demand = plan.demand if part.kind in OF_KEYS else plan.query_demand
        return away(part), demand.joined_works(rank, part.owner, part.row_set)

    lists = [mine.forward, *([mine.backward] if backward else [])]
    steps = tuple(
        tuple((hops(step.sends), hops(step.recvs), tuple(map(visit, step.visits))) for step in steps) for steps in lists
    )
    rows = plan.layout_of("q").rows(rank), plan.layout.rows(rank)
    return rows, steps, tuple(map(away, mine.saved)) if backward else ()


def batch_ranks(plan: Plan, ranks: Iterable[int], *, backward: bool) -> list[BatchedRanks]:
    """Group `ranks` into batches whose plans have the same `shape`."""
    found: dict[object, list[int]] = {}
    for rank in ranks:
        found.setdefault(shape(plan, rank, backward=backward), []).append(rank)
    return [BatchedRanks(plan, tuple(members)) for members in found.values()]


def connected(plan: Plan, ranks: Sequence[int], *, backward: bool) -> Iterator[list[int]]:
    """Yield groups of `ranks`; no rank sends messages to another group.

    Raises InvalidInput if a backward, or a pass-Q forward, needs ranks that are not in `ranks`.
    """
    inside, todo = set(ranks), set(ranks)
    sums = "gradients" if backward else None if plan.forward_rotates == "kv" else "(out, lse) of queries"
    for start in ranks:
        if start not in todo:
            continue
        todo.discard(start)
        group, stack = [], [start]
        while stack:
            rank = stack.pop()
            group.append(rank)
            mine = plan.for_rank(rank)
            for step in (*mine.forward, *(mine.backward if backward else ())):
                peers = {hop.peer for hop in (*step.sends, *step.recvs)}
                if sums is not None and not peers <= inside:
                    raise InvalidInput(
                        f"rank {rank} exchanges {sums} with rank {min(peers - inside)}, which is not executed; "
                        "execute all ranks, or whole segments of a dilated pattern, or leave out backward=True and "
                        "rotate='q'"
                    )
                stack += sorted(peers & todo)
                todo -= peers
        yield sorted(group)


@dataclass
class _BatchMessage:
    """A batch of messages that batch number `batch` sends or receives, [members, heads, rows, width] each.

    `left` are the receiving batches that have not yet copied their part.
    """

    batch: int
    hop: Hop
    views: list[torch.Tensor]
    left: set[int]


#: The label of a post, and its messages.
_BatchTicket = tuple[str, list[_BatchMessage]]


#: Returns K and V of a part, for messages from ranks that are not executed.
Answer = Callable[[Part], tuple[torch.Tensor, ...]]


class Lockstep:
    """Runs one program for each batch of ranks, and carries their messages.

    Receive buffers contain NaN until they are filled. `answer` generates messages from ranks that are not executed,
    which works for keys and values only. Messages to such ranks are counted, then dropped.
    """

    def __init__(self, members: Sequence[BatchedRanks], answer: Answer, *, backward: bool = False) -> None:
        self.members, self.answer, self.backward = members, answer, backward
        self.size = members[0].whole.ranks
        self.answered = self.sent_bytes = self.sent_messages = 0
        self._home: dict[int, tuple[int, int]] = {
            rank: (c, i) for c, batched in enumerate(members) for i, rank in enumerate(batched.ranks)
        }
        self._hops = [self._known(batched) for batched in members]
        self._routes: dict[tuple[int, int], list[tuple[int, np.ndarray, np.ndarray]]] = {}
        self._sent: dict[tuple[int, int, int], _BatchMessage] = {}
        self._open: list[_BatchMessage] = []

    def run(self, programs: Sequence[Program[T]]) -> list[T]:
        """Run the programs of all batches in turns to their ends; returns their results in order."""
        results = in_turns(programs, self._post, lambda ticket: not any(x.left for x in ticket[1]), self._stuck)
        assert not self._open, "some received messages were never sent"
        assert not any(send.left for send in self._sent.values()), "some sent messages were never received"
        return results

    def _stuck(self, waiting: Mapping[int, _BatchTicket]) -> str:
        return "; ".join(f"rank {self.members[c].first}, {label}" for c, (label, _) in [*waiting.items()][:8])

    def _known(self, batched: BatchedRanks) -> tuple[dict[tuple[int, int], Hop], dict[tuple[int, int], Hop]]:
        """(sends, receives) of batched ranks, each by (peer, tag)."""
        mine = batched.plan.for_rank(batched.first)
        steps: tuple[Step, ...] = mine.backward if self.backward else mine.forward
        sends = {(hop.peer, hop.tag): hop for step in steps for hop in step.sends}
        return sends, {(hop.peer, hop.tag): hop for step in steps for hop in step.recvs}

    def _post(self, c: int, post: Post) -> _BatchTicket:
        messages, batched = list[_BatchMessage](), self.members[c]
        for message in post.recvs:
            hop = self._hops[c][1][message.peer, message.tag]
            message.data[:WATCHED].fill_(255)
            messages.append(_BatchMessage(c, hop, _views(batched, hop, message), {c}))
            self._open.append(messages[-1])
        for message in post.sends:
            away = (message.peer - batched.first) % self.size
            hop, left = self._hops[c][0][message.peer, message.tag], {t for t, *_ in self._route(c, away)} - {OUTSIDE}
            assert (c, away, message.tag) not in self._sent, f"{post.label}: two sends share peer and tag"
            messages.append(_BatchMessage(c, hop, _views(batched, hop, message), left))
            self._sent[c, away, message.tag] = messages[-1]
            self.sent_bytes += message.data.numel()
            self.sent_messages += len(batched.ranks)
        for recv in [recv for recv in self._open if self._arrive(recv)]:
            self._open.remove(recv)
        return post.label, messages

    def _arrive(self, recv: _BatchMessage) -> bool:
        """Fill a batch of receives if all its senders have posted; returns whether it did."""
        batched = self.members[recv.batch]
        away = (recv.hop.peer - batched.first) % self.size
        route = self._route(recv.batch, away)
        keys = [(s, -away % self.size, recv.hop.tag) for s, _, _ in route if s != OUTSIDE]
        if not all(key in self._sent for key in keys):
            return False
        for s, mine, theirs in route:
            if s == OUTSIDE:
                self._answer(batched, recv, mine)
                continue
            send = self._sent[s, -away % self.size, recv.hop.tag]
            assert len(send.views) == len(recv.views), "sender and receiver disagree on the message"
            for target, x in zip(recv.views, send.views, strict=True):
                target[mine] = x[theirs]
            send.left.discard(recv.batch)
        recv.left.clear()
        return True

    def _answer(self, batched: BatchedRanks, recv: _BatchMessage, index: np.ndarray) -> None:
        """Fill the messages from ranks that are not executed."""
        for i in index.tolist():
            for part, tensors in _parts(batched, recv, i):
                assert part.kind == "kv", "queries and sums come from executed ranks only"
                for x, y in zip(tensors, self.answer(part), strict=True):
                    x.copy_(y[0])
            self.answered += 1

    def _route(self, c: int, away: int) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """The ranks `away` ranks after the members of batch `c`: (their batch, indices in `c`, indices there)."""
        if (c, away) not in self._routes:
            peers = [self._home.get((rank + away) % self.size, (OUTSIDE, 0)) for rank in self.members[c].ranks]
            homes, there = np.array([home for home, _ in peers]), np.array([i for _, i in peers])
            self._routes[c, away] = [
                (home, here := np.flatnonzero(homes == home), there[here]) for home in np.unique(homes).tolist()
            ]
        return self._routes[c, away]


def _parts(batched: BatchedRanks, recv: _BatchMessage, index: int) -> Iterator[tuple[Part, list[torch.Tensor]]]:
    """Yield each part of a member's message, its owner shifted for the member, and its tensors [heads, rows, width]."""
    views, by = iter(recv.views), batched.ranks[index] - batched.first
    for part in recv.hop.parts:
        tensors = [next(views)[index] for _ in batched.plan.tensors(part.kind)]
        yield part._replace(owner=(part.owner + by) % batched.whole.ranks), tensors


def _views(batched: BatchedRanks, hop: Hop, message: Message) -> list[torch.Tensor]:
    """The tensors of a batch of messages, each [members, heads, rows, width]."""
    views = message_views(message.data, batched.plan, hop.parts)
    return [x for part in hop.parts for x in views[part]]
