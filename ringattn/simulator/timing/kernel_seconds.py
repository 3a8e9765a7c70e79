"""Seconds per pair of a plan, from measured kernel times or modelled rates, averaged over visits of sampled ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from ...cache import cached
from ...dtypes import ITEM_BYTES
from ...errors import Unsupported
from ...machine.kernel_times import BACKWARD, BEYOND, BLOCK, KernelRates, KernelTimes
from ...machine.machine import Machine
from ...pattern.tile import Tile
from ...plan.demand import sampled_ranks
from ...plan.plan import Plan
from ...plan.work import Work

#: The number of sampled ranks: at most MOST_RANKS and at least FEWEST_RANKS, and between them about PLANNED_STEPS steps
#: in total, as each rank of a dense pattern has as many steps as there are ranks.
MOST_RANKS, FEWEST_RANKS, PLANNED_STEPS = 8, 3, 192
#: The largest share of a plan's pairs that may lie in tiles more than `BEYOND` times larger than the measured ones.
MOST_STRAY = 0.1
#: How often expanding rows moves the bytes of the keys and values that it makes: written by the product, and copied to
#: where the kernel reads them. A backward expands again, and makes the gradients of rows and of weights.
EXPAND_PASSES, EXPAND_BACKWARD = 2, 3
#: Blocks of distant owners sampled per rank, in addition to its own block and its neighbours' blocks.
SAMPLED_OWNERS = 8


def timed_ranks(ranks: int, most: int = MOST_RANKS) -> list[int]:
    """A sample of ranks, ascending, with the first and the last; their computations represent those of all ranks."""
    return sampled_ranks(ranks, most, FEWEST_RANKS, PLANNED_STEPS, ends=True)


def pair_seconds(
    plan: Plan, machine: Machine, backward: bool, most: int = MOST_RANKS, enough: int | None = None
) -> float:
    """Seconds that the attention kernel takes per (query, key, head, branch) pair, for the whole batch.

    They come from measured kernel times if the machine has them, else from modelled rates, else from its flops: 2 (D +
    Dv) FLOPs per pair in a forward. Times and rates are averaged over the blocks that at most `most` sampled ranks
    compute with; rates use only the first `enough` tiles of each. Expanding the rows of a `block` is included.
    """
    flops = 2 * (plan.head_dim + plan.value_dim) * (BACKWARD if backward else 1.0)
    ring_ranks = tuple(timed_ranks(plan.ring_plan(0)[0].ranks, most=most))
    expanding = _expand_seconds_per_pair(plan, machine, backward, ring_ranks) if plan.expand_flops else 0.0
    if machine.kernel is not None:
        return expanding + plan.batch * seconds_per_pair(plan, machine.kernel, flops, backward, ring_ranks)
    if machine.kernel_rates is not None:
        gathered = machine.one_gather and plan.schedule == "allgather"
        rates = machine.kernel_rates
        return expanding + plan.batch * modelled_seconds_per_pair(plan, rates, gathered, backward, ring_ranks, enough)
    return expanding + plan.batch * flops / machine.flops


@cached
def _expand_seconds_per_pair(plan: Plan, machine: Machine, backward: bool, ranks: tuple[int, ...]) -> float:
    """Seconds of expanding rows, for the whole batch, divided by the pairs of the visits that `ranks` make."""
    ring_plan = plan.ring_plan(0)[0]
    visits = [*_sample_visits(ring_plan, ranks)]
    pairs = sum(weight * ring_plan.demand.pairs(*visit) for weight, *visit in visits)
    seconds = sum(weight * expand_seconds(ring_plan, machine, backward, *visit) for weight, *visit in visits)
    return seconds / pairs if pairs else 0.0


def expand_seconds(ring_plan: Plan, machine: Machine, backward: bool, rank: int, owner: int) -> float:
    """Seconds in which `rank` expands the rows of the block of `owner` that it needs, for the whole batch.

    0 if keys and values are not made of rows by a product. The sum of computing and of moving the result.
    """
    if not (flops := ring_plan.expand_flops):
        return 0.0
    rates, merge = machine.kernel_rates, machine.merge
    moved = (
        EXPAND_PASSES * ring_plan.kv_heads * (ring_plan.head_dim + ring_plan.value_dim) * ITEM_BYTES[ring_plan.dtype]
    )
    memory = inf if rates is None and merge is None else 2 * (merge or 0.0) if rates is None else rates.memory
    row = flops / (machine.matmul or machine.flops) + moved / memory
    rows = ring_plan.demand.count_needed((range(rank, rank + 1),), owner) // ring_plan.block_heads
    return ring_plan.batch * rows * row * (EXPAND_BACKWARD if backward else 1)


@cached
def seconds_per_pair(plan: Plan, times: KernelTimes, flops: float, backward: bool, ranks: tuple[int, ...]) -> float:
    """Average measured seconds of the kernel per (query, key, head, branch) pair of one batch element.

    `flops` are the FLOPs of one pair. The average is over all blocks that `ranks` compute with; these are ranks of
    `plan.ring_plan(0)`, which differs from the plan if it has Ulysses groups. Raises Unsupported if more than a tenth
    of the pairs lie in tiles of more than twice the measured sizes, or if dtype or head dim are far from the measured
    ones.
    """
    times.check(plan.dtype, plan.head_dim)
    seconds = pairs = stray_pairs = 0.0
    largest_stray = (0, 0)
    ring_plan, _ = plan.ring_plan(0)
    for weight, rank, owner in _sample_visits(ring_plan, ranks):
        seconds += weight * visit_seconds(ring_plan, times, flops, backward, rank, owner)
        for work in ring_plan.demand.joined_works(rank, owner):
            for shape, rows, keys, count in lower_to_tiles(work):
                pairs += weight * count
                if not times.grid(shape, backward).covers(rows, keys):
                    stray_pairs += weight * count
                    largest_stray = max(largest_stray, (rows, keys))
    if not pairs:
        return 0.0
    if stray_pairs > MOST_STRAY * pairs and not times.extrapolate:
        dense = times.grid("dense", backward)
        raise Unsupported(
            f"tiles of {largest_stray[0]:,} rows x {largest_stray[1]:,} keys: the kernel times of this machine end at "
            f"{dense.rows[-1]:,} x {dense.keys[-1]:,}, and tiles more than {BEYOND:g} times as large are not "
            "extrapolated; measure larger tiles with ringattn calibrate rows=[...], or allow larger tiles with "
            "machine.extrapolate=true"
        )
    return seconds / pairs


def visit_seconds(ring_plan: Plan, times: KernelTimes, flops: float, backward: bool, rank: int, owner: int) -> float:
    """Measured seconds of the kernel for a rank's queries and an owner's keys, per batch element.

    `flops` are the FLOPs of one pair. The overhead of a call is divided among the batch elements.
    """
    seconds = 0.0
    for work in ring_plan.demand.joined_works(rank, owner):
        seconds += times.overhead[backward] / ring_plan.batch
        for shape, rows, keys, pairs in lower_to_tiles(work):
            seconds += pairs * flops / times.grid(shape, backward).rate(rows, keys)
    return seconds


def modelled_seconds_per_pair(
    plan: Plan, rates: KernelRates, gathered: bool, backward: bool, ranks: Sequence[int], enough: int | None = None
) -> float:
    """Average modelled seconds of the kernel per (query, key, head, branch) pair of one batch element.

    The average is over all blocks that `ranks` compute with. `gathered`: a rank computes with all blocks in one kernel
    call, so the launch and moving rows count only once, with its own block. The first `enough` tiles of a block
    represent the others; once that many tiles were seen in all, further blocks are skipped, because tiles of one
    pattern are much alike.
    """

    def compute() -> float:
        seconds, pairs, item, tiles = 0.0, 0.0, ITEM_BYTES[plan.dtype], 0
        dims, ring_plan = plan.head_dim + plan.value_dim, plan.ring_plan(0)[0]
        visit = rates.visit if ring_plan.ranks > 1 and not gathered else 0.0
        for weight, rank, owner in _sample_visits(ring_plan, ranks):
            listed, whole = ring_plan.demand.first_works(rank, owner, enough)
            works = [(work, len(work.heads) * work.repeat * plan.batch) for work in listed]
            seen = [heads * _pairs_per_head(work) for work, heads in works]
            tiles += sum(len(work.k) * work.repeat for work in listed)
            # Pairs of the whole visit / pairs of the listed works.
            share = 1.0 if whole else plan.batch * ring_plan.demand.pairs(rank, owner) / sum(seen)
            # One call computes the works of a visit.
            blocks = share * sum(heads * -(-(work.keys if backward else len(work.q)) // BLOCK) for work, heads in works)
            pairs += weight * share * sum(seen)
            for work, heads in works:
                rate = rates.pair_seconds(blocks, dense=work.dense, dims=dims, backward=backward, item=item)
                seconds += weight * share * heads * _computed_per_head(work) * rate
            if works and (rank == owner or not gathered):
                rows = round(share * sum(heads * len(work.q) for work, heads in works))
                start = rates.start_seconds(rows, dims=dims, backward=backward, item=item)
                seconds += weight * (start + visit)
            if enough is not None and tiles >= enough:
                break
        return seconds / pairs if pairs else 0.0

    # Cached with the demand, so that plans with other schedules share it.
    key = modelled_seconds_per_pair, rates, gathered, backward, enough, *plan.sizes.values(), *ranks
    return plan.ring_plan(0)[0].demand.cache.answer(key, compute)


def _sample_visits(plan: Plan, ranks: Iterable[int]) -> Iterator[tuple[float, int, int]]:
    """(weight, rank, owner) of sampled visits: of `ranks` to their own, neighbouring and evenly spaced other blocks.

    The weight is the number of visits that a sampled visit represents. If there are few owners, all are sampled.
    """
    world = plan.ranks
    near = sorted({0, 1 % world, (world - 1) % world})
    far = {2 + (world - 4) * i // (SAMPLED_OWNERS - 1) for i in range(SAMPLED_OWNERS)} if world > 3 else set()
    weights = [(distance, 1.0) for distance in near]
    weights += [(distance, (world - 3) / len(far)) for distance in sorted(far)]
    for rank in ranks:
        for distance, weight in weights:
            owner = (rank + distance) % world
            if plan.demand.visits(rank, owner):
                yield weight, rank, owner


def _pairs_per_head(work: Work) -> int:
    """(query, key) pairs of one head and one repetition of a work."""
    rows, keys = len(work.q), work.keys
    return rows * keys if work.dense else Tile(range(1), range(rows), range(keys), work.lo, work.hi).pairs


def _computed_per_head(work: Work) -> float:
    """The pairs of `_pairs_per_head`, and the hidden ones that a kernel computes: it only skips whole tiles of BLOCK.

    Along an edge of what is visible, that is half a tile of keys for each row.
    """
    rows, edges = len(work.q), (work.lo is not None) + (work.hi is not None)
    return min(_pairs_per_head(work) + edges * rows * BLOCK / 2, rows * work.keys)


def lower_to_tiles(work: Work) -> Iterator[tuple[str, int, int, int]]:
    """Yield (shape, rows, keys, pairs) of the tiles into which kernels split a work.

    `pairs` are summed over heads, and over repetitions of the tile.
    """
    rows, keys, repeats = len(work.q), work.keys, len(work.heads) * work.repeat
    pairs = _pairs_per_head(work) * repeats
    if work.dense:
        yield "dense", rows, keys, pairs
        return
    if work.hi is not None:
        # A rate counts only visible pairs; the pairs that a kernel computes in excess depend on the width of the band.
        width = pairs // (rows * repeats) if work.lo is None else min(work.hi - work.lo + 1, keys)
        yield "band", rows, max(width, 1), pairs
        return
    assert work.lo is not None
    # Kernels split the work into the keys that every row sees and a triangle.
    seen_by_all = min(max(-work.lo, 0), keys)
    dense_pairs = rows * seen_by_all * repeats
    if seen_by_all:
        yield "dense", rows, seen_by_all, dense_pairs
    if pairs > dense_pairs:
        yield "triangle", rows, 1, pairs - dense_pairs
