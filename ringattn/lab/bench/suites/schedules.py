"""Suite "schedules": the time of each schedule's messages between two hosts that are joined by a slow link."""

from __future__ import annotations

from functools import partial
from typing import Any

from ....call.functional import ring_attention
from ....pattern import parse_pattern
from ....transport.torchdist import TorchDist
from ..calls import check_error, check_shards, compute_whole, get_layout, make_call, make_ring, make_shards, plan_ring
from ..case import BenchCase, BenchColumn, BenchSuite, Context, Ratio, Run, make_settings
from ..hosts import Cluster
from .host import InstantMessages, NoKernel, make_passes

#: Lengths of 16 documents, which do not end at the ends of shards.
DOCUMENTS = [200, 317, 150, 403, 61, 298, 350, 244, 411, 90, 333, 275, 180, 366, 222, 196]
#: Lengths of documents, the longest at the end, and the layouts that cut them.
PACKED = [120, 75, 410, 33, 260, 94, 510, 61, 188, 700, 45, 320, 150, 230, 900, 4096]
LAYOUTS = ("contiguous", "zigzag", "balanced")
PACKED_NOTE = (
    "packed: one document has half of the tokens; contiguous, zigzag, balanced: shards by that layout, schedule "
    "direct, one thread for each process; four processes share two cores: the others use what a waiting rank leaves "
    "idle, and imbalance costs less than on four cores"
)
MESSAGES_NOTE = (
    "columns SCHEDULE_messages: the schedule's time in communication, as the executor runs its plan without kernels "
    "and packs, posts and awaits each message at its step; columns named after a schedule alone are whole calls"
)
COMPUTE_NOTE = (
    "column compute: the same call over a transport whose messages take no time, so that compute / ring is 1 minus the "
    "share of exposed communication; compute / ring_messages, counted per visit over per hop, is the premise: at least "
    "2. All ranks share the machine's cores, so that processor time in the system's network code counts as exposed"
)
DOUBLE_NOTE = (
    "double_ring: with N hosts of m ranks, blocks of B bytes and links of R bytes/s per host and direction, the "
    "forward of a dense ring sends N m - 1 blocks over each link, one per step: (N m - 1) B / R; the double ring sends "
    "(N - 1) m. Messages within a host take next to no time. The ratio of the forward is therefore at most 3 / 2 = 1.5 "
    "for 2 x 2 ranks, which has no target, and at most 7 / 4 = 1.75 for 2 x 4. In the backward of 2 x 2, queries go "
    "around the ring, 4.5 blocks in all with lse, delta and dq, while the double ring sends 2 blocks of gradients"
)


class InstantTransport(InstantMessages, TorchDist):  # type: ignore[misc]
    """Gloo, but messages take no time and deliver zeros, see `InstantMessages`."""


def list_cases() -> list[BenchCase]:
    """The cases of this suite: communication of local patterns, the double ring, and overlap.

    Their targets are what the project promises.
    """
    slow, slower_4, slower_8 = Cluster(2, 2, 20e6), Cluster(2, 2, 5e6), Cluster(2, 4, 5e6)
    documents = f"Documents({DOCUMENTS})"
    return [
        _local_case("window", slow, "Causal() & Window(255)"),
        _local_case("documents", slow, documents),
        _local_case("window_step", slow, "Causal() & Window(255)", backward=True),
        _local_case("documents_zigzag", slow, documents, layout="zigzag", ring_target=None),
        _double_ring_case("double_ring_4", slower_4, 1024, None),
        _double_ring_case("double_ring_4_step", slower_4, 1024, 1.5, backward=True),
        _double_ring_case("double_ring_8", slower_8, 2048, 1.5),
        _overlap_case("overlap", Cluster(2, 2, 96e6), 8192),
        *(_packed_case(*each) for each in (("packed", 2, False), ("packed_step", 2, True), ("packed_4", 4, False))),
    ]


def _local_case(
    name: str,
    cluster: Cluster,
    pattern: str,
    *,
    tokens: int = sum(DOCUMENTS),
    layout: str = "contiguous",
    backward: bool = False,
    ring_target: float | None = 5.0,
) -> BenchCase:
    """A case: communication time of an all-gather over that of schedules that send only what a local pattern needs."""
    schedules = ("allgather", "ring", "direct")
    columns = (
        *(BenchColumn(f"{schedule}_messages", 1, partial(_make_messages, schedule=schedule)) for schedule in schedules),
        *(BenchColumn(schedule, 1, partial(make_ring, schedule=schedule)) for schedule in schedules),
    )
    ratios = (
        Ratio("allgather_messages", "ring_messages", ring_target),
        Ratio("allgather_messages", "direct_messages", 5.0),
        Ratio("allgather", "ring"),
        Ratio("allgather", "direct"),
    )
    settings = make_settings(tokens, pattern=pattern, layout=layout, backward=backward)
    return BenchCase(name, cluster.ranks, settings, columns, ratios, _check, cluster=cluster, notes=(MESSAGES_NOTE,))


