"""Seconds of messages that share a node's card, and of visits that share its cores: by the plan, without a clock.

A card that served its messages in the order of their arrival, or all that are on it at a time, would give some message
less where another one arrives earlier, so that a faster machine could take longer. Here the plan alone says which
messages share a card: those whose steps overlap, as if all of them began together and were served evenly. The visits
that share cores are those of one step. So seconds grow with those of each other work, and depend on nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CardUse:
    """A message on a card from step `first` to the end of step `last`, which would occupy the card alone for `gap`
    seconds."""

    first: int
    last: int
    gap: float


def share_evenly(uses: Sequence[CardUse]) -> np.ndarray:
    """Seconds for which each message occupies the card, float64 [uses].

    A message of g seconds among others of h seconds each takes the sum of min(g, h), its own g included: until it has
    ended, every other message has been served for as long, or has ended.
    """
    members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    at_step: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for index, use in enumerate(uses):
        members[use.first, use.last].append(index)
    for first, last in members:
        for step in range(first, last + 1):
            at_step[step].add((first, last))
    gaps = np.array([use.gap for use in uses])
    seconds = np.zeros(len(uses))
    for (first, last), indices in members.items():
        together = set().union(*(at_step[step] for step in range(first, last + 1)))
        ascending = np.sort(gaps[[index for span in together for index in members[span]]])
        shorter = np.searchsorted(ascending, gaps[indices])
        served = np.concatenate([[0.0], np.cumsum(ascending)])[shorter]
        seconds[indices] = served + gaps[indices] * (len(ascending) - shorter)
    return seconds


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
