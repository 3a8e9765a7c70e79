"""What a K/V cache must answer: every token of every row kept as a plain list, and dense softmax in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn import Pattern


class DenseCache:
    """The tokens of each row of a batch, of one layer; `pattern` is asked for its mask of `most` tokens."""

    def __init__(self, pattern: Pattern, heads: int, most: int, batch: int) -> None:
        self.mask = torch.from_numpy(pattern.mask(most, heads)).double()
        self.scale = pattern.bind(heads, most).output_scale
        self.keys: list[list[Tensor]] = [[] for _ in range(batch)]
        self.values: list[list[Tensor]] = [[] for _ in range(batch)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, padding: Tensor | None = None,
        sinks: Tensor | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """out [B, H, T, Dv] in fp64 of new tokens, which are kept; 0 at padding."""
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
        for row in range(len(q)):
            real = [i for i in range(q.shape[2]) if padding is None or not padding[row, i]]
            first = len(self.keys[row])
            self.keys[row] += [k[row, :, i].double() for i in real]
            self.values[row] += [v[row, :, i].double() for i in real]
            if not real:
                continue
            keys, values = torch.stack(self.keys[row], 1), torch.stack(self.values[row], 1)  # [K, n, D]
            shared, number = q.shape[1] // k.shape[1], keys.shape[1]
            for head in range(q.shape[1]):
                weight = self.mask[head, first : first + len(real), :number]
                logits = q[row, head, real].double() @ keys[head // shared].T * scale
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                logits = logits + weight.log()
                extra = torch.full(
                    (len(real), 1), -torch.inf if sinks is None else float(sinks[head]), dtype=torch.float64
                )
                probabilities = torch.cat((logits, extra), 1).softmax(1)[:, :-1].nan_to_num(0.0)
                out[row, head, real] = probabilities @ values[head // shared] * self.scale
        return out

    def crop(self, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            del self.keys[row][length:], self.values[row][length:]

    def fork(self, rows: list[int]) -> None:
        self.keys = [[*self.keys[row]] for row in rows]
        self.values = [[*self.values[row]] for row in rows]
