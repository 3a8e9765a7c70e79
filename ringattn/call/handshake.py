"""The handshake: ranks compare what they are about to do, before a call's first message or while its messages travel.

Before the first message, every rank sends in one exchange a digest of its normalized arguments, and the values that may
differ between ranks, mainly its number of rows. If the digests are equal, every rank makes the plan by itself, and all
make the same one. Otherwise a second exchange, "arguments", compares the arguments in full, and a third one, "plan",
the plans: a layout may be given by name on one rank and as an object on another. For a deferred comparison
(`announces`), a rank sends the digest and goes on, see `transport.comparison`.

The next exchange depends only on what all ranks received in the previous one, so all ranks enter the same exchanges. If
a rank raises before an exchange, its error replaces its record and ends the handshake on all ranks
(`transport.records`): that rank raises its own exception, the other ranks raise a Mismatch that names the rank. An
exception after the last exchange ends the calls of all ranks (`Transport.fail`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial

import torch

from ..cache import cached
from ..errors import Mismatch
from ..kernels.contract import VisitKernel
from ..layout.regular import Layout, name_rows
from ..plan.plan import FORMAT, Plan
from ..transport.base import TAG_BITS, Transport
from ..transport.records import (
    FINGERPRINT_BYTES,
    ORDER,
    ErrorReport,
    Exchange,
    by_rank,
    compare,
    compare_records,
    digest,
    undecoded,
)
from .compile import CompiledCall

#: The maximum bytes of a record of arguments. Long fields are shortened to digests.
LIMIT = 1 << 14
#: Bytes of a number in a record.
NUMBER = 8
#: Bytes of a call's record: fingerprint, rows, index in a compiled graph, tokens; with dropout a seed follows.
FIXED = FINGERPRINT_BYTES + 3 * NUMBER
#: Bytes of the longest record of a call: if queries have their own layout, their rows and tokens follow.
LONGEST = FIXED + 3 * NUMBER
#: The index of a call in its compiled graph, from 1; 0 outside of compiled graphs.
call_index: ContextVar[int] = ContextVar("ringattn_call_index", default=0)


def agree(transport: Transport, call: CompiledCall, stage: str = "call") -> tuple[Plan, VisitKernel, int]:
    """Compare an attention call between ranks; return its plan, this rank's kernel, and the number of the call.

    The plan and the number are equal on all ranks. `stage` names the kind of call: if ranks are at different stages,
    all of them raise Mismatch. Collective.
    """
    kernel, drops = call.kernel, call.kernel.dropout is not None
    with Exchange(transport, stage, limit=LONGEST) as exchange:
        exchange.mine = _make_record(call, call_index.get())
        if kernel.dropout is not None and stage == "call":
            exchange.mine += (kernel.dropout.seeded().seed or 0).to_bytes(NUMBER, "little")
    records = tuple(exchange.records)
    plan = call.cache.answer(
        (agree, transport.size, records),
        partial(_plan_together, transport, call, stage, records),
        keep=lambda plan: not drops and _are_alike(records),
    )
    kernel = _share_seed(kernel, records) if drops else kernel
    return plan, kernel, transport.events << TAG_BITS


@cached
def _make_record(call: CompiledCall, index: int) -> bytes:
    """This rank's record for call number `index` of a compiled graph, without a seed for dropout."""
    numbers = [call.rows, index, _count_tokens(call.layout)]
    if call.q_layout is not None:
        numbers += [call.q_rows, _count_tokens(call.q_layout)]
    return digest(_spell(call)) + b"".join(x.to_bytes(NUMBER, "little") for x in numbers)


def _are_alike(records: Sequence[bytes]) -> bool:
    """Whether the digests in the records of all ranks are equal."""
    return len({raw[:FINGERPRINT_BYTES] for raw in records}) == 1


