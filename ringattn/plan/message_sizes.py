"""The checked sizes of a plan, and the heads, widths, dtypes and bytes of the parts of its messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..cache import Value
from ..dtypes import ITEM_BYTES, dtype_name
from ..errors import InvalidInput
from ..text import did_you_mean
from .steps import Kind

#: What travels in the backward.
ROTATE = ("auto", "keys", "queries")


@dataclass(frozen=True)
class PlanSizes(Value):
    """The numbers and names of a plan beside its pattern, layout and schedule, checked. Raises InvalidInput.

    `kv_heads` are by default as many as `heads`, and `value_dim` is `head_dim`. A dtype may be a torch.dtype.
    """

    heads: int = 1
    kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = 64
    value_dim: int = None  # type: ignore[assignment]
    dtype: str = "float32"
    batch: int = 1
    comm_dtype: str | None = None
    rotate: str = "auto"

    def __post_init__(self) -> None:
        self._normalize(
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            value_dim=self.head_dim if self.value_dim is None else self.value_dim,
            dtype=dtype_name(self.dtype),
            comm_dtype=None if self.comm_dtype is None else dtype_name(self.comm_dtype),
        )
        for name in ("heads", "kv_heads", "head_dim", "value_dim", "batch"):
            if getattr(self, name) < (least := int(name != "batch")):
                raise InvalidInput(f"{name}={getattr(self, name)}: must be an integer >= {least}")
        if self.heads % self.kv_heads:
            divisors = "kv_heads=" + " or ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise InvalidInput(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads; try {divisors}")
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(f"dtype {self.dtype} is not supported; expected one of {', '.join(ITEM_BYTES)}")
        fitting = [name for name in ("float32", "bfloat16") if ITEM_BYTES[name] <= ITEM_BYTES[self.dtype]]
        if self.comm_dtype is not None and self.comm_dtype not in fitting:  # float16 lacks the range of gradients
            raise InvalidInput(f"comm_dtype={self.comm_dtype}: {self.dtype} may travel as {' or '.join(fitting)}")
        check_rotate(self.rotate)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(PlanSizes)}

    def part_dtype(self, kind: Kind, *, as_sent: bool = True) -> str:
        """The dtype of a block or of its sums: in a message (`as_sent`), or where a rank computes with it."""
        # Rounding lse would change the weights exponentially.
        if as_sent and self.comm_dtype is not None and kind != "row":
            return self.comm_dtype
        return self.dtype if kind in ("kv", "q") or self.dtype == "float64" else "float32"

    def part_heads(self, kind: Kind) -> int:
        """The number of heads of a block or of its sums."""
        return self.kv_heads if kind in ("kv", "grad") else self.heads

    def part_widths(self, kind: Kind) -> tuple[int, ...]:
        """The last dims of the tensors of a block or of its sums."""
        if kind == "row":  # lse and delta
            return 1, 1
        return (self.head_dim,) if kind == "dq" else (self.head_dim, self.value_dim)

    def block_bytes(self, kind: Kind, rows: int, *, as_sent: bool = True) -> int:
        """Bytes of a block, or of its sums, with `rows` rows of all heads together."""
        return self.batch * rows * sum(self.part_widths(kind)) * ITEM_BYTES[self.part_dtype(kind, as_sent=as_sent)]

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


def check_rotate(rotate: object) -> None:
    """Raise InvalidInput where `rotate` is not one of `ROTATE`."""
    if rotate not in ROTATE:
        hint = did_you_mean(rotate, ROTATE) if isinstance(rotate, str) else ""
        raise InvalidInput(f"rotate={rotate!r}: {hint}expected {', '.join(ROTATE)}")
