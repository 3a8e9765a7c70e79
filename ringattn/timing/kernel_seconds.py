"""Seconds of a plan's pairs, from measured kernel times: its visits are lowered to tiles, as kernels lower them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import Unsupported
from ..machine.kernel_times import BEYOND, KernelTimes
from ..pattern.tile import Tile
from ..plan.plan import Plan
from ..plan.work import Work

#: The share of a plan's pairs that may lie in tiles further beyond.
STRAY = 0.1
#: Visits of a rank that are looked at, beside those of itself and of its neighbours.
LOOKED_AT = 8


def seconds_per_pair(plan: Plan, times: KernelTimes, flops: float, backward: bool, ranks: Iterable[int]) -> float:
    """Seconds of the kernel per (query, key, head, branch) pair of one batch element, over visits of some `ranks`.

    `flops` are those of one pair; of a plan with teams, `ranks` are places between them. Raises Unsupported where more
    than a tenth of the pairs lie in tiles of more than twice the measured sizes.
    """

    def find() -> float:
        times.check(plan.dtype, plan.head_dim)
        return _seconds_per_pair(plan, times, flops, backward, ranks)

    return plan.cache.answer((seconds_per_pair, times, flops, backward), find)


def _seconds_per_pair(plan: Plan, times: KernelTimes, flops: float, backward: bool, ranks: Iterable[int]) -> float:
    seconds = pairs = stray = 0.0
    largest: tuple[int, int] = (0, 0)
    overhead = times.overhead[backward] / plan.batch
    inner, _ = plan.ring_plan(0)
    for weight, rank, owner in _visits(inner, ranks):
        for work in inner.demand.batched(rank, owner):
            seconds += weight * overhead
            for shape, rows, keys, count in lowered(work):
                grid = times.grid(shape, backward)
                seconds += weight * count * flops / grid.rate(rows, keys)
                pairs += weight * count
                if not grid.covers(rows, keys):
                    stray += weight * count
                    largest = max(largest, (rows, keys))
    if not pairs:
        return 0.0
    if stray > STRAY * pairs and not times.extrapolate:
        top = times.grid("dense", backward)
        raise Unsupported(
            f"tiles of {largest[0]:,} rows x {largest[1]:,} keys: the kernel times of this machine end at "
            f"{top.rows[-1]:,} x {top.keys[-1]:,}, and at most {BEYOND:g} times as much is extrapolated; measure larger "
            "ones with ringattn calibrate rows=[...], or allow it with machine.extrapolate=true"
        )
    return seconds / pairs


def _visits(plan: Plan, looked_at: Iterable[int]) -> Iterator[tuple[float, int, int]]:
    """(weight, rank, owner) of visits: all of few ranks; of many, own and neighbours' blocks, and evenly spaced others."""
    ranks = plan.ranks
    near = sorted({0, 1 % ranks, (ranks - 1) % ranks})
    rest = sorted({2 + (ranks - 4) * i // (LOOKED_AT - 1) for i in range(LOOKED_AT)} if ranks > 3 else set())
    shares = [(distance, 1.0) for distance in near] + [(distance, (ranks - 3) / len(rest)) for distance in rest]
    for rank in looked_at:
        for distance, share in shares:
            owner = (rank + distance) % ranks
            if plan.demand.visits(rank, owner):
                yield share, rank, owner


def lowered(work: Work) -> Iterator[tuple[str, int, int, int]]:
    """(shape, rows, keys, pairs over heads and repetitions) of the tiles that kernels make of a work."""
    rows, keys, times = len(work.q), work.keys, len(work.heads) * work.repeat
    if work.dense:
        yield "dense", rows, keys, rows * keys * times
        return
    pairs = Tile(range(1), range(rows), range(keys), work.lo, work.hi).pairs * times
    if work.hi is not None:
        yield "band", rows, max(pairs // (rows * times), 1), pairs
        return
    assert work.lo is not None
    # Keys that every row sees, then a triangle, as the kernels split it.
    wide = min(max(-work.lo, 0), keys)
    if wide:
        yield "dense", rows, wide, rows * wide * times
    if pairs - rows * wide * times > 0:
        yield "triangle", rows, 1, pairs - rows * wide * times
