"""One round of a calibration, in which everything is measured once, and all rounds joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, TypeVar

from ...errors import InvalidInput
from ...kernels.base import Kernel
from . import kernels
from .fits import Sample
from .links import Overlap, measure_overlap, time_ping_pong, time_shift
from .measuring_ranks import MeasuringRanks, Settings, TimedBytes
from .passes import PassCase, Runs, time_passes

T = TypeVar("T")
#: A measurement of one round.
D = TypeVar("D", Sample, TimedBytes, Overlap)


@dataclass(frozen=True)
class CalibrationSizes:
    """Ascending sizes to measure: rows and keys of tiles, keys per row of bands, bytes of messages."""

    rows: Sequence[int]
    widths: Sequence[int]
    messages: Sequence[int]

    def __post_init__(self) -> None:
        for name, sizes, least in (("rows", self.rows, 2), ("widths", self.widths, 1), ("messages", self.messages, 2)):
            if len(sizes) < least or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 1:
                raise InvalidInput(f"{name}={list(sizes)}: expected at least {least} ascending sizes >= 1")


@dataclass(frozen=True)
class Round:
    """What one round has measured, or all rounds together. A process alone has no messages, overlaps and passes."""

    overheads: kernels.Overheads
    works: list[Sample]
    merges: list[TimedBytes]
    ping_pong: list[TimedBytes]
    #: Messages to the next rank by the prefix of the numbers that they give: "", or "node_" within a node.
    shifts: dict[str, list[TimedBytes]]
    overlaps: list[Overlap]
    #: The runs of each pass.
    runs: list[Runs]

    @classmethod
    def measure(
        cls,
        ranks: MeasuringRanks,
        kernel: Kernel,
        settings: Settings,
        sizes: CalibrationSizes,
        cases: Sequence[PassCase],
        *,
        first: bool,
    ) -> Round:
        """Measure everything once. Collective."""
        overheads = kernels.time_overheads(ranks, kernel, settings)
        works = list(kernels.list_works(sizes.rows, sizes.widths, settings.heads))
        samples = kernels.time_works(ranks, kernel, works, settings)
        merges = kernels.time_merges(ranks, sizes.rows, settings)
        if ranks.size == 1:
            return cls(overheads, samples, merges, [], {}, [], [])
        shifts = {
            prefix: time_shift(ranks, kernel, sizes.messages, settings, within_node=within_node)
            for prefix, within_node in _list_links(ranks).items()
        }
        overlaps = [measure_overlap(ranks, kernel, rows, settings) for rows in sizes.rows]
        runs: list[Runs] = [(run,) for run in time_passes(ranks, cases, settings, warm_up=first)]
        return cls(overheads, samples, merges, time_ping_pong(ranks, sizes.messages), shifts, overlaps, runs)

    @classmethod
    def join(cls, rounds: Sequence[Round]) -> Round:
        """The rounds as one, in which every measurement has the seconds of all rounds."""
        return cls(
            overheads=(_chain(one.overheads[0] for one in rounds), _chain(one.overheads[1] for one in rounds)),
            works=_join([one.works for one in rounds]),
            merges=_join([one.merges for one in rounds]),
            ping_pong=_join([one.ping_pong for one in rounds]),
            shifts={prefix: _join([one.shifts[prefix] for one in rounds]) for prefix in rounds[0].shifts},
            overlaps=_join([one.overlaps for one in rounds]),
            runs=[_chain(runs) for runs in zip(*(one.runs for one in rounds), strict=True)],
        )


def _list_links(ranks: MeasuringRanks) -> dict[str, bool]:
    """The kinds of links by the prefix of their numbers, and whether the links lie within a node.

    The only kind of links has no prefix; where there are nodes of several ranks, that between nodes has none.
    """
    if ranks.nodes == 1 or ranks.ranks_per_node == 1:
        return {"": ranks.ranks_per_node > 1}
    return {"": False, "node_": True}


def _join(rounds: Sequence[Sequence[D]]) -> list[D]:
    """What was measured in each round, with the seconds of all rounds."""

    def chain_fields(same: Sequence[D]) -> D:
        names = [name for name, value in vars(same[0]).items() if isinstance(value, tuple)]
        joined: dict[str, Any] = {name: _chain(getattr(one, name) for one in same) for name in names}
        return replace(same[0], **joined)

    return [chain_fields(same) for same in zip(*rounds, strict=True)]


def _chain(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))
