"""The steps of a rank: the messages that it posts, their sizes, and the visits that it computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from ..cache import Value
from ..dtypes import ITEM_BYTES, ROW_BYTES, dtype_name
from ..errors import InvalidInput
from ..pattern.base import check_integer
from ..text import did_you_mean, shown
from .row_sets import ALL_ROWS, AllRows, RowSet, RowSets

#: What a part of a message holds. "Sums" have dtype fp32, or fp64 for fp64 inputs.
#: - "kv": keys and values of a block, in the input dtype; "grad": the sums of dK and dV of a block so far.
#: - In a pass-Q backward, "q": q and dO of a block, in the input dtype; "row": lse and delta of its rows, in the dtype
#:   of sums (instead of delta possibly the factor of `kernels.pad.times_unit` that stands for it, which saves receivers
#:   work); "dq": the sums of dQ so far.
#: - In a pass-Q forward, "query": q of a block, in the input dtype; "part": (out, lse) over the keys that its rows have
#:   met so far, a sum that merges.
#: - Inside a Ulysses group, for the heads of one rank, "qkv": q, k and v of the rows of `owner`; "out": output and lse
#:   of these rows; "dout" and "dqkv": the gradients of "out" and "qkv".
Kind = Literal["kv", "grad", "q", "row", "dq", "query", "part", "qkv", "out", "dout", "dqkv"]
#: Parts of these kinds are passed on unchanged.
BLOCKS: tuple[Kind, ...] = ("kv", "q", "row", "query")
#: Parts of these kinds are sums, to which ranks add.
SUMS: tuple[Kind, ...] = ("grad", "dq", "part")
#: Parts of these kinds are not rounded to `comm_dtype`: a rounded query or lse would change attention weights.
UNROUNDED: tuple[Kind, ...] = ("row", "query", "part")
#: Parts of these kinds are rows of keys, all others rows of queries.
OF_KEYS: tuple[Kind, ...] = ("kv", "grad")
#: The order in which a plan lists the parts of a message; `runtime.buffers` places them in the message.
ORDER: dict[Kind, int] = {"grad": 0, "dq": 0, "part": 0, "row": 1, "kv": 2, "q": 2, "query": 2}


class Part(NamedTuple):
    """Part of a message: rows of the block of `owner`, or sums for these rows (such as gradients) on their way to it.

    `row_set` says which rows of which heads: key/value heads, or query heads under pass-Q. In a plan with a `block`
    it has one head, which stands for all heads of all tensors.
    """

    kind: Kind
    owner: int
    row_set: RowSet | AllRows = ALL_ROWS


class Hop(NamedTuple):
    """A message that a rank sends to, or receives from, `peer`; in flight until the end of the rank's step `until`.

    Both sides use the same `tag`, which is unique among the messages from one rank to another.
    """

    peer: int
    tag: int
    parts: tuple[Part, ...]
    until: int


@dataclass(frozen=True)
class Step:
    """One step of a rank: post `sends` and `recvs`, compute with the parts in `visits`, wait for the due messages.

    `clock` ascends over the steps of a rank. Both ends of a message post it at the same clock; steps of different ranks
    can therefore be aligned, although each rank omits the steps at which it does nothing.
    """

    sends: tuple[Hop, ...] = ()
    recvs: tuple[Hop, ...] = ()
    visits: tuple[Part, ...] = ()
    clock: int = 0

    def __bool__(self) -> bool:
        return bool(self.sends or self.recvs or self.visits)

    @property
    def posts(self) -> list[tuple[int, tuple[Hop, ...], tuple[Hop, ...]]]:
        """The step's messages, grouped by the step at whose end they are due: (`Hop.until`, sends, receives)."""

        def due(hops: tuple[Hop, ...], end: int) -> tuple[Hop, ...]:
            return tuple([hop for hop in hops if hop.until == end])

        ends = sorted({hop.until for hop in (*self.sends, *self.recvs)})
        return [(end, due(self.sends, end), due(self.recvs, end)) for end in ends]


@dataclass(frozen=True)
class RankPlan:
    """The steps of one rank in each pass; `saved` are the parts it keeps from the forward for its backward."""

    rank: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """Approximate size of the steps in bytes, for `cache.estimate_bytes`. The demand counts the row sets."""
        steps = (*self.forward, *self.backward)
        parts = sum(len(step.visits) for step in steps)
        return 600 * len(steps) + 800 * (parts + sum(1 + len(hop.parts) for s in steps for hop in s.sends + s.recvs))


def make_parts(kind: Kind, owner: int, row_sets: RowSets) -> tuple[Part, ...]:
    """Message parts of the given kind for the block of `owner`, one per row set."""
    return tuple([Part(kind, owner, row_set) for row_set in row_sets])


