"""Suite "auto": how often the schedule that `auto` picks is the fastest in 40 measured settings, and how close its
pick comes to the fastest simulated schedule in 100 modelled settings."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from ....call.planner import make_plan
from ....errors import InvalidInput
from ....machine.machine import Machine
from ....machine.presets import MACHINES, get_machine
from ....plan.plan import Plan
from ....simulator.timing.auto import list_schedules
from ....simulator.timing.simulation import simulate
from ..calls import check_shards, make_ring
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, make_settings
from ..hosts import Cluster

HEADS, HEAD_DIM = 2, 64
#: A pick counts as right if the fastest schedule takes at least this share of the pick's time.
NEAR = 0.9
#: The promised share of settings with a right pick.
TARGET = 0.9
#: (name, pattern, layout, tokens) of settings on processes of one machine, each with 2 and with 4 ranks. With so many
#: tokens a call takes at least 10 ms.
LOCAL: tuple[tuple[str, str, str, int], ...] = (
    ("full", "Full()", "contiguous", 4096),
    ("causal", "Causal()", "zigzag", 4096),
    ("window", "Causal() & Window(511)", "contiguous", 16384),
    ("window", "Causal() & Window(511)", "zigzag", 16384),
    ("documents", "Causal() & Documents({documents})", "zigzag", 16384),
    ("longnet", "Dilated((512, 1024, 2048), (1, 2, 4))", "contiguous", 16384),
    ("blocks", "strided_blocks(128, stride=8)", "contiguous", 16384),
    ("far", "dilated_blocks(128, offsets=(1, 8, 16))", "contiguous", 16384),
)
#: (name, pattern, layout, tokens) of settings on two nodes of two ranks, each run on each of CLUSTERS: the first few
#: of LOCAL with half the tokens, and others.
LINKED: tuple[tuple[str, str, str, int], ...] = (
    *((name, pattern, layout, tokens // 2) for name, pattern, layout, tokens in LOCAL[:5]),
    ("longnet", "Dilated((512, 1024, 4096), (1, 2, 4))", "contiguous", 8192),
    ("blocks", "strided_blocks(128, stride=8)", "contiguous", 4096),
    ("far", "dilated_blocks(128, offsets=(1, 32))", "contiguous", 8192),
)
CLUSTERS = (Cluster(2, 2, 10e6), Cluster(2, 2, 40e6), Cluster(4, 1, 100e6))
NOTE = (
    "auto: forward, 1 thread per rank, the layout as given; auto / best is the time of the schedule that auto picks, "
    "divided by that of the fastest schedule (medians over the rounds); it is 1 if auto picks the fastest. The model "
    "knows the rates of the links, and assumes half the speed of a core if four ranks share two cores"
)
MODELLED_NOTE = (
    "modelled: forward on a preset, in bfloat16 with a head_dim of 128; auto / best is the simulated time of the pick, "
    "divided by that of the fastest schedule that fits; nothing is measured"
)
#: Ranks of the modelled settings, number of settings for each, and the seed of the random draws.
RANKS = (4, 8, 16, 32, 64)
SETTINGS, SEED = 20, 17
PRESETS = ("h100_nvlink_ib", "a100_nvlink_ib", "a100_pcie")


def list_cases() -> list[BenchCase]:
    """The cases of this suite: 40 settings that are measured, and 100 whose times are predicted."""
    cpu = MACHINES["cpu"]
    cases = [
        _case(f"{name}_{layout}_{tokens}_{ranks}", pattern, layout, tokens, ranks, cpu)
        for name, pattern, layout, tokens in LOCAL
        for ranks in (2, 4)
    ]
    for cluster in CLUSTERS:
        machine = Machine(
            flops=cpu.flops / 2,  # four ranks share two cores
            latency=cpu.latency,
            bandwidth=cluster.bandwidth,
            ranks_per_node=cluster.ranks_per_node,
            node_bandwidth=cpu.bandwidth if cluster.ranks_per_node > 1 else None,
            shared_nic=True,
        )
        hosts = f"{cluster.nodes}_hosts_{cluster.bandwidth / 1e6:.0f}"
        cases += [
            _case(f"{name}_{layout}_{hosts}", pattern, layout, tokens, cluster.ranks, machine, cluster)
            for name, pattern, layout, tokens in LINKED
        ]
    return cases + [_modelled_case(ranks) for ranks in RANKS]


def _modelled_case(ranks: int) -> BenchCase:
    """A case that simulates `auto`'s pick and every other schedule, in random settings on presets."""
    settings = {"ranks": ranks, "settings": SETTINGS, "seed": SEED}

    def measure(context: Context, repeat: int) -> dict[str, Any]:
        source = random.Random(f"{SEED}, {ranks}")
        drawn = [_draw(source, ranks, number) for number in range(SETTINGS)]
        rows = [{**asdict(setting), **setting.judge()} for setting in drawn]
        return {"times": {}, "errors": {}, "details": {"settings": rows}}

    def summarise(record: CaseRecord) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = record["details"]["settings"]
        return [row | {"near": row["auto / best"] <= 1 / NEAR} for row in rows]

    return BenchCase(
        f"modelled_{ranks}", 1, settings, (), measure=measure, summarise=summarise, weight=ranks, notes=(MODELLED_NOTE,)
    )


