"""The runs of a layout, and the exchange of states and halos between them. Needs no torch.

A run is a range of consecutive positions that one rank holds. A recurrent layer maps the state before a run to the
state after it by an affine map (A, B) whose size does not depend on the length of the run, and a causal convolution
needs the last rows before a run, its halo. Both are units that travel from run to run in a few rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import Unsupported
from ..layout import Layout
from ..machine.machine import Machine
from ..pattern.documents import Documents

#: Bytes of a number of a state, unless the inputs are fp64.
STATE_ITEM = 4
#: The most runs of one rank: each costs a state, in compute and in messages.
MOST_RUNS = 16
#: The most ranks for which an all-gather of all states is considered.
MOST_GATHERED = 64


class LayoutRun(NamedTuple):
    """A run of adjacent positions start .. stop-1 on `rank`, whose local rows for them begin at `first`."""

    rank: int
    start: int
    stop: int
    first: int


class RunHop(NamedTuple):
    """A transfer between runs: the last `rows` rows of run `source` go to run `target`.

    With R runs in all, target R + r stands for the final state on rank r.
    """

    source: int
    target: int
    rows: int = 1


class RunPart(NamedTuple):
    """Part of a message from rank `sender` to rank `receiver`: the last `rows` rows of run `source`."""

    sender: int
    receiver: int
    source: int
    rows: int


@lru_cache(maxsize=256)
def list_runs(layout: Layout) -> tuple[LayoutRun, ...]:
    """The runs (adjacent tokens on one rank) of all ranks, in the order of the sequence.

    Raises Unsupported if a rank has more than MOST_RUNS runs, or if the positions are not 0 .. tokens-1.
    """
    if layout.stacked > 1 or layout.domain not in ((range(layout.tokens),), ()):
        raise Unsupported(f"layout {layout.name}: recurrent layers need all positions from 0 on; try layout='zigzag'")
    runs = []
    for rank, shard in enumerate(layout.all_places):
        first, joined, count = 0, list[LayoutRun](), 0
        for r in shard:
            for part in [r] if r.step == 1 else [range(p, p + 1) for p in r[: MOST_RUNS + 1]]:
                if joined and joined[-1].stop == part.start:
                    joined[-1] = joined[-1]._replace(stop=part.stop)
                else:
                    joined.append(LayoutRun(rank, part.start, part.stop, first))
                first += len(part)
            count = max(count + (r.step == 1 or len(r)), len(joined))
        if len(joined) > MOST_RUNS:
            raise Unsupported(
                f"layout {layout.name}: rank {rank} holds {count:,} runs of consecutive tokens, and a recurrent layer "
                f"needs a state for each; at most {MOST_RUNS} are supported; try layout='zigzag', which has 2"
            )
        runs += joined
    return tuple(sorted(runs, key=lambda run: run.start))


@dataclass(frozen=True)
class RunPlan:
    """The messages of one exchange between runs, in rounds; `unit` is the bytes of one state or one input row."""

    runs: tuple[LayoutRun, ...]
    #: "gather", "scan" or "rows".
    way: str
    rounds: tuple[tuple[RunHop, ...], ...]
    unit: int

    def rank_of(self, run: int) -> int:
        """The rank that owns a run, or the rank that a target beyond the last run stands for, see `RunHop`."""
        return self.runs[run].rank if run < len(self.runs) else run - len(self.runs)

    @cached_property
    def parts(self) -> tuple[tuple[RunPart, ...], ...]:
        """The parts that ranks send in each round.

        If several runs of a rank need the same rows, the rank gets them once. A rank may send to itself.
        """
        rounds = []
        for hops in self.rounds:
            rows: dict[tuple[int, int, int], int] = {}
            for source, target, count in hops:
                key = self.rank_of(source), self.rank_of(target), source
                rows[key] = max(count, rows.get(key, 0))
            rounds.append(tuple(RunPart(*key, rows[key]) for key in sorted(rows)))
        return tuple(rounds)

    @cached_property
    def messages(self) -> dict[tuple[int, int, int], int]:
        """The bytes of each message of a forward, by (round, sender, receiver); the backward sends as many back."""
        found: dict[tuple[int, int, int], int] = {}
        for number, parts in enumerate(self.parts):
            for sender, receiver, _, rows in parts:
                if sender != receiver:
                    key = number, sender, receiver
                    found[key] = found.get(key, 0) + rows * self.unit
        return found

    def seconds(self, machine: Machine) -> float:
        """The modelled seconds of a forward: the sum over rounds of the latency and the busiest rank's transfers."""
        total = 0.0
        for number in range(len(self.rounds)):
            busy: dict[tuple[int, int], float] = {}
            late = 0.0
            for (_, *ends), count in ((key, x) for key, x in self.messages.items() if key[0] == number):
                _, latency, bandwidth = machine.link(*ends)
                late = max(late, latency)
                for key in enumerate(ends):
                    busy[key] = busy.get(key, 0.0) + count / bandwidth
            total += late + max(busy.values(), default=0.0)
        return total


