"""Leaves: all work is cut at a global grid, and results meet in a tree that does not depend on the number of ranks.

A leaf is a run of at most L adjacent positions. A kernel computes the pairs of a leaf of queries and a leaf of keys in
calls that depend on these two leaves only. Results for a leaf meet in a binary tree over the numbers of the leaves on
the other side: node (level, i) joins all leaves whose number, shifted right by `level` bits, is i. Leaves that see
nothing of each other are absent from the tree, and never awaited. In packed documents numbers begin anew with each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..cache import Cache, cached
from ..errors import InvalidInput, Unsupported
from ..layout.leafwise import find_borders
from ..pattern.base import ONE_HEAD, Pattern, Position, Run, Side
from ..pattern.documents import find_documents
from ..pattern.tile import Tile, find_runs, intersect, shift_range
from ..pattern.views import HeadSlice, PatternView
from .row_sets import Ranges, RowSet, to_numbers
from .steps import Hop, Part, RankPlan, Step
from .work import find_tiles

T = TypeVar("T")
#: Bytes of the results that the leaves of a plan cache.
ANSWERS = 1 << 26


class Tree(Generic[T]):
    """The nodes of one leaf so far: complete subtrees, joined as soon as both sides are there, in whatever order.

    `seen` are the numbers of the leaves on the other side, ascending; `join` makes a node of its left and right half.
    """

    def __init__(self, seen: Ranges, join: Callable[[T, T], T]) -> None:
        self.seen, self.join, self.top = seen, join, seen[-1][-1].bit_length()
        self.nodes: dict[tuple[int, int], T] = {}

    def put(self, level: int, index: int, node: T) -> None:
        """Add a node, and join it with what it completes."""
        while level < self.top:
            other = self.nodes.pop((level, index ^ 1), None)
            if other is not None:
                node = self.join(other, node) if index % 2 else self.join(node, other)
            elif any(run.start >> level <= index ^ 1 <= run[-1] >> level for run in self.seen):
                break  # the other half has not come
            level, index = level + 1, index >> 1
        assert (level, index) not in self.nodes, "a node comes once"
        self.nodes[level, index] = node

    @property
    def root(self) -> T | None:
        """The node over all leaves; None as long as one is missing."""
        return self.nodes.get((self.top, 0))


@dataclass(frozen=True)
class Nodes(RowSet):
    """The rows of the nodes of gradients that a rank sends to the owner of a block, one node after another.

    `names` are their (leaf, level, index), `leaves` the (local rows, numbers of the leaves that see it) of each leaf.
    """

    names: tuple[tuple[int, int, int], ...] = ()
    leaves: tuple[tuple[int, range, Ranges], ...] = ()

    __hash__ = RowSet.kept_hash

    @cached_property
    def by_leaf(self) -> dict[int, tuple[range, Ranges]]:
        """`leaves` by the number of the leaf."""
        return {leaf: (rows, seen) for leaf, rows, seen in self.leaves}


class LeafPair(NamedTuple):
    """A leaf of queries and a leaf of keys, with their rows in the tensors of a visit.

    `first` is the first leaf of their document. `tiles` are the pairs that the mask shows, in rows of the two leaves.
    """

    query: int
    key: int
    first: int
    q: range
    k: range
    tiles: tuple[Tile, ...]


class LeafVisit(NamedTuple):
    """What a kernel of leaves computes in a visit: pairs, and which leaves those of queries, and of keys, meet in all.

    `nodes` are those that it sends to the owner of the block in a backward; None: the block is this rank's own.
    """

    pairs: tuple[LeafPair, ...]
    by_query: dict[int, Ranges]
    by_key: dict[int, Ranges]
    nodes: Nodes | None


@dataclass(frozen=True)
class Rounded(PatternView):
    """A pattern with whole leaves: a query attends all keys of a leaf of which its own leaf attends any, in all heads.

    It says which rows travel, and which pairs kernels compute.
    """

    pattern: Pattern
    borders: tuple[int, ...]
    heads: int

    __hash__ = Pattern.kept_hash

    @cached_property
    def cache(self) -> Cache:
        return Cache(ANSWERS)

    @cached_property
    def _borders(self) -> np.ndarray:
        return np.array(self.borders)

    def leaf(self, position: Any) -> Any:
        """The number of the leaf of each position; those outside the sequence belong to its first or last leaf."""
        found = np.clip(np.searchsorted(self._borders, position, "right") - 1, 0, max(len(self.borders) - 2, 0))
        return found if np.ndim(position) else int(found)

    def places(self, leaf: int) -> range:
        """The positions of a leaf."""
        return range(self.borders[leaf], self.borders[leaf + 1])

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        if len(self.borders) < 2:
            return self.pattern.run(side, first, last)
        ends = self._borders[self.leaf(first)], self._borders[self.leaf(last) + 1] - 1
        run = self.pattern.run(side, *(x if np.ndim(x) else int(x) for x in ends))
        if run is None:
            return None
        low, high = self._borders[self.leaf(run[0])], self._borders[self.leaf(run[1]) + 1] - 1
        return (low, high) if np.ndim(low) or np.ndim(high) else (int(low), int(high))

    @cached
    def seen(self, side: Side, leaf: int) -> Ranges:
        """The leaves of keys that a leaf of queries sees; with side "queries", those that see a leaf of keys."""
        own, whole = self.places(leaf), range(self.borders[-1])
        if (run := self.pattern.run(side, own[0], own[-1])) is not None:
            return (range(self.leaf(run[0]), self.leaf(run[1]) + 1),)
        mask, sides = np.zeros(len(self.borders) - 1, dtype=bool), (own, whole) if side == "keys" else (whole, own)
        for _, rows in self.pattern.paired(side, *sides, range(self.heads)):
            mask[self.leaf(np.array(rows))] = True
        return find_runs(mask)

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        for leaf in range(self.leaf(q[0]), self.leaf(q[-1]) + 1) if q and k else ():
            rows = intersect(q, self.places(leaf))
            for run in self.seen("keys", leaf) if rows else ():
                if keys := intersect(k, range(self.borders[run.start], self.borders[run.stop])):
                    yield Tile(heads, rows, keys)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        sees = np.frompyfunc(lambda i, j: any(j in run for run in self.seen("keys", int(i))), 2, 1)
        return np.asarray(sees(self.leaf(q), self.leaf(k)), dtype=bool)


class Leaves:
    """The leaves of a `plan.Plan`, and what its ranks compute and send by leaf."""

    def __init__(self, plan: Any) -> None:
        assert plan.reproducible is not None
        self.plan, self.cache = plan, Cache(ANSWERS)
        whole = plan.pattern.pattern if isinstance(plan.pattern, HeadSlice) else plan.pattern
        borders, documents = find_borders(whole, plan.tokens, plan.reproducible), find_documents(whole)
        self.rounded = Rounded(plan.pattern, borders, plan.heads)
        starts = np.unique(documents.starts) if documents else np.zeros(1, dtype=int)
        #: The first leaf of the document of each leaf.
        self.first = np.searchsorted(borders, starts)[np.searchsorted(starts, borders[:-1], "right") - 1].tolist()

    @cached
    def local(self, rank: int) -> tuple[tuple[int, range], ...]:
        """(leaf, local rows) of each leaf of a rank, in local order. Raises InvalidInput for a border off the grid."""
        found, first, of = list[tuple[int, range]](), 0, self.rounded
        for run in self.plan.layout.shard(rank):
            leaves = range(of.leaf(run[0]), of.leaf(run[-1]) + 1)
            if run.step != 1 or (of.borders[leaves[0]], of.borders[leaves[-1] + 1]) != (run.start, run.stop):
                raise InvalidInput(
                    f"reproducible={self.plan.reproducible}: the layout {self.plan.layout.name} cuts leaves: rank "
                    f"{rank} has positions {run.start} .. {run[-1]}{f' in steps of {run.step}' if run.step > 1 else ''}"
                    f"; try make_layout('leaves(zigzag, {self.plan.reproducible})', ..., pattern=...), or contiguous "
                    "or striped(1) for zigzag"
                )
            for leaf in leaves:
                rows = shift_range(of.places(leaf), first - run.start)
                found.append((leaf, rows))
            first += len(run)
        return tuple(found)

    def numbers(self, side: Side, leaf: int) -> Ranges:
        """The leaves on a side that meet a leaf of the other, counted from the first leaf of their document."""
        return tuple([shift_range(run, -self.first[leaf]) for run in self.rounded.seen(side, leaf)])

    def visit(self, rank: int, part: Part) -> LeafVisit:
        """What `rank` computes with a part of a block of keys."""
        keys, pairs = dict(self._rows_in(part)), list[LeafPair]()
        for i, q in self.local(rank):
            for j in (j for run in self.rounded.seen("keys", i) for j in run if j in keys):
                pairs.append(LeafPair(i, j, self.first[j], q, keys[j], self.tiles(i, j)))
        by_query = {pair.query: self.numbers("keys", pair.query) for pair in pairs}
        by_key = {pair.key: self.numbers("queries", pair.key) for pair in pairs}
        return LeafVisit(tuple(pairs), by_query, by_key, None if part.owner == rank else self.nodes(rank, part.owner))

    @cached
    def nodes(self, rank: int, owner: int) -> Nodes:
        """The nodes of dk and dv that `rank` sends to an owner: what its queries complete of the trees of each leaf."""
        mine, found = [leaf for leaf, _ in self.local(rank)], list[tuple[int, range, list[tuple[int, int]]]]()
        for j, rows in self.local(owner):
            if seeing := [i for i in mine if any(i in run for run in self.rounded.seen("queries", j))]:
                tree: Tree[bool] = Tree(self.numbers("queries", j), lambda one, other: True)
                for i in seeing:
                    tree.put(0, i - self.first[i], True)
                found.append((j, rows, sorted(tree.nodes)))
        return Nodes(
            tuple(range(self.plan.kv_heads)),
            ((range(sum(len(rows) * len(names) for _, rows, names in found)),),),
            tuple((j, *name) for j, _, names in found for name in names),
            tuple((j, rows, self.numbers("queries", j)) for j, rows, _ in found),
        )

    @cached
    def tiles(self, query: int, key: int) -> tuple[Tile, ...]:
        """The tiles of `LeafPair`: a function of the two leaves, so that the op does not depend on shards."""
        q, k = self.rounded.places(query), self.rounded.places(key)
        return tuple(find_tiles(self.plan.pattern, (q,), (k,), self.plan.heads))

    def send_home(self, rank: int, steps: Callable[[int], RankPlan]) -> RankPlan:
        """The steps of a rank; in its backward, nodes go straight to the owner of a block, one step after the visit.

        `steps` gives the steps of each rank, in which sums travel with blocks.
        """
        plan, new = self.plan, dict[int, tuple[list[Hop], list[Hop]]]()
        for other in range(plan.ranks):
            if other != rank and not plan.demand.visits(other, rank):
                continue
            for step in self.cache.answer((steps, other), lambda other=other: steps(other)).backward:  # type: ignore[misc]
                for owner in sorted({part.owner for part in step.visits} - {other}):
                    if rank in (other, owner):
                        part = Part("grad", owner, self.nodes(other, owner))
                        hop = Hop(owner + other - rank, 4 * plan.ranks, (part,), 0)  # a tag above those of blocks
                        new.setdefault(step.clock + 1, ([], []))[owner == rank].append(hop)
        own = steps(rank)
        found = {clock: Step(clock=clock) for clock in new} | {step.clock: step for step in own.backward}
        index = {clock: i for i, clock in enumerate(sorted(found))}

        def place(hops: tuple[Hop, ...], clock: int, side: int) -> tuple[Hop, ...]:
            placed = [
                hop._replace(until=index[own.backward[hop.until].clock], parts=parts)
                for hop in hops
                if (parts := tuple(part for part in hop.parts if part.kind != "grad"))
            ]
            return *placed, *(hop._replace(until=index[clock]) for hop in new.get(clock, ((), ()))[side])

        placed = (
            replace(found[clock], sends=place(found[clock].sends, clock, 0), recvs=place(found[clock].recvs, clock, 1))
            for clock in index
        )
        return replace(own, backward=tuple(placed))

    def _rows_in(self, part: Part) -> Iterator[tuple[int, range]]:
        """(leaf, rows in the tensors of a part) of the leaves of a block that a part holds."""
        if not isinstance(part.row_set, RowSet):
            yield from self.local(part.owner)
            return
        (runs,) = part.row_set.rows
        held = to_numbers(runs)
        for leaf, rows in self.local(part.owner):
            at = int(np.searchsorted(held, rows.start))
            if at < len(held) and held[at] == rows.start:
                assert held[at + len(rows) - 1] == rows[-1], "row sets hold whole leaves"
                yield leaf, range(at, at + len(rows))


def count_nodes(plan: Any) -> dict[str, int]:
    """The leaves of a plan, their pairs, and the nodes that ranks send to owners in a backward, with their bytes."""
    rounded, steps = plan.leaves.rounded, [step for rank in range(plan.ranks) for step in plan.for_rank(rank).backward]
    nodes = [part for step in steps for hop in step.sends for part in hop.parts if isinstance(part.row_set, Nodes)]
    leaves = len(rounded.borders) - 1
    return {
        "leaves": leaves,
        "pairs_of_leaves": sum(len(run) for leaf in range(leaves) for run in rounded.seen("keys", leaf)),
        "nodes": sum(len(part.row_set.names) for part in nodes if isinstance(part.row_set, Nodes)),
        "node_bytes": sum(map(plan.part_bytes, nodes)),
    }


def check_leaves(plan: Any) -> None:
    """Raise InvalidInput or Unsupported if a plan cannot give the same bits for any number of ranks."""
    split, schedule = plan.ulysses_size > 1, f"schedule={plan.schedule!r}"
    reasons = {
        "needs queries and keys at the same positions; leave out q_layout= or first=": plan.q_layout is not None,
        "takes no documents of each batch row; pack them into one row": plan.stacked,
        f"takes patterns of one softmax, {plan.pattern!r} has several": plan.pattern.branches > 1,
        f"cannot be had with {schedule}, which sums copies of {plan.kv_heads} key/value heads; try schedule='direct'": (
            split and plan.kv_heads % plan.ulysses_size > 0
        ),
        f"cannot be had with {schedule} and {plan.pattern!r}, whose heads may differ; try schedule='direct'": (
            split and plan.tokens > 0 and plan.pattern.run("keys", 0, 0) is None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(f"reproducible={plan.reproducible} {reason}")
    for rank in range(plan.ranks):
        plan.leaves.local(rank)
