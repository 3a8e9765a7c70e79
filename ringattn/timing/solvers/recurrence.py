"""The ring as a recurrence: when each rank begins each step, and what the solvers that solve it share.

With S_r(k) the time at which rank r begins step k, c its visit, mu its merging, l_r = alpha_r + m_r / beta_r the time
of its message to the next rank, g_r = m_r / beta_r the part of it that occupies the link, and B receive slots:

    X_r(k)    = max(S_r(k), S_next(k - B + 1))          the sender has the block, the receiver a slot
    A_next(k) = max(X_r(k) + l_r(k), A_next(k') + g_r(k))     k': the message before on this link
    S_r(k+1)  = max(S_r(k) + c_r(k) + gamma min(c_r(k), l) + mu_r(k), A_r(k), and, where ranks wait for sends, A_next(k - B + 1))

l in the last line is the longest message that r sends or receives in step k: gamma is the part of its time that messages
take from a visit. Each direction of travel has messages of its own. With B = 1, where l >= g, this is a stencil of three ranks:
S_r(k+1) = max(S_r(k) + a_r, S_{r-1}(k) + b_r, S_{r+1}(k) + d_r), where the backward adds chords: a message between ranks r and q
that are no neighbours begins at max(S_r(k), S_q(k)), and both wait for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import InvalidInput

#: One number for all ranks, or float64 [ranks].
Value = float | np.ndarray
NEVER = float("-inf")


@dataclass(frozen=True)
class DirectMessages:
    """Messages that begin when both ends, `source` and `target`, have begun step `at`, counted from where it is said,
    and take `seconds`; both ends wait for them before their next step. One entry per message, ascending by step.
    """

    at: np.ndarray
    source: np.ndarray
    target: np.ndarray
    bytes: np.ndarray
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.at)

    def inside(self, begin: int, end: int) -> DirectMessages:
        """The chords at steps begin .. end - 1, which count from `begin`."""
        some = slice(*np.searchsorted(self.at, (begin, end)))
        at, source, target, size, seconds = (
            x[some] for x in (self.at, self.source, self.target, self.bytes, self.seconds)
        )
        return DirectMessages(at - begin, source, target, size, seconds)

    def later(self, seconds: float) -> DirectMessages:
        """The same messages, which take `seconds` longer."""
        return replace(self, seconds=self.seconds + seconds)


@dataclass(frozen=True)
class Lane:
    """Messages of one step in one direction: rank r sends to rank r + sign.

    `seconds` is l >= 0, or -inf where rank r sends nothing; `gap` is g <= l; `bytes` are those that rank r sends.
    """

    sign: int
    seconds: Value
    gap: Value = 0.0
    bytes: Value = 0.0


@dataclass(frozen=True)
class Phase:
    """`steps` steps alike: each rank computes for `compute` seconds, merges for `merge`, and sends along `lanes`.

    A phase of one step may have `chords`, too, whose `at` is 0; `longest` are the seconds of the longest of each rank, 0
    where it has none.
    """

    steps: int
    compute: Value
    merge: Value = 0.0
    lanes: tuple[Lane, ...] = ()
    chords: DirectMessages | None = None
    longest: Value = 0.0


@dataclass(frozen=True)
class Stall:
    """One visit that takes `seconds` longer: that of `rank` at `step`, counted from 0 over all phases."""

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True)
class Ring:
    """A ring problem. `phases` may be a function that yields them anew, where they are too many to hold.

    `waits`: a rank waits for its own message of step k, too, before it begins step k + `buffers`, as the executor does.
    """

    ranks: int
    phases: tuple[Phase, ...] | Callable[[], Iterable[Phase]]
    buffers: int = 1
    gamma: float = 0.0
    waits: bool = True
    stalls: tuple[Stall, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.buffers < 1 or self.gamma < 0:
            raise InvalidInput(
                f"a ring needs ranks >= 1, buffers >= 1 and gamma >= 0, got {self.ranks}, {self.buffers}, {self.gamma}"
            )
        for phase in self.phases if isinstance(self.phases, tuple) else ():
            self._check(phase)
        steps = None if callable(self.phases) else sum(phase.steps for phase in self.phases)
        for stall in self.stalls:
            inside = 0 <= stall.rank < self.ranks and stall.step >= 0 and (steps is None or stall.step < steps)
            if not inside or not 0 <= stall.seconds < float("inf"):
                raise InvalidInput(
                    f"{stall}: expected a rank 0 .. {self.ranks - 1}, a step "
                    f"{'>= 0' if steps is None else f'0 .. {steps - 1}'} and seconds >= 0"
                )

    def _check(self, phase: Phase) -> None:
        values = (
            phase.compute,
            phase.merge,
            *(v for lane in phase.lanes for v in (lane.seconds, lane.gap, lane.bytes)),
        )
        for value in values:
            if isinstance(value, np.ndarray) and value.shape != (self.ranks,):
                raise InvalidInput(
                    f"a ring of {self.ranks} ranks needs arrays of shape [{self.ranks}], got {value.shape}"
                )
        for lane in phase.lanes:
            if lane.sign not in (1, -1) or bool(np.any(np.greater(lane.gap, lane.seconds) & np.isfinite(lane.seconds))):
                raise InvalidInput("a lane has sign +1 or -1, and occupies its link no longer than its message takes")

    def each(self) -> Iterator[Phase]:
        """The phases in order, split at the steps of stalls."""
        first = 0
        for phase in self.phases() if callable(self.phases) else self.phases:
            inside = [stall for stall in self.stalls if first <= stall.step < first + phase.steps]
            yield from _split(phase, first, inside, self.ranks)
            first += phase.steps

    def busy(self, phase: Phase) -> Value:
        """Seconds that ranks are busy in a step of a phase: visit, interference, merging."""
        compute = phase.compute
        if self.gamma:
            compute = compute + self.gamma * smallest(compute, self.travel(phase))
        return compute + phase.merge

    def travel(self, phase: Phase) -> Value:
        """Seconds of the longest message that a rank sends or receives in a step of a phase, 0 where there is none."""
        found = phase.longest
        for lane in phase.lanes:
            found = largest(found, lane.seconds, shifted(lane.seconds, lane.sign))
        return found

    def stencil(self, phase: Phase) -> tuple[Value, Value, Value]:
        """(a, b, d) of a phase: how much later than itself, the rank below it and the one above it a rank begins.

        For B = 1 alone.
        """
        assert self.buffers == 1
        own, below, above = self.busy(phase), NEVER, NEVER
        for lane in phase.lanes:
            arrives, leaves = shifted(lane.seconds, lane.sign), lane.seconds
            both = (arrives, leaves) if self.waits else (arrives,)
            own = largest(own, *both)
            first, second = (arrives, leaves) if lane.sign > 0 else (leaves, arrives)
            below = largest(below, first) if lane.sign > 0 or self.waits else below
            above = largest(above, second) if lane.sign < 0 or self.waits else above
        return own, below, above


def shifted(value: Value, sign: int) -> Value:
    """What the rank that sends to r has: value[..., r - sign]."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return value
    # np.roll takes ten times as long on few ranks.
    return np.concatenate((value[..., -sign:], value[..., :-sign]), axis=-1)


