"""Checks before the first message: of one rank's arguments, and that all ranks agree about theirs."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from .errors import InvalidInput, Mismatch, RingAttentionError, plural
from .kernels import get_kernel
from .kernels.base import Kernel
from .layout import Layout, check_layout
from .pattern import Pattern, as_pattern
from .plan import Plan, make_plan
from .rotation import check_rotate
from .schedules import resolve
from .sizes import ITEM_BYTES
from .timing import Machine, get_machine
from .transport.base import Transport

#: Characters of an error that other ranks repeat.
QUOTED = 1500
#: Bytes of the digest by which a rank tells the others what it is about to do.
MARK = 8
#: No model has more heads; a tensor that seems to, and has few tokens, has probably not been transposed.
MANY_HEADS = 256
SWAPPED = (
    "; if the tensors are [batch, tokens, heads, head_dim], pass x.transpose(1, 2) (the modules of ringattn.nn take "
    "order='BNHD')"
)
#: Handshakes that a transport remembers.
REMEMBERED = 1024


@dataclass(frozen=True)
class Call:
    """The arguments of a call beside its tensors."""

    pattern: Pattern
    layout: str | Layout
    schedule: str
    kernel: str
    scale: Any
    deterministic: bool
    wire_dtype: Any = None
    machine: Machine | str | None = None
    rotate: Any = "auto"
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
        if str(q.dtype).removeprefix("torch.") not in ITEM_BYTES:
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
        "dtype": str(q.dtype).removeprefix("torch."),
        "batch": q.shape[0],
    }


def agree(
    transport: Transport, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call,
    wrong: RingAttentionError | None = None,
) -> tuple[Plan, Kernel]:  # fmt: skip
    """The plan that all ranks of the transport run, and this rank's kernel.

    Every call begins with a few bytes from each rank: what it is about to do. Where all ranks have done the same
    together before, the answer is remembered; else a handshake follows. So a rank whose own arguments are the same
    as before still hears that another's shard has changed, or is wrong. Where one rank's arguments are wrong
    (`wrong` is what its caller has found already), or ranks disagree, every rank raises.
    """
    error: RingAttentionError | None = None
    key: Any = None
    kernel: Kernel | None = None
    record: dict[str, Any] = {}
    try:
        if wrong is not None:
            raise wrong
        kernel = call.check(q, k, v)
        transport.check(q.device)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        key = (tuple(q.shape), tuple(k.shape), tuple(v.shape), q.dtype, q.device, grad, call)
        record = _record(q, k, v, call, grad)
    except RingAttentionError as caught:
        error = caught
        record = {"error": str(caught)[:QUOTED]}
    mine = json.dumps(record).encode()
    marks = tuple(transport.gather(hashlib.blake2b(mine, digest_size=MARK).digest()))
    known = None if error is not None else transport.agreed.get((key, marks))
    if known is not None:
        return known
    records = [json.loads(raw) for raw in transport.gather(mine)]
    _raise_errors(records, error)
    _compare(records)
    plan, error = None, None
    try:
        rows = [found["rows"] for found in records]
        tokens = sum(rows)
        plan = make_plan(
            call.pattern, tokens=tokens, ranks=transport.size, layout=call.layout, schedule=call.schedule,
            machine=get_machine(call.machine, q.device.type), wire_dtype=call.wire_dtype, rotate=call.rotate,
            **describe(q, k, v),
        )  # fmt: skip
        _check_rows(plan, rows)
        record = {"plan": plan.hash}
    except RingAttentionError as caught:
        error = caught
        record = {"error": str(caught)[:QUOTED]}
    records = [json.loads(raw) for raw in transport.gather(json.dumps(record).encode())]
    _raise_errors(records, error)
    _compare(records)
    assert plan is not None and kernel is not None
    if len(transport.agreed) >= REMEMBERED:
        transport.agreed.clear()  # on all ranks alike: they make the same calls
    if not call.pattern.transient:
        transport.agreed[key, marks] = (plan, kernel)
    return plan, kernel


def _record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, grad: bool) -> dict[str, Any]:
    pattern = repr(call.pattern) if not call.pattern.transient else f"{_SELECTED} {_digest(repr(call.pattern))}"
    return {
        "rows": q.shape[2],
        **describe(q, k, v),
        "device": q.device.type,
        "pattern": pattern if len(pattern) < 200 else f"{pattern[:160]}... (digest {_digest(pattern)})",
        "layout": call.layout if isinstance(call.layout, str) else _written(call.layout),
        "schedule": call.schedule,
        "kernel": call.kernel,
        "machine": repr(get_machine(call.machine, q.device.type)),
        "scale": call.scale,
        "deterministic": call.deterministic,
        "wire_dtype": None if call.wire_dtype is None else str(call.wire_dtype),
        "rotate": call.rotate,
        "return_lse": call.return_lse,
        "requires_grad": grad,
    }


def _written(layout: Layout) -> str:
    return f"{layout.name} (partition {layout.digest})" if layout.digest else layout.name


_SELECTED = "blocks selected anew (all ranks need the same scorer weights, k, and train or eval mode),"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _raise_errors(records: list[dict[str, Any]], mine: RingAttentionError | None) -> None:
    if mine is not None:
        raise mine
    for rank, record in enumerate(records):
        if "error" in record:
            raise Mismatch(f"rank {rank} cannot take part: {record['error']}")


def _compare(records: list[dict[str, Any]]) -> None:
    for name in records[0]:
        values = [record[name] for record in records]
        if name != "rows" and any(value != values[0] for value in values):
            who = {value: [r for r, other in enumerate(values) if other == value] for value in values}
            parts = [f"{value} on rank{'s' if len(ranks) > 1 else ''} {_ranks(ranks)}" for value, ranks in who.items()]
            raise Mismatch(f"the ranks disagree about {name}: {'; '.join(parts)}. All ranks must pass the same")


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