def borders(documents: Documents | None) -> list[np.ndarray]:
    """The positions at which documents start, ascending, each once.

    One array for all batch rows, or one for each row if they differ.
    """
    if documents is None:
        return [np.array([0])]
    return [np.unique(documents.row(row).starts[:-1] or (0,)) for row in range(documents.rows or 1)]


def _oldest(documents: Documents | None, runs: Sequence[LayoutRun]) -> list[int]:
    """For each run the first position whose token its state depends on; its own start if it needs no state."""
    rows = borders(documents)
    return [min(int(row[np.searchsorted(row, run.start, "right") - 1]) for row in rows) for run in runs]


@lru_cache(maxsize=256)
def plan_states(layout: Layout, documents: Documents | None, unit: int, machine: Machine) -> RunPlan:
    """Plan how each run learns its initial state: by an all-gather or by a scan, whichever is faster on `machine`.

    Each run has an affine map from the state before it to the state after it; a map has `unit` bytes. In the all-gather
    every run gets the maps of the runs before it in one round. In the scan (Hillis & Steele 1986) it gets its
    predecessor's map, and then, in ceil(log2(runs)) rounds, the composed maps of 2, 4, 8 ... runs before it. Maps from
    before the document of a run are not sent.
    """
    runs = list_runs(layout)
    oldest = _oldest(documents, runs)
    stops = [run.stop for run in runs]
    #: The first run that run i needs; i if none.
    least = [min(bisect_right(stops, old), i) for i, old in enumerate(oldest)]
    rounds, apart = [tuple(RunHop(i - 1, i) for i in range(1, len(runs)) if least[i] < i)], 1
    # After a round, run i has composed the maps of the `apart` runs before it.
    while hops := tuple(RunHop(i - apart, i) for i in range(apart, len(runs)) if least[i] < i - apart):
        rounds.append(hops)
        apart *= 2
    scan = RunPlan(runs, "scan", tuple(hops for hops in rounds if hops), unit)
    if layout.ranks > MOST_GATHERED:
        return scan
    hops = tuple(RunHop(j, i) for i in range(len(runs)) for j in range(least[i], i))
    gather = RunPlan(runs, "gather", (hops,) if hops else (), unit)
    return min(gather, scan, key=lambda plan: plan.seconds(machine))


@lru_cache(maxsize=256)
def plan_rows(layout: Layout, documents: Documents | None, count: int, unit: int, *, ends: bool = False) -> RunPlan:
    """Plan the messages that bring each run the last `count` rows before it, as far as they are in its document.

    With `ends`, they bring each rank the last `count` rows of the sequence instead.
    """
    runs = list_runs(layout)
    targets = [*enumerate(zip((run.start for run in runs), _oldest(documents, runs), strict=True))]
    if ends:
        targets = [(len(runs) + rank, (layout.tokens, 0)) for rank in range(layout.ranks)]
    stops = [run.stop for run in runs]
    hops = []
    for target, (start, oldest) in targets:
        for source in range(bisect_right(stops, oldest := max(start - count, oldest)), len(runs)):
            if runs[source].start < start:
                hops.append(RunHop(source, target, runs[source].stop - max(oldest, runs[source].start)))
            else:
                break
    return RunPlan(runs, "rows", (tuple(hops),) if hops else (), unit)


class Piece(NamedTuple):
    """Rows begin .. end-1 of a rank's [B * n] rows that lie in the same run, document and batch row."""

    begin: int
    end: int
    row: int
    run: int
    #: The position of its first token.
    start: int
    #: The tokens of its document before it, 0 at the start of a document.
    before: int
    #: Whether the document goes on in a later run.
    goes_on: bool


@lru_cache(maxsize=256)
def cut_pieces(layout: Layout, documents: Documents | None, rank: int, batch: int) -> tuple[Piece, ...]:
    """Split a rank's rows into pieces, which end where a run, a document or a batch row ends; in order of the rows."""
    runs = list_runs(layout)
    mine = sorted((run.first, index) for index, run in enumerate(runs) if run.rank == rank)
    rows, borders_of, pieces = layout.rows(rank), borders(documents), []
    for row in range(batch):
        starts = borders_of[row if len(borders_of) > 1 else 0]
        for _, index in mine:
            run = runs[index]
            inner = starts[np.searchsorted(starts, run.start, "right") : np.searchsorted(starts, run.stop)]
            base = row * rows + run.first - run.start
            for start, stop in pairwise([run.start, *map(int, inner), run.stop]):
                first = int(starts[np.searchsorted(starts, start, "right") - 1])
                more = stop == run.stop < layout.tokens and stop not in starts
                pieces.append(Piece(base + start, base + stop, row, index, start, start - first, more))
    return tuple(pieces)


def cut_ends(layout: Layout, documents: Documents | None, batch: int) -> list[Piece]:
    """An empty piece at the end of the sequence for each batch row, which belongs to the row's last document."""
    tokens = layout.tokens
    firsts = [int(starts[starts < max(tokens, 1)][-1]) for starts in borders(documents)]
    firsts = firsts if len(firsts) == batch else firsts * batch
    return [Piece(0, 0, row, 0, tokens, tokens - first, False) for row, first in enumerate(firsts)]
