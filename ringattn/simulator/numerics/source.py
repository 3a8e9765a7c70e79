"""Generated inputs: every row is a pure function of (seed, tensor, position), so no tensor has to exist as a whole.

Some columns are fixed, so that the data alone identifies the position of a row, independently of plan and transport:

    q[..., -2] = position, q[..., -1] = 0        v[..., 0] = 1 (every softmax gives 1), v[..., 1] = position
    k[..., -2] = 0, k[..., -1] = position        grad[..., 1] = 0

in units of 1 / 2^bits, which are exact. In the product of q and k each tag meets a 0, so tags do not affect logits.
For the same reason the gradients of k[..., -1], v[..., 1] and q[..., -2] are 0, and these columns can carry counts.

With a `period` m, row p of k equals row p mod m, and so does row p of v except for its position tag. Attention over
any number of keys then becomes attention over m keys with integer multiplicities. m is a prime that does not divide
the shard length, so no two shards are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from ...errors import InvalidInput
from ...kernels.dropout import GAMMA, finalize, shift
from ...layout.regular import Layout
from ...plan.plan import Plan
from ...plan.row_sets import AllRows
from ...plan.steps import Kind, Part

Name = Literal["q", "k", "v", "grad"]
NAMES: tuple[Name, ...] = ("q", "k", "v", "grad")
#: The tensors of a block sent in a forward.
BLOCK_NAMES: dict[Kind, tuple[Name, ...]] = {"kv": ("k", "v"), "query": ("q",)}
#: Columns with positions (Q_TAG, K_TAG, RAMP), and the column of ones.
Q_TAG, K_TAG, ONES, RAMP = -2, -1, 0, 1
#: Integers up to 2^bits are exact in each dtype.
BITS = {"float64": 53, "float32": 24}
#: Rows generated at a time.
CHUNK = 1 << 14
#: The default period; a shard length that is a multiple of it needs another one.
PERIOD = 4099


@dataclass
class RowSource:
    """Generates q, k, v and `grad` (d loss / d out) at any position, for one batch element. Made by `make_source`.

    `queries` and `keys` are the positions of the rows, as ascending runs.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    seed: int = 0
    period: int | None = None
    #: Rows beyond one period in a periodic table, so that a shard is a view of the table.
    margin: int = 0
    _tables: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def unit(self) -> float:
        """The step between the tags that encode positions: the row at position p has the tag p * `unit`."""
        return 2.0 ** -max(self.end - 1, 0).bit_length()

    @property
    def end(self) -> int:
        """The first position after all queries and keys."""
        return max((runs[-1].stop for runs in (self.queries, self.keys) if runs), default=0)

    def rows(self, name: Name, r: range) -> torch.Tensor:
        """Rows at positions `r` of a tensor, [1, heads, len(r), width]. Do not write to the result."""
        if self.period is None or name in ("q", "grad"):
            return self._fresh(name, r)
        if name not in self._tables:
            index = torch.arange(self.period + self.margin, device="cpu") % self.period
            self._tables[name] = self._fresh(name, range(self.period)).index_select(2, index)
        table = self._tables[name]
        start = r.start % self.period
        if r.step == 1 and start + len(r) <= table.shape[2]:
            found = table[:, :, start : start + len(r)]
        else:
            place = np.arange(r.start, r.stop, r.step) % self.period
            found = table.index_select(2, torch.from_numpy(place))
        if name == "v":
            found = found.clone(memory_format=torch.contiguous_format)
            found[..., RAMP] = self._tags(r)
        return found

    def block(self, plan: Plan, part: Part) -> tuple[torch.Tensor, ...]:
        """The generated rows of a part: (k, v) or (q,), [1, heads, rows, width] each."""
        layout, row_set, names = plan.layout_of(part.kind), part.row_set, BLOCK_NAMES[part.kind]
        if isinstance(row_set, AllRows):
            return tuple(self.join(name, layout.shard(part.owner)) for name in names)
        places, heads = [placed(layout, part.owner, rows) for rows in row_set.rows], list(row_set.heads)
        if len(places) == 1:
            found = tuple(self.join(name, places[0]) for name in names)
            return found if len(heads) == found[0].shape[1] else tuple(x[:, heads] for x in found)
        each = list(zip(heads, places, strict=True))
        return tuple(torch.cat([self.join(name, runs)[:, [head]] for head, runs in each], 1) for name in names)

    def join(self, name: Name, runs: Sequence[range]) -> torch.Tensor:
        """Rows at the positions of all `runs`, concatenated in their order."""
        parts = [self.rows(name, r) for r in runs or (range(0),)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def stacked(self, name: Name, layout: Layout, ranks: Sequence[int]) -> torch.Tensor:
        """The shards of ranks, all of equal length, as a batch: [ranks, heads, rows, width]."""
        shards = [layout.shard(rank) for rank in ranks]
        if all(len(s) == 1 and s[0].step == 1 for s in shards) and all(
            a[0].stop == b[0].start for a, b in pairwise(shards)
        ):
            whole = self.rows(name, range(shards[0][0].start, shards[-1][0].stop))
            return whole[0].unflatten(1, (len(ranks), -1)).transpose(0, 1)
        return torch.cat([self.join(name, shard) for shard in shards])

    def _fresh(self, name: Name, r: range) -> torch.Tensor:
        heads = self.heads if name in ("q", "grad") else self.kv_heads
        width = self.head_dim if name in ("q", "k") else self.value_dim
        first = (self.seed * len(NAMES) + NAMES.index(name)) * self.heads
        out = normal_rows(range(first, first + heads), r, width, self.dtype)[None]
        if name == "grad":
            out[..., RAMP] = 0
        elif name == "q":
            out[..., Q_TAG], out[..., K_TAG] = self._tags(r), 0
        elif name == "k":
            out[..., Q_TAG], out[..., K_TAG] = 0, self._tags(r)
        else:
            out[..., ONES], out[..., RAMP] = 1, self._tags(r)
        return out

    def _tags(self, r: range) -> torch.Tensor:
        return (torch.arange(r.start, r.stop, r.step, dtype=torch.float64, device="cpu") * self.unit).to(self.dtype)


class TensorSource(RowSource):
    """A source that holds whole tensors, each [1, heads, N, width]."""

    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, source: RowSource) -> TensorSource:
        """Generate all rows of another source once, and hold them as tensors."""
        s = source
        made = cls(s.queries, s.keys, s.heads, s.kv_heads, s.head_dim, s.value_dim, s.dtype, s.seed, s.period)
        made.tensors = {name: s.rows(name, range(s.end)) for name in NAMES}
        return made

    def rows(self, name: Name, r: range) -> torch.Tensor:
        if r.stop > self.end:  # a period may extend beyond the sequence
            return self._fresh(name, r)
        return self.tensors[name][:, :, r.start : r.stop : r.step]


