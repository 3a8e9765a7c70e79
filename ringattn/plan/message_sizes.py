"""What the parts of messages are made of, in which dtype, and how many bytes that is."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ..dtypes import ITEM_BYTES
from ..layout.regular import Layout
from .steps import BLOCKS, SUMS, Kind, Part


class MessageSizes:
    """What a plan says of the parts of its messages. See `Plan` for what these are."""

    layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    batch: int
    comm_dtype: str | None

    @cached_property
    def ulysses_size(self) -> int:
        """See `Plan.ulysses_size`."""
        raise NotImplementedError

    def ring_plan(self, rank: int) -> tuple[Any, int]:
        """See `Plan.ring_plan`."""
        raise NotImplementedError

    def part_dtype(self, part: Part, *, wire: bool = True) -> str:
        """The dtype of a part of a block or of gradients, in a message or where it is computed with."""
        if wire and self.comm_dtype is not None and part.kind != "row":  # weights are exponentials of lse
            return self.comm_dtype
        return self.dtype if part.kind in ("kv", "q") or self.dtype == "float64" else "float32"

    def part_heads(self, kind: Kind) -> int:
        """Heads of a block or of its gradients."""
        return self.kv_heads if kind in ("kv", "grad") else self.heads

    def part_widths(self, kind: Kind) -> tuple[int, ...]:
        """The last dims of the tensors of a part of a block or of gradients."""
        if kind == "row":  # lse and delta
            return 1, 1
        return (self.head_dim,) if kind == "dq" else (self.head_dim, self.value_dim)

    def part_bytes(self, part: Part, *, wire: bool = True) -> int:
        """Bytes of a piece of a message, or of a part of a block or of gradients where it is computed with."""
        item = ITEM_BYTES[self.dtype]
        wide, both = max(item, 4), self.head_dim + self.value_dim
        rows = self.layout.rows(part.owner)
        if part.kind in (*BLOCKS, *SUMS):
            if self.ulysses_size > 1:  # between the teams
                return self.ring_plan(0)[0].part_bytes(part, wire=wire)
            rows = self.part_heads(part.kind) * rows if part.cut is None else part.cut.size
            return self.batch * rows * sum(self.part_widths(part.kind)) * ITEM_BYTES[self.part_dtype(part, wire=wire)]
        heads, kv_heads = self.heads // self.ulysses_size, self.kv_heads // self.ulysses_size
        if part.kind in ("qkv", "dqkv"):
            return self.batch * rows * (heads * self.head_dim + kv_heads * both) * item
        return self.batch * rows * heads * (self.value_dim * item + wide)
