"""The handshake before the first message: checks of one rank's arguments, and a comparison of all ranks' arguments.

The handshake has at most three exchanges. In each exchange every rank sends exactly one record.

1. "call" ("positions" if only positions are asked for): a digest of this rank's arguments, in one spelling for all
   forms of equal arguments, and the history of its table of remembered handshakes. If the histories differ, all ranks
   clear their tables, so that all tables are equal. All ranks then look up the digests of all ranks. Either all ranks
   find a plan, which ends the handshake, or no rank does.
2. "arguments": the arguments in full, which are compared.
3. "plan": the hash of the plan that this rank has made from the arguments. If all hashes are equal, all ranks
   remember the plan.

Which exchange follows depends only on what all ranks have received in the previous exchange, so that all ranks enter
the same exchanges. If a rank raises between two exchanges, its error replaces its record in the next exchange and ends
the handshake on all ranks (`transport.records`): that rank raises its own exception, the other ranks raise a Mismatch
that names the rank. A rank can still leave in the middle, for example when it is interrupted within an exchange. Its
next "call" then meets the other ranks at another stage, all ranks raise, and the ranks are in step again. The history
of that rank's table differs from then on, which the next call finds.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch

from ..dtypes import ITEM_BYTES, dtype_name
from ..errors import InvalidInput, Mismatch, Unsupported
from ..kernels import get_kernel
from ..kernels.base import Kernel
from ..kernels.pad import EXTRA
from ..layout.regular import Layout, check_layout, layout_name
from ..machine.presets import get_machine
from ..pattern import Pattern
from ..plan.message_sizes import check_rotate
from ..plan.plan import Plan
from ..plan.schedules import resolve
from ..planner import make_plan
from ..text import plural
from ..transport.base import Transport
from ..transport.records import MARK, Exchange, digest
from .options import AttentionOptions, read_dropout

if TYPE_CHECKING:
    from ..kernels.dropout import Dropout

#: The most bytes of a record of arguments. Long fields are shortened to digests.
LIMIT = 1 << 14
#: Bytes of the number of a call, and of its place.
NUMBER = 8
#: Bytes of a call's record: digest, history, place in a compiled graph, number; with dropout a seed follows.
FIXED = 2 * MARK + 2 * NUMBER
#: The place of a call among those of its compiled graph, from 1 on; 0 outside of such graphs.
place: ContextVar[int] = ContextVar("ringattn_place", default=0)
#: Returns the q, k and v of a call, or raises.
Prepare = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
#: No model has more heads. A tensor with more heads and few tokens has probably not been transposed.
MANY_HEADS = 256
SWAPPED = (
    "; if the tensors are [batch, tokens, heads, head_dim], pass x.transpose(1, 2) (the modules of ringattn.nn take "
    "order='BNHD')"
)


@dataclass(frozen=True, kw_only=True)
class Call(AttentionOptions):
    """The arguments of a call except its tensors. See `ring_attention`."""

    pattern: Pattern
    layout: str | Layout
    scale: float
    return_lse: bool = False
    #: Whether every head has one more key with a learned logit.
    sinks: bool = False
    #: Whether padded keys are hidden, which makes q and k wider.
    key_padding_mask: bool = False

    def __post_init__(self) -> None:
        if self.layout is None:
            raise InvalidInput(
                "layout=None: the rows of a shard do not tell how the sequence was cut; give the Layout that cut the "
                "sequence, or its name, such as layout='zigzag'"
            )
        super().__post_init__()

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel:
        """The kernel to use. Raises an error that says what is wrong with this rank's arguments."""
        _check_tensors(q, k, v)
        if not isfinite(self.scale):
            raise InvalidInput(f"scale must be a finite number, got {self.scale}; leave it out for 1 / sqrt(head_dim)")
        if self.softcap is not None and not 0 < self.softcap < inf:
            raise InvalidInput(f"softcap must be a finite number > 0, such as 50.0, got {self.softcap}; None: no cap")
        get_machine(self.machine)
        resolve(self.schedule)
        check_rotate(self.rotate)
        check_layout(self.layout if isinstance(self.layout, str) else self.layout.name)
        softcap, dropout = self.softcap, read_dropout(self.dropout)
        kernel = get_kernel(self.kernel, q, k, v, deterministic=self.deterministic, softcap=softcap, dropout=dropout)
        if self.key_padding_mask:
            kernel = kernel.derive(padded=True)
        width, differentiable = max(q.shape[-1], v.shape[-1]), any(x.requires_grad for x in (q, k, v))
        most = kernel.max_head_dim
        if self.return_lse and differentiable and most is not None and width + EXTRA > most:
            raise Unsupported(
                f"a head dim of {width} with return_lse, and gradients: the gradient of lse takes {EXTRA} columns, "
                f"and kernel {kernel.name} computes {most} at most; leave return_lse out, or try kernel=reference"
            )
        return kernel

    def plan(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int, ranks: int, layout: str | Layout
    ) -> Plan:
        """The plan of the call for `tokens` rows of tensors like q, k and v."""
        return make_plan(
            self.pattern,
            tokens=tokens,
            ranks=ranks,
            layout=layout,
            schedule=self.schedule,
            machine=get_machine(self.machine, q.device.type),
            comm_dtype=self.comm_dtype,
            rotate=self.rotate,
            **describe(q, k, v),
        )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise InvalidInput where q, k and v do not fit each other. Warns if heads and tokens seem exchanged."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            actual = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise InvalidInput(f"{name} must be a tensor [batch, heads, tokens, head_dim], got {actual}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        kinds = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise InvalidInput(f"q, k and v must have one dtype and one device, got {kinds}")
    if dtype_name(q.dtype) not in ITEM_BYTES:
        raise InvalidInput(f"dtype {q.dtype} is not supported; expected one of {', '.join(ITEM_BYTES)}")
    if not (q.shape[0] == k.shape[0] == v.shape[0]) or not (q.shape[2] == k.shape[2] == v.shape[2]):
        raise InvalidInput(f"q, k and v must have the same batch and the same tokens, got {shapes}{_hint(q, k, v)}")
    sizes = q.shape[1], q.shape[3], v.shape[3], k.shape[1]
    if k.shape[1] != v.shape[1] or q.shape[-1] != k.shape[-1] or 0 in sizes:
        raise InvalidInput(
            f"k and v must have the same heads, q and k the same head dim, and none may be 0, got {shapes}"
        )
    if q.shape[1] % k.shape[1]:
        raise InvalidInput(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly ({shapes}); "
            f"the query heads must be a multiple of the key/value heads{_hint(q, k, v)}"
        )
    if q.shape[1] > MANY_HEADS and q.shape[1] >= 8 * q.shape[2] > 0:
        warnings.warn(
            f"q {tuple(q.shape)} is read as [batch, heads, tokens, head_dim], {q.shape[1]:,} heads of "
            f"{plural(q.shape[2], 'token')}{SWAPPED}",
            stacklevel=3,
        )