def _plan_together(transport: Transport, call: CompiledCall, stage: str, records: Sequence[bytes]) -> Plan:
    """The plan that follows from the records of all ranks."""
    for rank, raw in enumerate(records):
        if len(raw) not in range(FIXED, LONGEST + 1, NUMBER):
            raise undecoded(rank, raw)
    _compare_indices(_read_numbers(records, FINGERPRINT_BYTES + NUMBER))
    alike = _are_alike(records)
    if not alike:
        with Exchange(transport, "arguments", LIMIT) as arguments:
            arguments.mine = _spell(call)
        compare_records(arguments.records)
    q_rows = rows = _read_numbers(records, FINGERPRINT_BYTES)
    _compare_tokens(_read_numbers(records, FINGERPRINT_BYTES + 2 * NUMBER), sum(rows))
    if call.q_layout is not None:
        q_rows = _read_numbers(records, FIXED)
        _compare_tokens(_read_numbers(records, FIXED + NUMBER), sum(q_rows))

    def make() -> Plan:
        layout, q_layout = name_rows(call.layout, rows), name_rows(call.q_layout, q_rows)
        plan = call.plan(sum(rows), sum(q_rows), transport.size, layout, q_layout)
        _check_rows(plan.layout, dict(enumerate(rows)))
        if call.q_layout is not None:
            _check_rows(plan.layout_of("q"), dict(enumerate(q_rows)))
        return plan

    if alike:
        # If planning fails, the arguments are wrong, and equal on all ranks: all ranks raise the same error.
        with ErrorReport(transport, stage, deferred=True, common=(ValueError,)):
            return make()
    with Exchange(transport, "plan", LIMIT) as plans:
        plan = make()
        layouts = {"layout": spell_layout(plan.layout), "q_layout": spell_layout(plan.layout_of("q"))}
        plans.mine = json.dumps({**layouts, "plan": plan.hash}).encode()
    compare_records(plans.records)
    return plan


def announces(transport: Transport, call: CompiledCall) -> bool:
    """Whether ranks can compare the call while its messages travel, because each rank can make the plan alone.

    A rank cannot if a layout is given by name, which needs the number of rows of all ranks, or if dropout has no seed,
    which needs the seed of rank 0.
    """
    drawn = call.kernel.dropout is not None and call.kernel.dropout.seed is None
    by_name = isinstance(call.layout, str) or isinstance(call.q_layout, str)
    return transport.defers(call.options.check) and not by_name and not drawn


def announce(transport: Transport, call: CompiledCall) -> tuple[Plan, VisitKernel, int]:
    """Like `agree`, but without waiting for other ranks; only for calls for which `announces` is True.

    Errors of other ranks are raised later; the group can then make no more calls.
    """
    plan, fields = _plan_alone(call, transport.rank, transport.size)
    announced = b'{"stage": "call", "index": %d, %s' % (call_index.get(), fields)
    return plan, call.kernel.seeded(), transport.announce(announced)


@cached
def _plan_alone(call: CompiledCall, rank: int, size: int) -> tuple[Plan, bytes]:
    """(plan, end of the call's record) for a call whose layouts are known."""
    layout, q_layout = call.layout, call.q_layout or call.layout
    assert isinstance(layout, Layout) and isinstance(q_layout, Layout)
    plan = call.plan(layout.tokens, q_layout.tokens, size, layout, call.q_layout)
    _check_rows(plan.layout, {rank: call.rows})
    if call.q_layout is not None:
        _check_rows(plan.layout_of("q"), {rank: call.q_rows})
    seed = None if call.kernel.dropout is None else call.kernel.dropout.seed
    record = {"tokens": layout.tokens, "q_tokens": q_layout.tokens, "seed of dropout": seed}
    return plan, json.dumps(record)[1:-1].encode() + b", " + _spell(call)[1:]


def _read_numbers(records: Sequence[bytes], first: int) -> list[int]:
    """The number at byte `first` of each rank's record; first=-NUMBER: the last number."""
    return [int.from_bytes(raw[first:][:NUMBER], "little") for raw in records]


def _count_tokens(layout: str | Layout) -> int:
    """The tokens of a layout, plus one; 0 for a name, which fits any number of tokens."""
    return 0 if isinstance(layout, str) else layout.tokens + 1


def _compare_tokens(counts: list[int], held: int) -> None:
    """Raise a Mismatch on every rank if the layouts of the ranks are for different numbers of tokens."""
    name = "the tokens of a layout"
    compare({rank: {name: count - 1 if count else held} for rank, count in enumerate(counts)})


def _share_seed(kernel: VisitKernel, records: Sequence[bytes]) -> VisitKernel:
    """The kernel with the seed of rank 0. Raises Mismatch on every rank if the ranks were given different seeds."""
    assert kernel.dropout is not None
    seeds = _read_numbers(records, -NUMBER)
    if kernel.dropout.seed is not None:
        compare({rank: {"the seed of dropout": seed} for rank, seed in enumerate(seeds)})
    return kernel.seeded(seeds[0])


def _compare_indices(indices: list[int]) -> None:
    """Raise a Mismatch on every rank if compiled graphs run calls in different orders; 0: a call outside of graphs."""
    if len({0, *indices}) > 2:
        calls = "; ".join(f"rank {rank} runs call {index}" for rank, index in enumerate(indices) if index)
        raise Mismatch(
            f"the compiled graphs of the ranks run their calls in different orders: {calls}. Compile the same function "
            "on all ranks, or keep calls that do not depend on each other in separate graphs"
        )


