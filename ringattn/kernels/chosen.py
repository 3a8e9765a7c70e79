"""Keys chosen by content: the kernel that chooses them, and which keys of a call are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..plan.visit import Visit
from ..plan.work import Work
from .base import band
from .contract import CallData, Chosen, KernelPass, OpChoice, Pair, Tensors, VisitKernel
from .memory import expand_heads, wide

#: Rows and keys of a tile. All tiles have this shape: the bits of a score then depend only on its row and key.
TILE_ROWS, TILE_KEYS = 16, 256


def move_rows(chosen: Tensor, distance: int) -> Tensor:
    """Choices [B, ...] of batch rows that are joined end to end: each row's are `distance` after those of the last."""
    moves = torch.arange(len(chosen), device=chosen.device).view(-1, *[1] * (chosen.ndim - 1)) * distance
    return torch.where(chosen < 0, chosen, chosen + moves.to(chosen.dtype))


def find_chosen(chosen: Tensor, positions: Tensor, of: Chosen) -> Tensor:
    """Which keys of a call are chosen by its rows: bool [B, H or 1, rows, keys].

    chosen: [B, H, rows, k], those of `of` for the rows of the call. positions: int64 [B, K, keys, 1].
    """
    alike = chosen.stride(1) == 0 and positions.stride(1) == 0
    blocks = positions.squeeze(-1)
    blocks = blocks // of.stride * of.blocks + blocks % of.stride // of.block
    if alike:
        chosen, blocks = chosen[:, :1], blocks[:, :1]
    first = int(blocks.min())
    size = int(blocks.max()) - first + 1
    places = chosen.long() - first
    places.masked_fill_((places < 0) | (places >= size), size)
    table = torch.zeros((*chosen.shape[:3], size + 1), dtype=torch.bool, device=chosen.device).scatter_(
        -1, places, True
    )
    columns = (expand_heads(blocks, chosen.shape[1]) - first).unsqueeze(2)
    return table.gather(-1, columns.expand(-1, -1, chosen.shape[2], -1))


class TopKeys(VisitKernel):
    """Chooses the `count` keys of the largest scores, sum over heads of w relu(q k), for each row and each head of k.

    The last column of q holds w. Of equal scores the lower position comes first, so that any split of the keys gives
    the same choice.
    """

    name = "top_keys"

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def key(self) -> tuple[object, ...]:
        return (TopKeys,)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        pass

    def explain(self, *works: Work, head_dim: int = 128) -> OpChoice:
        return OpChoice(((self.name, 1),))

    def begin(self, call: CallData, q: Tensor, block: Tensors) -> KernelPass:
        return TopKeysPass(self.count, call, q, block)


class TopKeysPass(KernelPass):
    """One forward of `TopKeys`, in fp32 (fp64 for fp64); its result is (positions int32 [B, G, n, count], scores)."""

    def __init__(self, count: int, call: CallData, q: Tensor, block: Tensors) -> None:
        self.call, self.groups = call, block[0].shape[1]
        self.shape = len(q), self.groups, q.shape[2], count
        self.weights = _pad_rows(q[..., -1:], TILE_ROWS)
        #: [B, G, tiles, H / G * rows of a tile, D]
        tiles = _pad_rows(q[..., :-1], TILE_ROWS).unflatten(2, (-1, TILE_ROWS)).unflatten(1, (self.groups, -1))
        self.tiles = tiles.transpose(2, 3).flatten(3, 4).contiguous()

    def new_sums(self, out: Tensor | None) -> tuple[Tensor, Tensor]:
        device, dtype = self.tiles.device, self.tiles.dtype
        empty = torch.full(self.shape, -1, dtype=torch.int64, device=device)
        return empty, torch.full(self.shape, -torch.inf, dtype=dtype, device=device)

    def finish(self, sums: Pair) -> Pair:
        return sums[0].to(torch.int32), sums[1]

    def visit_forward(self, visit: Visit, q: Tensor, block: Tensors, sums: Pair) -> None:
        positions = self.call.places(visit.part)[1][0].to(q.device)
        keys = _pad_rows(block[0], TILE_KEYS).to(self.tiles.dtype)
        visible = _find_visible(visit.works, q.shape[1], q.shape[2], len(positions), q.device)
        for first in range(0, q.shape[2], TILE_ROWS):
            rows = slice(first, first + TILE_ROWS)
            if visible[rows].any():
                for element in range(len(q)):
                    self._choose(element, rows, keys[element], visible[rows], positions, sums)

    def _choose(self, element: int, rows: slice, keys: Tensor, visible: Tensor, positions: Tensor, sums: Pair) -> None:
        """Merge the scores of a tile of rows with all keys of a visit into the choices so far."""
        tile, count = rows.start // TILE_ROWS, len(visible)
        scores = torch.full((self.groups, *visible.shape), -torch.inf, dtype=keys.dtype, device=keys.device)
        weights = self.weights[element, :, rows].unflatten(0, (self.groups, -1))
        for first in range(0, len(positions), TILE_KEYS):
            columns = slice(first, first + TILE_KEYS)
            seen = visible[:, columns]
            if not seen.any():
                continue
            for group in range(self.groups):
                logits = (self.tiles[element, group, tile] @ keys[group, columns].T).relu_()
                found = logits.unflatten(0, (-1, TILE_ROWS)).mul_(weights[group]).sum(0)
                scores[group, :, columns] = found[:count, : seen.shape[1]].masked_fill(~seen, -torch.inf)
        places, best = (x[element, :, rows] for x in sums)
        scores, places = torch.cat([best, scores], -1), torch.cat([places, positions.expand(scores.shape)], -1)
        by_place = places.argsort(-1)
        order = scores.gather(-1, by_place).sort(dim=-1, descending=True, stable=True).indices[..., : self.shape[-1]]
        order = by_place.gather(-1, order)
        best = scores.gather(-1, order)
        sums[1][element, :, rows] = best
        sums[0][element, :, rows] = places.gather(-1, order).masked_fill(best == -torch.inf, -1)

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("a choice has no gradient")

    new_grads: Any = _refuse
    finish_grads: Any = _refuse
    visit_backward: Any = _refuse


def _pad_rows(x: Tensor, size: int) -> Tensor:
    """x [B, H, n, D] in fp32 (fp64 for fp64), contiguous, with rows of zeros up to a multiple of `size`."""
    rows = -(-x.shape[2] // size) * size
    padded = torch.zeros((*x.shape[:2], rows, x.shape[3]), dtype=wide(x.dtype), device=x.device)
    padded[:, :, : x.shape[2]] = x
    return padded


def _find_visible(works: Sequence[Work], heads: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """Which keys the rows see by the pattern: bool [rows, keys]."""
    visible = torch.zeros((rows, keys), dtype=torch.bool, device=device)
    for work in works:
        if work.heads != range(heads):
            raise Unsupported("top_keys takes a pattern that is the same for all heads; choose for each head alone")
        columns = torch.tensor([number for run in work.k for number in run], device=device)
        lines = torch.arange(work.q.start, work.q.stop, work.q.step, device=device)
        seen = band(len(lines), len(columns), work.lo, work.hi, device)
        visible[lines[:, None], columns] |= seen
    return visible
