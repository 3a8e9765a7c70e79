"""Turns the routes of blocks into the steps of a rank, forward and backward, for every schedule with routes.

A block goes from its owner along a tree of ranks. Each edge carries the rows that its target or a rank further down the
tree needs, so that a row stops at the last rank that needs it. The backward is the forward in reverse: a row starts at
the rank where it stopped, which saved it, and travels back to its owner; the sums of its gradients follow one step
behind, in the same messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import lcm
from typing import ClassVar, NamedTuple

from ...errors import Unsupported
from ...layout.regular import Contiguous
from ..demand import BlockDemand, sampled_ranks
from ..row_sets import NO_ROWS, RowSets, count_rows, subtract
from ..steps import ORDER, Hop, Kind, Part, Step, make_parts

#: With up to EXACT_RANKS ranks the bytes of all blocks are counted, with more those of SAMPLED blocks.
EXACT_RANKS, SAMPLED = 64, 16


class Schedule(ABC):
    """Decides which rank sends which block to which rank, and at which step; `demand` says who needs what."""

    #: Whether a number follows the name of the schedule, as in "double_ring(8)"; it is passed after the demand.
    numbered: ClassVar[bool] = False
    #: The number of ranks per node, if the schedule distinguishes nodes.
    ranks_per_node = 1
    #: Whether ranks save blocks of keys for the backward: False if keys do not travel in the forward.
    saves = True

    def __init__(self, demand: BlockDemand) -> None:
        self.demand = demand

    @abstractmethod
    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's forward."""

    @abstractmethod
    def backward(self, rank: int) -> tuple[Step, ...]:
        """What a rank does at each step of a backward in which keys, values and their gradients travel (pass-KV)."""

    @abstractmethod
    def backward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """What a rank does at each step of a backward in which queries and their gradients travel (pass-Q).

        `demand` must be a `QueryDemand`.
        """

    def forward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """What a rank does at each step of a forward in which queries and their (out, lse) travel (pass-Q).

        `demand` must be a `QueryDemand`. Raises Unsupported if the schedule cannot send queries.
        """
        raise Unsupported(
            f"{type(self).__name__} cannot send queries around in the forward, only keys and values; try rotate='kv'"
        )

    def saved_parts(self, rank: int) -> tuple[Part, ...]:
        """The received keys and values that a rank keeps after the forward, for a pass-KV backward.

        () if the backward gathers them again.
        """
        return ()

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int] | None:
        """(bytes between nodes, all bytes) of a backward; None if they can only be counted from the steps.

        `block` is the bytes of one row of one head in a travelling block, and `sums` the bytes of its gradients.
        `queries` means that queries travel (pass-Q). With more than EXACT_RANKS ranks, only the blocks of
        `sampled_owners` are counted.
        """
        return None