def check_sinks(sinks: Any, q: torch.Tensor) -> None:
    """Raise InvalidInput unless `sinks` is None, or floats [H] on the device of q [B, H, n, D]."""
    if sinks is None or not isinstance(q, torch.Tensor) or q.ndim != 4:  # a wrong q is reported by `Call.check`
        return
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point() or sinks.shape != q.shape[1:2]:
        kind = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, torch.Tensor) else repr(sinks)
        raise InvalidInput(
            f"sinks must be a float tensor [heads] = ({q.shape[1]},), one logit per query head, got {kind}; for first "
            "tokens that all rows see use the pattern Sinks"
        )
    if sinks.device != q.device:
        raise InvalidInput(f"sinks are on {sinks.device}, the queries are on {q.device}; move the sinks there")


def _hint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Advice to transpose if the shapes would fit with heads and tokens exchanged; else no text."""
    tokens, heads = q.shape[1], q.shape[2]
    would_fit = tokens == k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2] > 0 and heads % k.shape[2] == 0
    return SWAPPED if would_fit and tokens > heads else ""


def describe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """The sizes and the dtype of the tensors, as keyword arguments of `make_plan`."""
    return {
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "dtype": dtype_name(q.dtype),
        "batch": q.shape[0],
    }


def agree(transport: Transport, call: Call, prepare: Prepare, stage: str = "call") -> tuple[Plan, Kernel, int]:
    """The plan that all ranks of the transport run, this rank's kernel for (q, k, v) = `prepare()`, and the number of
    the call: the largest of the ranks' own, so that ranks that have left calls early agree, too. Collective.

    Every exception of `prepare`, and of the work between the exchanges, reaches all ranks. `stage` names the first
    exchange: ranks that make a handshake for different purposes raise Mismatch.
    """
    agreed = transport.agreed
    with Exchange(transport, stage, limit=FIXED + NUMBER) as exchange:
        q, k, v = prepare()
        kernel = call.check(q, k, v)
        transport.check(q.device)
        record = json.dumps(_record(q, k, v, call)).encode()
        numbers = place.get(), next(transport.calls)
        exchange.mine = digest(record) + agreed.history + b"".join(x.to_bytes(NUMBER, "little") for x in numbers)
        if kernel.dropout is not None and stage == "call":
            exchange.mine += (kernel.dropout.seeded().seed or 0).to_bytes(NUMBER, "little")
    for rank, raw in enumerate(exchange.records):
        if len(raw) not in (FIXED, FIXED + NUMBER):
            raise _undecoded(rank, raw)
    _compare_places(_read_numbers(exchange.records, 2 * MARK))
    marks = tuple(raw[:MARK] for raw in exchange.records)
    plan: Plan | None = agreed.begin(marks, tuple(raw[MARK : 2 * MARK] for raw in exchange.records))
    if plan is None:
        plan = _agree_in_full(transport, q, k, v, call, record)
    agreed.end(marks, None if call.pattern.transient else plan)
    kernel = kernel if kernel.dropout is None else _share_seed(kernel, exchange.records)
    return plan, kernel, max(_read_numbers(exchange.records, 2 * MARK + NUMBER))


def _read_numbers(records: list[bytes], first: int) -> list[int]:
    """The numbers of all ranks that begin at byte `first` of their records."""
    return [int.from_bytes(raw[first : first + NUMBER], "little") for raw in records]


def _share_seed(kernel: Kernel, records: list[bytes]) -> Kernel:
    """The kernel with the seed of rank 0. Raises Mismatch on every rank if the ranks were given different seeds."""
    assert kernel.dropout is not None
    seeds = _read_numbers(records, FIXED)
    if kernel.dropout.seed is not None:
        _compare([{"the seed of dropout": seed} for seed in seeds])
    return kernel.seeded(seeds[0])


def _compare_places(places: list[int]) -> None:
    """Raise a Mismatch on every rank if compiled graphs run calls in different orders; 0 is a call of no graph."""
    if len({0, *places}) > 2:
        calls = "; ".join(f"rank {rank} runs call {index}" for rank, index in enumerate(places) if index)
        raise Mismatch(
            f"the compiled graphs of the ranks run their calls in different orders: {calls}. Compile the same function "
            "on all ranks, or keep calls that do not depend on each other in graphs of their own"
        )


def _agree_in_full(
    transport: Transport, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, record: bytes
) -> Plan:
    """The plan after the exchanges "arguments" and "plan". Every rank raises Mismatch if arguments or plans differ."""
    with Exchange(transport, "arguments", LIMIT) as arguments:
        arguments.mine = record
    with Exchange(transport, "plan", LIMIT) as plans:
        records = _decode(arguments.records)
        _compare(records)
        rows = [fields["rows"] for fields in records]
        plan = call.plan(q, k, v, sum(rows), transport.size, call.layout)
        _check_rows(plan, rows)
        plans.mine = json.dumps({"layout": _spell_layout(plan.layout), "plan": plan.hash}).encode()
    _compare(_decode(plans.records))
    return plan


def agree_backward(transport: Transport, number: int) -> None:
    """Return if all ranks begin the backward of the same call, number `number`; else raise Mismatch on every rank.

    Ranks that run backwards in different orders would add the gradients of one call to the gradients of another. A few
    bytes from each rank prevent this. Collective.
    """
    with Exchange(transport, "backward", NUMBER) as exchange:
        exchange.mine = number.to_bytes(NUMBER, "little")
    numbers = [int.from_bytes(raw, "little") for raw in exchange.records]
    if any(other != number for other in numbers):
        calls = "; ".join(f"rank {rank} runs that of call {other + 1:,}" for rank, other in enumerate(numbers))
        raise Mismatch(
            f"the ranks run backwards of different calls of their group: {calls}. Run backwards and calls in the same "
            "order on all ranks"
        )


def _record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, Any]:
    """What this rank is about to do, in one spelling for all forms of equal arguments.

    `rows`, and `layout_tokens` (the tokens that a Layout was made for), may differ between ranks and are not compared.
    """
    layout, comm_dtype = call.layout, call.comm_dtype
    pattern = repr(call.pattern)
    if call.pattern.transient:
        pattern = f"{_SELECTED} {_short_digest(pattern)}"
    return {
        "rows": q.shape[2],
        "layout_tokens": layout.tokens if isinstance(layout, Layout) else None,
        **{entry.name: getattr(call, entry.name) for entry in fields(call)},
        **describe(q, k, v),
        "device": q.device.type,
        # Fields with several spellings.
        "pattern": _shorten(pattern),
        "layout": layout_name(layout) if isinstance(layout, str) else _spell_layout(layout),
        "schedule": resolve(call.schedule),
        "machine": _shorten(repr(get_machine(call.machine, q.device.type))),
        "comm_dtype": None if comm_dtype is None else dtype_name(comm_dtype),
        "dropout": _spell_dropout(call.dropout),
        "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }


def _spell_layout(layout: Layout) -> str:
    """The name of a layout, with a digest of the partition if the layout is balanced."""
    return f"{layout.name} (partition {layout.digest})" if layout.digest else layout.name


def _spell_dropout(dropout: float | Dropout) -> str | None:
    """The probability, and whether the seed is given, as text; None where no weight is dropped."""
    read = read_dropout(dropout)
    return None if read is None else f"{float(read.p)} by a {'drawn' if read.seed is None else 'given'} seed"


#: Stands for a pattern that a scorer selects in every call.
_SELECTED = "blocks selected anew (all ranks need the same scorer weights, k, and train or eval mode),"


def _shorten(text: str) -> str:
    """The text, or its beginning and a digest if it is long."""
    return text if len(text) < 200 else f"{text[:160]}... (digest {_short_digest(text)})"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _decode(records: list[bytes]) -> list[dict[str, Any]]:
    """The records of all ranks. Raises a Mismatch that names the first rank whose record cannot be decoded."""
    decoded: list[dict[str, Any]] = []
    for rank, raw in enumerate(records):
        try:
            fields = json.loads(raw)
        except ValueError:  # not UTF-8, or not JSON
            fields = None
        if not isinstance(fields, dict) or (decoded and fields.keys() != decoded[0].keys()):
            raise _undecoded(rank, raw)
        decoded.append(fields)
    return decoded


def _undecoded(rank: int, raw: bytes) -> Mismatch:
    """The error for a record that cannot be decoded."""
    return Mismatch(
        f"rank {rank} sent {plural(len(raw), 'byte')} that cannot be decoded as its part of the handshake; install the "
        "same ringattn on all ranks, and let nothing else use this transport meanwhile"
    )


def compare_records(records: list[bytes]) -> list[dict[str, Any]]:
    """The fields of all ranks' records, JSON objects. Every rank raises Mismatch where compared fields differ."""
    decoded = _decode(records)
    _compare(decoded)
    return decoded


