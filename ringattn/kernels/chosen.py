"""Keys chosen by content: the kernel that chooses them, and the one that attends to chosen keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..plan.visit import Visit
from ..plan.work import Work, split_heads
from .base import Kernel, band
from .contract import CallData, Chosen, KernelPass, OpChoice, Pair, Tensors, VisitKernel
from .memory import wide, wide_zeros
from .pad import crop_to

#: Neighbouring rows whose chosen keys are always copied together.
ROWS = 16
#: The most rows whose choices are searched at once, and the most pairs of a call, which has a mask for them.
SPLIT_ROWS, CALL_PAIRS = 2048, 1 << 22
#: FLOPs that take as long as copying a number of a key and adding its gradient, and as a call; estimated.
COPY_FLOPS, CALL_FLOPS = 64, 1 << 21
#: Rows and keys of a tile of scores. All have this shape: the bits of a score then depend only on its row and key.
TILE_ROWS, TILE_KEYS = 16, 256


def move_rows(chosen: Tensor, distance: int) -> Tensor:
    """Choices [B, ...] of batch rows that are joined end to end: each row's are `distance` after those of the last."""
    moves = torch.arange(len(chosen), device=chosen.device).view(-1, *[1] * (chosen.ndim - 1)) * distance
    return torch.where(chosen < 0, chosen, chosen + moves.to(chosen.dtype))


@dataclass(frozen=True, eq=False)
class ChosenTile:
    """One call of a kernel: neighbouring rows of an element of the batch, and the keys that any of them chose.

    `heads`, `kv` and `rows` count in the tensors of a work. `columns` are the numbers of its keys, int64; None: all.
    `hidden`, bool [1, rows, columns], are the pairs that the mask or the choices hide.
    """

    element: int
    heads: slice
    kv: slice
    rows: slice
    columns: Tensor | None
    hidden: Tensor
    work: Work

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.element : self.element + 1, self.heads, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        x = x[self.element : self.element + 1, self.kv]
        return x if self.columns is None else x.index_select(2, self.columns)

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Add the gradients of the tile's keys to those of all keys."""
        target, part = total[self.element, self.kv], crop_to(part[0], total.shape[-1])
        if self.columns is None:
            target += part
        else:
            target.index_add_(1, self.columns, part.to(total.dtype))


