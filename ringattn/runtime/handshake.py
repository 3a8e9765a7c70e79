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
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from ..errors import Mismatch
from ..kernels.base import Kernel
from ..layout.regular import Layout
from ..plan.plan import Plan
from ..transport.base import TAG_BITS, Tags, Transport, drive
from ..transport.records import (
    MARK,
    Exchange,
    by_rank,
    compare,
    compare_records,
    describe_error,
    digest,
    undecoded,
)
from .call import Call
from .executor import Forward, Job, backward, forward

#: The most bytes of a record of arguments. Long fields are shortened to digests.
LIMIT = 1 << 14
#: Bytes of the number of a call, and of its place.
NUMBER = 8
#: Bytes of a call's record: digest, history, place in a compiled graph, number; with dropout a seed follows.
FIXED = 2 * MARK + 2 * NUMBER
#: The place of a call among those of its compiled graph, from 1 on; 0 outside of such graphs.
place: ContextVar[int] = ContextVar("ringattn_place", default=0)


def agree(transport: Transport, call: Call, stage: str = "call") -> tuple[Plan, Kernel, int]:
    """The plan that all ranks of the transport run, this rank's kernel, and the number of the call. Collective.

    The number is the largest of the ranks' own, so that ranks that have left calls early agree, too. Every exception
    between the exchanges reaches all ranks. `stage` names the first exchange: ranks that make a handshake for different
    purposes raise Mismatch. A call that `announces` waits for nobody: errors of other ranks come later, and are final.
    """
    remembered, kernel = transport.handshakes, call.kernel
    if stage == "call" and announces(transport, call):
        return announce(transport, call)
    with Exchange(transport, stage, limit=FIXED + NUMBER) as exchange:
        record = json.dumps(_record(call)).encode()
        numbers = place.get(), next(transport.calls)
        exchange.mine = digest(record) + remembered.history + b"".join(x.to_bytes(NUMBER, "little") for x in numbers)
        if kernel.dropout is not None and stage == "call":
            exchange.mine += (kernel.dropout.seeded().seed or 0).to_bytes(NUMBER, "little")
    for rank, raw in enumerate(exchange.records):
        if len(raw) not in (FIXED, FIXED + NUMBER):
            raise undecoded(rank, raw)
    _compare_places(_read_numbers(exchange.records, 2 * MARK))
    marks = tuple(raw[:MARK] for raw in exchange.records)
    plan: Plan | None = remembered.begin(marks, tuple(raw[MARK : 2 * MARK] for raw in exchange.records))
    if plan is None:
        plan = _agree_in_full(transport, call, record)
    remembered.end(marks, None if call.pattern.transient else plan)
    kernel = kernel if kernel.dropout is None else _share_seed(kernel, exchange.records)
    return plan, kernel, max(_read_numbers(exchange.records, 2 * MARK + NUMBER))


def announces(transport: Transport, call: Call) -> bool:
    """Whether the ranks compare a call beside its messages, as all that they need for it is known to each of them.

    A layout by name needs the rows of all ranks, and dropout without a seed the seed of rank 0.
    """
    drawn = call.kernel.dropout is not None and call.kernel.dropout.seed is None
    return transport.defers(call.options.check) and isinstance(call.layout, Layout) and not drawn


def announce(transport: Transport, call: Call) -> tuple[Plan, Kernel, int]:
    """As `agree`, by what this rank knows. All ranks compare their calls meanwhile, see `transport.comparison`."""
    layout = call.layout
    assert isinstance(layout, Layout)
    plan = call.plan(layout.tokens, transport.size, layout)
    if call.rows != layout.rows(transport.rank):
        raise Mismatch(
            f"rank {transport.rank} holds {call.rows} rows, where the layout {layout.name} of {layout.tokens:,} tokens "
            f"gives it {layout.rows(transport.rank)}; shard with layout.shard_tensor(x, rank)"
        )
    seed = None if call.kernel.dropout is None else call.kernel.dropout.seed
    own = {"stage": "call", "rows": None, "place": place.get(), "the seed of dropout": seed}
    record = {**_record(call), **own}
    return plan, call.kernel.seeded(), transport.announce(json.dumps(record).encode())


def _read_numbers(records: list[bytes], first: int) -> list[int]:
    """The numbers of all ranks that begin at byte `first` of their records."""
    return [int.from_bytes(raw[first : first + NUMBER], "little") for raw in records]


def _share_seed(kernel: Kernel, records: list[bytes]) -> Kernel:
    """The kernel with the seed of rank 0. Raises Mismatch on every rank if the ranks were given different seeds."""
    assert kernel.dropout is not None
    seeds = _read_numbers(records, FIXED)
    if kernel.dropout.seed is not None:
        compare({rank: {"the seed of dropout": seed} for rank, seed in enumerate(seeds)})
    return kernel.seeded(seeds[0])


def _compare_places(places: list[int]) -> None:
    """Raise a Mismatch on every rank if compiled graphs run calls in different orders; 0 is a call of no graph."""
    if len({0, *places}) > 2:
        calls = "; ".join(f"rank {rank} runs call {index}" for rank, index in enumerate(places) if index)
        raise Mismatch(
            f"the compiled graphs of the ranks run their calls in different orders: {calls}. Compile the same function "
            "on all ranks, or keep calls that do not depend on each other in graphs of their own"
        )


