"""Recurrent layers of hybrid models: parameters, and the seconds and messages of a layer over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...dtypes import ITEM_BYTES
from ...files import Count
from ...layout.regular import make_layout
from ...machine.machine import Machine
from ...recurrence.runs import STATE_ITEM, RunPlan, plan_rows, plan_states
from ...text import plural, size

#: Rows of a chunk.
CHUNK = 64
#: A backward takes this many forwards, as for matrix products.
BACKWARD = 2


@dataclass(frozen=True)
class Recurrence:
    """The sizes of the recurrent layers of a model: gated delta rules or, with `mamba`, Mamba-2.

    keys, values: the columns of a head's state; in Mamba-2, keys is the state size.
    key_heads: the number of heads of keys (groups), which heads of values share.
    convolved: the number of columns that pass the short convolution.
    projected: the number of columns of the projections of the input.
    own: the parameters of a layer outside its matrices, minus those that an attention layer has outside its own.
    """

    heads: Count
    key_heads: Count
    keys: Count
    values: Count
    kernel: Count
    convolved: Count
    projected: Count
    own: int
    mamba: bool = False

    @property
    def output(self) -> int:
        """The number of columns of the output before its projection."""
        return self.heads * self.values

    @property
    def state_bytes(self) -> int:
        """The bytes of the affine map (A, B) that summarizes a run of tokens, for one sequence."""
        decay = 1 if self.mamba else self.keys**2
        return self.heads * (decay + self.keys * self.values) * STATE_ITEM

    def flops(self, *, summary: bool) -> int:
        """FLOPs of one token in a forward or, with `summary`, in computing only the affine map of a run of tokens.

        In chunks of C rows, per head: products of keys with each other and of queries with keys 2 C K each, the
        triangular solve C (K + V), the product of its result with the query-key products 2 C V, and three products with
        the state 2 K V each (arXiv:2412.06464). Mamba-2 has no solve. A summary has K more columns, and no output.
        """
        c, k, v = CHUNK, self.keys, self.values
        if self.mamba:
            return self.heads * (2 * k * v if summary else 2 * c * k + 2 * c * v + 4 * k * v)
        if summary:
            return self.heads * (2 * c * k + c * (2 * k + v) + 4 * k * (k + v))
        return self.heads * (4 * c * k + c * (k + v) + 2 * c * v + 6 * k * v)


@dataclass(frozen=True)
class LayerRecurrence:
    """The predicted seconds of a recurrent layer on the ranks of one context-parallel group, with communication."""

    forward: float
    backward: float
    #: The exchange between ranks, in words.
    plan: str


@lru_cache(maxsize=1024)
def recur(
    model: Recurrence, machine: Machine, tokens: int, *, cp: int, tp: int, layout: str, batch: int, dtype: str
) -> LayerRecurrence:
    """Predict the time of a recurrent layer with its convolution, for `batch` sequences.

    The seconds of computing are FLOPs divided by the rate of matrix products, plus the time to move inputs and outputs
    through memory. With several ranks, forward and backward also compute a summary of each run of adjacent tokens: the
    affine map that the run applies to the state. Raises Unsupported for layouts whose ranks hold many runs.
    """
    near = machine.changed(ranks_per_node=max(machine.ranks_per_node // tp, 1)) if tp > 1 else machine
    cut = make_layout("zigzag" if layout == "auto" else layout, tokens=tokens, ranks=cp)
    item, rows = ITEM_BYTES[dtype], batch * max(map(cut.rows, (0, cp - 1)))
    states = plan_states(cut, None, batch * model.state_bytes // tp, near)
    halo = plan_rows(cut, None, model.kernel - 1, batch * model.convolved * item // tp)
    flops = model.flops(summary=False) + (model.flops(summary=True) if cp > 1 else 0)
    memory = machine.kernel_rates.memory if machine.kernel_rates is not None else 2 * (machine.merge or machine.flops)
    moved = item * (2 * model.convolved + 2 * model.output)
    computing = rows / tp * (flops / (machine.matmul or machine.flops) + moved / memory)
    exchange = states.seconds(near) + halo.seconds(near)
    sent, messages = (sum(one) for one in zip(_busiest(states), _busiest(halo), strict=True))
    plan = f"{states.way} of states" if states.rounds else "no exchange"
    words = f"{plan} in {plural(len(states.rounds), 'round')}, {size(sent)} and {plural(messages, 'message')} a rank"
    return LayerRecurrence(computing + exchange, BACKWARD * computing + exchange, words if cp > 1 else plan)


def _busiest(plan: RunPlan) -> tuple[int, int]:
    """(bytes, messages) that the busiest rank sends in a forward."""
    sent: dict[int, tuple[int, int]] = {}
    for (_, sender, _), count in plan.messages.items():
        before = sent.get(sender, (0, 0))
        sent[sender] = before[0] + count, before[1] + 1
    return max(sent.values(), default=(0, 0))
