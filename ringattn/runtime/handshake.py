"""Checks before the first message: of one rank's arguments, and that all ranks agree about theirs.

The handshake is a state machine of at most three exchanges, in each of which every rank sends exactly one record.

1. "call" ("positions" where only they are wanted): the mark of this rank's record, a digest of its arguments in one
   spelling for all forms of equal arguments, and the history of its table of remembered handshakes. Where the histories
   differ, all ranks empty their tables. Then all tables are the same; all ranks look the marks of all ranks up in theirs,
   and all find a plan, which ends the handshake, or none does.
2. "arguments": the records in full, which are compared.
3. "plan": the hash of the plan that this rank has made of them. Where all are the same, all ranks remember the plan.

Which exchange comes next depends only on what all ranks have received in the last one, never on what one rank knows, so
that no rank waits in an exchange that another does not enter. An exception of one rank between two exchanges takes the
place of its record in the next one, and ends the handshake on all ranks (`transport.records`): that rank raises its own
exception, the others a Mismatch that names the rank. A rank that leaves all the same, as where it is interrupted within
an exchange, sends its next "call" while others wait at another stage: all raise, and are in step again. What such a
rank remembers has another history then, which the next call finds.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import ITEM_BYTES, dtype_name
from ..errors import InvalidInput, Mismatch, plural
from ..kernels import get_kernel
from ..kernels.base import Kernel
from ..layout.regular import Layout, check_layout, layout_name
from ..machine.machine import Machine
from ..machine.presets import get_machine
from ..pattern import Pattern, as_pattern
from ..plan.message_sizes import check_rotate
from ..plan.plan import Plan
from ..plan.schedules import resolve
from ..planner import make_plan
from ..transport.base import Transport
from ..transport.records import MARK, Exchange, digest
from .options import AttentionOptions

#: The most bytes of a record of arguments, whose long fields are shortened to digests.
LIMIT = 1 << 14
#: Bytes of the number of a call.
NUMBER = 8
#: Makes the q, k and v of a call.
Prepare = Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
#: No model has more heads; a tensor that seems to, and has few tokens, has probably not been transposed.
MANY_HEADS = 256
SWAPPED = (
    "; if the tensors are [batch, tokens, heads, head_dim], pass x.transpose(1, 2) (the modules of ringattn.nn take "
    "order='BNHD')"
)


@dataclass(frozen=True, kw_only=True)
class Call(AttentionOptions):
    """The arguments of a call beside its tensors."""

    pattern: Pattern
    layout: str | Layout
    scale: float
    return_lse: bool = False

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel:
        """The kernel to use, or an error that says what is wrong with the local arguments."""
        as_pattern(self.pattern)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.ndim != 4:
                found = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
                raise InvalidInput(f"{name} must be a tensor [batch, heads, tokens, head_dim], got {found}")
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
            kinds = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
            raise InvalidInput(f"q, k and v must have one dtype and one device, got {kinds}")
        if dtype_name(q.dtype) not in ITEM_BYTES:
            raise InvalidInput(f"dtype {q.dtype} is not supported; expected one of {', '.join(ITEM_BYTES)}")
        if not (q.shape[0] == k.shape[0] == v.shape[0]) or not (q.shape[2] == k.shape[2] == v.shape[2]):
            raise InvalidInput(f"q, k and v must have the same batch and the same tokens, got {shapes}{_hint(q, k, v)}")
        if (
            k.shape[1] != v.shape[1]
            or q.shape[-1] != k.shape[-1]
            or 0 in (q.shape[1], q.shape[3], v.shape[3], k.shape[1])
        ):
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
                f"{plural(q.shape[2], 'token')}{SWAPPED}", stacklevel=2,
            )  # fmt: skip
        if isinstance(self.scale, bool) or not isinstance(self.scale, int | float):
            raise InvalidInput(f"scale must be a number, got {self.scale!r}; leave it out for 1 / sqrt(head_dim)")
        if self.layout is None:
            raise InvalidInput(
                "layout=None: the rows of a shard do not tell how the sequence was cut; give the Layout that cut it, or "
                "its name, such as layout='zigzag'"
            )
        names: tuple[tuple[str, Any, Any, str], ...] = (
            ("layout", self.layout, str | Layout, "zigzag"),
            ("schedule", self.schedule, str, "auto"),
            ("kernel", self.kernel, str, "auto"),
        )
        for name, value, kinds, example in names:
            if not isinstance(value, kinds):
                raise InvalidInput(f"{name} must be a name such as {example!r}, got {value!r}")
        if not isinstance(self.machine, Machine | str | None):
            raise InvalidInput(f"machine must be a ringattn.Machine or a name such as 'cpu', got {self.machine!r}")
        get_machine(self.machine)
        if not self.scale == self.scale or self.scale in (float("inf"), float("-inf")):
            raise InvalidInput(f"scale must be a finite number, got {self.scale}; leave it out for 1 / sqrt(head_dim)")
        resolve(self.schedule)
        check_rotate(self.rotate)
        check_layout(self.layout if isinstance(self.layout, str) else self.layout.name)
        return get_kernel(self.kernel, q, k, v, deterministic=self.deterministic)


def _hint(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """What to try where wrong shapes would be right ones with heads and tokens exchanged."""
    tokens, heads = q.shape[1], q.shape[2]
    fits = tokens == k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2] > 0 and heads % k.shape[2] == 0
    return SWAPPED if fits and tokens > heads else ""


def describe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """What a plan needs to know of the tensors."""
    return {
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[3],
        "value_dim": v.shape[3],
        "dtype": dtype_name(q.dtype),
        "batch": q.shape[0],
    }


def agree(transport: Transport, call: Call, prepare: Prepare, stage: str = "call") -> tuple[Plan, Kernel]:
    """The plan that all ranks of the transport run, and this rank's kernel for the (q, k, v) that `prepare` gives.

    Every exception of `prepare`, and of what is done here between the exchanges, reaches all ranks. `stage` names the
    first exchange: ranks that agree for different purposes are no match.
    """
    agreed = transport.agreed
    with Exchange(transport, stage, limit=2 * MARK) as told:
        q, k, v = prepare()
        kernel = call.check(q, k, v)
        transport.check(q.device)
        record = json.dumps(_record(q, k, v, call)).encode()
        told.mine = digest(record) + agreed.history
    for rank, both in enumerate(told.records):
        if len(both) != 2 * MARK:
            raise _undecoded(rank, both)
    marks = tuple(both[:MARK] for both in told.records)
    plan: Plan | None = agreed.begin(marks, tuple(both[MARK:] for both in told.records))
    if plan is None:
        plan = _compared(transport, q, k, v, call, record)
    agreed.end(marks, None if call.pattern.transient else plan)
    return plan, kernel


def _compared(
    transport: Transport, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, record: bytes
) -> Plan:
    """The plan after a handshake in full; every rank raises where the records, or the plans made of them, differ."""
    with Exchange(transport, "arguments", LIMIT) as told:
        told.mine = record
    with Exchange(transport, "plan", LIMIT) as made:
        records = _fields(told.records)
        _compare(records)
        rows = [found["rows"] for found in records]
        plan = make_plan(
            call.pattern, tokens=sum(rows), ranks=transport.size, layout=call.layout, schedule=call.schedule,
            machine=get_machine(call.machine, q.device.type), comm_dtype=call.comm_dtype, rotate=call.rotate,
            **describe(q, k, v),
        )  # fmt: skip
        _check_rows(plan, rows)
        made.mine = json.dumps({"layout": _written(plan.layout), "plan": plan.hash}).encode()
    _compare(_fields(made.records))
    return plan


def agree_backward(transport: Transport, number: int) -> None:
    """Return where all ranks begin the backward of the same call of their ring; else every rank raises Mismatch.

    As a call, its backward begins with a few bytes from each rank: ranks that run backwards in different order would
    add the gradients of one call to those of another.
    """
    with Exchange(transport, "backward", NUMBER) as told:
        told.mine = number.to_bytes(NUMBER, "little")
    numbers = [int.from_bytes(raw, "little") for raw in told.records]
    if any(other != number for other in numbers):
        who = "; ".join(f"rank {rank} runs that of call {other + 1:,}" for rank, other in enumerate(numbers))
        raise Mismatch(
            f"the ranks run backwards of different calls of their group: {who}. Run backwards and calls in the same order "
            "on all ranks"
        )


def _record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> dict[str, Any]:
    """What this rank is about to do, in one spelling for all forms of equal arguments.

    `rows` and `layout_tokens`, the tokens that a Layout was made for, are this rank's own: they are not compared.
    """
    layout, wire = call.layout, call.comm_dtype
    pattern = repr(call.pattern)
    if call.pattern.transient:
        pattern = f"{_SELECTED} {_short_digest(pattern)}"
    return {
        "rows": q.shape[2],
        "layout_tokens": layout.tokens if isinstance(layout, Layout) else None,
        **describe(q, k, v),
        "device": q.device.type,
        "pattern": _shortened(pattern),
        "layout": layout_name(layout) if isinstance(layout, str) else _written(layout),
        "schedule": resolve(call.schedule),
        "kernel": call.kernel,
        "machine": _shortened(repr(get_machine(call.machine, q.device.type))),
        "scale": float(call.scale),
        "deterministic": bool(call.deterministic),
        "comm_dtype": None if wire is None else dtype_name(wire),
        "rotate": call.rotate,
        "return_lse": bool(call.return_lse),
        "requires_grad": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)),
    }


def _written(layout: Layout) -> str:
    return f"{layout.name} (partition {layout.digest})" if layout.digest else layout.name


_SELECTED = "blocks selected anew (all ranks need the same scorer weights, k, and train or eval mode),"


def _shortened(text: str) -> str:
    return text if len(text) < 200 else f"{text[:160]}... (digest {_short_digest(text)})"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fields(records: list[bytes]) -> list[dict[str, Any]]:
    """The records of all ranks; a Mismatch that names the rank of the first that is none."""
    found: list[dict[str, Any]] = []
    for rank, raw in enumerate(records):
        try:
            fields = json.loads(raw)
        except ValueError:  # neither UTF-8, nor JSON
            fields = None
        if not isinstance(fields, dict) or (found and fields.keys() != found[0].keys()):
            raise _undecoded(rank, raw)
        found.append(fields)
    return found


def _undecoded(rank: int, raw: bytes) -> Mismatch:
    return Mismatch(
        f"rank {rank} sent {plural(len(raw), 'byte')} that cannot be decoded as its part of the handshake; install the same "
        "ringattn on all ranks, and let nothing else use this transport meanwhile"
    )


def _compare(records: list[dict[str, Any]]) -> None:
    for name in records[0]:
        values = [record[name] for record in records]
        if name in _OWN or all(value == values[0] for value in values) or (name == "layout" and _open(values)):
            continue
        who = {value: [r for r, other in enumerate(values) if other == value] for value in values}
        parts = [f"{value} on rank{'s' if len(ranks) > 1 else ''} {_ranks(ranks)}" for value, ranks in who.items()]
        raise Mismatch(f"the ranks disagree about {name}: {'; '.join(parts)}. All ranks must pass the same")


#: Fields of a record that are not compared.
_OWN = ("rows", "layout_tokens")


def _open(layouts: list[str]) -> bool:
    """Whether balanced layouts are given by name on some ranks: the partitions are compared when all are known."""
    return all(x.startswith("balanced") for x in layouts) and not all("partition" in x for x in layouts)


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _check_rows(plan: Plan, rows: list[int]) -> None:
    wanted = [plan.layout.rows(rank) for rank in range(plan.ranks)]
    for rank, (found, right) in enumerate(zip(rows, wanted, strict=True)):
        if found != right:
            more = ", pattern=..., heads=..." if plan.layout.digest else ""
            raise Mismatch(
                f"rank {rank} holds {found:,} rows, but the layout {plan.layout.name} of {plan.tokens:,} tokens over "
                f"{plan.ranks} ranks gives it {right:,}; shard with ringattn.make_layout({plan.layout.name!r}, "
                f"tokens={plan.tokens}, ranks={plan.ranks}{more}).shard_tensor(x, rank)"
            )