def largest(*values: Any) -> Any:
    """The elementwise maximum; a number where all are numbers."""
    if not any(isinstance(value, np.ndarray) for value in values):
        return max(values)
    found = values[0]
    for value in values[1:]:
        found = np.maximum(found, value)
    return found


def smallest(one: Value, other: Value) -> Any:
    """The elementwise minimum; a number where both are numbers."""
    return np.minimum(one, other) if isinstance(one, np.ndarray) or isinstance(other, np.ndarray) else min(one, other)


def _split(phase: Phase, first: int, stalls: list[Stall], ranks: int) -> Iterator[Phase]:
    done = first
    for step in sorted({stall.step for stall in stalls}):
        if step > done:
            yield replace(phase, steps=step - done)
        late = np.zeros(ranks)
        for stall in stalls:
            if stall.step == step:
                late[stall.rank] += stall.seconds
        # A stall does not scale with interference: it is added where merging is.
        yield replace(phase, steps=1, merge=phase.merge + late)
        done = step + 1
    if first + phase.steps > done:
        yield replace(phase, steps=first + phase.steps - done)


@dataclass(frozen=True)
class Solved:
    """What a solver found: seconds until the last rank has finished, of each rank where the solver knows them [ranks]."""

    solver: str
    seconds: float
    finish: np.ndarray | None
    why: str
