"""The Plan, a pure function of its inputs: which rank computes which pairs when, and sends which rows to which rank."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..cache import Cache, cached, estimate_bytes
from ..errors import InvalidInput
from ..layout.regular import Balanced, Layout, make_layout, restore_layout
from ..pattern import Pattern, parse_pattern
from ..pattern.documents import find_documents
from .demand import ANSWERS, KeyDemand, QueryDemand
from .row_sets import ONE_ROW, RowSet
from .schedules import make_schedule, resolve, split_ulysses
from .schedules.base import Schedule, sampled_owners
from .steps import BLOCKS, OF_KEYS, SUMS, Hop, Kind, Part, PlanSizes, RankPlan, Step, parse_rotate

if TYPE_CHECKING:
    from .choice import Choice
    from .leaves import Leaves
    from .listing import Listing

#: Increased whenever the same inputs give different steps, so that ranks of different versions refuse to run together.
FORMAT = 4


class Rotation:
    """Computes the steps of each rank under a schedule without Ulysses groups.

    `keys` schedules blocks of keys, `queries` blocks of queries, and `size` gives the bytes of a part of a message.
    `forward` says what travels in the forward, "kv" or "q". In the backward with `rotate="auto"`, whatever sends fewer
    bytes travels; keys on a tie. For a double ring, which is meant to save traffic between nodes, bytes between nodes
    are compared first.
    """

    def __init__(
        self, keys: Schedule, queries: Schedule, forward: str, rotate: str, size: Callable[[Part], int]
    ) -> None:
        self.keys, self.queries, self.rotate, self.size = keys, queries, rotate, size
        self.forward = keys.forward if forward == "kv" else queries.forward_of_queries
        keys.saves = forward == "kv"

    @cached_property
    def chosen(self) -> str:
        """Which blocks travel in the backward: "kv" (keys and values) or "q" (queries)."""
        if self.rotate != "auto":
            return self.rotate
        if self.keys.demand.layout.ranks == 1:
            return "kv"
        keys, queries = self.count_bytes()
        return "q" if queries < keys else "kv"

    def count_bytes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The bytes sent in a backward, as two pairs (bytes between nodes, all bytes): for pass-KV and for pass-Q.

        In pass-KV keys and values travel, in pass-Q queries. With up to `schedules.base.EXACT_RANKS` ranks, all blocks
        are counted. With more ranks, the same few blocks are counted for both, which is enough to compare them.
        """
        kv, grad, q, row, dq = (self.size(Part(kind, 0, ONE_ROW)) for kind in ("kv", "grad", "q", "row", "dq"))
        keys = self.keys.count_backward_bytes(kv, grad, queries=False)
        queries = self.queries.count_backward_bytes(q + row, dq, queries=True)
        if keys is None or queries is None:
            return self._count_steps(self.keys.backward), self._count_steps(self.queries.backward_of_queries)
        return keys, queries

    def steps(self, rank: int, forward: tuple[Step, ...] | None = None) -> RankPlan:
        """What `rank` does at each step of the forward, unless that is given, and of the backward."""
        if self.chosen == "kv":
            backward, saved = self.keys.backward(rank), self.keys.saved_parts(rank) if self.keys.saves else ()
        else:
            backward, saved = self.queries.backward_of_queries(rank), ()
        return RankPlan(rank, self.forward(rank) if forward is None else forward, backward, saved)

    def _count_steps(self, steps: Callable[[int], tuple[Step, ...]]) -> tuple[int, int]:
        """(bytes between nodes, all bytes) that the ranks of `sampled_owners` send in their steps."""
        node, between, every = self.keys.ranks_per_node, 0, 0
        for rank in sampled_owners(self.keys.demand):
            for hop in (hop for step in steps(rank) for hop in step.sends):
                size = sum(map(self.size, hop.parts))
                every += size
                between += size if rank // node != hop.peer // node else 0
        return between, every