def _double_ring_case(
    name: str, cluster: Cluster, tokens: int, target: float | None, *, backward: bool = False
) -> BenchCase:
    """A case: time of dense calls with the ring over that with the double ring."""
    double_ring = f"double_ring({cluster.ranks_per_node})"
    columns = tuple(BenchColumn(name, 1, partial(make_ring, schedule=name)) for name in ("ring", double_ring))
    ratios = (Ratio("ring", double_ring, target),)
    settings = make_settings(tokens, pattern="Full()", layout="contiguous", backward=backward)
    return BenchCase(name, cluster.ranks, settings, columns, ratios, _check, cluster=cluster, notes=(DOUBLE_NOTE,))


def _overlap_case(name: str, cluster: Cluster, tokens: int) -> BenchCase:
    """A case: time of a dense ring without communication over that with communication."""
    columns = (
        BenchColumn("compute", 1, lambda context: make_ring(context, transport=InstantTransport())),
        BenchColumn("ring", 1, make_ring),
        BenchColumn("ring_messages", 1, partial(_make_messages, schedule="ring")),
    )
    hops_per_visit = (cluster.ranks - 1) / cluster.ranks
    ratios = (Ratio("compute", "ring", 0.9), Ratio("compute", "ring_messages", 2.0, work=hops_per_visit))
    settings = make_settings(tokens, pattern="Full()", layout="contiguous", backward=False)
    return BenchCase(name, cluster.ranks, settings, columns, ratios, _check, cluster=cluster, notes=(COMPUTE_NOTE,))


def _packed_case(name: str, ranks: int, backward: bool) -> BenchCase:
    """A case: time of packed documents of very different lengths under contiguous, zigzag and balanced shards."""
    columns = tuple(BenchColumn(layout, 1, partial(_make_packed, layout=layout)) for layout in LAYOUTS)
    ratios = (Ratio("contiguous", "balanced", 1.4 if ranks == 2 else None), Ratio("zigzag", "balanced"))
    settings = make_settings(sum(PACKED), pattern=f"Causal() & Documents({PACKED})", backward=backward)
    return BenchCase(name, ranks, settings, columns, ratios, _check_packed, notes=(PACKED_NOTE,))


def _make_packed(context: Context, layout: str) -> Run:
    pattern, cut = parse_pattern(context.settings["pattern"]), get_layout(context, layout)
    attend = partial(ring_attention, pattern=pattern, layout=cut, schedule="direct")
    return make_call(context, attend, layout=layout)


def _check_packed(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Errors of each layout's calls against one device."""
    exact = compute_whole(context)
    return {name: check_error(name, result, make_shards(context, exact, name)) for name, result in results.items()}


def _make_messages(context: Context, schedule: str) -> Run:
    """A run of the plan's messages without kernels, posted and awaited at each step; it returns the bytes sent."""
    transport, plan = TorchDist(), plan_ring(context.settings, context.ranks, schedule)
    passes = make_passes(plan, context.rank, NoKernel(), transport)
    runs = [passes[name] for name in ("forward", "backward") if name == "forward" or context.settings["backward"]]

    def run() -> int:
        bytes_before = transport.counters.sent_bytes
        for one in runs:
            one()
        return transport.counters.sent_bytes - bytes_before

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Errors of whole calls against one device; asserts that columns of messages send the bytes of their plan."""
    settings, messages = context.settings, [name for name in results if name.endswith("_messages")]
    for name in messages:
        plan = plan_ring(settings, context.ranks, name.removesuffix("_messages"))
        directions = [False, True] if settings["backward"] else [False]
        planned = [plan.bytes_sent(context.rank, backward=backward) for backward in directions]
        assert results[name] == sum(planned), f"{name}: {results[name]} bytes sent, {planned} planned"
    # The messages of compute bring zeros.
    return check_shards(context, {name: x for name, x in results.items() if name not in (*messages, "compute")})


SUITE = BenchSuite(
    list_cases,
    title="Schedules where a slow link joins two hosts",
    about=("Names with _messages are the messages alone, without attention. Above 1 the second schedule is faster.",),
)
