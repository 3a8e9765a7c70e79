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
    """Decides when each block that `demand` describes goes from which rank to which rank."""

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
        """The steps of a rank's pass-KV backward: keys, values and their gradients travel."""

    @abstractmethod
    def backward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's pass-Q backward: queries and their gradients travel; `demand` is a `QueryDemand`."""

    def forward_of_queries(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank's pass-Q forward: queries and their (out, lse) travel; `demand` is a `QueryDemand`."""
        raise Unsupported(
            f"{type(self).__name__} cannot send queries around in the forward, only keys and values; try rotate='kv'"
        )

    def saved_parts(self, rank: int) -> tuple[Part, ...]:
        """The parts that a rank saves after the forward for a pass-KV backward; none if that gathers the keys again."""
        return ()

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int] | None:
        """(bytes between nodes, all bytes) of a backward, without making its steps; None if that needs the steps.

        `block` and `sums` are the bytes of one row of one head: of the block that travels, and of its gradients.
        `queries` means pass-Q. With more than EXACT_RANKS ranks, counts only the blocks of `sampled_owners`.
        """
        return None


def sampled_owners(demand: BlockDemand) -> list[int]:
    """Ranks whose blocks stand for the blocks of all ranks; all ranks if there are at most EXACT_RANKS.

    With more ranks, returns one period from the middle if the demand is periodic over ranks, else SAMPLED evenly spaced
    ranks.
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
    """Rows of `owner` go from rank `source` to rank `target`, which computes with them at step `step`.

    Both ranks post the message at step `post` < `step`, and it is in flight until the end of step `step` - 1. A rank
    computes with its own block at step 0. `ring` numbers the rings of a schedule, such as its directions.
    """

    owner: int
    source: int
    target: int
    post: int
    step: int
    ring: int = 0


class Route(Schedule):
    """A schedule whose blocks travel along trees of ranks, one per owner, only to ranks that need or forward rows."""

    #: The number of different values of `Edge.ring`.
    rings = 1

    @abstractmethod
    def arrivals(self, rank: int) -> Iterator[Edge]:
        """The edges to `rank`, latest first."""

    @abstractmethod
    def edges_at(self, rank: int, step: int) -> tuple[Edge, ...]:
        """The edges to `rank` for its step `step` > 0; edges that carry no rows may be among them."""

    def arcs(self, rank: int) -> tuple[Iterator[Edge], ...]:
        """The edges of `arrivals` in parts (arcs) that can be listed independently, each latest first.

        If possible, owners ascend or descend within an arc, so that one walk over the owners can follow the arcs of
        many ranks.
        """
        return (self.arrivals(rank),)

    @abstractmethod
    def first_edges(self, owner: int) -> tuple[Edge, ...]:
        """The edges on which the block of `owner` leaves it."""

    @abstractmethod
    def next_edges(self, edge: Edge) -> tuple[Edge, ...]:
        """The edges on which the target of `edge` passes its rows on."""

    @abstractmethod
    def served(self, edge: Edge) -> tuple[range, ...]:
        """The ranks that the edge serves, as runs: its target, and all ranks further down the tree."""

    def carried(self, edge: Edge) -> RowSets:
        """The rows that travel on an edge."""
        return self.demand.needed_rows(self.served(edge), edge.owner)

    def stopping(self, edge: Edge) -> RowSets:
        """The rows that arrive on an edge and go no further."""
        reach, further = self.demand.row_reach, self.next_edges(edge)
        if not further:
            return self.carried(edge)
        if reach is not None:
            return reach.needed(self.served(edge), edge.owner, 0, [self.served(e) for e in further])
        return self._subtract(edge.owner, self.carried(edge), [self.carried(e) for e in further])

    def last_edges(self, owner: int) -> Iterator[Edge]:
        """The edges of the block of `owner` that bring rows which go no further."""
        return (edge for edge in self.edges_of(owner) if self.stopping(edge) != NO_ROWS)

    def edges_of(self, owner: int) -> Iterator[Edge]:
        """All edges of the block of `owner`."""
        todo = [*self.first_edges(owner)]
        while todo:
            edge = todo.pop()
            todo += self.next_edges(edge)
            yield edge

    def returned(self, edge: Edge, carried: RowSets) -> RowSets:
        """The rows among `carried` whose gradient sums return on this edge, and not on an earlier sibling.

        Siblings are the edges on which one source passes on rows of the block.
        """
        siblings = self.next_edges(self.edges_by_owner(edge.source)[edge.owner])
        earlier = takewhile(lambda sibling: sibling != edge, siblings)
        return self._subtract(edge.owner, carried, [*map(self.carried, earlier)])

    def saved_rows(self, rank: int) -> dict[Edge, RowSets]:
        """By edge, the rows that `rank` saves for the backward; in the backward, their owners send only the others.

        A rank saves rows that go no further, the latest arrivals first, and at most as many as one block has.
        """
        if not self.saves:
            return {}
        # Other schedules of the same demand share its cache, so the key names the schedule.
        key = (Route.saved_rows, type(self), self.ranks_per_node, rank)
        return self.demand.cache.answer(key, lambda: self.find_saved_rows(rank))

    def is_saved(self, edge: Edge) -> bool:
        """Whether the target of `edge` saves rows that arrive on it, see `saved_rows`."""
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
        """The edges from `rank`."""
        onward = (e for edge in self.edges_by_owner(rank).values() for e in self.next_edges(edge))
        return [*self.first_edges(rank), *onward]

    def sends(self, edge: Edge) -> bool:
        """Whether the edge is one of the `departures` of its source, without listing them."""
        if edge.owner == edge.source:
            return edge in self.first_edges(edge.owner)
        arrival = self.arrival(edge.source, edge.owner)
        return arrival is not None and edge in self.next_edges(arrival)

    def arrival(self, rank: int, owner: int) -> Edge | None:
        """The edge on which the block of `owner` reaches `rank`; None if no row of it does."""
        return self.edges_by_owner(rank).get(owner)

    def edges_by_owner(self, rank: int) -> dict[int, Edge]:
        """By owner, the edge on which its block reaches `rank`; earliest first."""
        key = (Route.edges_by_owner, type(self), self.ranks_per_node, rank)
        return self.demand.cache.answer(key, lambda: {e.owner: e for e in [*self.arrivals(rank)][::-1]})

    def count_backward_bytes(self, block: int, sums: int, *, queries: bool) -> tuple[int, int] | None:
        """As in `Schedule`. Under pass-KV, blocks skip rows that their readers saved in the forward."""
        owners = sampled_owners(self.demand)
        saved = self.count_saved(owners) if self.saves and not queries else 0
        sent = self.count_moved(owners) * (block + sums) - saved * block
        return sent, sent

    def count_moved(self, owners: Sequence[int]) -> int:
        """The number of rows that move on the edges of the blocks of `owners`, summed over edges and heads."""
        count = self.demand.count_needed
        return sum(count(self.served(edge), owner) for owner in owners for edge in self.edges_of(owner))

    def count_saved(self, ranks: Sequence[int]) -> int:
        """The number of rows that `ranks` save from the forward, summed over heads.

        With more than EXACT_RANKS ranks, looks only at the last `LATEST` arrivals: where no rows stop, the search would
        go through as many arrivals as there are ranks.
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
    """Collects what a rank does at each step; steps count up (+1) or down (-1).

    Parts with equal `MessageKey` become one message.
    """

    sign: int
    visits: dict[int, list[Part]] = field(default_factory=dict)
    sends: dict[MessageKey, list[Part]] = field(default_factory=dict)
    recvs: dict[MessageKey, list[Part]] = field(default_factory=dict)

    def visit(self, step: int, block: tuple[Part, ...]) -> None:
        """Add a visit to a block."""
        self.visits.setdefault(step, []).extend(block)

    def send(self, post: int, until: int, peer: int, block: tuple[Part, ...]) -> None:
        """Add parts to the message to `peer`."""
        if block:
            self.sends.setdefault((post, until, peer), []).extend(block)

    def recv(self, post: int, until: int, peer: int, block: tuple[Part, ...]) -> None:
        """Add parts to the message from `peer`."""
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
