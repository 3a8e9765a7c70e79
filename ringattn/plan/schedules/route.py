"""From the ways that blocks take to the steps of a rank, forward and backward; the same for every schedule.

A block goes from its owner along a tree of ranks. Each edge carries the rows that somebody behind it needs, so that a
row stops at the last rank that needs it. The backward is the forward in reverse: a row starts where it stopped, from
what that rank kept, and goes home; the gradients gathered for it lag one step behind, in the same messages.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from ..row_sets import RowSets, minus, total
from ..steps import ORDER, Hop, Part, Step, parts
from .base import Schedule

T = TypeVar("T")


@dataclass(frozen=True)
class Edge:
    """Rows of `owner` go from rank `source` to `target`, which computes with them at step `time`.

    The message is posted by both at step `post` < `time`, and may take until `time` - 1. A rank computes with its own
    block at step 0. `lane` tells apart edges of a schedule that uses several directions.
    """

    owner: int
    source: int
    target: int
    post: int
    time: int
    lane: int = 0


class Route(Schedule):
    """The trees along which blocks go, one per owner, without the branches behind which nobody needs a row."""

    #: Numbers of `Edge.lane` in use.
    lanes = 1

    @abstractmethod
    def arrivals(self, rank: int) -> Iterator[Edge]:
        """The edges to `rank`, the latest first."""

    @abstractmethod
    def at(self, rank: int, time: int) -> tuple[Edge, ...]:
        """The edges to `rank` for its step `time` > 0, those behind which nobody needs a row perhaps among them."""

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        """The same edges in parts that are known without each other, each the latest first. Where a route can, the owners
        of a part are in ascending or in descending order, so that many ranks can follow theirs in one walk."""
        return (self.arrivals(rank),)

    @abstractmethod
    def first(self, owner: int) -> tuple[Edge, ...]:
        """The edges on which the block of `owner` leaves it."""

    @abstractmethod
    def onward(self, edge: Edge) -> tuple[Edge, ...]:
        """The edges on which the target of `edge` passes rows on."""

    @abstractmethod
    def behind(self, edge: Edge) -> tuple[range, ...]:
        """Runs of ranks that the edge serves: its target, and all behind it."""

    def cuts(self, edge: Edge) -> RowSets:
        """The rows that travel on an edge."""
        return self.demand.cuts(self.behind(edge), edge.owner)

    def ends(self, edge: Edge) -> RowSets:
        """The rows that arrive on an edge and go no further."""
        return self._minus(edge.owner, self.cuts(edge), [self.cuts(e) for e in self.onward(edge)])

    def stops(self, owner: int) -> Iterator[Edge]:
        """The edges of the block of `owner` on which rows arrive that go no further."""
        todo = list(self.first(owner))
        while todo:
            edge = todo.pop()
            todo += self.onward(edge)
            if self.ends(edge):
                yield edge

    def back(self, edge: Edge, siblings: Iterable[Edge] = ()) -> RowSets:
        """The rows that the backward brings back on an edge: those that no sibling before it brings."""
        earlier = []
        for sibling in siblings:
            if sibling == edge:
                break
            earlier.append(self.cuts(sibling))
        return self._minus(edge.owner, self.cuts(edge), earlier)

    def kept(self, rank: int) -> dict[Edge, RowSets]:
        """What `rank` holds on to for the backward: of the latest rows that end here as much as one block.

        What it does not keep it gets again from the owner.
        """
        return self._answer("kept", rank, self.latest)

    def latest(self, rank: int, arrivals: int | None = None) -> dict[Edge, RowSets]:
        """What `kept` gives, looked for in the latest `arrivals` only, where that is given."""
        found: dict[Edge, RowSets] = {}
        left: dict[int, int] = {}
        block = self.demand.block_heads * self.demand.layout.rows(rank)
        for edge in islice(self.arrivals(rank), arrivals):
            room = left.setdefault(edge.lane, block)
            if len(left) == self.lanes and max(left.values()) <= 0:
                break  # a rank to which all blocks go is not looked at as a whole
            ends = self.ends(edge) if room > 0 else ()
            size = total(ends, self.demand.block_heads, self.demand.layout.rows(edge.owner))
            if size and (size <= room or room == block):  # one at least, even where its block is a row longer
                found[edge] = ends
            left[edge.lane] = room - size
        return found

    def held(self, rank: int) -> tuple[Part, ...]:
        """What `rank` keeps after the forward for a backward in which keys rotate."""
        arrivals, kept = self.arriving(rank).values(), self.kept(rank)
        return tuple(part for edge in arrivals if edge in kept for part in parts("kv", edge.owner, kept[edge]))

    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's forward."""
        builder = StepBuilder(+1)
        if self.demand.visits(rank, rank):
            builder.visit(0, (Part("kv", rank),))
        for edge in self.arriving(rank).values():
            block = parts("kv", edge.owner, self.cuts(edge))
            builder.recv(edge.post, edge.time - 1, edge.source, block)
            if self.demand.visits(rank, edge.owner):
                builder.visit(edge.time, block)
        for edge in self.departing(rank):
            builder.send(edge.post, edge.time - 1, edge.target, parts("kv", edge.owner, self.cuts(edge)))
        return builder.steps()

    def backward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which keys and values, and their gradients, go back."""
        builder, arrivals, departures = StepBuilder(-1), tuple(self.arriving(rank).values()), self.departing(rank)
        if self.demand.visits(rank, rank):
            builder.visit(0, (Part("kv", rank),))
        for edge in arrivals:
            if self.demand.visits(rank, edge.owner):
                builder.visit(edge.time, parts("kv", edge.owner, self.cuts(edge)))
        kept = self.kept(rank)
        for edge in arrivals:
            if edge.source != edge.owner:
                siblings = self.onward(self.arriving(edge.source)[edge.owner])
                builder.send(edge.time, edge.post + 1, edge.source, parts("kv", edge.owner, self.back(edge, siblings)))
            builder.send(edge.time - 1, edge.post, edge.source, parts("grad", edge.owner, self.cuts(edge)))
            if edge not in kept:
                builder.recv(edge.time + 1, edge.time + 1, edge.owner, parts("kv", edge.owner, self.ends(edge)))
        for edge in departures:
            if edge.owner != rank:
                siblings = self.onward(self.arriving(rank)[edge.owner])
                builder.recv(edge.time, edge.post + 1, edge.target, parts("kv", edge.owner, self.back(edge, siblings)))
            builder.recv(edge.time - 1, edge.post, edge.target, parts("grad", edge.owner, self.cuts(edge)))
        for edge in self.stops(rank):
            if edge not in self.kept(edge.target):
                builder.send(edge.time + 1, edge.time + 1, edge.target, parts("kv", rank, self.ends(edge)))
        return builder.steps()

    def queries(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's backward in which queries rotate. The route is one of blocks of queries.

        They go outward as keys do in a forward, with lse and delta. What is gathered for a row lags one step behind,
        and goes home from where the row stops. Where a row goes on to two ranks, its sum so far goes with the first;
        the other begins anew.
        """
        builder = StepBuilder(+1)
        if self.demand.visits(rank, rank):
            builder.visit(0, (Part("q", rank),))
        for edge in self.arriving(rank).values():
            cuts, time = self.cuts(edge), (edge.post, edge.time - 1)
            builder.recv(*time, edge.source, parts("row", edge.owner, cuts) + parts("q", edge.owner, cuts))
            if self.demand.visits(rank, edge.owner):
                builder.visit(edge.time, parts("q", edge.owner, cuts))
            if edge.source != edge.owner:
                siblings = self.onward(self.arriving(edge.source)[edge.owner])
                builder.recv(edge.post + 1, edge.time, edge.source, parts("dq", edge.owner, self.back(edge, siblings)))
            builder.send(edge.time + 1, edge.time + 1, edge.owner, parts("dq", edge.owner, self.ends(edge)))
        for edge in self.departing(rank):
            cuts, time = self.cuts(edge), (edge.post, edge.time - 1)
            builder.send(*time, edge.target, parts("row", edge.owner, cuts) + parts("q", edge.owner, cuts))
            if edge.owner != rank:
                siblings = self.onward(self.arriving(rank)[edge.owner])
                builder.send(edge.post + 1, edge.time, edge.target, parts("dq", edge.owner, self.back(edge, siblings)))
        for edge in self.stops(rank):
            builder.recv(edge.time + 1, edge.time + 1, edge.target, parts("dq", rank, self.ends(edge)))
        return builder.steps()

    def departing(self, rank: int) -> list[Edge]:
        """The edges from `rank`."""
        return [*self.first(rank), *(e for edge in self.arriving(rank).values() for e in self.onward(edge))]

    def arriving(self, rank: int) -> dict[int, Edge]:
        """The edges to `rank` by owner."""
        return self._answer("edges", rank, lambda rank: {e.owner: e for e in [*self.arrivals(rank)][::-1]})

    def _answer(self, name: str, rank: int, make: Callable[[int], T]) -> T:
        """What is known of a rank, kept with the demand, which other schedules may ask as well."""
        return self.demand.memory.answer((type(self), self.inner, name, rank), lambda: make(rank))

    def _minus(self, owner: int, cuts: RowSets, others: list[RowSets]) -> RowSets:
        return minus(cuts, others, self.demand.block_heads, self.demand.layout.rows(owner))


