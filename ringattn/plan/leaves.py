"""Leaves: all work is cut at a global grid, and results meet in a tree that does not depend on the number of ranks.

A leaf is a run of at most L adjacent positions. A kernel computes the pairs of a leaf of queries and a leaf of keys in
calls that depend on these two leaves only. Results for a leaf meet in a binary tree over the numbers of the leaves on
the other side: node (level, i) joins all leaves whose number, shifted right by `level` bits, is i. Leaves that see
nothing of each other are absent from the tree, and never awaited. In packed documents numbers begin anew with each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from ..errors import InvalidInput, Unsupported
from ..layout.leafwise import find_borders
from ..pattern.base import ONE_HEAD, Pattern, Position, Run, Side
from ..pattern.documents import find_documents
from ..pattern.tile import Tile, find_runs
from ..pattern.views import HeadSlice, PatternView
from .row_sets import Ranges, RowSet, to_numbers
from .steps import Hop, Part, RankPlan, Step

if TYPE_CHECKING:
    from .plan import Plan

T = TypeVar("T")
#: Kernels compute leaves with a multiple of this many rows, of which the last may be padding: bits of calls with few
#: rows depend on where they lie in memory.
ALIGNED = 16


class Tree(Generic[T]):
    """The nodes of one leaf so far: complete subtrees, joined as soon as both sides are there, in whatever order.

    `seen` are the numbers of the leaves on the other side, ascending; `join` makes a node of its left and right half.
    """

    def __init__(self, seen: Sequence[int], join: Callable[[T, T], T]) -> None:
        self.seen, self.join = seen, join
        self.top = seen[-1].bit_length() if seen else 0
        self.nodes: dict[tuple[int, int], T] = {}

    def put(self, level: int, index: int, node: T) -> None:
        """Add a node, and join it with what it completes."""
        while level < self.top:
            other = self.nodes.pop((level, index ^ 1), None)
            if other is not None:
                node = self.join(node, other) if index % 2 == 0 else self.join(other, node)
            elif self._awaits(level, index ^ 1):
                break
            level, index = level + 1, index >> 1
        assert (level, index) not in self.nodes, "a node comes once"
        self.nodes[level, index] = node

    @property
    def root(self) -> T | None:
        """The node over all leaves; None as long as one is missing."""
        return self.nodes.get((self.top, 0))

    def _awaits(self, level: int, index: int) -> bool:
        """Whether some leaf below a node that has not come is ever to come."""
        at = bisect_left(self.seen, index << level)
        return at < len(self.seen) and self.seen[at] >> level == index


@dataclass(frozen=True)
class Nodes(RowSet):
    """The rows of the nodes of gradients that a rank sends to the owner of a block, one node after another.

    `names` are their (leaf, level, index). `seen_by` has, for each leaf of the block, its number and local rows, and
    the numbers of the leaves of queries that see it.
    """

    names: tuple[tuple[int, int, int], ...] = ()
    seen_by: tuple[tuple[int, range, tuple[int, ...]], ...] = ()

    __hash__ = RowSet.kept_hash

    @cached_property
    def leaves(self) -> dict[int, tuple[range, tuple[int, ...]]]:
        """For each leaf, its local rows and the numbers of the leaves of queries that see it."""
        return {leaf: (rows, seen) for leaf, rows, seen in self.seen_by}


class LeafPair(NamedTuple):
    """A leaf of queries and a leaf of keys, by number, with their rows in the tensors of a visit.

    `hidden` [1 or H, rows, keys] says which pairs the mask hides, in rows padded to a multiple of `ALIGNED`; None: no
    pair or, if `causal`, the keys after the query.
    """

    query: int
    key: int
    q: range
    k: range
    causal: bool
    hidden: np.ndarray | None


class LeafVisit(NamedTuple):
    """What a kernel of leaves computes in a visit: pairs, and the query leaves that see each of its leaves of keys.

    `nodes` are those that it sends to the owner of the block in a backward; None: the block is this rank's own.
    """

    pairs: tuple[LeafPair, ...]
    seen_by: dict[int, tuple[int, ...]]
    nodes: Nodes | None
    #: The numbers of leaves in their documents.
    numbers: dict[int, int]


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
    def _borders(self) -> np.ndarray:
        return np.array(self.borders)

    @cached_property
    def _seen(self) -> dict[tuple[Side, int], Ranges]:
        return {}

    def leaf(self, position: Any) -> Any:
        """The number of the leaf of each position; those outside the sequence belong to its first or last leaf."""
        last = max(len(self.borders) - 2, 0)
        return np.clip(np.searchsorted(self._borders, position, "right") - 1, 0, last)

    def rows(self, leaf: int) -> range:  # type: ignore[override]  # no batch of patterns is rounded
        """The positions of a leaf."""
        return range(self.borders[leaf], self.borders[leaf + 1])

    def run(self, side: Side, first: Position, last: Position) -> Run | None:
        ends = self._borders[self.leaf(first)], self._borders[self.leaf(last) + 1] - 1
        run = self.pattern.run(side, *(x if np.ndim(x) else int(x) for x in ends))
        if run is None or len(self.borders) < 2:
            return run
        low, high = self._borders[self.leaf(run[0])], self._borders[self.leaf(run[1]) + 1] - 1
        return cast(Run, tuple(x if np.ndim(x) else int(x) for x in (low, high)))

    def seen(self, side: Side, leaf: int) -> Ranges:
        """The leaves of keys that a leaf of queries sees; with side "queries", those that see a leaf of keys."""
        if (side, leaf) not in self._seen:
            own, whole, heads = self.rows(leaf), range(self.borders[-1]), range(self.heads)
            run = self.pattern.run(side, own[0], own[-1])
            if run is not None:
                found = (range(int(self.leaf(run[0])), int(self.leaf(run[1])) + 1),)
            else:
                mask = np.zeros(len(self.borders) - 1, dtype=bool)
                for _, rows in self.pattern.paired(side, *((own, whole) if side == "keys" else (whole, own)), heads):
                    mask[self.leaf(np.arange(rows.start, rows.stop, rows.step))] = True
                found = find_runs(mask)
            self._seen[side, leaf] = found
        return self._seen[side, leaf]

    def tiles(self, q: range, k: range, heads: range = ONE_HEAD) -> Iterator[Tile]:
        if not q or not k:
            return
        for leaf in range(int(self.leaf(q[0])), int(self.leaf(q[-1])) + 1):
            rows = _clip(q, self.rows(leaf))
            for run in self.seen("keys", leaf) if rows else ():
                keys = _clip(k, range(self.borders[run.start], self.borders[run.stop]))
                if keys:
                    yield Tile(heads, rows, keys)

    def visible(self, q: np.ndarray, k: np.ndarray, head: int, tokens: int) -> np.ndarray:
        sees = np.frompyfunc(lambda i, j: any(j in run for run in self.seen("keys", int(i))), 2, 1)
        return np.asarray(sees(self.leaf(q), self.leaf(k)), dtype=bool)


def _clip(r: range, within: range) -> range:
    """The members of `r` that are within a range of step 1."""
    first = r.start + -(-max(within.start - r.start, 0) // r.step) * r.step
    return range(first, min(r.stop, within.stop), r.step)


class Leaves:
    """The leaves of a plan, and what its ranks compute and send by leaf."""

    def __init__(self, plan: Plan) -> None:
        assert plan.reproducible is not None
        self.plan, pattern = plan, plan.pattern
        whole = pattern.pattern if isinstance(pattern, HeadSlice) else pattern
        self.borders = find_borders(whole, plan.tokens, plan.reproducible)
        documents = find_documents(whole)
        starts = np.array(documents.starts if documents else (0,))
        #: For each leaf, the number of the first leaf of its document.
        self.origins = np.searchsorted(self.borders, starts)[
            np.searchsorted(starts, self.borders[:-1], "right") - 1
        ].tolist()
        self.rounded = Rounded(pattern, self.borders, plan.heads)
        self._local: dict[int, tuple[tuple[int, range], ...]] = {}
        self._masks: dict[tuple[int, int], tuple[bool, np.ndarray | None]] = {}
        self._nodes: dict[tuple[int, int], Nodes] = {}
        self._steps: dict[int, RankPlan] = {}

    def number(self, leaf: int) -> int:
        """The number of a leaf in its document."""
        return leaf - int(self.origins[leaf])

    def local(self, rank: int) -> tuple[tuple[int, range], ...]:
        """(leaf, local rows) of each leaf of a rank, in local order. Raises InvalidInput if a border is off the grid."""
        if rank not in self._local:
            found, first = list[tuple[int, range]](), 0
            for run in self.plan.layout.shard(rank):
                leaves = range(int(self.rounded.leaf(run[0])), int(self.rounded.leaf(run[-1])) + 1)
                if run.step != 1 or (self.borders[leaves[0]], self.borders[leaves[-1] + 1]) != (run.start, run.stop):
                    length, name = self.plan.reproducible, self.plan.layout.name
                    raise InvalidInput(
                        f"reproducible={length}: the layout {name} cuts a leaf: rank {rank} has the positions "
                        f"{run.start} .. {run[-1]}{f' in steps of {run.step}' if run.step > 1 else ''}; cut the "
                        f"sequence with make_layout('leaves(zigzag, {length})', ..., pattern=...), or contiguous or "
                        "striped(1) in place of zigzag"
                    )
                for leaf in leaves:
                    size = len(self.rounded.rows(leaf))
                    found.append((leaf, range(first, first + size)))
                    first += size
            self._local[rank] = tuple(found)
        return self._local[rank]

    def visit(self, rank: int, part: Part) -> LeafVisit:
        """What `rank` computes with a part of a block of keys."""
        keys, pairs = dict(self._rows_in(part)), []
        for i, q in self.local(rank):
            for j in (j for run in self.rounded.seen("keys", i) for j in run if j in keys):
                pairs.append(LeafPair(i, j, q, keys[j], *self.mask(i, j)))
        columns = {pair.key: self.numbers("queries", pair.key) for pair in pairs}
        nodes = None if part.owner == rank else self.nodes(rank, part.owner)
        numbers = {leaf: self.number(leaf) for pair in pairs for leaf in pair[:2]}
        return LeafVisit(tuple(pairs), columns, nodes, numbers)

    def numbers(self, side: Side, leaf: int) -> tuple[int, ...]:
        """The numbers of the leaves on a side that are in some pair with a leaf of the other, ascending."""
        origin = int(self.origins[leaf])
        return tuple([j - origin for run in self.rounded.seen(side, leaf) for j in run])

    def nodes(self, rank: int, owner: int) -> Nodes:
        """The nodes of dk and dv that `rank` sends to an owner: what its queries complete of the trees of each leaf."""
        if (rank, owner) not in self._nodes:
            self._nodes[rank, owner] = self._find_nodes(rank, owner)
        return self._nodes[rank, owner]

    def _find_nodes(self, rank: int, owner: int) -> Nodes:
        mine = sorted(leaf for leaf, _ in self.local(rank))
        names, leaves, count = list[tuple[int, int, int]](), list[tuple[int, range, tuple[int, ...]]](), 0
        for j, rows in self.local(owner):
            tree: Tree[bool] = Tree(self.numbers("queries", j), lambda one, other: True)
            for run in self.rounded.seen("queries", j):
                for i in mine[bisect_left(mine, run.start) : bisect_left(mine, run.stop)]:
                    tree.put(0, self.number(i), True)
            if tree.nodes:
                names += [(j, *name) for name in sorted(tree.nodes)]
                leaves.append((j, rows, self.numbers("queries", j)))
                count += len(tree.nodes) * len(rows)
        return Nodes(tuple(range(self.plan.kv_heads)), ((range(count),),), tuple(names), tuple(leaves))

    def mask(self, query: int, key: int) -> tuple[bool, np.ndarray | None]:
        """(causal, hidden) of `LeafPair`: a function of the two leaves, so that the op does not depend on the shards."""
        if (query, key) not in self._masks:
            q, k, heads = self.rounded.rows(query), self.rounded.rows(key), range(self.plan.heads)
            tiles = [*self.plan.pattern.tiles(q, k, heads)]
            whole = len(tiles) == 1 and (len(tiles[0].heads), len(tiles[0].q), len(tiles[0].k)) == (
                *(len(heads), len(q), len(k)),
            )
            if whole and tiles[0].dense and len(k) % ALIGNED == 0:
                self._masks[query, key] = False, None
            elif whole and len(q) == len(k) and (tiles[0].lo, tiles[0].hi) == (q.start - k.start, None):
                self._masks[query, key] = True, None
            else:
                self._masks[query, key] = False, _hide(tiles, q, k, heads)
        return self._masks[query, key]

    def send_home(self, rank: int, steps: Callable[[int], RankPlan]) -> RankPlan:
        """The steps of a rank; in its backward, nodes go straight to the owner of a block, one step after the visit.

        `steps` gives the steps of each rank, in which sums travel with blocks.
        """
        sends, recvs = dict[int, list[Hop]](), dict[int, list[Hop]]()
        plan, tag = self.plan, 4 * self.plan.ranks  # above all tags of blocks
        for other in (other for other in range(plan.ranks) if plan.demand.visits(other, rank) or other == rank):
            if other not in self._steps:
                self._steps[other] = steps(other)
            for step in self._steps[other].backward:
                for owner in sorted({part.owner for part in step.visits} - {other}):
                    if rank in (other, owner):
                        home = Part("grad", owner, self.nodes(other, owner))
                        to, peer = (sends, owner) if rank == other else (recvs, other)
                        to.setdefault(step.clock + 1, []).append(Hop(peer, tag, (home,), 0))
        own = self._steps[rank]
        blocks = [
            replace(step, sends=_without_sums(step.sends), recvs=_without_sums(step.recvs)) for step in own.backward
        ]
        old = {index: step.clock for index, step in enumerate(blocks)}
        found = {step.clock: step for step in blocks} | {
            clock: Step(clock=clock) for clock in {*sends, *recvs} - {*old.values()}
        }
        index = {clock: i for i, clock in enumerate(sorted(found))}

        def place(hops: tuple[Hop, ...], new: list[Hop], clock: int) -> tuple[Hop, ...]:
            placed = [hop._replace(until=index[old[hop.until]]) for hop in hops]
            return *placed, *(hop._replace(until=index[clock]) for hop in new)

        return replace(
            own,
            backward=tuple(
                replace(
                    found[clock],
                    sends=place(found[clock].sends, sends.get(clock, []), clock),
                    recvs=place(found[clock].recvs, recvs.get(clock, []), clock),
                )
                for clock in index
            ),
        )

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


def _without_sums(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    kept = (hop._replace(parts=tuple(part for part in hop.parts if part.kind != "grad")) for hop in hops)
    return tuple(hop for hop in kept if hop.parts)


def _hide(tiles: Sequence[Tile], q: range, k: range, heads: range) -> np.ndarray:
    """The pairs of two leaves that no tile has, bool [1 or H, rows, keys], all of the padding among them."""
    hidden = np.ones((len(heads), -(-len(q) // ALIGNED) * ALIGNED, -(-len(k) // ALIGNED) * ALIGNED), dtype=bool)
    for tile in tiles:
        rows, keys = np.array(tile.q), np.array(tile.k)
        distance = rows[:, None] - keys[None]
        sees = np.ones_like(distance, dtype=bool)
        sees &= True if tile.lo is None else distance >= tile.lo
        sees &= True if tile.hi is None else distance <= tile.hi
        hidden[np.ix_(tile.heads, rows - q.start, keys - k.start)] &= ~sees
    return hidden[:1] if (hidden == hidden[:1]).all() else hidden


def check_leaves(plan: Plan) -> None:
    """Raise InvalidInput or Unsupported if a plan cannot give the same bits for any number of ranks."""
    length = plan.reproducible
    size = plan.ulysses_size
    if plan.q_layout is not None:
        raise Unsupported(f"reproducible={length} needs queries and keys at the same positions; leave out q_layout=")
    if plan.stacked:
        raise Unsupported(f"reproducible={length} takes no documents of each batch row; pack them into one row")
    if plan.pattern.branches > 1:
        raise Unsupported(f"reproducible={length} takes patterns of one softmax, {plan.pattern!r} has several; leave it out")
    if size > 1 and plan.kv_heads % size:
        raise Unsupported(
            f"reproducible={length}: schedule={plan.schedule!r} would sum copies of the {plan.kv_heads} key/value heads; "
            "try schedule='direct', or a degree that divides them"
        )
    if size > 1 and plan.tokens and plan.pattern.run("keys", 0, 0) is None:
        raise Unsupported(
            f"reproducible={length}: heads of {plan.pattern!r} may have masks of their own, of which a rank of "
            f"schedule={plan.schedule!r} would see some; try schedule='direct'"
        )
    for rank in range(plan.ranks):
        plan.leaves.local(rank)
