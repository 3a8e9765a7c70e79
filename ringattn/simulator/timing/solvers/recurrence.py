"""The ring as a recurrence for the times at which ranks begin steps, and arithmetic shared by its solvers.

S_r(k) is the time at which rank r begins step k, c_r the time of its visit, mu_r of its merge, and l_r = latency_r +
m_r / bandwidth_r of its message of m_r bytes to the next rank, which begins when both ranks have begun the step:

    A_next(k) = max(S_r(k), S_next(k)) + l_r(k)
    S_r(k + 1) = max(S_r(k) + c_r(k) + gamma min(c_r(k), l) + mu_r(k), A_r(k), A_next(k))

The last term is the end of the rank's own message, for which the executor waits. In the last formula, l is the mean of
the longest message that r sends in step k and the longest that it receives, and gamma the fraction of that time by
which messages slow a visit. Each direction of travel has its own messages. So the recurrence is a stencil of three
ranks: S_r(k+1) = max(S_r(k) + a_r, S_{r-1}(k) + b_r, S_{r+1}(k) + d_r). The backward adds direct messages: a message
between ranks r and q that are not neighbors begins at max(S_r(k), S_q(k)), and both ranks wait for its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise

import numpy as np

#: One number for all ranks, or float64 [ranks].
Value = float | np.ndarray
NEVER = float("-inf")


@dataclass(frozen=True)
class DirectMessages:
    """Messages sent directly between owners of blocks and the last ranks that receive their rows, as arrays [messages].

    A message begins when both ends, `source` and `target`, have begun step `step` of the pass, and takes `seconds`.
    Both ends wait for its end before they begin the next step. Messages are ordered by step, then by source.
    """

    step: np.ndarray
    source: np.ndarray
    target: np.ndarray
    bytes: np.ndarray
    seconds: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def select(self, which: np.ndarray | slice) -> DirectMessages:
        """The messages that a mask or a slice selects."""
        return DirectMessages(*(values[which] for values in vars(self).values()))

    def between(self, begin: int, end: int) -> DirectMessages:
        """The messages of steps begin .. end - 1."""
        return self.select(slice(*np.searchsorted(self.step, (begin, end))))


NO_DIRECT = DirectMessages(*np.zeros((5, 0), dtype=np.int64))


@dataclass(frozen=True)
class NeighborMessages:
    """The messages of one step in one direction: each rank r sends `bytes` to rank r + sign.

    `seconds` is the time of each sender's message, at least 0; -inf if it sends none.
    """

    sign: int
    seconds: Value
    bytes: Value = 0.0


@dataclass(frozen=True)
class Phase:
    """`steps` equal steps: each rank computes for `compute` seconds, merges for `merge`, and sends `messages`.

    A phase of one step may also have `direct` messages. `longest_direct` holds the seconds of the longest direct
    message that each rank sends, and of the longest that it receives; 0 if it has none.
    """

    steps: int
    compute: Value
    merge: Value = 0.0
    messages: tuple[NeighborMessages, ...] = ()
    direct: DirectMessages = NO_DIRECT
    longest_direct: tuple[Value, Value] = (0.0, 0.0)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The fields of the phase that differ between ranks, which are therefore arrays."""
        sent = (value for lane in self.messages for value in (lane.seconds, lane.bytes))
        return [value for value in (self.compute, self.merge, *sent) if isinstance(value, np.ndarray)]


@dataclass(frozen=True)
class Stall:
    """A delay: at step `step`, rank `rank` computes for `seconds` longer. Steps count from 0 over the whole pass."""

    rank: int
    step: int
    seconds: float


@dataclass(frozen=True)
class Ring:
    """The input of the ring solvers: `ranks` ranks, and what they do in phases of equal steps.

    `phases` is () if there are too many phases to store.
    """

    ranks: int
    phases: tuple[Phase, ...] = ()
    gamma: float = 0.0
    stalls: tuple[Stall, ...] = ()

    def __post_init__(self) -> None:
        assert self.ranks >= 1 and self.gamma >= 0

    def split(self, phases: Iterable[Phase]) -> Iterator[Phase]:
        """Yield the phases in order, with each stalled step as a phase of its own, which includes the delay."""
        first = 0
        for phase in phases:
            stalls = [stall for stall in self.stalls if first <= stall.step < first + phase.steps]
            ends = {stall.step - first + after for stall in stalls for after in (0, 1)}
            for begin, end in pairwise(sorted({0, phase.steps, *ends})):
                late = np.zeros(self.ranks)
                for stall in stalls:
                    late[stall.rank] += stall.seconds * (stall.step == first + begin)
                # Messages do not lengthen a stall: add its seconds to the merge, which has no interference.
                yield replace(phase, steps=end - begin, merge=phase.merge + late if late.any() else phase.merge)
            first += phase.steps

    def busy(self, phase: Phase) -> Value:
        """Seconds that each rank is busy in one step of a phase: computing, slowed down by messages, and merging."""
        compute = phase.compute
        if self.gamma:
            sent, received = phase.longest_direct  # 0 s without a message
            for lane in phase.messages:
                sent, received = largest(sent, lane.seconds), largest(received, shift_ranks(lane.seconds, lane.sign))
            compute = compute + self.gamma * np.minimum(compute, (sent + received) / 2)
        return compute + phase.merge

    def coefficients(self, phase: Phase) -> tuple[Value, Value, Value, Value]:
        """(a, b, d, busy): how one step of a phase delays the next, and the seconds that ranks are busy.

        A rank begins its next step at least `a` seconds after it began the last one, `b` seconds after rank - 1 did,
        and `d` seconds after rank + 1 did.
        """
        own = busy = self.busy(phase)
        below: Value = NEVER
        above: Value = NEVER
        for sent in phase.messages:
            arrives, leaves = shift_ranks(sent.seconds, sent.sign), sent.seconds
            from_below, from_above = (arrives, leaves) if sent.sign > 0 else (leaves, arrives)
            own, below, above = largest(own, arrives, leaves), largest(below, from_below), largest(above, from_above)
        return own, below, above, busy


def instant(seconds: Value) -> Value:
    """Replace message seconds or coefficients by 0; NEVER (no message) stays."""
    if isinstance(seconds, np.ndarray):
        return np.where(np.isfinite(seconds), 0.0, NEVER)
    return NEVER if seconds == NEVER else 0.0


def shift_ranks(value: Value, sign: int) -> Value:
    """For each rank r, the value of rank r - sign, which sends to it."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return value
    # For few ranks, np.roll is ten times slower.
    return np.concatenate((value[..., -sign:], value[..., :-sign]), axis=-1)


def largest(*values: Value) -> Value:
    """The elementwise maximum; a number if all values are numbers."""
    maximum: Value = reduce(np.maximum, values)
    return maximum