def _agree_in_full(transport: Transport, call: Call, record: bytes) -> Plan:
    """The plan after the exchanges "arguments" and "plan". Every rank raises Mismatch if arguments or plans differ."""
    with Exchange(transport, "arguments", LIMIT) as arguments:
        arguments.mine = record
    with Exchange(transport, "plan", LIMIT) as plans:
        records = compare_records(arguments.records)
        rows = [fields["rows"] for fields in records]
        plan = call.plan(sum(rows), transport.size, call.layout)
        _check_rows(plan, rows)
        plans.mine = json.dumps({"layout": _spell_layout(plan.layout), "plan": plan.hash}).encode()
    compare_records(plans.records)
    return plan


def agree_backward(transport: Transport, number: int, *, deferred: bool) -> None:
    """Return if all ranks begin the backward of the same call, number `number`; else raise Mismatch on every rank.

    Ranks that run backwards in different orders would add the gradients of one call to the gradients of another. A few
    bytes from each rank prevent this. Collective.
    """
    if deferred:
        record = {"stage": "backward", "call whose backward they run": number >> TAG_BITS}
        transport.announce(json.dumps(record).encode())
        return
    with Exchange(transport, "backward", NUMBER) as exchange:
        exchange.mine = number.to_bytes(NUMBER, "little")
    numbers = [int.from_bytes(raw, "little") for raw in exchange.records]
    if any(other != number for other in numbers):
        calls = "; ".join(f"rank {rank} runs that of call {other + 1:,}" for rank, other in enumerate(numbers))
        raise Mismatch(
            f"the ranks run backwards of different calls of their group: {calls}. Run backwards and calls in the same "
            "order on all ranks"
        )


def _record(call: Call) -> dict[str, Any]:
    """What this rank is about to do. Options of every name are in it, each in one spelling for equal arguments.

    `rows`, and `layout_tokens` (the tokens that a Layout was made for), may differ between ranks and are not compared.
    """
    layout, pattern = call.layout, repr(call.pattern)
    if call.pattern.transient:
        pattern = f"{_SELECTED} {_short_digest(pattern)}"
    return {
        **{entry.name: getattr(call.options, entry.name) for entry in fields(call.options)},
        "machine": _shorten(repr(call.machine())) if call.options.schedule == "auto" else None,
        "dropout": _spell_dropout(call.kernel),
        "pattern": _shorten(pattern),
        "layout": layout if isinstance(layout, str) else _spell_layout(layout),
        "layout_tokens": layout.tokens if isinstance(layout, Layout) else None,
        "return_lse": call.return_lse,
        "sinks": call.sinks,
        "key_padding_mask": call.key_padding_mask,
        "rows": call.rows,
        **call.sizes,
        "device": call.device.type,
        "requires_grad": call.requires_grad,
    }


def _spell_layout(layout: Layout) -> str:
    """The name of a layout, with a digest of the partition if the layout is balanced."""
    return f"{layout.name} (partition {layout.digest})" if layout.digest else layout.name


def _spell_dropout(kernel: Kernel) -> str | None:
    """The probability, and whether the seed is given, as text; None where no weight is dropped."""
    drop = kernel.dropout
    return None if drop is None else f"{float(drop.p)} by a {'drawn' if drop.seed is None else 'given'} seed"


#: Stands for a pattern that a scorer selects in every call.
_SELECTED = "blocks selected anew (all ranks need the same scorer weights, k, and train or eval mode),"


def _shorten(text: str) -> str:
    """The text, or its beginning and a digest if it is long."""
    return text if len(text) < 200 else f"{text[:160]}... (digest {_short_digest(text)})"


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_rows(plan: Plan, rows: list[int]) -> None:
    """Raise a Mismatch that lists the rows of all ranks if a rank's number of rows differs from the layout's."""
    layout = plan.layout.base
    planned = [layout.rows(rank) for rank in range(plan.ranks)]
    if rows != planned:
        more = ", pattern=..., heads=..." if layout.digest else ""
        raise Mismatch(
            f"the shards do not fit the layout {layout.name}: the ranks hold {by_rank(dict(enumerate(rows)))}; "
            f"of these {layout.tokens:,} tokens the layout gives {by_rank(dict(enumerate(planned)))}. A shard is "
            "wrong, or another layout has cut the sequence; shard with "
            f"ringattn.make_layout({layout.name!r}, tokens=..., ranks={plan.ranks}{more})"
            ".shard_tensor(x, rank), tokens being those of the whole sequence"
        )


@dataclass(frozen=True)
class OneRank:
    """Runs one rank of a transport. `number` counts the calls of the ring, equally on all ranks."""

    job: Job
    transport: Transport
    number: int
    deferred: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> Forward:
        tags = Tags.of_call(self.number, backward=False)
        with _told(self.transport):
            result = drive(forward(self.job, q, k, v, keep=keep, tags=tags), self.transport, self.job.rank)
            if self.deferred and not keep:  # no optimizer will wait for the comparison
                self.transport.synchronize()
            return result

    def backward(
        self, grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Forward
    ) -> tuple[Tensor, ...]:
        """(dq, dk, dv), once the ranks have agreed on the call whose backward they run."""
        agree_backward(self.transport, self.number, deferred=self.deferred)
        tags = Tags.of_call(self.number, backward=True)
        with _told(self.transport):
            program = backward(self.job, grad, grad_lse, q, k, v, result, tags=tags)
            return drive(program, self.transport, self.job.rank)


@contextmanager
def _told(transport: Transport) -> Iterator[None]:
    """A context whose exception ends the calls of all ranks, which may wait for messages of this rank."""
    try:
        yield
    except BaseException as error:
        transport.fail(describe_error(error))
        raise