class ChosenKeys(Kernel):
    """Attends each row to the keys that it has chosen, by masked calls of the kernel `inner` on few keys.

    A call has neighbouring rows, copies of the keys that any of them chose, and a mask. Neighbours share a call if that
    costs less than two, by the pairs that it computes, the keys that it copies and the call itself. Where nearly all
    keys are chosen, a call is a tile of the pattern with a mask, and nothing is copied.
    """

    #: The choices of a call's rows [B, H, rows, k], the positions of its keys int64 [B, K, keys, 1], and all choices.
    chosen: tuple[Tensor, Tensor, Chosen]

    def __init__(self, inner: Kernel) -> None:
        vars(self).update(vars(inner))
        self.inner, self.name = inner, inner.name

    @property
    def key(self) -> tuple[object, ...]:
        return ChosenKeys, *self.inner.key

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.inner.check(q, k, v)

    def split(self, work: Work) -> Iterator[Work]:
        for one in work.repetitions():
            for first in range(0, len(one.q), SPLIT_ROWS):
                yield one.narrow_rows(first, min(first + SPLIT_ROWS, len(one.q)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, work: Work, scale: float) -> tuple[Tensor, Tensor]:
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide(q.dtype), device=q.device)
        for tile in self._tiles(work, q.shape[-1] + v.shape[-1]):
            kernel, keys, values = self._kernel_of(tile), tile.of_keys(k), tile.of_keys(v)
            part, of_rows = kernel.forward(tile.of_queries(q), keys, values, tile.work, scale)
            empty = tile.hidden.all(-1)  # none of these keys: kernels differ in what they return
            tile.of_queries(out).copy_(part.masked_fill(empty.unsqueeze(-1), 0.0))
            tile.of_queries(lse).copy_(of_rows.masked_fill(empty, -torch.inf))
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, work: Work, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = map(wide_zeros, (q, k, v))
        for tile in self._tiles(work, q.shape[-1] + v.shape[-1]):
            kernel, keys, values = self._kernel_of(tile), tile.of_keys(k), tile.of_keys(v)
            dout, rows, results, total = map(tile.of_queries, (grad, q, out, lse))
            found = kernel.backward(dout, rows, keys, values, results, total, tile.work, scale)
            tile.of_queries(dq).copy_(crop_to(found[0], dq.shape[-1]))
            tile.add_to(dk, found[1])
            tile.add_to(dv, found[2])
        return dq, dk, dv

    def _kernel_of(self, tile: ChosenTile) -> Kernel:
        if self.dropout is None:
            return self.inner.derive(hidden=tile.hidden)
        assert self.numbers is not None, "a kernel with dropout is given the numbers of each call"
        numbers = tile.of_queries(self.numbers[0]), tile.of_keys(self.numbers[1])
        return self.inner.derive(hidden=tile.hidden, dropout=self.dropout, numbers=numbers)

    def _tiles(self, work: Work, width: int) -> Iterator[ChosenTile]:
        """The calls for a work, if a key and its value have `width` numbers; rows without keys may be in none."""
        chosen, positions, of = self.chosen
        numbers = positions.squeeze(-1)
        numbers = numbers // of.stride * of.blocks + numbers % of.stride // of.block
        size, alike = len(work.heads) // len(work.kv), numbers.stride(1) == 0
        for _, run in groupby(range(len(work.heads)), lambda i: (work.heads[i] // of.group, alike or i // size)):
            same = [*run]
            for heads, kv in split_heads(range(same[0], same[-1] + 1), size):
                costs = 2 * width * len(heads), COPY_FLOPS * width * len(kv)
                for element in range(len(chosen)):
                    choices, marks = chosen[element, heads.start], numbers[element, kv.start]
                    for rows, columns, hidden in _cut_tiles(choices, marks, work, *costs):
                        _, of_q, of_k = map(range, hidden.shape)
                        part = Work(range(len(heads)), range(len(kv)), of_q, (of_k,), 0)
                        slices = slice(heads.start, heads.stop), slice(kv.start, kv.stop), rows
                        yield ChosenTile(element, *slices, columns, hidden, part)


def _cut_tiles(
    chosen: Tensor, numbers: Tensor, work: Work, pair_cost: int, key_cost: int
) -> Iterator[tuple[slice, Tensor | None, Tensor]]:
    """(rows, columns, hidden bool [1, rows, columns]) of the calls for rows with choices [rows, k].

    The numbers [keys] are those of the keys' blocks; `columns` None are all keys. Costs are FLOPs of a pair, and those
    that take as long as copying a key.
    """
    keys, device = work.keys, chosen.device
    first = int(numbers.min())
    numbers = numbers - first
    size = int(numbers.max()) + 1
    places = chosen.long() - first
    places.masked_fill_((places < 0) | (places >= size), size)

    def table(parts: Sequence[Tensor]) -> Tensor:
        """Which keys each of some lists of choices names, bool [lists, keys]."""
        marks = torch.zeros((len(parts), size + 1), dtype=torch.bool, device=device)
        for mark, part in zip(marks, parts, strict=True):
            mark[part.flatten()] = True
        return marks[:, numbers]

    def cost(rows: int, columns: int) -> int:
        return columns * (rows * pair_cost + (key_cost if columns < keys else 0)) + CALL_FLOPS

    order = torch.arange(keys, device=device)
    groups: list[tuple[int, int, Tensor, int]] = []  # rows, and which keys they need
    for start, needed in zip(range(0, len(places), ROWS), table(places.split(ROWS)), strict=True):
        stop = min(start + ROWS, len(places))
        if not work.dense:
            needed &= _in_band(work, order, start, stop)
        count = int(needed.sum())
        if groups:
            before, _, others, their = groups[-1]
            both = others | needed
            joined = int(both.sum())
            apart = cost(start - before, their) + cost(stop - start, count)
            if cost(stop - before, joined) <= apart and (stop - before) * joined <= CALL_PAIRS:
                groups[-1] = before, stop, both, joined
                continue
        groups.append((start, stop, needed, count))
    for start, stop, needed, count in groups:
        if not count:
            continue
        columns = needed.nonzero().squeeze(-1)
        marks = torch.zeros((stop - start, size + 1), dtype=torch.bool, device=device)
        hidden = ~marks.scatter_(1, places[start:stop], True)[:, numbers[columns]]
        distance = torch.arange(start, stop, device=device).unsqueeze(-1) - columns
        if work.lo is not None:
            hidden |= distance < work.lo
        if work.hi is not None:
            hidden |= distance > work.hi
        yield slice(start, stop), None if count == keys else columns, hidden.unsqueeze(0)


def _in_band(work: Work, order: Tensor, start: int, stop: int) -> Tensor:
    """Which keys any of some rows sees."""
    seen = torch.ones_like(order, dtype=torch.bool)
    if work.lo is not None:
        seen &= order < stop - work.lo
    if work.hi is not None:
        seen &= order >= start - work.hi
    return seen


def take_best(scores: Tensor, places: Tensor, count: int) -> Pair:
    """The places of the `count` largest scores, best first, and these scores. A score of -inf has the place -1.

    Of equal scores the lower place comes first.
    """
    by_place = places.argsort(-1)
    order = scores.gather(-1, by_place).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    order = by_place.gather(-1, order)
    best = scores.gather(-1, order)
    return places.gather(-1, order).masked_fill(best == -torch.inf, -1), best


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
        visible = find_visible(visit.works, q.shape[1], q.shape[2], len(positions), q.device)
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
        sums[0][element, :, rows], sums[1][element, :, rows] = take_best(scores, places, self.shape[-1])

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


def find_visible(works: Sequence[Work], heads: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """Which keys the rows see by the pattern: bool [rows, keys]."""
    visible = torch.zeros((rows, keys), dtype=torch.bool, device=device)
    for work in works:
        if work.heads != range(heads):
            raise Unsupported("keys are chosen by a pattern that is the same for all heads; choose for each head alone")
        columns = torch.cat([torch.arange(run.start, run.stop, run.step, device=device) for run in work.k])
        lines = torch.arange(work.q.start, work.q.stop, work.q.step, device=device)
        seen = band(len(lines), len(columns), work.lo, work.hi, device)
        visible[lines[:, None], columns] |= seen
    return visible