def placed(layout: Layout, owner: int, local: Sequence[range]) -> list[range]:
    """Convert ranges of local rows of `owner` to ranges of positions, in the same order."""
    ranges, shard = [], layout.shard(owner)
    for run in local:
        first = 0
        for r in shard:
            skip = max(0, -(-(first - run.start) // run.step))
            inside = range(run.start + skip * run.step, min(run.stop, first + len(r)), run.step)
            if inside:
                ranges.append(r[inside.start - first : inside.stop - first : inside.step])
            first += len(r)
    return ranges


def check_seed(seed: object) -> None:
    """Raise InvalidInput unless `seed` is an integer >= 0."""
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise InvalidInput(f"seed={seed!r}: expected an integer >= 0; try seed=0")


def make_source(plan: Plan, *, seed: int = 0, period: int | None = None) -> RowSource:
    """A generator of a plan's inputs; K and V repeat every `period` positions (a prime), or never for None.

    Raises InvalidInput for a wrong seed or period.
    """
    domains = plan.layout_of("q").domain, plan.layout.domain
    sizes = plan.heads, plan.kv_heads, plan.head_dim, plan.value_dim
    longest = plan.layout.rows(0)
    source = RowSource(*domains, *sizes, getattr(torch, plan.dtype), seed, period, min(longest + 1, 1 << 16))
    if plan.dtype not in BITS or source.end > 1 << BITS[plan.dtype]:
        raise InvalidInput(
            f"dtype {plan.dtype} cannot represent the {source.end:,} positions of the sequence exactly; "
            "try dtype='float64' (float32: up to 16,777,216 tokens)"
        )
    if min(plan.head_dim, plan.value_dim) < 3:
        raise InvalidInput(
            f"head_dim={plan.head_dim} and value_dim={plan.value_dim}: at least 3 are needed, as two columns hold "
            "positions; try 16"
        )
    if plan.batch != 1:
        raise InvalidInput(
            f"batch={plan.batch}: the numerics simulator executes one sequence; make the plan with batch=1"
        )
    if period is not None:
        if isinstance(period, bool) or not isinstance(period, int) or not _prime(period):
            raise InvalidInput(f"period={period!r} must be a prime, so that no two shards are equal; try {PERIOD}")
        if longest and longest % period == 0:
            raise InvalidInput(
                f"period={period} divides the {longest:,} rows of a shard: all shards would be equal, and swapping "
                f"two would go unnoticed; try another prime such as {PERIOD}"
            )
    return source


def normal_rows(streams: range, r: range, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers [streams, len(r), width], each a function of (stream, position in `r`, column)."""
    columns = torch.arange(width, device="cpu")
    out = torch.empty(len(streams), len(r), width, dtype=dtype, device="cpu")
    for rows, part in zip(out.split(CHUNK, 1), chunks(r), strict=False):
        index = torch.arange(part.start, part.stop, part.step, device="cpu")[:, None] * width + columns
        for x, stream in zip(rows, streams, strict=True):
            x[:] = counter_normal(stream, index)
    return out


def chunks(r: range, most: int = CHUNK) -> Iterator[range]:
    """Split a range into parts of at most `most`, to limit temporary memory."""
    return (r[first : first + most] for first in range(0, len(r), most))


def counter_normal(stream: int, index: torch.Tensor) -> torch.Tensor:
    """Pseudo-random standard normal numbers, float64, one for each entry of the int64 tensor `index`.

    They depend on (stream, index) only: two hashes of these, converted by Box-Muller.
    """
    key = (stream & (1 << 63) - 1) * 0xBF58476D1CE4E5B9 % (1 << 63)
    u = [shift(finalize((index * 2 + i ^ key) * GAMMA), 11).double() * 2.0**-53 for i in (0, 1)]
    return (-2 * (1 - u[0]).log()).sqrt() * (2 * math.pi * u[1]).cos()


def _prime(n: int) -> bool:
    return n > 2 and n % 2 == 1 and all(n % d for d in range(3, int(n**0.5) + 1, 2))