@dataclass(frozen=True, kw_only=True)
class Plan(PlanSizes):
    """A plan, as its inputs; the rest is derived, lazily and per rank. Make one with `make_plan`.

    Its bytes, messages and pairs are counted exactly, not modelled.
    """

    pattern: Pattern
    layout: Layout
    schedule: str
    #: The layout of the queries if their positions differ from those of the keys; `layout` is then for keys only.
    q_layout: Layout | None = None
    #: What `auto` compared and why it chose this plan; None if the caller named layout and schedule.
    choice: Choice | None = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    @property
    def q_tokens(self) -> int:
        """The number of queries: `tokens`, unless queries have a layout of their own."""
        return self.layout_of("q").tokens

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @cached_property
    def stacked(self) -> bool:
        """Whether the batch rows are planned as one long sequence, joined end to end."""
        return self.layout.stacked > 1

    @property
    def stride(self) -> int:
        """The positions of a batch row in a plan that joins batch rows: row i begins at position i * stride."""
        return max(_end(layout.base) for layout in (self.layout, self.q_layout) if layout is not None)

    @cached_property
    def output_scale(self) -> float:
        """The factor by which the output is multiplied, see `Pattern.output_scale`."""
        return self.pattern.output_scale

    def layout_of(self, kind: Kind) -> Layout:
        """The layout of the rows in parts of this kind: of the keys for "kv" and "grad", otherwise of the queries."""
        return self.layout if self.q_layout is None or kind in OF_KEYS else self.q_layout

    def exchange_rows(self, kind: Kind, rank: int) -> tuple[int, ...]:
        """The number of rows that `rank` contributes to each tensor of a Ulysses exchange of this kind."""
        if kind in ("qkv", "dqkv"):
            of_keys = len(self.exchange_tensors(kind, self.ulysses_size)) - 1
            return self.layout_of("q").rows(rank), *[self.layout.rows(rank)] * of_keys
        return (self.layout_of("q").rows(rank),) * 2

    @cached_property
    def cache(self) -> Cache:
        """A cache for results derived from this plan; it lives as long as the plan.

        It serves the methods marked `cached`, and other packages may store results here. A key made by another package
        starts with the function that computes the result.
        """
        return Cache(ANSWERS)

    @cached_property
    def demand(self) -> KeyDemand:
        """Which keys each rank needs. In a plan with Ulysses groups use the demand of a `ring_plan` instead."""
        return self.demand_of(self.pattern if self.reproducible is None else self.leaves.rounded)

    @cached_property
    def leaves(self) -> Leaves:
        """The leaves of a plan with `reproducible`. With Ulysses groups use those of a `ring_plan` for its visits."""
        from .leaves import Leaves  # few plans have leaves

        return Leaves(self)

    def demand_of(self, pattern: Pattern) -> KeyDemand:
        """Which keys each rank would need under another pattern."""
        return KeyDemand(pattern, self.layout, self.heads, self.kv_heads, self.q_layout, self.block_heads)

    @cached_property
    def query_demand(self) -> QueryDemand:
        """Which queries each rank needs if queries travel (pass-Q).

        In a plan with Ulysses groups use the demand of a `ring_plan` instead.
        """
        return QueryDemand(self.demand)

    def with_choice(self, choice: Choice) -> Plan:
        """A copy of this plan with the given `choice`; both plans share the caches of their demands."""
        plan, asked, size = replace(self, choice=choice), self.ring_plan(0)[0].demand, self.ulysses_size
        # If each query attends one run, all heads are alike.
        alike = bool(self.tokens) and asked.pattern.run("keys", 0, 0) is not None
        for member in range(size if alike else 1):
            plan.ring_plan(member)[0].demand.share_answers(asked)
        return plan

    def for_rank(self, rank: int) -> RankPlan:
        """The steps of one rank, without planning the other ranks."""
        self._check_rank(rank)
        if not self.batch:
            return RankPlan(rank, (), ())  # nothing to compute, nothing to send
        return self.plan_rank(rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise InvalidInput(f"rank {rank} is not one of the {self.ranks} ranks 0 .. {self.ranks - 1} of the plan")

    @cached
    def forward_steps(self, rank: int) -> tuple[Step, ...]:
        """What one rank does at each step of the forward; does not plan the backward unless it has to."""
        self._check_rank(rank)
        if not self.batch:
            return ()
        if self.ulysses_size == 1:
            return self._rotation.forward(rank)
        ring_plan, place = self.ring_plan(rank)
        return self._with_exchanges(RankPlan(rank, ring_plan.forward_steps(place), ())).forward

    @cached
    def plan_rank(self, rank: int) -> RankPlan:
        """The result of `for_rank` for a plan whose batch is not empty."""
        if self.ulysses_size == 1:
            steps = self._rotation.steps
            if self.reproducible is None:
                return steps(rank, self.forward_steps(rank))
            return self.leaves.send_home(rank, steps)
        ring_plan, place = self.ring_plan(rank)
        return self._with_exchanges(replace(ring_plan.for_rank(place), rank=rank))

    def _with_exchanges(self, between: RankPlan) -> RankPlan:
        from .schedules.ulysses import wrap_in_exchanges  # few plans have Ulysses groups

        return wrap_in_exchanges(between, self.ulysses_size, self.ranks, self.exchange_rows)

    @cached_property
    def _rotation(self) -> Rotation:
        return self.make_rotation(self.demand)

    def make_rotation(self, demand: KeyDemand) -> Rotation:
        """A `Rotation`, which computes the steps of each rank for `demand`; for plans without Ulysses groups."""
        query_demand = self.query_demand if demand is self.demand else QueryDemand(demand)
        keys, queries = (make_schedule(self.schedule, blocks) for blocks in (demand, query_demand))
        _, backward = parse_rotate(self.rotate)
        # Rounded queries would give other attention weights than the forward.
        backward = "kv" if backward == "auto" and self.comm_dtype is not None else backward
        return Rotation(keys, queries, self.forward_rotates, backward, self.part_bytes)

    @cached_property
    def forward_rotates(self) -> str:
        """Which blocks travel in the forward: "q" if `rotate` says so for the forward, else "kv"."""
        return "q" if parse_rotate(self.rotate, both=self.q_layout is not None)[0] == "q" else "kv"

    @property
    def is_plain(self) -> bool:
        """Whether queries and keys are the same tokens and the forward is pass-KV."""
        return self.q_layout is None and self.forward_rotates == "kv"

    @property
    def rotates(self) -> str:
        """Which blocks travel in the backward, "kv" or "q"; with Ulysses groups, between the groups."""
        return self._rotation.chosen if self.ulysses_size == 1 else self._ring_plans[0].rotates

    @cached_property
    def ulysses_size(self) -> int:
        """The number of ranks in a Ulysses group, which exchange tokens for heads; 1 unless the schedule is ulysses."""
        return split_ulysses(self.schedule)[0]

    def ring_plan(self, rank: int) -> tuple[Plan, int]:
        """(plan, place): the plan that `rank` follows between Ulysses groups, and the rank's number in it.

        (self, rank) if the schedule has no Ulysses groups.
        """
        if self.ulysses_size == 1:
            return self, rank
        return self._ring_plans[rank % self.ulysses_size], rank // self.ulysses_size

    @cached_property
    def _ring_plans(self) -> list[Plan]:
        """For each place in a group, the plan between the members at this place of all groups."""
        from ..pattern.views import HeadSlice  # few plans have Ulysses groups

        size, schedule = split_ulysses(self.schedule)
        (heads, kv_heads), layout = self.member_heads(size), self.layout.grouped(size)
        q_layout = None if self.q_layout is None else self.q_layout.grouped(size)
        members = (HeadSlice(self.pattern, i * heads) for i in range(size))
        between = replace(self, layout=layout, q_layout=q_layout, schedule=schedule, heads=heads, kv_heads=kv_heads)
        return [replace(between, pattern=member) for member in members]

    @property
    def kept_bytes(self) -> int:
        """Approximate size of the plan in bytes, with everything cached so far."""
        used = [plan for plan in vars(self).get("_ring_plans", ()) if "demand" in vars(plan)]
        caches = {id(c): c for p in (self, *used) for c in (p.cache, p.demand.cache, p.query_demand.cache)}
        return self._input_bytes + sum(cache.bytes for cache in caches.values())

    @cached_property
    def _input_bytes(self) -> int:
        return estimate_bytes([getattr(self, entry.name) for entry in fields(self)])

    def part_bytes(self, part: Part, *, as_sent: bool = True) -> int:
        """The bytes of a part in a message or, with as_sent=False, in the dtype in which a rank computes with it."""
        if part.kind not in BLOCKS and part.kind not in SUMS:
            return self.exchange_bytes(part.kind, self.exchange_rows(part.kind, part.owner), self.ulysses_size)
        if self.ulysses_size > 1:  # the part travels between the groups
            return self.ring_plan(0)[0].part_bytes(part, as_sent=as_sent)
        rows, heads = part.row_set, self.part_heads(part.kind)
        count = rows.size if isinstance(rows, RowSet) else heads * self.layout_of(part.kind).rows(part.owner)
        return self.block_bytes(part.kind, count, as_sent=as_sent)

    def bytes_sent(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Bytes that a rank (None: all ranks together) sends in the forward, or in the backward."""
        return sum(self.part_bytes(part) for hop in self._sends(rank, backward) for part in hop.parts)

    def messages(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Messages that a rank (None: all) sends in the forward, or in the backward."""
        return len(self._sends(rank, backward))

    def full_ring_bytes(self, *, backward: bool = False) -> int:
        """Bytes that a ring of all ranks would send if it skipped no rows: every block to every other rank."""
        kinds: tuple[Kind, ...] = ("kv",) if self.forward_rotates == "kv" else ("query", "part")
        if backward:
            kinds = ("kv", "grad") if self.rotates == "kv" else ("q", "row", "dq")
        blocks = (self.block_bytes(kind, self.part_heads(kind) * self.layout_of(kind).tokens) for kind in kinds)
        return (self.ranks - 1) * sum(blocks)

    def pairs(self, rank: int | None = None) -> int:
        """(query, key, head, branch) pairs that a rank (None: all) computes."""
        if rank is not None and self.ulysses_size > 1:
            ring_plan, place = self.ring_plan(rank)
            return ring_plan.pairs(place)
        layout, heads = self.layout_of("q"), range(self.heads)
        rows = layout.domain if rank is None else layout.shard(rank)
        return sum(self.pattern.count(q, k, heads) for q in rows for k in self.layout.domain)

    @property
    def density(self) -> float:
        """Pairs / (heads x queries x keys): 1 is full attention; each branch adds its own pairs."""
        return self.pairs() / max(self.heads * self.q_tokens * self.tokens, 1)

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank / mean pairs per rank; 1 is perfect balance."""
        total = self.pairs()
        return max(map(self.pairs, range(self.ranks))) * self.ranks / total if total else 1.0

    @cached_property
    def documents(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(number of tokens, ranks that own them) for each packed document that is not empty.

        () if there are no documents, if batch rows have different documents, or if queries have their own layout.
        """
        found = None if self.q_layout is not None else find_documents(self.pattern)
        if found is None:
            return ()
        starts, holders = found.starts, [list[int]() for _ in found.lengths]
        for rank in range(self.ranks):
            for rows in self.layout.shard(rank):
                first, last = bisect_right(starts, rows[0]) - 1, bisect_right(starts, rows[-1]) - 1
                for number in range(first, last + 1):
                    # The first of these rows that is not before the document.
                    row = rows[max(-(-(starts[number] - rows[0]) // rows.step), 0)]
                    if row < starts[number + 1] and holders[number][-1:] != [rank]:
                        holders[number].append(rank)
        lengths = [end - start for start, end in pairwise(starts)]
        return tuple((length, tuple(ranks)) for length, ranks in zip(lengths, holders, strict=True) if length)

    @cached_property
    def hash(self) -> str:
        """Hexadecimal digest of the inputs and of the format's version; plans with equal hashes have equal steps."""
        return hashlib.sha256(json.dumps(self._inputs(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON, with its hash."""
        return json.dumps({**self._inputs(), "hash": self.hash}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` or `ringattn plan output.path=` wrote. Raises InvalidInput for any other text."""
        from .record import read_record  # loaded only when a plan is read

        record = read_record(text, FORMAT)
        pattern, tokens, ranks = parse_pattern(record.pattern), record.tokens, record.ranks
        sizes = PlanSizes(**{entry.name: getattr(record, entry.name) for entry in fields(PlanSizes)})

        def restore(name: str, tokens: int, partition: list[tuple[int, int]] | None) -> Layout:
            if partition is not None:
                return restore_layout(name, tokens, ranks, partition)
            return make_layout(name, tokens=tokens, ranks=ranks, pattern=pattern, heads=sizes.heads)

        if record.q_layout is None:
            pattern.check(tokens, sizes.heads)
        layout, q_layout = restore(record.layout, tokens, record.partition), None
        bound = pattern.bind(sizes.heads, tokens)
        if record.q_layout is not None:
            q_layout = restore(record.q_layout, record.q_tokens, record.q_partition)
            bound = bind_sides(pattern, layout, q_layout, sizes.heads)
        schedule = resolve(record.schedule, ranks, sizes.heads, sizes.kv_heads)
        plan = arrange(bound, layout, schedule, sizes, q_layout)
        if plan.hash != record.hash:
            raise InvalidInput(
                f"the plan's contents have the hash {plan.hash}, but the file states {record.hash}: it was edited; "
                "make the plan again"
            )
        return plan

    def picture(self, *, ascii: bool = False, width: int | None = None) -> str:
        """The forward as text: for each rank and step, how full the computed block of pairs is, and whether it sends.

        At most `width` columns wide (None: as wide as the terminal).
        """
        from .drawing import draw_steps  # loaded only when a plan is drawn

        return draw_steps(self.ranks, self.forward_steps, self._level, ascii=ascii, width=width)

    def listing(self, rank: int) -> Listing:
        """What one rank posts, computes and waits for, step by step, to print or as JSON."""
        from .listing import Listing  # loaded only when a plan is listed

        (ring_plan, place), steps = self.ring_plan(rank), self.for_rank(rank)

        def pairs(part: Part) -> int:
            demand = ring_plan.demand if part.kind == "kv" else ring_plan.query_demand
            return sum(work.pairs for work in demand.works(place, part.owner, part.row_set))

        def block_rows(part: Part) -> int:
            return ring_plan.layout_of(part.kind).rows(part.owner)

        travels, shard = (ring_plan.forward_rotates, ring_plan.rotates), self.layout_of("q").shard(rank)
        return Listing(self.hash, self.ranks, steps, shard, travels, self.part_bytes, pairs, block_rows, self.block)

    def visited(self, rank: int, step: Step) -> dict[int, tuple[int, int]]:
        """By owner of a block that `rank` visits in a step of the forward: (pairs that it computes, all its pairs).

        With Ulysses groups, owners are numbered by group, as in `listing`.
        """
        plan, place = self.ring_plan(rank)
        passes_q, queries, keys = plan.forward_rotates == "q", plan.layout_of("q"), plan.layout
        found = {}
        for owner in {part.owner: None for part in step.visits}:
            mine, theirs = (owner, place) if passes_q else (place, owner)
            found[owner] = plan.demand.pairs(mine, theirs), plan.heads * queries.rows(mine) * keys.rows(theirs)
        return found

    def _level(self, rank: int, step: Step) -> int:
        """The computed share of the pairs of the blocks that a step visits, as a level of `draw_steps`."""
        visited = self.visited(rank, step).values()
        pairs, all_pairs = (sum(counts) for counts in zip((0, 0), *visited, strict=True))
        return 0 if not pairs else 3 if pairs >= all_pairs else 2 if 2 * pairs >= all_pairs else 1

    def _sends(self, rank: int | None, backward: bool) -> list[Hop]:
        """The messages that a rank (None: all ranks together) sends in a pass."""
        return [hop for step in self._steps(rank, backward) for hop in step.sends]

    def _steps(self, rank: int | None, backward: bool) -> Iterator[Step]:
        for one in range(self.ranks) if rank is None else [rank]:
            yield from self.for_rank(one).backward if backward else self.forward_steps(one)

    def _inputs(self) -> dict[str, Any]:
        # A balanced layout may have been made for a pattern other than the plan's.
        layout = self.layout.base
        partition: dict[str, Any] = {"partition": layout.runs} if isinstance(layout, Balanced) else {}
        if self.q_layout is not None:
            q_layout = self.q_layout.base
            partition |= {"q_layout": q_layout.name, "q_tokens": q_layout.tokens}
            partition |= {"q_partition": q_layout.runs} if isinstance(q_layout, Balanced) else {}
        optional = "block", "reproducible"
        sizes = {name: value for name, value in self.sizes.items() if name not in optional or value is not None}
        return {
            **partition,
            "format": FORMAT,
            "pattern": repr(self.pattern.unstacked),
            "tokens": layout.tokens,
            "ranks": self.ranks,
            "layout": layout.name,
            "schedule": self.schedule,
            **sizes,
            "batch": self.batch * self.layout.stacked,
        }


def bind_sides(pattern: Pattern, layout: Layout, q_layout: Layout, heads: int) -> Pattern:
    """The pattern bound to the keys of `layout` and the queries of `q_layout`; InvalidInput if it does not fit them."""
    keys, queries = _end(layout), _end(q_layout)
    pattern.check_sides(keys, queries, heads)
    return pattern.bind(heads, max(keys, queries))


def _end(layout: Layout) -> int:
    """The position after the last one."""
    return layout.domain[-1].stop if layout.domain else 0


def arrange(bound: Pattern, layout: Layout, schedule: str, sizes: PlanSizes, q_layout: Layout | None = None) -> Plan:
    """Make a plan for a bound pattern; batch rows with different patterns are planned as one long sequence.

    In that case each rank owns its positions in every row, and the batch size becomes 1. Raises InvalidInput unless the
    batch has as many rows as the pattern.
    """
    rows = bound.rows
    if rows is not None:
        if rows != sizes.batch:
            raise InvalidInput(f"the pattern has {rows} rows of documents, but the batch has {sizes.batch} rows")
        from ..layout import stack_rows  # few batches have rows with patterns of their own
        from ..pattern.views import RowByRow

        stride = max(_end(x) for x in (layout, q_layout) if x is not None)
        bound, sizes, layout = RowByRow(bound, stride), replace(sizes, batch=1), stack_rows(layout, rows, stride)
        q_layout = None if q_layout is None else stack_rows(q_layout, rows, stride)
    plan = Plan(pattern=bound, layout=layout, schedule=schedule, q_layout=q_layout, **sizes.sizes)
    if plan.reproducible is not None:
        from .leaves import check_leaves  # few plans have leaves

        check_leaves(plan)
    return plan
