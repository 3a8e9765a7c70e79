"""Subtracts what all keys share, so that logits are small enough for fp32 in the forward and in the backward."""

from __future__ import annotations

from math import inf

from torch import Tensor, float32, float64, where
from torch.linalg import vector_norm

from ..plan.row_sets import ALL_ROWS, AllRows, RowSet
from .contract import Tensors, VisitKernel
from .memory import expand_heads
from .pad import EXTRA, crop_to, delta, with_column

#: If logits of the first key may exceed this, the first key is subtracted from all keys.
LARGE = 32.0


class Centre:
    """Subtracts a rank's first key from all keys if logits are large, which makes rounding errors small.

    Kernels round the lse of each call: fp32 numbers near 374, for example, are 3e-5 apart. Such errors would give the
    calls of a row wrong weights in the output. In the backward, weights would differ from those of the forward, an
    error that is multiplied by what all keys have in common. After the subtraction, logits and these errors are small.
    The number by which each row's logits fell is added back to lse in fp64; (row sum of dS) x key is added back to dq,
    see `restore`. Only the rank's first token decides whether to subtract, so no later token changes the bits of an
    earlier row: the first key is subtracted if |q| |k| exceeds LARGE, where |q| is at least the norm of a row of ones,
    because other queries may be larger than the first one, or less orthogonal to the key.
    """

    def __init__(self, kernel: VisitKernel, q: Tensor, k: Tensor, scale: float) -> None:
        self.scale, self.key = scale, k[:, :, :1]
        if kernel.padded:
            self.key = self.key.clone()
            self.key[..., :EXTRA] = 0.0  # these columns hide padded keys
        #: The key of each query head, [B, H, 1, D].
        self.of_queries = expand_heads(self.key, q.shape[1])
        fits = q.shape[-1] + EXTRA <= (kernel.max_head_dim or inf)
        takes = q.dtype == float32 and kernel.softcap is None and 0 not in (len(q), q.shape[2], k.shape[2])
        self.moves = kernel.centred and fits and takes
        if self.moves:
            query = q[:, :, :1, EXTRA:] if kernel.padded else q[:, :, :1]
            sizes = vector_norm(query, dim=-1, dtype=float64).clamp_min_(query.size(-1) ** 0.5)
            largest = sizes.mul_(vector_norm(self.of_queries, dim=-1, dtype=float64)).max()
            if q.is_cpu:
                self.moves = LARGE < float(largest) * scale < inf
            else:  # without a wait of the host for the device: a key of zeros stands for none
                largest = largest * scale
                large = (largest > LARGE) & (largest < inf)
                self.key, self.of_queries = (where(large, x, 0.0) for x in (self.key, self.of_queries))

    def keys(self, k: Tensor, of: AllRows | RowSet = ALL_ROWS, *, wider: bool = False) -> Tensor:
        """The keys k after the subtraction; `wider` adds a column of ones, which yields the row sums of dS.

        `of` says which heads k has.
        """
        k = k - _select(self.key, of) if self.moves else k
        return with_column(k, 1.0) if wider else k

    def queries(self, q: Tensor, of: AllRows | RowSet = ALL_ROWS) -> Tensors:
        """(q, shifts): shifts [B, H, n] say by how much each row's logits fall; only (q,) if nothing is subtracted."""
        return (q, self._logits(q, of)) if self.moves else (q,)

    def rows(self, q: Tensor, lse: Tensor, of: AllRows | RowSet = ALL_ROWS) -> Tensors:
        """The tensors that a backward needs per query row: lse and, if a key is subtracted, that key."""
        if not self.moves:
            return (lse,)
        return (lse - self._logits(q, of)).to(lse.dtype), _select(self.of_queries, of).expand(q.shape)

    def _logits(self, q: Tensor, of: AllRows | RowSet = ALL_ROWS) -> Tensor:
        """The logits of the key, [B, H, n], in fp64."""
        return delta(q.double(), _select(self.of_queries, of).double(), None).squeeze(-1) * self.scale


def _select(key: Tensor, of: AllRows | RowSet) -> Tensor:
    """The key for some heads, [B, heads, 1, D]."""
    return key[:, of.heads] if isinstance(of, RowSet) and len(of.heads) < key.size(1) else key


def restore(dq: Tensor, key: Tensor) -> Tensor:
    """Convert dq, computed with keys minus `key`, to dq for the original keys.

    The column of dq after the head dim holds the row sums of dS.
    """
    width = key.shape[-1]
    return crop_to(dq, width) + dq[..., width : width + 1] * key
