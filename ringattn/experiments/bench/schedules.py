"""Suite "schedules": what moving costs by each schedule, between two nodes that a slow link joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...functional import attention, ring_attention
from ...layout.regular import make_layout
from ...pattern import parse_pattern
from ...plan.plan import Plan
from ...plan.steps import Batch, Hop, Step
from ...planner import make_plan
from ...transport.base import Message, Post, Transport
from .case import BenchCase, BenchColumn, Context, Ratio, Run, relative_error
from .links import Free, Links

HEADS, DIM = 8, 64
#: A result that differs from one device by more than this is wrong, and is not timed.
WRONG = 1e-5
#: About 16 documents, whose ends are not those of shards.
DOCUMENTS = [200, 317, 150, 403, 61, 298, 350, 244, 411, 90, 333, 275, 180, 366, 222, 196]
MESSAGES_NOTE = (
    "columns with the name of a schedule and _messages: its time in communication, the messages of its plan and nothing "
    "else, each posted and waited for at its step, without computing; columns with the plain name are whole calls"
)
COMPUTE_NOTE = (
    "column compute: the same call over a transport whose messages take no time, so that compute / ring is 1 less the "
    "share of exposed communication; compute / ring_messages, counted per visit over per hop, is the premise: at least 2. "
    "All ranks share the machine's cores, and what the system's network code takes of them is exposed"
)
DOUBLE_NOTE = (
    "double_ring: outer link 10 times slower than the inner ones. With N nodes of m ranks, blocks of B bytes, an outer "
    "link of R bytes/s per node and direction and inner ones of 10 R per rank, the forward of a dense ring sends N m - 1 "
    "blocks over each outer link, one per step: (N m - 1) B / R; the double ring (N - 1) m, and m - 1 inner hops after "
    "the last: ((N - 1) m + (m - 1) / 10) B / R. So at most 3 / 2.1 = 1.43 is possible for 2 x 2 ranks forward, which "
    "therefore has no target, and 7 / 4.3 = 1.63 for 2 x 4. In the backward of 2 x 2 queries go around the "
    "ring, 4.5 blocks in all with lse, delta and dq, while the double ring sends 2 of gradients. outer_bytes: bytes that "
    "leave a node, counted in the plans"
)


def cases() -> list[BenchCase]:
    """Targets are the project's promises."""
    slow = Links(2, 2, 20e6, 200e6)
    tenth, tenth_8 = Links(2, 2, 5e6, 50e6), Links(2, 4, 5e6, 50e6)
    documents = f"Documents({DOCUMENTS})"
    return [
        _moving("window", slow, "Causal() & Window(255)"),
        _moving("documents", slow, documents),
        _moving("window_step", slow, "Causal() & Window(255)", backward=True),
        _moving("documents_step", slow, documents, backward=True),
        _moving("documents_zigzag", slow, documents, layout="zigzag", ring=None),
        _double("double_ring_4", tenth, 1024, None),
        _double("double_ring_4_step", tenth, 1024, 1.5, backward=True),
        _double("double_ring_8", tenth_8, 2048, 1.5),
        _overlap("overlap", Links(2, 2, 48e6, 480e6), 16384),
    ]


def _moving(
    name: str, links: Links, pattern: str, *, tokens: int = sum(DOCUMENTS), layout: str = "contiguous",
    backward: bool = False, ring: float | None = 5.0,
) -> BenchCase:  # fmt: skip
    """Time in communication of what a local pattern needs, over that of an all-gather."""
    names = ("allgather", "ring", "direct")
    columns = [BenchColumn(f"{s}_messages", 1, _messages(s)) for s in names] + [
        BenchColumn(s, 1, _whole(s)) for s in names
    ]
    ratios = (
        Ratio("allgather_messages", "ring_messages", ring), Ratio("allgather_messages", "direct_messages", 5.0),
        Ratio("allgather", "ring"), Ratio("allgather", "direct"),
    )  # fmt: skip
    return _case(name, links, _settings(tokens, pattern, layout, backward), columns, ratios, MESSAGES_NOTE)


def _double(name: str, links: Links, tokens: int, target: float | None, *, backward: bool = False) -> BenchCase:
    double = f"double_ring({links.inner})"
    columns = [BenchColumn(s, 1, _whole(s)) for s in ("ring", double)]
    return _case(
        name, links, _settings(tokens, "Full()", "contiguous", backward), columns, (Ratio("ring", double, target),),
        DOUBLE_NOTE,
    )  # fmt: skip


def _overlap(name: str, links: Links, tokens: int) -> BenchCase:
    columns = [
        BenchColumn("compute", 1, _whole("ring", free=True)), BenchColumn("ring", 1, _whole("ring")),
        BenchColumn("ring_messages", 1, _messages("ring")),
    ]  # fmt: skip
    share = (links.ranks - 1) / links.ranks  # hops per visit
    ratios = (Ratio("compute", "ring", 0.9), Ratio("compute", "ring_messages", 2.0, work=share))
    return _case(name, links, _settings(tokens, "Full()", "contiguous", False), columns, ratios, COMPUTE_NOTE)


def _case(
    name: str, links: Links, settings: dict[str, Any], columns: list[BenchColumn], ratios: tuple[Ratio, ...], note: str
) -> BenchCase:
    used = dict.fromkeys(column.name.removesuffix("_messages") for column in columns if column.name != "compute")
    counted = {schedule: _leaving(_plan(settings, links.ranks, schedule), links) for schedule in used}
    settings = {**settings, "outer_bytes": counted}
    return BenchCase(name, links.ranks, settings, tuple(columns), ratios, _check, links=links, notes=(note,))


