"""A study's series carried on to more tokens, on a straight line through the last two points. Always extrapolated."""

from __future__ import annotations

from dataclasses import dataclass

from ...machine.machine import Machine
from .plots import find_series, list_passes, total
from .tables import Row, Table


@dataclass(frozen=True)
class Extrapolation:
    """A series at `tokens` on `ranks` ranks, from its last two points, whose numbers are `points`.

    `seconds` of all passes; `failure` is the mean seconds between failures of any rank; `watts` and `memory` (bytes)
    are sums over all ranks.
    """

    series: str
    tokens: int
    ranks: int
    seconds: float
    failure: float | None
    watts: float | None
    memory: int
    points: tuple[int, int]


def extrapolate(table: Table, machines: dict[int, Machine], tokens: int) -> list[Extrapolation]:
    """Every series of the table at `tokens`, more than any point has; `machines` by the number of the point.

    Left out are series whose last two points have different shards or equal ranks: a line through them says nothing.
    """
    lines = []
    for name, rows in find_series(table, "tokens", without=("ranks", "shard", "tokens")).items():
        last = rows[-2:]
        if len(last) == 2 and last[0]["shard"] == last[1]["shard"] and last[0]["ranks"] != last[1]["ranks"]:
            lines.append(_extend(name, last[0], last[1], machines[last[1]["point"]], tokens))
    return lines


def _extend(series: str, first: Row, second: Row, machine: Machine, tokens: int) -> Extrapolation:
    ranks = -(-tokens // second["shard"])
    slope = (total(second, "time") - total(first, "time")) / (second["ranks"] - first["ranks"])
    memory = max(second[f"{direction} memory"] for direction in list_passes(second))
    return Extrapolation(
        series=series,
        tokens=tokens,
        ranks=ranks,
        seconds=total(second, "time") + slope * (ranks - second["ranks"]),
        failure=None if machine.mtbf is None else machine.mtbf / ranks,
        watts=None if machine.watts is None else machine.watts * ranks,
        memory=memory * ranks,
        points=(first["point"], second["point"]),
    )
