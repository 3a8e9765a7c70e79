"""Seconds of visits that share the cores of a node: the visits of one step are taken to begin together.

As with shared cards, the plan alone says which visits share: those of one step of the pass, on the ranks of one node.
So the seconds of a visit grow with those of the others and fall with the number of cores, and depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence


def share_cores(seconds: Sequence[float], cores: int) -> list[float]:
    """When each of several visits ends that begin at 0 and would take `seconds` on a core of their own.

    While n of them last, each runs at min(1, cores / n) of its speed.
    """
    if len(seconds) <= cores:
        return list(seconds)
    ends = [0.0] * len(seconds)
    now = served = 0.0
    ascending = sorted(range(len(seconds)), key=seconds.__getitem__)
    for ended, index in enumerate(ascending):
        now += (seconds[index] - served) * max(1.0, (len(seconds) - ended) / cores)
        ends[index], served = now, seconds[index]
    return ends
