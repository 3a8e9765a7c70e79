"""A study's last points carried on to more tokens, on a straight line. Extrapolated, and said to be."""

from __future__ import annotations

from dataclasses import dataclass

from ...machine.machine import Machine
from .plots import passes, series, total
from .tables import Row, Table


@dataclass(frozen=True)
class Extended:
    """A series at `tokens` on `ranks` ranks: seconds of all passes, mean seconds between failures of some rank, watts and
    bytes of all ranks; `points` are those that it is made from."""

    series: str
    tokens: int
    ranks: int
    seconds: float
    failure: float | None
    watts: float | None
    memory: int
    points: tuple[int, int]


def extended(table: Table, machines: dict[int, Machine], tokens: int) -> list[Extended]:
    """Every series of the table at `tokens`, which is more than any point has; `machines` by point."""
    found = []
    for name, rows in series(table, "tokens", without=("ranks", "shard", "tokens")).items():
        last = rows[-2:]
        if len(last) < 2 or last[0]["shard"] != last[1]["shard"] or last[0]["ranks"] == last[1]["ranks"]:
            continue  # of a line through points with other shards nothing could be said
        found.append(_one(name, last, machines[last[1]["point"]], tokens))
    return found


def _one(name: str, last: list[Row], machine: Machine, tokens: int) -> Extended:
    (a, b), ranks = last, -(-tokens // last[1]["shard"])
    slope = (total(b, "time") - total(a, "time")) / (b["ranks"] - a["ranks"])
    memory = max(b[f"{one} memory"] for one in passes(b))
    return Extended(
        name, tokens, ranks, total(b, "time") + slope * (ranks - b["ranks"]),
        None if machine.mtbf is None else machine.mtbf / ranks, None if machine.watts is None else machine.watts * ranks,
        memory * ranks, (a["point"], b["point"]),
    )  # fmt: skip