#: What travels in a pass: keys and values (pass-KV) or queries (pass-Q, arXiv:2411.01783).
ROTATE = ("auto", "kv", "q")


@dataclass(frozen=True)
class PlanSizes(Value):
    """The sizes, dtypes and options of a plan: all inputs other than pattern, layout and schedule.

    `kv_heads` defaults to `heads`, and `value_dim` to `head_dim`. A dtype may be a torch.dtype. `block` lists (heads,
    width, dtype) of the tensors that travel if keys and values are expanded from these at the visit, see `ra.Rows`; the
    dtype defaults to `dtype`. None: k and v travel. `reproducible` is the length of a leaf, see `plan.leaves`; None: no
    leaves. Raises InvalidInput for a wrong value.
    """

    heads: int = 1
    kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = 64
    value_dim: int = None  # type: ignore[assignment]
    dtype: str = "float32"
    batch: int = 1
    comm_dtype: str | None = None
    rotate: str = "auto"
    block: tuple[tuple[int, int, str], ...] | None = None
    reproducible: int | None = None

    def __post_init__(self) -> None:
        self._normalize(
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            value_dim=self.head_dim if self.value_dim is None else self.value_dim,
            dtype=dtype_name(self.dtype),
            comm_dtype=None if self.comm_dtype is None else dtype_name(self.comm_dtype),
        )
        for name in ("heads", "kv_heads", "head_dim", "value_dim", "batch"):
            least = int(name != "batch")
            self._normalize(**{name: check_integer(getattr(self, name), name, least, f"{name}=8")})
        if self.heads % self.kv_heads:
            divisors = "kv_heads=" + " or ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise InvalidInput(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads; try {divisors}")
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(f"dtype {self.dtype} is not supported; expected one of {', '.join(ITEM_BYTES)}")
        fitting = [name for name in ("float32", "bfloat16") if ITEM_BYTES[name] <= ITEM_BYTES[self.dtype]]
        if self.comm_dtype is not None and self.comm_dtype not in fitting:  # float16 lacks the range of gradients
            raise InvalidInput(f"comm_dtype={self.comm_dtype}: {self.dtype} may travel as {' or '.join(fitting)}")
        parse_rotate(self.rotate)
        if self.block is not None:
            shaped = isinstance(self.block, list | tuple) and all(isinstance(x, list | tuple) for x in self.block)
            if not shaped or not self.block or not {*map(len, self.block)} <= {2, 3}:
                raise InvalidInput(f"block={shown(self.block)}: expected (heads, width) of each tensor of a row")
            self._normalize(block=tuple([self._check_tensor(*tensor) for tensor in self.block]))
        if self.reproducible is not None:
            self._check_leaves()

    def _check_leaves(self) -> None:
        """Raise InvalidInput for options that would round or order sums by rank; keys travel in both passes."""
        length = check_integer(self.reproducible, "reproducible", 1, "reproducible=512, the tokens of a leaf")
        unfit = [name for name in ("comm_dtype", "block") if getattr(self, name) is not None]
        unfit += ["rotate"] if "q" in self.rotate.split(", ") else []
        if unfit:
            reason = {"comm_dtype": "rounds sums by hop", "block": "expands rows by visit", "rotate": "moves queries"}
            raise InvalidInput(
                f"reproducible={length}: {unfit[0]}={shown(getattr(self, unfit[0]))} {reason[unfit[0]]}; leave out one"
            )
        self._normalize(reproducible=length, rotate="kv")

    def _check_tensor(self, heads: int, width: int, dtype: object = None) -> tuple[int, int, str]:
        """(heads, width, dtype) of a tensor of `block`, normalized. Raises InvalidInput."""
        name, example = self.dtype if dtype is None else dtype_name(dtype), "block=((1, 512), (1, 64))"
        if name not in ROW_BYTES:
            raise InvalidInput(f"rows of dtype {name} are not supported; expected one of {', '.join(ROW_BYTES)}")
        return check_integer(heads, "heads of a block", 1, example), check_integer(width, "width", 1, example), name

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(PlanSizes)}

    @property
    def block_heads(self) -> int:
        """The heads of a row set of a block of keys: one stands for all if all heads of all tensors travel together."""
        return self.kv_heads if self.block is None else 1

    def part_heads(self, kind: Kind) -> int:
        """The number of heads of a row set of a block or of its sums."""
        return self.block_heads if kind in OF_KEYS else self.heads

    def tensors(self, kind: Kind, *, as_sent: bool = True) -> tuple[tuple[int, int, str], ...]:
        """(heads, width, dtype) of each tensor in parts of this kind; in "grad", of those of a block with a gradient.

        The dtype is that of messages or, with as_sent=False, that in which ranks compute.
        """
        found: Iterable[tuple[int, int, str]]
        sums = _wide(self.dtype)
        if kind in OF_KEYS:
            keys, values = (self.kv_heads, self.head_dim, self.dtype), (self.kv_heads, self.value_dim, self.dtype)
            found = (keys, values) if self.block is None else self.block
            if kind == "grad":
                found = [(heads, width, _wide(dtype)) for heads, width, dtype in found if dtype in ITEM_BYTES]
        elif kind == "row":  # lse and delta
            found = [(self.heads, 1, sums)] * 2
        elif kind == "part":  # out and lse
            found = (self.heads, self.value_dim, sums), (self.heads, 1, sums)
        elif kind == "q":
            found = [(self.heads, width, self.dtype) for width in (self.head_dim, self.value_dim)]
        else:
            found = [(self.heads, self.head_dim, self.dtype if kind == "query" else sums)]
        if not as_sent or self.comm_dtype is None or kind in UNROUNDED:
            return tuple(found)
        comm, least = self.comm_dtype, ITEM_BYTES[self.comm_dtype]
        return tuple((h, w, comm if ITEM_BYTES.get(dtype, 0) >= least else dtype) for h, w, dtype in found)

    @property
    def expand_flops(self) -> int:
        """FLOPs that make k and v of one row of a `block`, if these are made as in multi-head latent attention.

        There, a matrix product makes them of the first tensor, but for those columns of k that the other tensors are.
        0 without a product: the block is k and v, in itself or as integers, or its row is the key of all heads.
        """
        if self.block is None:
            return 0
        (heads, rank, dtype), rest = self.block[0], sum(width for _, width, _ in self.block[1:])
        is_key = heads == self.kv_heads and (heads > 1 or rank + rest == self.head_dim)
        made = max(self.head_dim - rest, 0) + self.value_dim
        return 0 if is_key or dtype not in ITEM_BYTES else 2 * heads * rank * self.kv_heads * made

    def block_bytes(self, kind: Kind, rows: int, *, as_sent: bool = True) -> int:
        """The bytes of `rows` rows in a part of this kind; `rows` is summed over the heads of row sets."""
        per_row = sum(heads * width * ROW_BYTES[dtype] for heads, width, dtype in self.tensors(kind, as_sent=as_sent))
        return self.batch * rows * per_row // self.part_heads(kind)

    def member_heads(self, ulysses_size: int) -> tuple[int, int]:
        """(query heads, key/value heads) that each rank of a Ulysses group attends with.

        If there are fewer key/value heads than ranks in a group, each rank has a copy of the head that its query heads
        use.
        """
        return self.heads // ulysses_size, max(self.kv_heads // ulysses_size, 1)

    def exchange_tensors(self, kind: Kind, ulysses_size: int) -> tuple[tuple[int, int, str], ...]:
        """(heads, width, dtype) of each tensor in a message between two ranks of a Ulysses group: one rank's heads.

        Tensors of a `block` are not split by heads: each rank of a group gets all of them.
        """
        heads, kv_heads = self.member_heads(ulysses_size)
        if kind in ("qkv", "dqkv"):
            of_q = (heads, self.head_dim, self.dtype)
            if self.block is not None:  # gradients of rows are sums over the ranks of the group
                return of_q, *self.tensors("kv" if kind == "qkv" else "grad", as_sent=False)
            return of_q, (kv_heads, self.head_dim, self.dtype), (kv_heads, self.value_dim, self.dtype)
        # lse or its gradient comes first, so that the wider dtype is aligned.
        return (heads, 1, _wide(self.dtype)), (heads, self.value_dim, self.dtype)

    def exchange_bytes(self, kind: Kind, rows: Sequence[int], ulysses_size: int) -> int:
        """The bytes of a message between two ranks of a Ulysses group: one rank's heads, `rows` rows per tensor."""
        tensors = zip(rows, self.exchange_tensors(kind, ulysses_size), strict=True)
        return self.batch * sum(count * heads * width * ROW_BYTES[dtype] for count, (heads, width, dtype) in tensors)


def _wide(dtype: str) -> str:
    """The dtype of sums, as `kernels.memory.wide`."""
    return dtype if dtype == "float64" else "float32"


def parse_rotate(rotate: object, *, both: bool = False) -> tuple[str, str]:
    """What travels in the (forward, backward), of `ROTATE`, by two values such as "q, kv", or by one for the backward.

    With `both`, one value holds for both passes, else keys travel in the forward. Raises InvalidInput.
    """
    passes = rotate.split(", ") if isinstance(rotate, str) else []
    if len(passes) not in (1, 2) or not {*passes} <= {*ROTATE}:
        hint = did_you_mean(rotate, ROTATE) if isinstance(rotate, str) else ""
        raise InvalidInput(f"rotate={shown(rotate)}: {hint}expected {', '.join(ROTATE)}, or two such as 'q, kv'")
    return passes[0] if both or len(passes) == 2 else "kv", passes[-1]
