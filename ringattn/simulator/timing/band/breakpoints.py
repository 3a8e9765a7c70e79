"""The few ranks at which pairs or rows of a band may change from one rank to the next, however many ranks there are.

Pairs and rows are made of clipped distances between chunks: they are constant but where a distance crosses a limit of
the band, or where ranks wrap around from the last to the first. A distance is a constant of the step plus 0, 1 or 2
times the rank, so that the breakpoints follow by solving for the rank. There may be more breakpoints than changes,
never fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ....plan.schedules.relay import Way
from .band import Band
from .traffic import BandTraffic

#: A chunk meets a limit of the band at two distances; the other offsets make up for the rounding of divisions.
AROUND = np.arange(-3, 4)


def find_rank_breakpoints(band: Band, ways: Sequence[Way], traffic: BandTraffic, distance: np.ndarray) -> np.ndarray:
    """Ranks at which a run of equal ranks may begin, at steps that visit blocks from `distance`, int64 [steps, points].

    The points of a step are in no order, may repeat, and include rank 0.
    """
    points = [np.zeros((len(distance), 1), dtype=np.int64)]
    for way in ways:
        # Owners at which rows change, moved to the ranks that send the rows; then ranks at which pairs change.
        for moving in traffic.moving:
            hops = distance - moving.lag
            turn = way.sign * (hops + traffic.homeward)[:, None]
            points.append((find_owner_breakpoints(band, way, hops) + turn) % band.ranks)
        turn = way.sign * distance[:, None]
        points += [_replace_outside(_repeat_steps(point, distance), band.ranks) for point in _pair_points(band, turn)]
    return np.concatenate(points, axis=1)


def find_owner_breakpoints(band: Band, way: Way, hops: np.ndarray) -> np.ndarray:
    """Owners at which a run may begin whose blocks send equally many rows on each hop, int64 [hops, points]."""
    points = [
        _replace_outside(_repeat_steps(point, hops), band.ranks) for point in _row_points(band, way, hops[:, None])
    ]
    return np.concatenate(points, axis=1)


def _limit_distances(band: Band) -> np.ndarray:
    """Distances of a query chunk from a key chunk at which the band may end, int64 [distances]."""
    limits = [limit // band.size for limit in (band.lo, band.hi) if limit is not None]
    return np.unique(np.concatenate([limit + AROUND for limit in limits])) if limits else np.zeros(1, dtype=np.int64)


def _pair_points(band: Band, turn: np.ndarray) -> Iterator[np.ndarray]:
    """Ranks at which pairs of visits change, where owner = rank - turn around the ring."""
    ranks, limits = band.ranks, _limit_distances(band)
    yield turn % ranks
    if band.chunks == 2:
        # The chunks of rank and of 2 ranks - 1 - owner are at a limit: rank + owner - (2 ranks - 1) = +- limit.
        for around in (-ranks, 0, ranks):
            for limit in (limits, -limits):
                yield from _halves(turn + around + 2 * ranks - 1 + limit)


def _row_points(band: Band, way: Way, hops: np.ndarray) -> Iterator[np.ndarray]:
    """Owners at which the rows change that ranks at distances hop + 1 .. way.limit see."""
    ranks, limits = band.ranks, _limit_distances(band)
    yield np.zeros((1, 1), dtype=np.int64)
    # The nearest or farthest query chunk is that of the first or of the last rank, or its mirror. The key chunk is that
    # of the owner, or its mirror.
    for end in (0, ranks, 2 * ranks) if band.chunks == 2 else (0, ranks):
        for limit in (limits, -limits):
            yield end + limit[None]
    for distance in (way.sign * (hops + 1), np.full((1, 1), way.sign * way.limit)):
        # The query chunk is at a distance from the owner around the ring: ranks wrap around, or it meets a mirrored
        # chunk.
        yield (-distance) % ranks + np.arange(-1, 2)
        if band.chunks == 2:
            for around in (-ranks, 0, ranks):
                for limit in (limits, -limits):
                    yield from _halves(2 * ranks - 1 - distance + around + limit)


def _halves(twice: np.ndarray) -> Iterator[np.ndarray]:
    """Halves of integers, rounded down and rounded up."""
    yield twice // 2
    yield (twice + 1) // 2


def _repeat_steps(points: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Points [1 or steps, points] for every step, [steps, points]."""
    return np.broadcast_to(points, (len(steps), points.shape[1]))


def _replace_outside(points: np.ndarray, ranks: int) -> np.ndarray:
    """The points, with rank 0 for those that are outside of 0 .. ranks - 1."""
    return np.where((points >= 0) & (points < ranks), points, 0)