def _settings(tokens: int, pattern: str, layout: str, backward: bool) -> dict[str, Any]:
    return {
        "batch": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32", "tokens": tokens,
        "pattern": pattern, "layout": layout, "backward": backward,
    }  # fmt: skip


def _plan(settings: dict[str, Any], ranks: int, schedule: str) -> Plan:
    shape = {key: settings[key] for key in ("tokens", "layout", "heads", "kv_heads", "head_dim", "dtype", "batch")}
    return make_plan(parse_pattern(settings["pattern"]), ranks=ranks, schedule=schedule, **shape)


def _leaving(plan: Plan, links: Links) -> dict[str, int]:
    """Bytes over the busiest outer link, in the forward and in the backward."""

    def most(backward: bool) -> int:
        sums = [0] * links.nodes
        for rank in range(plan.ranks):
            steps = plan.for_rank(rank).backward if backward else plan.for_rank(rank).forward
            for hop in (hop for step in steps for hop in step.sends if links.node(hop.peer) != links.node(rank)):
                sums[links.node(rank)] += sum(map(plan.part_bytes, hop.parts))
        return max(sums)

    return {"forward": most(False), "backward": most(True)}


def _inputs(context: Context) -> list[torch.Tensor]:
    """q, k, v and a cotangent, the same on every rank."""
    source, settings = torch.Generator().manual_seed(1), context.settings
    shape = (settings["batch"], HEADS, settings["tokens"], DIM)
    return [torch.randn(shape, generator=source, device="cpu") for _ in range(4)]


def _transport(context: Context) -> Transport:
    assert context.transport is not None, "the cases of this suite run behind links"
    return context.transport


def _whole(schedule: str, *, free: bool = False) -> Callable[[Context], Run]:
    """A call of ring_attention; `free`: its messages take no time."""

    def make(context: Context) -> Run:
        settings, transport = context.settings, _transport(context)
        layout = make_layout(settings["layout"], tokens=settings["tokens"], ranks=context.ranks)
        q, k, v, grad = (layout.shard_tensor(x, context.rank).clone() for x in _inputs(context))
        pattern = parse_pattern(settings["pattern"])
        inputs = [x.requires_grad_(settings["backward"]) for x in (q, k, v)]
        through = Free(transport) if free else transport

        def run() -> tuple[torch.Tensor, ...]:
            out = ring_attention(q, k, v, pattern, transport=through, layout=layout, schedule=schedule)
            return (out.detach(), *(torch.autograd.grad(out, inputs, grad) if settings["backward"] else ()))

        return run

    return make


def _messages(schedule: str) -> Callable[[Context], Run]:
    """The messages of the plan, posted and waited for where the executor does."""

    def make(context: Context) -> Run:
        transport, plan = _transport(context), _plan(context.settings, context.ranks, schedule)
        mine = plan.for_rank(context.rank)

        def prepare(hops: tuple[Hop, ...]) -> tuple[Message, ...]:
            sizes = [sum(map(plan.part_bytes, hop.parts)) for hop in hops]
            return tuple(
                Message(hop.peer, hop.tag, torch.zeros(size, dtype=torch.uint8, device="cpu"))
                for hop, size in zip(hops, sizes, strict=True)
            )

        def posts(steps: tuple[Step, ...]) -> list[list[tuple[Batch, Post]]]:
            return [
                [(b, Post(prepare(b.sends), prepare(b.recvs), f"step {i}")) for b in step.posts]
                for i, step in enumerate(steps)
            ]

        programs = [posts(mine.forward), *([posts(mine.backward)] if context.settings["backward"] else [])]

        def run() -> int:
            before = transport.counters.sent_bytes
            for steps in programs:
                under_way: list[tuple[int, Any]] = []
                for index, step in enumerate(steps):
                    under_way += [(batch.until, transport.post(post)) for batch, post in step]
                    for until, ticket in under_way:
                        if until == index:
                            transport.wait(ticket)
            return transport.counters.sent_bytes - before

        return run

    return make


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Whole calls equal one device, and messages are those of the plan."""
    settings, errors = context.settings, {}
    truth = _truth(context)
    for name, found in results.items():
        if name == "compute":
            continue
        if name.endswith("_messages"):
            plan = _plan(settings, context.ranks, name.removesuffix("_messages"))
            planned = [
                plan.bytes_sent(context.rank, backward=b) for b in ([False, True] if settings["backward"] else [False])
            ]
            assert found == sum(planned), f"{name}: {found} bytes sent, {planned} planned"
            continue
        errors[name] = max(relative_error(x, y) for x, y in zip(found, truth, strict=True))
        assert errors[name] < WRONG, f"{name} is wrong by {errors[name]:.1e}"
    return errors


def _truth(context: Context) -> list[torch.Tensor]:
    settings = context.settings
    q, k, v, grad = _inputs(context)
    inputs = [x.requires_grad_(settings["backward"]) for x in (q, k, v)]
    out = attention(q, k, v, parse_pattern(settings["pattern"]))
    found = [out.detach(), *(torch.autograd.grad(out, inputs, grad) if settings["backward"] else ())]
    layout = make_layout(settings["layout"], tokens=settings["tokens"], ranks=context.ranks)
    return [layout.shard_tensor(x, context.rank) for x in found]
