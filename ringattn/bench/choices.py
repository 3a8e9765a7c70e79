"""How near `auto` comes to the fastest simulated schedule, in random settings on presets. Modelled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from ..errors import InvalidInput
from ..machine.presets import get_machine
from ..pattern import parse_pattern
from ..plan.plan import Plan
from ..planner import make_plan
from ..simulator.timing.simulation import simulate

RANKS = (4, 8, 16, 32, 64)
#: Settings of each number of ranks, and the seed that draws them.
SETTINGS, SEED = 20, 17
MACHINES = ("h100_nvlink_ib", "a100_nvlink_ib", "a100_pcie")
#: Query heads and key/value heads.
HEADS = ((32, 8), (32, 32), (64, 8), (40, 8), (16, 2))
#: Powers of two between which tokens are drawn. A block mask has a tile for each block, so that it gets fewer tokens.
TOKENS, BLOCK_TOKENS = (14, 20), (14, 17)
#: Up to this many ranks the backward is simulated, too.
BOTH = 16
#: Between Ulysses groups: the ring, and these where there are at most MOST_GROUPS groups.
BETWEEN, MOST_GROUPS = ("direct", "allgather"), 16


@dataclass(frozen=True)
class Setting:
    """One call of `auto`."""

    pattern: str
    layout: str
    tokens: int
    ranks: int
    heads: int
    kv_heads: int
    machine: str

    def plan(self, schedule: str) -> Plan:
        """The plan with this schedule. Raises InvalidInput where the schedule does not fit."""
        return make_plan(
            parse_pattern(self.pattern),
            tokens=self.tokens,
            ranks=self.ranks,
            layout=self.layout,
            schedule=schedule,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=128,
            dtype="bfloat16",
            machine=self.machine,
        )

    @cached_property
    def schedules(self) -> list[str]:
        """Every schedule that fits: rings, direct, all-gather, and Ulysses groups of any size with these between."""
        node = get_machine(self.machine).ranks_per_node
        sizes = [size for size in range(2, self.ranks + 1) if self.ranks % size == 0]
        names = ["ring", "direct", "allgather"]
        names += [f"double_ring({size})" for size in sizes if size in (node, node // 2)]
        for size in sizes:
            others = BETWEEN if 1 < self.ranks // size <= MOST_GROUPS else ()
            names += [f"ulysses({size}, {name})" for name in ("ring", *others)]
        return [name for name in names if self._fits(name)]

    def _fits(self, schedule: str) -> bool:
        try:
            return bool(self.plan(schedule))
        except InvalidInput:
            return False

    def simulate(self) -> dict[str, tuple[float, float]]:
        """By schedule, the seconds of a forward, and of a forward and a backward (of many ranks, of no backward)."""
        found = {}
        for name in self.schedules:
            plan = self.plan(name)
            forward = simulate(plan, self.machine).seconds
            backward = simulate(plan, self.machine, backward=True).seconds if self.ranks <= BOTH else 0.0
            found[name] = forward, forward + backward
        return found

    def judge(self) -> dict[str, object]:
        """What `auto` picks, what is fastest, and the pick's time over the fastest, in a forward and in both passes."""
        picked, seconds = self.plan("auto").schedule, self.simulate()
        if picked not in seconds:  # between more groups than are simulated for all
            plan = self.plan(picked)
            seconds[picked] = (simulate(plan, self.machine).seconds,) * 2
        best = [min(seconds, key=lambda name: seconds[name][passes]) for passes in (0, 1)]
        ratios = [seconds[picked][passes] / seconds[best[passes]][passes] for passes in (0, 1)]
        both = ratios[1] if self.ranks <= BOTH else None
        return {"auto": picked, "best": best[0], "auto / best": ratios[0], "forward + backward": both}


def draw_settings(ranks: int, count: int = SETTINGS, seed: int = SEED) -> list[Setting]:
    """Random settings, the patterns in turn."""
    source = random.Random(f"{seed}, {ranks}")
    return [_draw(source, ranks, number) for number in range(count)]


def _draw(source: random.Random, ranks: int, number: int) -> Setting:
    kind = ("causal", "window", "documents", "dilated", "blocks")[number % 5]
    tokens = 1 << source.randint(*(BLOCK_TOKENS if kind == "blocks" else TOKENS))
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
    heads, kv_heads = source.choice(HEADS)
    return Setting(pattern, layout, tokens, ranks, heads, kv_heads, source.choice(MACHINES))


def _draw_lengths(source: random.Random, tokens: int) -> list[int]:
    """Lengths of documents, exponentially distributed around a random mean."""
    mean = source.choice((1 << 12, 1 << 14, tokens // 2))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(max(64, int(source.expovariate(1 / mean))), tokens - sum(lengths)))
    return lengths
