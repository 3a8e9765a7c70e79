"""Generation: a K/V cache that is sharded over ranks, and attention of new tokens to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..machine.machine import Machine

#: How a step merges the ranks' partial results, and how ranks hold the keys of layers with a window, see `KVCache`.
MERGES, WINDOWS = ("auto", "gather", "scatter"), ("shard", "copy")


def merge_seconds(machine: Machine, size: int, ranks: int, stride: int = 1, merge: str = "auto") -> tuple[str, float]:
    """(way, seconds): how ranks merge their partial results of `size` bytes each, and the predicted time.

    The way is "gather" or "scatter". The `ranks` ranks are `stride` apart.
    - "gather": every rank sends its whole result to every other rank, in one round.
    - "scatter": every rank receives 1 / `ranks` of the heads from all others, merges them, and sends them the merged
      part: two rounds with 1 / `ranks` of the bytes each.
    - "auto": the faster of the two.
    """
    gather, scatter = (_exchange_seconds(machine, part, ranks, stride) for part in (size, size / ranks))
    seconds = {"gather": gather, "scatter": 2 * scatter}
    chosen = min(seconds, key=lambda name: seconds[name]) if merge == "auto" else merge
    return chosen, seconds[chosen]


def _exchange_seconds(machine: Machine, size: float, ranks: int, stride: int) -> float:
    """Seconds in which each of `ranks` ranks, `stride` apart, sends `size` bytes to every other one, all at once.

    Messages within a node and between nodes travel at the same time. If a node has only one network card, its ranks
    share the card for messages between nodes.
    """
    node = machine.ranks_per_node
    inside = max(min(ranks, node // stride), 1)
    times = [0.0]
    for near, peers in ((True, inside - 1), (False, ranks - inside)):
        latency, bandwidth = machine.rates(near)
        if peers:
            times.append(latency + peers * size * (node if machine.shared_nic and not near else 1) / bandwidth)
    return max(times)