def sampled_owners(demand: BlockDemand) -> list[int]:
    """A sample of ranks, whose blocks represent those of all ranks; all ranks if there are at most EXACT_RANKS.

    With more ranks, the sample is SAMPLED evenly spaced ranks. If the demand repeats from rank to rank, it is one
    period from the middle instead.
    """
    layout, ranks = demand.layout, demand.layout.ranks
    if ranks <= EXACT_RANKS:
        return list(range(ranks))
    repeats = demand.readers is layout and isinstance(layout, Contiguous) and layout.tokens % ranks == 0
    period = demand.pattern.period if repeats else None
    if period is not None and layout.tokens:
        rows = layout.tokens // ranks
        size = lcm(period, rows) // rows
        if size <= SAMPLED:
            return list(range(ranks // 2, ranks // 2 + size))
    return sampled_ranks(ranks, SAMPLED)


#: With more than EXACT_RANKS ranks, a rank's LATEST last arrivals stand for all that it saves.
LATEST = 64


class Edge(NamedTuple):
    """One transfer: rank `source` sends rows of the block of `owner` to rank `target`, which uses them at step `step`.

    Both ranks post the message at step `post` < `step`, and it is in flight until the end of step `step` - 1. A rank
    computes with its own block at step 0. `ring` tells apart the rings of a schedule, such as its two directions.
    """

    owner: int
    source: int
    target: int
    post: int
    step: int
    ring: int = 0


class Route(Schedule):
    """Base of schedules that send each block along a tree of ranks; ranks get only rows that they need or pass on."""

    #: The number of different values of `Edge.ring`.
    rings = 1

    @abstractmethod
    def arrivals(self, rank: int) -> Iterator[Edge]:
        """Yield the edges that end at `rank`, those with the latest step first."""

    @abstractmethod
    def edges_at(self, rank: int, step: int) -> tuple[Edge, ...]:
        """The edges that bring rows to `rank` for step `step` > 0; some of them may carry no rows."""

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        """The edges of `arrivals`, split into iterators (arcs) that can be read independently, latest edges first.

        Where possible, the owners in an arc ascend or descend, so that one pass over the owners can follow the arcs of
        many ranks.
        """
        return (self.arrivals(rank),)

    @abstractmethod
    def first_edges(self, owner: int) -> tuple[Edge, ...]:
        """The edges on which `owner` itself sends its block."""

    @abstractmethod
    def next_edges(self, edge: Edge) -> tuple[Edge, ...]:
        """The edges on which the target of `edge` passes on the rows that it received."""

    @abstractmethod
    def served(self, edge: Edge) -> tuple[range, ...]:
        """The ranks that get rows through this edge, as runs: its target and all ranks further down the tree."""

    def carried(self, edge: Edge) -> RowSets:
        """The rows that travel on an edge."""
        return self.demand.needed_rows(self.served(edge), edge.owner)

    def stopping(self, edge: Edge) -> RowSets:
        """The rows that arrive on this edge and that its target passes on to no other rank."""
        reach, further = self.demand.row_reach, self.next_edges(edge)
        if not further:
            return self.carried(edge)
        if reach is not None:
            return reach.needed(self.served(edge), edge.owner, 0, [self.served(e) for e in further])
        return self._subtract(edge.owner, self.carried(edge), [self.carried(e) for e in further])

    def last_edges(self, owner: int) -> Iterator[Edge]:
        """Yield the edges of the block of `owner` whose target passes on only some of the rows, or none."""
        return (edge for edge in self.edges_of(owner) if self.stopping(edge) != NO_ROWS)

    def edges_of(self, owner: int) -> Iterator[Edge]:
        """All edges of the block of `owner`."""
        todo = [*self.first_edges(owner)]
        while todo:
            edge = todo.pop()
            todo += self.next_edges(edge)
            yield edge

    def returned(self, edge: Edge, carried: RowSets) -> RowSets:
        """The rows of `carried` whose gradient sums come back over this edge.

        If a rank passes the same row on over several edges, the sums return over the first of them.
        """
        siblings = self.next_edges(self.edges_by_owner(edge.source)[edge.owner])
        earlier = takewhile(lambda sibling: sibling != edge, siblings)
        return self._subtract(edge.owner, carried, [*map(self.carried, earlier)])

    def saved_rows(self, rank: int) -> dict[Edge, RowSets]:
        """The received rows that `rank` keeps for the backward, by edge; in the backward the owner sends only the rest.

        A rank keeps rows that it passes on to no other rank, the latest arrivals first, and at most as many as one
        block has.
        """
        if not self.saves:
            return {}
        # Other schedules of the same demand share its cache, so the key names the schedule.
        key = (Route.saved_rows, type(self), self.ranks_per_node, rank)
        return self.demand.cache.answer(key, lambda: self.find_saved_rows(rank))

    def is_saved(self, edge: Edge) -> bool:
        """Whether the target of `edge` keeps rows that arrive on it for the backward, see `saved_rows`."""
        return edge in self.saved_rows(edge.target)

    def find_saved_rows(self, rank: int) -> dict[Edge, RowSets]:
        """`saved_rows`, without its cache."""
        return {edge: self.stopping(edge) for edge in self._size_saved(rank)}

    def _size_saved(self, rank: int, arrivals: int | None = None) -> dict[Edge, int]:
        """By edge, the number of rows of `find_saved_rows` over all heads, from only the latest `arrivals` if given."""
        saved: dict[Edge, int] = {}
        room_by_ring: dict[int, int] = {}
        block = self.demand.block_heads * self.demand.layout.rows(rank)
        for edge in islice(self.arrivals(rank), arrivals):
            room = room_by_ring.setdefault(edge.ring, block)
            if len(room_by_ring) == self.rings and max(room_by_ring.values()) <= 0:
                break  # otherwise a rank that gets all blocks would look at all of them
            size = self._count_stopping(edge) if room > 0 else 0
            if size and (size <= room or room == block):  # at least one block, even if it is a row longer
                saved[edge] = size
            room_by_ring[edge.ring] = room - size
        return saved

    def saved_parts(self, rank: int) -> tuple[Part, ...]:
        arrivals, saved = self.edges_by_owner(rank).values(), self.saved_rows(rank)
        return tuple(part for edge in arrivals if edge in saved for part in make_parts("kv", edge.owner, saved[edge]))

    def forward(self, rank: int) -> tuple[Step, ...]:
        builder = StepBuilder(+1)
        if self.demand.visits(rank, rank):
            builder.visit(0, (Part("kv", rank),))
        for edge in self.edges_by_owner(rank).values():
            block = make_parts("kv", edge.owner, self.carried(edge))
            builder.recv(edge.post, edge.step - 1, edge.source, block)
            if self.demand.visits(rank, edge.owner):
                builder.visit(edge.step, block)
        for edge in self.departures(rank):
            builder.send(edge.post, edge.step - 1, edge.target, make_parts("kv", edge.owner, self.carried(edge)))
        return builder.steps()

    def backward(self, rank: int) -> tuple[Step, ...]:
        builder = StepBuilder(-1)
        arrivals = tuple(self.edges_by_owner(rank).values())
        if self.demand.visits(rank, rank):
            builder.visit(0, (Part("kv", rank),))
        saved = self.saved_rows(rank)
        for edge in arrivals:
            carried = self.carried(edge)
            if self.demand.visits(rank, edge.owner):
                builder.visit(edge.step, make_parts("kv", edge.owner, carried))
            if edge.source != edge.owner:
                returned = make_parts("kv", edge.owner, self.returned(edge, carried))
                builder.send(edge.step, edge.post + 1, edge.source, returned)
            builder.send(edge.step - 1, edge.post, edge.source, make_parts("grad", edge.owner, carried))
            if edge not in saved:
                stopping = make_parts("kv", edge.owner, self.stopping(edge))
                builder.recv(edge.step + 1, edge.step + 1, edge.owner, stopping)
        for edge in self.departures(rank):
            carried = self.carried(edge)
            if edge.owner != rank:
                returned = make_parts("kv", edge.owner, self.returned(edge, carried))
                builder.recv(edge.step, edge.post + 1, edge.target, returned)
            builder.recv(edge.step - 1, edge.post, edge.target, make_parts("grad", edge.owner, carried))
        for edge in self.last_edges(rank):
            if not self.is_saved(edge):
                builder.send(edge.step + 1, edge.step + 1, edge.target, make_parts("kv", rank, self.stopping(edge)))
        return builder.steps()

    def forward_of_queries(self, rank: int) -> tuple[Step, ...]:
        return self._send_queries(rank, ("query",), "part")

    def backward_of_queries(self, rank: int) -> tuple[Step, ...]:
        return self._send_queries(rank, ("row", "q"), "dq")

    def _send_queries(self, rank: int, kinds: tuple[Kind, ...], sums: Kind) -> tuple[Step, ...]:
        """The steps of a pass-Q pass: parts of `kinds` travel, with the `sums` for the rows of the last kind.

        Queries travel from their owners as keys do in a pass-KV forward. The sums of a row follow one step behind, and
        return to the owner from the rank where the row stops. If a row goes on to two ranks, its sums go to the first,
        and the second starts without sums.
        """

        def query_parts(owner: int, row_sets: RowSets) -> tuple[Part, ...]:
            return tuple(part for kind in kinds for part in make_parts(kind, owner, row_sets))

        visited = kinds[-1]
        builder = StepBuilder(+1)
        if self.demand.visits(rank, rank):
            builder.visit(0, (Part(visited, rank),))
        for edge in self.edges_by_owner(rank).values():
            carried = self.carried(edge)
            builder.recv(edge.post, edge.step - 1, edge.source, query_parts(edge.owner, carried))
            if self.demand.visits(rank, edge.owner):
                builder.visit(edge.step, make_parts(visited, edge.owner, carried))
            if edge.source != edge.owner:
                returned = make_parts(sums, edge.owner, self.returned(edge, carried))
                builder.recv(edge.post + 1, edge.step, edge.source, returned)
            builder.send(edge.step + 1, edge.step + 1, edge.owner, make_parts(sums, edge.owner, self.stopping(edge)))
        for edge in self.departures(rank):
            carried = self.carried(edge)
            builder.send(edge.post, edge.step - 1, edge.target, query_parts(edge.owner, carried))
            if edge.owner != rank:
                returned = make_parts(sums, edge.owner, self.returned(edge, carried))
                builder.send(edge.post + 1, edge.step, edge.target, returned)
        for edge in self.last_edges(rank):
            builder.recv(edge.step + 1, edge.step + 1, edge.target, make_parts(sums, rank, self.stopping(edge)))
        return builder.steps()

    def departures(self, rank: int) -> list[Edge]:
        """All messages that `rank` sends in a pass: its own blocks, and those that it forwards."""
        onward = (e for edge in self.edges_by_owner(rank).values() for e in self.next_edges(edge))
        return [*self.first_edges(rank), *onward]

    def sends(self, edge: Edge) -> bool:
        """Whether this edge is really used: whether it is one of the `departures` of its source. Does not list them."""
        if edge.owner == edge.source:
            return edge in self.first_edges(edge.owner)
        arrival = self.arrival(edge.source, edge.owner)
        return arrival is not None and edge in self.next_edges(arrival)

    def arrival(self, rank: int, owner: int) -> Edge | None:
        """The edge on which the block of `owner` reaches `rank`; None if no row of it does."""
        return self.edges_by_owner(rank).get(owner)

    def edges_by_owner(self, rank: int) -> dict[int, Edge]:
        """For each owner, the edge on which its block reaches `rank`; earliest edges first."""
        key = (Route.edges_by_owner, type(self), self.ranks_per_node, rank)
        return self.demand.cache.answer(key, lambda: {e.owner: e for e in [*self.arrivals(rank)][::-1]})

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int] | None:
        """(bytes between nodes, all bytes) of a backward, with arguments as in `Schedule`.

        If keys travel, rows that ranks kept from the forward are not sent again.
        """
        owners = sampled_owners(self.demand)
        saved = self.count_saved(owners) if self.saves and not queries else 0
        sent = self.count_moved(owners) * (block + sums) - saved * block
        return sent, sent

    def count_moved(self, owners: Sequence[int]) -> int:
        """The number of rows that are sent when the blocks of `owners` travel, summed over edges and heads."""
        count = self.demand.count_needed
        return sum(count(self.served(edge), owner) for owner in owners for edge in self.edges_of(owner))

    def count_saved(self, ranks: Sequence[int]) -> int:
        """The number of rows that `ranks` keep from the forward for the backward, summed over heads.

        With more than EXACT_RANKS ranks, only the last `LATEST` arrivals are examined: where all rows are passed on,
        the search would otherwise go through as many arrivals as there are ranks.
        """
        arrivals = None if self.demand.layout.ranks <= EXACT_RANKS else LATEST
        return sum(size for rank in ranks for size in self._size_saved(rank, arrivals).values())

    def _count_stopping(self, edge: Edge) -> int:
        """The number of rows in `stopping`, summed over heads."""
        reach, heads = self.demand.row_reach, self.demand.block_heads
        if reach is None:
            return count_rows(self.stopping(edge), heads, self.demand.layout.rows(edge.owner))
        further = [*map(self.served, self.next_edges(edge))]
        return reach.count(self.served(edge), edge.owner, further) * heads

    def _subtract(self, owner: int, row_sets: RowSets, others: list[RowSets]) -> RowSets:
        return subtract(row_sets, others, self.demand.block_heads, self.demand.layout.rows(owner))


#: (step at which a message is posted, last step during which it is in flight, peer)
MessageKey = tuple[int, int, int]


@dataclass
class StepBuilder:
    """Collects what a rank does at each step, in ascending (`sign` +1) or descending (-1) order of the steps.

    Parts with the same peer, and the same first and last step in flight, become one message.
    """

    sign: int
    visits: dict[int, list[Part]] = field(default_factory=dict)
    sends: dict[MessageKey, list[Part]] = field(default_factory=dict)
    recvs: dict[MessageKey, list[Part]] = field(default_factory=dict)

    def visit(self, step: int, block: tuple[Part, ...]) -> None:
        """Let the rank compute with `block` at `step`."""
        self.visits.setdefault(step, []).extend(block)

    def send(self, post: int, until: int, peer: int, block: tuple[Part, ...]) -> None:
        """Add parts to the message to `peer` that is in flight from step `post` to the end of step `until`."""
        if block:
            self.sends.setdefault((post, until, peer), []).extend(block)

    def recv(self, post: int, until: int, peer: int, block: tuple[Part, ...]) -> None:
        """Add parts to the message from `peer` that is in flight from step `post` to the end of step `until`."""
        if block:
            self.recvs.setdefault((post, until, peer), []).extend(block)

    def steps(self) -> tuple[Step, ...]:
        """The steps in order, without those at which nothing happens."""
        used = {*self.visits, *(step for key in (*self.sends, *self.recvs) for step in key[:2])}
        order = sorted(used, reverse=self.sign < 0)
        index = {step: i for i, step in enumerate(order)}
        sends = _group_by_post(self.sends, index)
        recvs = _group_by_post(self.recvs, index)

        def make_step(step: int) -> Step:
            visits = tuple(self.visits.get(step, ()))
            return Step(tuple(sends.get(step, ())), tuple(recvs.get(step, ())), visits, self.sign * step)

        return tuple(map(make_step, order))


def _group_by_post(messages: dict[MessageKey, list[Part]], index: dict[int, int]) -> dict[int, list[Hop]]:
    """The messages by the step at which they are posted; `index` renumbers steps without gaps."""
    hops: dict[int, list[Hop]] = {}
    for (post, until, peer), parts in messages.items():
        ordered = tuple(sorted(parts, key=lambda part: (ORDER[part.kind], part.owner)) if len(parts) > 1 else parts)
        tag = 2 * post + (post != until)
        hops.setdefault(post, []).append(Hop(peer, tag, ordered, index[until]))
    return hops
