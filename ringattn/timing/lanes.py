"""Messages of one clock on a machine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .rates import Faults, Rates
from .ring import NEVER, Lane, Value, shifted

#: Bytes that one message of a clock carries: those of each rank, or of all.
Bytes = np.ndarray | float


def lane(
    rates: Rates,
    faults: Faults,
    sign: int,
    size: Bytes,
    batch: Sequence[tuple[int, Bytes]],
    ranks: np.ndarray | None = None,
) -> Lane:
    """The messages of a lane, of all ranks or of `ranks`, neighbours along the last axis.

    Those of one rank and kind of link in a clock follow each other, so that each ends with the last of `batch`, all lanes
    of the clock, at its sender or its receiver.
    """
    near = {s: rates.near(s, ranks) for s, _ in batch}
    moved, gaps = {}, {}
    for s, other in batch:
        seconds, gap = rates.message(other, near[s])
        empty = np.equal(other, 0)
        factor = 1.0 if faults.slow_links is None else faults.slow_links
        moved[s], gaps[s] = np.where(empty, 0.0, seconds * factor), np.where(empty, 0.0, gap * factor)
    out = moved[sign]
    into = out  # by sender: what its receiver gets in all
    for s, _ in batch:
        if s != sign:
            out = out + np.where(near[s] == near[sign], moved[s], 0.0)
            came = (shifted(shifted(np.asarray(x), s), -sign) for x in (moved[s], near[s]))
            other, alike = came
            into = into + np.where(alike == near[sign], other, 0.0)
    seconds = np.where(np.equal(size, 0), NEVER, np.maximum(out, into))
    return Lane(sign, _few(seconds), _few(gaps[sign]), size)


def _few(value: np.ndarray) -> Value:
    """One number where all are equal."""
    value = np.atleast_1d(value)
    first = value.flat[0]
    return float(first) if bool((value == first).all()) else value


def scaled(seconds: Value, faults: Faults) -> Value:
    """Seconds of visits, on slow ranks more."""
    return seconds if faults.slow is None else seconds * faults.slow