def _case(
    name: str, pattern: str, layout: str, tokens: int, ranks: int, machine: Machine, cluster: Cluster | None = None
) -> BenchCase:
    written = pattern.format(documents=[tokens // 16] * 16)
    sizes: dict[str, Any] = {"tokens": tokens, "layout": layout, "heads": HEADS, "head_dim": HEAD_DIM}
    plan = make_plan(written, ranks=ranks, machine=machine, **sizes)
    settings = make_settings(**sizes, pattern=written, picked=plan.schedule)
    names = list_schedules(plan, machine)
    columns = tuple(BenchColumn(schedule, 1, partial(make_ring, schedule=schedule)) for schedule in names)
    ratios = tuple(Ratio(other, plan.schedule) for other in names if other != plan.schedule)
    return BenchCase(
        name, ranks, settings, columns, ratios, check_shards, cluster=cluster, summarise=_judge, notes=(NOTE,)
    )


def _judge(record: CaseRecord) -> list[dict[str, Any]]:
    """A table row with the fastest schedule, auto's pick, and ratios of medians."""
    picked = record["settings"]["picked"]
    medians = {name: column["median"] for name, column in record["columns"].items()}
    best = min(medians, key=lambda name: medians[name])
    ratio, worst = medians[picked] / medians[best], max(medians.values()) / medians[best]
    return [{"best": best, "auto": picked, "auto / best": ratio, "worst / best": worst, "near": ratio <= 1 / NEAR}]


def _conclude(records: list[CaseRecord]) -> tuple[str, bool]:
    """In how many settings auto picked the fastest schedule or one nearly as fast; and whether the target is met."""
    measured, modelled = (
        [row for record in records if bool(record["columns"]) is timed for row in record.get("summary", ())]
        for timed in (True, False)
    )
    judged, kind = (measured, "measured") if measured else (modelled, "modelled")
    share, ring_share = (
        sum(values) / max(len(judged), 1)
        for values in ((row["near"] for row in judged), (row["best"] == "ring" for row in judged))
    )
    text = f"auto picks the best schedule, or one within 10 % of it, in {share:.0%} of {len(judged)} settings ({kind})"
    text += f"; the ring is best in {ring_share:.0%}"  # a baseline that needs no model
    if measured and modelled:
        near = sum(row["near"] for row in modelled)
        text += f"; on presets in {near} of {len(modelled)} settings (modelled)"
    return text, share >= TARGET


@dataclass(frozen=True)
class Setting:
    """The settings of one call, for which `auto` picks a schedule."""

    pattern: str
    layout: str
    tokens: int
    ranks: int
    heads: int
    kv_heads: int
    machine: str

    def plan(self, schedule: str) -> Plan:
        """The plan with this schedule. Raises InvalidInput if the schedule does not fit the setting."""
        return make_plan(**asdict(self), schedule=schedule, head_dim=128, dtype="bfloat16")

    @cached_property
    def schedules(self) -> list[str]:
        """The schedules that fit this setting: ring, direct, all-gather, double rings, and Ulysses groups of any size.

        Ulysses groups are combined with ring, direct and all-gather.
        """
        node = get_machine(self.machine).ranks_per_node
        sizes = [size for size in range(2, self.ranks + 1) if self.ranks % size == 0]
        names = ["ring", "direct", "allgather"]
        names += [f"double_ring({size})" for size in sizes if size in (node, node // 2)]
        for size in sizes:
            others = ("direct", "allgather") if 1 < self.ranks // size <= 16 else ()
            names += [f"ulysses({size}, {name})" for name in ("ring", *others)]
        return [name for name in names if self._fits(name)]

    def _fits(self, schedule: str) -> bool:
        try:
            return bool(self.plan(schedule))
        except InvalidInput:
            return False

    def judge(self) -> dict[str, object]:
        """Which schedule `auto` chooses, which is fastest, and the ratio of their predicted forward times."""
        picked = self.plan("auto").schedule
        names = dict.fromkeys((*self.schedules, picked))  # auto may pick more groups than are listed
        seconds = {name: simulate(self.plan(name), self.machine).seconds for name in names}
        best = min(seconds, key=lambda name: seconds[name])
        return {"auto": picked, "best": best, "auto / best": seconds[picked] / seconds[best]}


def _draw(source: random.Random, ranks: int, number: int) -> Setting:
    """A random setting; the patterns take turns."""
    kind = ("causal", "window", "documents", "dilated", "blocks")[number % 5]
    tokens = 1 << source.randint(14, 17 if kind == "blocks" else 20)  # block masks have a tile for each block
    width, block = source.choice((255, 1023, 4095, 16383)), source.choice((128, 256, 512))
    segment = source.choice((1024, 2048, 4096))
    lengths = _draw_lengths(source, tokens)
    pattern = {
        "causal": "Causal()",
        "window": f"Causal() & Window({width})",
        "documents": f"Causal() & Documents({lengths})",
        "dilated": f"Dilated(({segment}, {2 * segment}, {4 * segment}), (1, 2, 4), causal=True)",
        "blocks": source.choice((f"strided_blocks({block}, stride=8)", f"dilated_blocks({block}, offsets=(1, 8, 16))")),
    }[kind]
    layout = source.choice(("contiguous", "zigzag"))
    heads, kv_heads = source.choice(((32, 8), (32, 32), (64, 8), (40, 8), (16, 2)))
    return Setting(pattern, layout, tokens, ranks, heads, kv_heads, source.choice(PRESETS))


def _draw_lengths(source: random.Random, tokens: int) -> list[int]:
    """Lengths of documents, exponentially distributed around a random mean."""
    mean = source.choice((1 << 12, 1 << 14, tokens // 2))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(max(64, int(source.expovariate(1 / mean))), tokens - sum(lengths)))
    return lengths


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="The pick of auto against the best schedule",
    bars=("time of auto's choice over the best", {"auto / best": "auto / best"}),
)
