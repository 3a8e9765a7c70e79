"""The checked sizes of a plan, and the heads, widths, dtypes and bytes of the parts of its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..dtypes import ITEM_BYTES, dtype_name
from ..errors import InvalidInput
from ..text import did_you_mean
from .steps import Kind

if TYPE_CHECKING:
    import torch

#: What travels in the backward.
ROTATE = ("auto", "keys", "queries")


class PlanSizes(NamedTuple):
    """The numbers and names of a plan beside its pattern, layout and schedule, in the order of its fields."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    batch: int
    comm_dtype: str | None
    rotate: str

    def dtype_of(self, kind: Kind, *, as_sent: bool) -> str:
        """The dtype of a block or of its sums: in a message (`as_sent`), or where a rank computes with it."""
        if (
            as_sent and self.comm_dtype is not None and kind != "row"
        ):  # rounding lse would change the weights exponentially
            return self.comm_dtype
        return self.dtype if kind in ("kv", "q") or self.dtype == "float64" else "float32"

    def heads_of(self, kind: Kind) -> int:
        """The number of heads of a block or of its sums."""
        return self.kv_heads if kind in ("kv", "grad") else self.heads

    def widths_of(self, kind: Kind) -> tuple[int, ...]:
        """The last dims of the tensors of a block or of its sums."""
        if kind == "row":  # lse and delta
            return 1, 1
        return (self.head_dim,) if kind == "dq" else (self.head_dim, self.value_dim)

    def block_bytes(self, kind: Kind, rows: int, *, as_sent: bool) -> int:
        """Bytes of a block, or of its sums, with `rows` rows of all heads together."""
        return self.batch * rows * sum(self.widths_of(kind)) * ITEM_BYTES[self.dtype_of(kind, as_sent=as_sent)]

    def member_heads(self, ulysses_size: int) -> tuple[int, int]:
        """(query heads, key/value heads) of a member of a Ulysses group.

        Of fewer key/value heads than members, each member has a copy of the one that its query heads use.
        """
        return self.heads // ulysses_size, max(self.kv_heads // ulysses_size, 1)

    def exchange_bytes(self, kind: Kind, rows: int, ulysses_size: int) -> int:
        """Bytes of a message inside a Ulysses group of `ulysses_size` ranks: `rows` rows for the heads of one rank."""
        item = ITEM_BYTES[self.dtype]
        heads, kv_heads = self.member_heads(ulysses_size)
        if kind in ("qkv", "dqkv"):
            width = heads * self.head_dim + kv_heads * (self.head_dim + self.value_dim)
            return self.batch * rows * width * item
        lse_item = max(item, 4)
        return self.batch * rows * heads * (self.value_dim * item + lse_item)


def check_sizes(
    *,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: str | torch.dtype = "float32",
    batch: int = 1,
    comm_dtype: str | torch.dtype | None = None,
    rotate: str = "auto",
) -> PlanSizes:
    """The sizes of a plan with all defaults filled in. Raises InvalidInput."""
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    for name, value, least in (
        ("heads", heads, 1),
        ("kv_heads", kv_heads, 1),
        ("head_dim", head_dim, 1),
        ("value_dim", value_dim, 1),
        ("batch", batch, 0),
    ):
        if value < least:
            raise InvalidInput(f"{name}={value}: must be an integer >= {least}")
    if heads % kv_heads:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise InvalidInput(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly; try kv_heads={' or '.join(divisors)}"
        )
    item = dtype_name(dtype)
    if item not in ITEM_BYTES:
        raise InvalidInput(f"dtype {item} is not supported; expected one of {', '.join(ITEM_BYTES)}")
    comm = None if comm_dtype is None else dtype_name(comm_dtype)
    fitting = [name for name in ("float32", "bfloat16") if ITEM_BYTES[name] <= ITEM_BYTES[item]]
    if comm is not None and comm not in fitting:
        raise InvalidInput(
            f"comm_dtype={comm}: K/V and gradients of {item} inputs may travel as {' or '.join(fitting)}; "
            "leave it out to send all bits (float16 lacks the range that gradients need)"
        )
    check_rotate(rotate)
    return PlanSizes(heads, kv_heads, head_dim, value_dim, item, batch, comm, rotate)


def check_rotate(rotate: object) -> None:
    """Raise InvalidInput where `rotate` is not one of `ROTATE`."""
    if rotate not in ROTATE:
        hint = did_you_mean(rotate, ROTATE) if isinstance(rotate, str) else ""
        raise InvalidInput(f"rotate={rotate!r}: {hint}expected {', '.join(ROTATE)}")
