"""Where the pairs and rows of a band may change from rank to rank at a step: a few places, however many ranks.

Both are made of distances between chunks, clipped: constant but where a distance crosses an edge of the band, or where
ranks turn from the last to the first. A distance is a rank, twice a rank, or none, and a constant of the step, so that the
places follow by solving for the rank. There may be more of them than changes, never fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...plan.schedules.relay import Way
from .banded import Banded
from .traffic import BandTraffic

#: A chunk is at an edge of the band for two distances around it; the rest forgives the rounding of divisions.
AROUND = np.arange(-3, 4)


def places(band: Banded, ways: Sequence[Way], course: BandTraffic, away: np.ndarray) -> np.ndarray:
    """Ranks at which a run of equal ranks may begin at the steps of visits at distances `away`, int64 [steps, places],
    unordered, repeated, 0 among them."""
    found = [np.zeros((len(away), 1), dtype=np.int64)]
    for way in ways:
        # Owners at which rows change, as the ranks that send their rows; then ranks at which pairs change.
        for cargo in course.cargo:
            hops = away - cargo.lag
            turn = way.sign * (hops + course.back)[:, None]
            found.append((owners(band, way, hops) + turn) % band.ranks)
        turn = way.sign * away[:, None]
        found += [_inside(_wide(place, away), band.ranks) for place in _pairs(band, turn)]
    return np.concatenate(found, axis=1)


def owners(band: Banded, way: Way, hops: np.ndarray) -> np.ndarray:
    """Owners at which a run may begin of those whose blocks send equal rows on some hops, int64 [hops, places], 0 among
    them."""
    found = [_inside(_wide(place, hops), band.ranks) for place in _rows(band, way, hops[:, None])]
    return np.concatenate(found, axis=1)


def _edges(band: Banded) -> np.ndarray:
    """Distances of chunks, query less key, at which the band ends, with some on either side; int64 [edges]."""
    bounds = [bound // band.size for bound in (band.lo, band.hi) if bound is not None]
    return np.unique(np.concatenate([bound + AROUND for bound in bounds])) if bounds else np.zeros(1, dtype=np.int64)


def _pairs(band: Banded, turn: np.ndarray) -> Iterator[np.ndarray]:
    """Ranks at which the pairs of their visits change: owner = rank - turn, with ranks added where that is outside."""
    ranks, edges = band.ranks, _edges(band)
    yield turn % ranks
    if (
        band.chunks == 2
    ):  # chunks of rank and 2 ranks - 1 - owner: rank + owner - (2 ranks - 1) = an edge, or its mirror
        for around in (-ranks, 0, ranks):
            for edge in (edges, -edges):
                yield from _halves(turn + around + 2 * ranks - 1 + edge)


def _rows(band: Banded, way: Way, hops: np.ndarray) -> Iterator[np.ndarray]:
    """Owners at which the rows change that ranks at distances hop + 1 .. limit see: query chunks u less key chunks."""
    ranks, edges = band.ranks, _edges(band)
    yield np.zeros((1, 1), dtype=np.int64)
    # u is that of the first or of the last rank, or mirrored to it; key chunks are the owner and its mirror.
    for end in (0, ranks, 2 * ranks) if band.chunks == 2 else (0, ranks):
        for edge in (edges, -edges):
            yield end + edge[None]
    for distance in (way.sign * (hops + 1), np.full((1, 1), way.sign * way.limit)):
        # u is at a distance from the owner, around the ring: where it turns, and where it meets a mirrored chunk.
        yield (-distance) % ranks + np.arange(-1, 2)
        if band.chunks == 2:
            for around in (-ranks, 0, ranks):
                for edge in (edges, -edges):
                    yield from _halves(2 * ranks - 1 - distance + around + edge)


def _halves(twice: np.ndarray) -> Iterator[np.ndarray]:
    """Halves of consecutive numbers, rounded both ways."""
    yield twice // 2
    yield (twice + 1) // 2


def _wide(place: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return np.broadcast_to(place, (len(steps), place.shape[1]))


def _inside(place: np.ndarray, ranks: int) -> np.ndarray:
    """Places outside of the ranks as rank 0."""
    return np.where((place >= 0) & (place < ranks), place, 0)
