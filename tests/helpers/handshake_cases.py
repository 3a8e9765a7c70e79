"""What the ranks of test_handshake.py run: module-level functions, importable by a spawned process."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn import Causal, Full, Window, functional
from ringattn.runtime import handshake as agreement
from ringattn.transport import records
from ringattn.transport.base import Transport
from ringattn.transport.records import Agreed
from ringattn.transport.torchdist import TorchDist

TOKENS = 24
#: Seconds after which a hang is told: long on a busy machine, and never waited for where all is well.
PATIENCE = 40.0


def told_by(call: Callable[[], Any]) -> str:
    """What a call raised, or "fine"."""
    try:
        call()
    except (ra.RingAttentionError, MemoryError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


class Heard:
    """A transport that notes the stages of its exchanges."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.stages = inner, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gather(self, record: bytes) -> list[bytes]:
        self.stages.append(record[records.PREFIX : records.PREFIX + record[4]].decode())
        return self.inner.gather(record)


def _shard(rank: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(1, 2, TOKENS // dist.get_world_size(), 8, generator=source) for _ in range(3))


def forms(rank: int) -> list[list[str]]:
    """Equal arguments in forms that differ from rank to rank, and from call to call: the stages of each call."""
    size, heard = dist.get_world_size(), Heard(TorchDist(timeout=PATIENCE))
    mine, odd = _shard(rank), rank == size - 1
    made = {
        name: ra.make_layout(name, tokens=TOKENS, ranks=size, pattern=Causal(), heads=2)
        for name in ("zigzag", "balanced(2)")
    }
    pairs: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"layout": "zigzag"}, {"layout": made["zigzag"]}),
        ({"layout": "zigzag"}, {"layout": " zigzag "}),
        ({"layout": "striped"}, {"layout": "striped( 1 )"}),
        ({"layout": "balanced(2)"}, {"layout": made["balanced(2)"]}),
        ({"layout": "zigzag", "machine": "cpu"}, {"layout": "zigzag", "machine": None}),
        ({"layout": "zigzag", "schedule": "auto"}, {"layout": "zigzag", "schedule": " auto"}),
        (
            {"layout": "zigzag", "schedule": "double_ring(1)"},
            {"layout": "zigzag", "schedule": "double_ring( ranks_per_node = 1 )"},
        ),
        ({"layout": "zigzag", "comm_dtype": "bfloat16"}, {"layout": "zigzag", "comm_dtype": torch.bfloat16}),
        ({"layout": "zigzag", "scale": 1}, {"layout": "zigzag", "scale": 1.0}),
    )
    told = []
    for plain, other in pairs:
        heard.inner.agreed = Agreed()
        heard.stages.clear()
        outs = [
            ra.ring_attention(*mine, Causal(), transport=heard, **options)
            for options in (plain, other if odd else plain, plain, plain if odd else other)
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)
        told.append(list(heard.stages))
    return told


def memories(rank: int) -> list[int]:
    """Ranks whose tables of remembered handshakes differ agree nevertheless; the exchanges of each call."""
    heard, mine = Heard(TorchDist(timeout=PATIENCE)), _shard(rank)

    def call(window: int) -> int:
        heard.stages.clear()
        ra.ring_attention(*mine, Window(window), transport=heard, layout="zigzag")
        return len(heard.stages)

    counts = [call(1), call(1), call(2), call(1)]  # 3, 1, 3, 1
    if rank == 1:
        heard.inner.agreed = Agreed()  # as where this rank alone has made its transport anew
    counts += [call(1), call(1), call(2)]  # 3, 1, 3
    whole = records.REMEMBERED
    records.REMEMBERED = 3
    for window in (3, 4):  # 1 is the least recently used
        call(window)
    assert len(heard.inner.agreed) == 3
    counts += [call(2), call(1), call(3)]  # 1, 3, 3
    records.REMEMBERED = whole
    return counts


#: Where an exception is put: a name of a module that a handshake looks up, and whether ranks then hear it in this call.
STAGES = {
    "options": (functional, "_make_call"),
    "arguments": (agreement, "describe"),
    "preparation": (functional, "_prepare"),
    "scale": (functional, "positive"),
    "kernel": (agreement, "get_kernel"),
    "comparison": (agreement, "_compare"),
    "plan": (agreement, "make_plan"),
    "rows": (agreement, "_check_rows"),
}


def exceptions(rank: int, kind: str) -> dict[str, tuple[str, str]]:
    """What each rank is told where rank 1 raises in the middle of a handshake, and in the next call."""
    error = {"memory": MemoryError("no room"), "interrupt": KeyboardInterrupt(), "ours": ra.Unsupported("not today")}[
        kind
    ]
    transport, mine = TorchDist(timeout=PATIENCE), _shard(rank)

    def broken(*arguments: Any, **more: Any) -> Any:
        raise error

    told = {}
    for number, (stage, (module, name)) in enumerate(STAGES.items()):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(module, name, broken)
            now = told_by(lambda: ra.ring_attention(*mine, Window(number), transport=transport, layout="zigzag"))
        wanted = told_by(lambda: ra.ring_attention(*mine, Window(number), transport=transport, layout="zigzag"))
        told[stage] = now, wanted
    return told


