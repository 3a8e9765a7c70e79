"""A layout of the rows of a batch one after another: each rank holds its positions of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..pattern.ranges import merge_runs
from .partition import Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Stacked(Layout):
    """The positions of `row_layout` in each of `count` rows, row after row; `tokens` are those of all rows.

    The shards of a tensor [1, H, count * N, D] are those of [count, H, N, D] by `row_layout`.
    """

    row_layout: Layout
    count: int

    @property
    def base(self) -> Layout:
        return self.row_layout

    @property
    def stacked(self) -> int:
        return self.count

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def digest(self) -> str:
        return self.base.digest

    @property
    def regular(self) -> bool:
        return self.base.regular

    def owner(self, position: int) -> int:
        return self.base.owner(position % self.base.tokens)

    def span(self, ranks: range) -> tuple[tuple[range, ...], bool]:
        ranges, exact = self.base.span(ranks)
        firsts = range(0, self.tokens, self.base.tokens) if ranges else range(0)
        parts = tuple(range(r.start + first, r.stop + first, r.step) for first in firsts for r in ranges)
        if len(ranks) == self.ranks and all(r.step == 1 for r in parts):
            parts = merge_runs(parts)
        return parts, exact

    def grouped(self, size: int) -> Layout:
        return stack_rows(self.base.grouped(size), self.count)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).reshape(1, x.shape[1], x.shape[0] * x.shape[2], *x.shape[3:])

    def unstack(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[1], self.count, x.shape[2] // self.count, *x.shape[3:]).transpose(0, 1)


def stack_rows(base: Layout, rows: int) -> Stacked:
    """The layout of `rows` rows that are cut by `base`."""
    return Stacked(base.tokens * rows, base.ranks, base, rows)