@dataclass
class StepBuilder:
    """What a rank does at each step, counted up (+1) or down (-1). Messages of one pair and time are one message."""

    sign: int
    visits: dict[int, list[Part]] = field(default_factory=dict)
    sends: dict[tuple[int, int, int], list[Part]] = field(default_factory=dict)
    recvs: dict[tuple[int, int, int], list[Part]] = field(default_factory=dict)

    def visit(self, time: int, block: tuple[Part, ...]) -> None:
        self.visits.setdefault(time, []).extend(block)

    def send(self, post: int, until: int, peer: int, block: tuple[Part, ...]) -> None:
        if block:
            self.sends.setdefault((post, until, peer), []).extend(block)

    def recv(self, post: int, until: int, peer: int, block: tuple[Part, ...]) -> None:
        if block:
            self.recvs.setdefault((post, until, peer), []).extend(block)

    def steps(self) -> tuple[Step, ...]:
        times = {*self.visits, *(t for key in (*self.sends, *self.recvs) for t in key[:2])}
        order = sorted(times, reverse=self.sign < 0)
        place = {time: i for i, time in enumerate(order)}
        sends = _by_post(self.sends, place)
        recvs = _by_post(self.recvs, place)
        return tuple(
            Step(tuple(sends.get(time, ())), tuple(recvs.get(time, ())), tuple(self.visits.get(time, ())))
            for time in order
        )


def _by_post(messages: dict[tuple[int, int, int], list[Part]], place: dict[int, int]) -> dict[int, list[Hop]]:
    found: dict[int, list[Hop]] = {}
    for (post, until, peer), pieces in messages.items():
        ordered = tuple(sorted(pieces, key=lambda part: (ORDER[part.kind], part.owner)))
        tag = 2 * post + (post != until)
        found.setdefault(post, []).append(Hop(peer, tag, ordered, place[until]))
    return found
