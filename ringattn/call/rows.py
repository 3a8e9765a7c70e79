"""`Rows`: tensors of one row a token that travel instead of keys and values, and are expanded to these at the visit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..dtypes import ROW_BYTES, dtype_name
from ..errors import InvalidInput
from ..kernels.memory import is_dense, kind_of
from ..pattern.base import check_integer
from ..text import shown


class Rows:
    """Rows that attention takes in place of k and v: `ring_attention(q, Rows(c, k_rope, expand=f), pattern, ...)`.

    tensors: [B, h, n, d] each, one row a token, with heads, width and dtype of their own. Integers, booleans and fp8
        travel as they are and have no gradient.
    expand: gives (k [B, K, n, D], v [B, K, n, Dv]) in the dtype of q for `expand(*tensors, *weights)`. It is called for
        a few rows at a time, on the rank whose queries attend to them, and again in the backward; each result may
        depend on its own row only. An `expand` with an argument `heads` (None: all) gets the range of key/value heads
        that a rank of a Ulysses group needs, and returns those only. None: the tensors are k and v themselves.
    weights: tensors that `expand` takes after those of the rows. They do not travel. Each call gives them one gradient,
        summed in fp32 (fp64 for fp64): on every rank that of the pairs which the rank computes, so that, as with any
        weight, the gradients of all ranks add up to the whole one.
    chunk: the most rows expanded at once; None: as many as make 128 MiB of keys and values.
    travel: "rows", or "auto": each rank expands its own rows and sends keys and values, if that is predicted to make
        the forward faster on `machine`.
    """

    def __init__(
        self,
        *tensors: Tensor,
        expand: Callable[..., Any] | None = None,
        weights: Sequence[Tensor] = (),
        chunk: int | None = None,
        travel: str = "rows",
    ) -> None:
        if not isinstance(weights, Sequence):
            raise InvalidInput(f"weights={shown(weights)}: expected the tensors that expand= takes after those of rows")
        if expand is None and (len(tensors) != 2 or len(weights) or chunk is not None):
            raise InvalidInput(
                f"Rows of {len(tensors)} tensors and {len(weights)} weights without expand=: give the function that "
                "makes k and v of them, or only k and v"
            )
        if expand is not None and not callable(expand):
            raise InvalidInput(f"expand={shown(expand)}: expected a function that returns k and v")
        if not tensors:
            raise InvalidInput("Rows without tensors: give those that expand= takes")
        if travel not in ("rows", "auto"):
            raise InvalidInput(f"travel={shown(travel)}: expected rows or auto")
        self.tensors, self.expand, self.weights, self.travel = tensors, expand, tuple(weights), travel
        self.chunk = None if chunk is None else check_integer(chunk, "chunk", 1, "chunk=1024")

    def replaced(self, tensors: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> Rows:
        """A copy with other tensors."""
        return Rows(*tensors, expand=self.expand, weights=weights, chunk=self.chunk, travel=self.travel)

    @property
    def takes_heads(self) -> bool:
        """Whether `expand` takes the heads to expand."""
        assert self.expand is not None
        return "heads" in signature(self.expand).parameters

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor or weight needs a gradient."""
        return any(x.requires_grad for x in (*self.tensors, *self.weights))

    @property
    def sizes(self) -> tuple[tuple[int, int, str], ...]:
        """(heads, width, dtype) of each tensor."""
        return tuple((x.shape[1], x.shape[3], dtype_name(x.dtype)) for x in self.tensors)

    def check(self) -> None:
        """Raise InvalidInput if the tensors do not fit together."""
        for name, group in (("rows", self.tensors), ("weights", self.weights)):
            for x in group:
                if not is_dense(x) or (name == "rows" and x.ndim != 4):
                    actual = f"shape {tuple(x.shape)}" if is_dense(x) else kind_of(x)
                    raise InvalidInput(f"{name} must be tensors, rows [batch, heads, tokens, width], got {actual}")
        kinds = {(x.shape[0], x.shape[2], x.device) for x in self.tensors}
        if len(kinds) != 1 or any(0 in (x.shape[1], x.shape[3]) for x in self.tensors):
            shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in self.tensors)
            raise InvalidInput(f"rows need one batch, the same tokens, one device, heads and columns, got {shapes}")
        for x in self.tensors:
            if dtype_name(x.dtype) not in ROW_BYTES:
                raise InvalidInput(f"rows of dtype {x.dtype} are not supported; expected one of {', '.join(ROW_BYTES)}")

    def sample(self) -> tuple[Tensor, Tensor]:
        """k and v of one row of zeros, which show heads, widths and dtype. Raises InvalidInput."""
        assert self.expand is not None
        batch = max(len(self.tensors[0]), 1)
        with torch.no_grad():
            found = self.expand(*(x.new_zeros((batch, x.shape[1], 1, x.shape[3])) for x in self.tensors), *self.weights)
        pair = isinstance(found, tuple | list) and len(found) == 2 and all(is_dense(x) and x.ndim == 4 for x in found)
        if not pair or {tuple(x.shape)[::2] for x in found} != {(batch, 1)}:
            raise InvalidInput(
                f"expand= returned {_show(found)} for one row in a batch of {batch}; expected k and v, [batch, heads, "
                "rows, head_dim] each"
            )
        return found[0], found[1]


def _show(found: Any) -> str:
    """What `expand` returned, tensors by their shapes."""
    each = found if isinstance(found, tuple | list) else (found,)
    return ", ".join(str(tuple(x.shape)) if is_dense(x) else shown(x) for x in each)


def read_arguments(k: Any, v: Any, pattern: Any) -> tuple[Any, Any, Any]:
    """(k, v, pattern) of a call, or (rows, None, pattern) of one with Rows. Raises InvalidInput."""
    if isinstance(k, Rows):
        if v is not None and pattern is not None:
            raise InvalidInput(f"Rows take the place of k and v; leave out v={shown(v)}")
        pattern = v if pattern is None else pattern
        k, v = (k, None) if k.expand is not None else k.tensors
    if pattern is None:
        raise InvalidInput("no pattern: give a Pattern or its text, such as 'Causal()', after k and v")
    return k, v, pattern
