"""The Plan: who computes which tile when, and who sends which rows to whom. A pure function of its inputs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cache import Cache, Value, estimate_bytes
from ..dtypes import ITEM_BYTES, dtype_name
from ..errors import InvalidInput
from ..layout.regular import DEFAULT_LAYOUT, Balanced, Layout, make_layout, restore_layout
from ..pattern import Pattern, parse_pattern
from ..pattern.head_slice import HeadSlice
from .block_demand import ANSWERS
from .choice import Choice
from .drawing import draw_steps
from .key_demand import KeyDemand
from .message_sizes import MessageSizes
from .query_demand import QueryDemand
from .rotation import Rotation, check_rotate
from .schedules import resolve, split_ulysses
from .schedules.ulysses import around
from .steps import Kind, Part, RankPlan, Step

if TYPE_CHECKING:
    import torch

#: Changes whenever the same inputs give other steps, so that ranks of different versions do not talk past each other.
FORMAT = 3
#: What `ringattn plan` writes beside the inputs and the hash of a plan.
ADDED = ("counted", "choice")


@dataclass(frozen=True)
class Plan(Value, MessageSizes):
    """Inputs of a plan; everything else is derived, lazily and per rank. Make one with `make_plan`."""

    pattern: Pattern
    layout: Layout
    schedule: str
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "float32"
    batch: int = 1
    comm_dtype: str | None = None
    rotate: str = "auto"
    #: What `auto` compared and why it took this; None where layout and schedule were named.
    choice: Choice | None = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        return self.layout.tokens

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @cached_property
    def demand(self) -> KeyDemand:
        return KeyDemand(self.pattern, self.layout, self.heads, self.kv_heads)

    def asking(self, demand: KeyDemand, choice: Choice | None = None) -> Plan:
        """The same plan, which asks `demand` instead of one of its own. That must give the same answers."""
        same = replace(self, choice=choice or self.choice)
        vars(same)["demand"] = demand
        return same

    def for_rank(self, rank: int) -> RankPlan:
        """The steps of one rank, without planning any other."""
        if not 0 <= rank < self.ranks:
            raise InvalidInput(f"rank {rank} is not one of the {self.ranks} ranks 0 .. {self.ranks - 1} of the plan")
        if not self.batch:
            return RankPlan(rank, (), ())  # nothing to compute, nothing to send
        return self.memory.answer(("steps", rank), lambda: self._made(rank))

    def forward_steps(self, rank: int) -> tuple[Step, ...]:
        """The forward of `for_rank`, without planning a backward where that is possible."""
        if self.ulysses_size > 1 or not self.batch:
            return self.for_rank(rank).forward
        return self.memory.answer(("forward", rank), lambda: self._rotation.keys.forward(rank))

    def _made(self, rank: int) -> RankPlan:
        if self.ulysses_size == 1:
            return self._rotation.steps(rank)
        inner, place = self.ring_plan(rank)
        return around(inner.for_rank(place), rank, self.ulysses_size, self.layout)

    @cached_property
    def _rotation(self) -> Rotation:
        rounds = self.comm_dtype is not None
        return Rotation(self.schedule, self.demand, self.rotate, self.part_bytes, rounds=rounds)

    @property
    def rotates(self) -> str:
        """What goes around in the backward, "keys" or "queries"; that of the first members where there are teams."""
        return self._rotation.chosen if self.ulysses_size == 1 else self._ring_plans[0].rotates

    @property
    def transposed(self) -> QueryDemand:
        """The demand for blocks of queries. Without teams."""
        return self._rotation.transposed

    @cached_property
    def ulysses_size(self) -> int:
        """Ranks that exchange tokens for heads before attention: 1 without the schedule ulysses."""
        return split_ulysses(self.schedule)[0]

    def ring_plan(self, rank: int) -> tuple[Plan, int]:
        """The plan between the teams that `rank` has a part in, and its rank there; (self, rank) without teams."""
        if self.ulysses_size == 1:
            return self, rank
        return self._ring_plans[rank % self.ulysses_size], rank // self.ulysses_size

    @cached_property
    def _ring_plans(self) -> list[Plan]:
        size, schedule = split_ulysses(self.schedule)
        heads, layout = self.heads // size, self.layout.grouped(size)
        return [
            replace(
                self, pattern=HeadSlice(self.pattern, i * heads), layout=layout, schedule=schedule, heads=heads,
                kv_heads=self.kv_heads // size,
            )
            for i in range(size)
        ]  # fmt: skip

    @cached_property
    def memory(self) -> Cache:
        """What is worked out from the plan and kept as long as it lives."""
        return Cache(ANSWERS)

    @property
    def kept_bytes(self) -> int:
        """About how many bytes the plan takes, with all that was worked out from it so far and is kept."""
        known = vars(self)
        caches = [known.get("memory")]
        if "_rotation" in known:
            caches += [vars(one).get("memory") for one in (self._rotation.demand, self._rotation.transposed)]
        elif "demand" in known:
            caches.append(vars(self.demand).get("memory"))
        members = sum(ring_plan.kept_bytes for ring_plan in known.get("_ring_plans", ()))
        return self._input_bytes + members + sum(cache.bytes for cache in caches if cache is not None)

    @cached_property
    def _input_bytes(self) -> int:
        return estimate_bytes([getattr(self, entry.name) for entry in fields(self)])

    def bytes_sent(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Bytes that a rank (None: all ranks together) sends in the forward, or in the backward. Counted."""
        hops = (hop for step in self._steps(rank, backward) for hop in step.sends)
        return sum(self.part_bytes(part) for hop in hops for part in hop.parts)

    def messages(self, rank: int | None = None, *, backward: bool = False) -> int:
        """Messages that a rank (None: all) sends in the forward, or in the backward. Counted."""
        return sum(len(step.sends) for step in self._steps(rank, backward))

    def full_ring_bytes(self, *, backward: bool = False) -> int:
        """Bytes that a ring which skips nothing would send: every block to every other rank."""
        kinds: tuple[Kind, ...] = ("kv",)
        if backward:
            kinds = ("kv", "grad") if self.rotates == "keys" else ("q", "row", "dq")
        return (self.ranks - 1) * sum(self.part_bytes(Part(kind, rank)) for kind in kinds for rank in range(self.ranks))

    def pairs(self, rank: int | None = None) -> int:
        """(query, key, head, branch) pairs that a rank (None: all) computes. Counted."""
        if rank is not None and self.ulysses_size > 1:
            inner, place = self.ring_plan(rank)
            return inner.pairs(place)
        whole, heads = range(self.tokens), range(self.heads)
        rows = [whole] if rank is None else self.layout.shard(rank)
        return sum(self.pattern.count(q, whole, heads) for q in rows)

    @property
    def density(self) -> float:
        """Pairs over heads x tokens x tokens: 1 is full attention, each branch adds its own. Counted."""
        return self.pairs() / (self.heads * self.tokens**2) if self.tokens else 0.0

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean of all ranks; 1 is perfect. Counted."""
        total = self.pairs()
        return max(map(self.pairs, range(self.ranks))) * self.ranks / total if total else 1.0

    @cached_property
    def hash(self) -> str:
        """Hexadecimal digest of the inputs and of the plan format: equal where the steps of all ranks are equal."""
        return hashlib.sha256(json.dumps(self._inputs(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON, with its hash."""
        return json.dumps({**self._inputs(), "hash": self.hash}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json`, or `ringattn plan output.path=`, wrote; an edited or foreign text is an error."""
        try:
            found = json.loads(text)
            claimed, version = found.pop("hash"), found.pop("format")
            pattern = found.pop("pattern")
            for name in ADDED:
                found.pop(name, None)
            runs = found.pop("partition", None)
            arguments: dict[str, Any] = dict(found)
            if runs is not None:
                sizes = arguments["tokens"], arguments["ranks"]
                arguments["layout"] = restore_layout(arguments["layout"], *sizes, runs)
        except InvalidInput:
            raise
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidInput(f"this is no plan written by Plan.to_json ({type(error).__name__}: {error})") from None
        if version != FORMAT:
            raise InvalidInput(f"the plan has format {version}, this ringattn reads format {FORMAT}; make it anew")
        try:
            plan = build_plan(parse_pattern(pattern), **arguments)
        except TypeError as error:
            raise InvalidInput(f"this is no plan written by Plan.to_json ({error})") from None
        if plan.hash != claimed:
            raise InvalidInput(f"the plan's inputs give hash {plan.hash}, the text says {claimed}: it was edited")
        return plan

    def picture(self, *, ascii: bool = False, width: int | None = None) -> str:
        """Rank x step, drawn from the true plan: how much of the visit of a step is computed. `width` columns at most (None:
        those of the terminal)."""
        steps = lambda rank: self.for_rank(rank).forward  # noqa: E731
        return draw_steps(self.ranks, steps, self._level, ascii=ascii, width=width)

    def _level(self, rank: int, step: Step) -> int:
        """The share of pairs that a visit computes, of all pairs of the visited blocks: see `draw_steps`."""
        inner, place = self.ring_plan(rank)
        owners = {part.owner for part in step.visits}
        whole = sum(inner.layout.rows(place) * inner.layout.rows(owner) for owner in owners) * inner.heads
        pairs = sum(inner.demand.pairs(place, owner) for owner in owners)
        return 0 if not pairs else 3 if pairs >= whole else 2 if 2 * pairs >= whole else 1

    def _steps(self, rank: int | None, backward: bool) -> list[Step]:
        ranks = range(self.ranks) if rank is None else [rank]
        plans = [self.for_rank(r) for r in ranks]
        return [step for plan in plans for step in (plan.backward if backward else plan.forward)]

    def _inputs(self) -> dict[str, Any]:
        # A balanced layout may have been made for another pattern than the plan's.
        partition = {"partition": self.layout.runs} if isinstance(self.layout, Balanced) else {}
        return {
            **partition,
            "format": FORMAT,
            "pattern": repr(self.pattern),
            "tokens": self.tokens,
            "ranks": self.ranks,
            "layout": self.layout.name,
            "schedule": self.schedule,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "dtype": self.dtype,
            "batch": self.batch,
            "comm_dtype": self.comm_dtype,
            "rotate": self.rotate,
        }


class PlanSizes(NamedTuple):
    """The checked numbers and names that a plan holds beside its pattern, layout and schedule, in the order of its fields."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    batch: int
    comm_dtype: str | None
    rotate: str


def check_sizes(
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: str | torch.dtype = "float32",
    batch: int = 1,
    comm_dtype: str | torch.dtype | None = None,
    rotate: str = "auto",
) -> PlanSizes:
    """The sizes of a plan with all defaults filled in. Raises InvalidInput."""
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    for name, value, least in (
        ("heads", heads, 1),
        ("kv_heads", kv_heads, 1),
        ("head_dim", head_dim, 1),
        ("value_dim", value_dim, 1),
        ("batch", batch, 0),
    ):
        if value < least:
            raise InvalidInput(f"{name}={value}: must be an integer >= {least}")
    if heads % kv_heads:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise InvalidInput(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly; try kv_heads={' or '.join(divisors)}"
        )
    item = dtype_name(dtype)
    if item not in ITEM_BYTES:
        raise InvalidInput(f"dtype {item} is not supported; expected one of {', '.join(ITEM_BYTES)}")
    comm = None if comm_dtype is None else dtype_name(comm_dtype)
    fitting = [name for name in ("float32", "bfloat16") if ITEM_BYTES[name] <= ITEM_BYTES[item]]
    if comm is not None and comm not in fitting:
        raise InvalidInput(
            f"comm_dtype={comm}: K/V and gradients of {item} inputs may travel as {' or '.join(fitting)}; "
            "leave it out to send all bits (float16 has not the range that gradients need)"
        )
    check_rotate(rotate)
    return PlanSizes(heads, kv_heads, head_dim, value_dim, item, batch, comm, rotate)


def build_plan(
    pattern: Pattern, *, tokens: int, ranks: int, schedule: str, layout: str | Layout = DEFAULT_LAYOUT, **sizes: Any
) -> Plan:
    """The plan with a named layout and schedule, and sizes as `check_sizes` takes them. Raises InvalidInput."""
    checked = check_sizes(**sizes)
    pattern.check(tokens, checked.heads)
    made = make_layout(layout, tokens=tokens, ranks=ranks, pattern=pattern, heads=checked.heads)
    name = resolve(schedule, ranks, checked.heads, checked.kv_heads)
    if name == "auto":
        raise InvalidInput("schedule='auto' is chosen by make_plan; build_plan takes a named schedule")
    return Plan(pattern.bind(checked.heads, tokens), made, name, *checked)