def agree_backward(transport: Transport, number: int, *, deferred: bool) -> None:
    """Check that all ranks begin the backward of the same call, that of `number`; else raise Mismatch on every rank.

    If ranks ran backwards in different orders, they would add gradients of one call to those of another. A few bytes
    from each rank prevent this. With `deferred`, the check does not wait, and errors are raised later. Collective.
    """
    if deferred:
        record = {"stage": "backward", ORDER: f"that of call {number >> TAG_BITS:,}"}
        transport.announce(json.dumps(record).encode())
        return
    with Exchange(transport, "backward", NUMBER) as exchange:
        exchange.mine = number.to_bytes(NUMBER, "little")
    numbers = _read_numbers(exchange.records, 0)
    compare({rank: {ORDER: f"that of call {other >> TAG_BITS:,}"} for rank, other in enumerate(numbers)})


@cached
def _spell(call: CompiledCall) -> bytes:
    """This rank's arguments, normalized, as JSON: equal arguments give equal text."""
    pattern = repr(call.pattern)
    if call.pattern.transient:
        pattern = f"{_SELECTED} {_short_digest(pattern)}"
    machine = call.machine() if call.chooses else None
    record = {
        "sinks": call.sinks,
        "key_padding_mask": call.key_padding_mask,
        "chosen keys": call.chosen and "groups {}, k {}, block {}".format(*call.chosen),
        "block": None,
        "travel": call.travel,
        "reproducible": None,  # before the schedule, which depends on it
        **{
            name: x if name != "block" else repr(x) for name, x in call.sizes.items()
        },  # before the scale, which depends on the head dim, which depends on the mask
        **{name: _shorten(x) if isinstance(x, str) else x for name, x in vars(call.options).items()},
        "machine": machine and f"{machine.preset or 'measured or own numbers'} (digest {_short_digest(repr(machine))})",
        "dropout": _spell_dropout(call.kernel),
        "pattern": _shorten(pattern),
        "layout": spell_layout(call.layout),
        "q_layout": None if call.q_layout is None else spell_layout(call.q_layout),
        "return_lse": call.return_lse,
        "plans": FORMAT,
        "device": call.device.type,
        "requires_grad": call.requires_grad,
        "op of leaves": None if call.options.reproducible is None else _spell_op(call),
    }
    return json.dumps(record).encode()


def _spell_op(call: CompiledCall) -> str:
    """What decides the bits of a leaf, except numbers: the kernel, the library, the CPU's instructions or the GPU."""
    device = torch.cuda.get_device_name(call.device) if call.device.type == "cuda" else ""
    return f"{call.kernel.name} of torch {torch.__version__} with {device or torch.backends.cpu.get_cpu_capability()}"


def spell_layout(layout: str | Layout) -> str:
    """The name of a layout; if the name alone does not determine the layout, a digest of its partition is added."""
    if isinstance(layout, str):
        return layout
    return f"{layout.name} (partition {layout.digest})" if layout.digest else layout.name


def _spell_dropout(kernel: VisitKernel) -> str | None:
    """The probability, and whether the seed is given, as text; None if no weight is dropped."""
    drop = kernel.dropout
    return None if drop is None else f"{float(drop.p)} by a {'drawn' if drop.seed is None else 'given'} seed"


#: The text for a pattern that a scorer selects anew in every call.
_SELECTED = "blocks selected anew (all ranks need the same scorer weights, k, and train or eval mode),"


def _shorten(text: str) -> str:
    """The text, or its beginning and a digest if it is long."""
    return text if len(text) <= 100 else f"{text[:70]}... (digest {_short_digest(text)})"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_rows(layout: Layout, rows: dict[int, int]) -> None:
    """Raise a Mismatch that lists the rows of ranks if a rank's number of rows differs from the layout's."""
    layout = layout.base
    planned = {rank: layout.rows(rank) for rank in rows}
    if rows != planned:
        more = ", pattern=..., heads=..." if layout.digest else ""
        raise Mismatch(
            f"the shards do not fit the layout {layout.name}: the ranks hold {by_rank(rows)}; for these "
            f"{layout.tokens:,} tokens the layout gives {by_rank(planned)}. A shard is wrong, or another layout "
            f"has cut the sequence; shard with ringattn.make_layout({layout.name!r}, tokens=..., ranks={layout.ranks}"
            f"{more}).shard_tensor(x, rank), with the tokens of the whole sequence"
        )