def after_agreement(rank: int) -> list[tuple[str, str]]:
    """Rank 1 leaves a call that needs no message after the agreement: what each rank is told, and of the next call."""
    transport, (q, k, v), told = TorchDist(timeout=PATIENCE), _shard(rank), []
    apart = ra.Documents([q.shape[2]] * dist.get_world_size())
    for error in (MemoryError("no room"), KeyboardInterrupt()):

        def broken(*arguments: Any, error: BaseException = error, **more: Any) -> Any:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(functional, "Job", broken)
            now = told_by(lambda: ra.ring_attention(q, k, v, apart, transport=transport, layout="contiguous"))
        after = told_by(lambda: ra.ring_attention(q, k, v, Full(), transport=transport, layout="contiguous"))
        told.append((now, after))
    return told


#: Of every argument that ranks compare, a value unlike that of `disagreements`.
OTHERS: dict[str, Any] = {
    "pattern": Full(), "layout": "zigzag", "schedule": "direct", "kernel": "reference", "machine": "cuda",
    "scale": -0.5, "deterministic": True, "comm_dtype": "bfloat16", "rotate": "queries", "softcap": 30.0,
    "dropout": 0.5, "return_lse": True, "sinks": torch.zeros(2),
    "key_padding_mask": torch.zeros(1, TOKENS // 3, dtype=torch.bool),
}  # fmt: skip


def disagreements(rank: int, names: list[str]) -> dict[str, str]:
    """What each rank is told where the last rank gives one argument another value."""
    transport, mine, told = TorchDist(timeout=PATIENCE), _shard(rank), {}
    plain: dict[str, Any] = {"pattern": Causal(), "layout": "contiguous", "schedule": "ring", "scale": 0.5}
    for name in names:
        given = {**plain, name: OTHERS[name]} if rank == dist.get_world_size() - 1 else plain
        told[name] = told_by(lambda given=given: ra.ring_attention(*mine, transport=transport, **given))  # type: ignore[misc]
    return told


def adaptive(rank: int) -> list[tuple[str, str]]:
    """As `exceptions`, at the stages of an adaptive module, and with another size of blocks on one rank."""
    from ringattn.nn import adaptive as module

    mine, told = _shard(rank), []
    torch.manual_seed(0)
    transport = TorchDist(timeout=PATIENCE)
    core = ra.nn.AdaptiveAttention(2, 8, block=4, k=1, transport=transport, layout="zigzag").eval()

    def broken(*arguments: Any, **more: Any) -> Any:
        raise MemoryError("no room")

    for name in ("_block_sums", "_pack_sums", "_add_all_sums", "top_k", "SelectedBlocks"):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(module, name, broken)
            now = told_by(lambda: core(*mine))
        told.append((now, told_by(lambda: core(*mine))))
    core.block = 6 if rank == 1 else 4
    now = told_by(lambda: core(*mine))
    core.block = 4
    told.append((now, told_by(lambda: core(*mine))))
    return told


def out_of_step(rank: int) -> list[tuple[str, str]]:
    """Rank 1 leaves a handshake without a word after its first, or its second exchange, or sends what is no record."""
    transport, mine, told = TorchDist(timeout=PATIENCE), _shard(rank), []
    gather = transport.gather

    def leaves(after: int) -> Callable[[bytes], list[bytes]]:
        def once(record: bytes) -> list[bytes]:
            nonlocal after
            after -= 1
            if after < 0:
                raise KeyboardInterrupt
            return gather(record)

        return once

    def call(pattern: ra.Pattern) -> str:
        return told_by(lambda: ra.ring_attention(*mine, pattern, transport=transport, layout="zigzag"))

    for after in (1, 2):
        if rank == 1:
            transport.gather = leaves(after)  # type: ignore[method-assign]
        left = call(Window(after))
        if rank == 1:  # the others still wait for the old call, and meet the new one
            transport.gather = gather  # type: ignore[method-assign]
            assert left.startswith("KeyboardInterrupt")
            left = call(Full())
        told.append((left, call(Causal())))
    for rubbish in (b"", b"{", b"\xdd\xff" * 700, b"ra\x07\x00\x00", records.frame("call", b"\xff", records.VALUE)):
        if rank == 1:
            gather(rubbish)
            told.append(("-", call(Causal())))
        else:
            told.append((call(Causal()), call(Causal())))
    # A body that cannot be decoded, in a frame that can.
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(agreement, "_record", lambda *arguments: ["no", "fields"])
        now = call(Window(5))
    told.append((now, call(Window(5))))
    return told


def timeouts(rank: int, late: float) -> dict[str, Any]:
    """A late rank within the timeout of its group; then the last rank stays away from the groups of the others."""
    size, told = dist.get_world_size(), {}
    mine = _shard(rank)
    groups = {seconds: dist.new_group(timeout=timedelta(seconds=seconds)) for seconds in (2, 600)}
    attend = lambda seconds, **more: ra.ring_attention(*mine, Full(), group=groups[seconds], layout="zigzag", **more)  # noqa: E731
    told["timeout"] = [
        TorchDist(groups[600]).timeout,
        TorchDist(groups[2]).timeout,
        TorchDist(groups[2], timeout=9).timeout,
    ]
    if rank == 1:
        time.sleep(late)
    told["late"] = told_by(lambda: attend(600))
    if rank < size - 1:
        start = time.monotonic()
        told["absent"] = told_by(lambda: attend(2))
        told["took"] = time.monotonic() - start
    dist.barrier()
    return told