def _compare(records: list[dict[str, Any]]) -> None:
    """Raise a Mismatch that names the ranks and their values if a compared field differs between ranks."""
    for name in records[0]:
        values = [record[name] for record in records]
        if name in _NOT_COMPARED or all(value == values[0] for value in values):
            continue
        if name == "layout" and _are_undecided(values):
            continue
        raise Mismatch(f"the ranks disagree about {name}: {_by_rank(values)}. Pass the same on all ranks")


def _by_rank(values: list[Any]) -> str:
    """The values of all ranks as text, each with the first of its ranks."""
    ranks = {value: [rank for rank, other in enumerate(values) if other == value] for value in values}
    return "; ".join(f"{value} on rank{'s' if len(who) > 1 else ''} {_list_ranks(who)}" for value, who in ranks.items())


#: Fields of a record that may differ between ranks.
_NOT_COMPARED = ("rows", "layout_tokens", "labels")


def _are_undecided(layouts: list[str]) -> bool:
    """Whether some rank names a balanced layout whose partition is known, and compared, only with the plan."""
    return all(x.startswith("balanced") for x in layouts) and not all("partition" in x for x in layouts)


def _list_ranks(ranks: list[int]) -> str:
    """The first ranks of a list, as text."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _check_rows(plan: Plan, rows: list[int]) -> None:
    """Raise a Mismatch that lists the rows of all ranks if a rank's number of rows differs from the layout's."""
    layout = plan.layout.base
    planned = [layout.rows(rank) for rank in range(plan.ranks)]
    if rows != planned:
        more = ", pattern=..., heads=..." if layout.digest else ""
        raise Mismatch(
            f"the shards do not fit the layout {layout.name}: the ranks hold {_by_rank(rows)}; of these "
            f"{layout.tokens:,} tokens the layout gives {_by_rank(planned)}. A shard is wrong, or another layout has "
            f"cut the sequence; shard with ringattn.make_layout({layout.name!r}, tokens=..., ranks={plan.ranks}{more})"
            ".shard_tensor(x, rank), tokens being those of the whole sequence"
        )
