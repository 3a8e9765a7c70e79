"""Handshakes of real ranks: equal arguments in any form, tables that differ, exceptions in the middle, missing
ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import told_by

import ringattn as ra
from ringattn import Causal, Full, Window
from ringattn.call import compile as compiled
from ringattn.call import functional
from ringattn.call import handshake as agreement
from ringattn.call.arguments import OPTION_NAMES
from ringattn.transport import records
from ringattn.transport.base import Post, Transport
from ringattn.transport.torchdist import TorchDist

TOKENS = 24
#: Seconds after which a hang is told: long on a busy machine, and never waited for where all is well.
PATIENCE = 40.0


class Heard:
    """A transport that notes the stages of its exchanges."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.stages = inner, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gather(self, record: bytes, stage: str) -> list[bytes]:
        self.stages.append(stage)
        return self.inner.gather(record, stage)


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
        heard.stages.clear()
        outs = [
            ra.ring_attention(*mine, Causal(), transport=heard, **options)
            for options in (plain, other if odd else plain, plain, plain if odd else other)
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)
        told.append(list(heard.stages))
    return told


#: Where an exception is put: a name of a module that a handshake looks up.
STAGES = {
    "options": (functional, "compile_call"),
    "arguments": (compiled, "_resolve"),
    "preparation": (compiled.CompiledCall, "prepare"),
    "kernel": (compiled, "get_kernel"),
    "record": (agreement, "_spell"),
    "plan": (compiled, "find_plan"),
    "rows": (agreement, "_check_rows"),
}


def exceptions(rank: int, kind: str) -> dict[str, tuple[str, str]]:
    """What each rank is told where rank 1 raises in the middle of a handshake, and in the next call."""
    error = {"memory": MemoryError("no room"), "interrupt": KeyboardInterrupt(), "ours": ra.Unsupported("not today")}[
        kind
    ]
    mine = _shard(rank)

    def broken(*arguments: Any, **more: Any) -> Any:
        raise error

    told = {}
    for number, (stage, (module, name)) in enumerate(STAGES.items()):
        if kind == "ours" and stage in ("plan", "rows"):  # whatever raises it there raises it on all ranks
            continue
        transport = TorchDist(dist.new_group(), timeout=PATIENCE)
        compiled._calls.clear()
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
                patch.setattr(functional, "Runner", broken)
            now = told_by(lambda: ra.ring_attention(q, k, v, apart, transport=transport, layout="contiguous"))
        after = told_by(lambda: ra.ring_attention(q, k, v, Full(), transport=transport, layout="contiguous"))
        told.append((now, after))
    return told


#: Of every argument that ranks compare, a value unlike that of `disagreements`.
OTHERS: dict[str, Any] = {
    "pattern": Full(), "layout": "zigzag", "schedule": "direct", "kernel": "reference", "machine": "cuda",
    "scale": -0.5, "deterministic": True, "comm_dtype": "bfloat16", "rotate": "q", "softcap": 30.0,
    "dropout": 0.5, "check": "now", "reproducible": 16, "return_lse": True, "sinks": torch.zeros(2),
    "key_padding_mask": torch.zeros(1, TOKENS // 3, dtype=torch.bool),
}  # fmt: skip


def disagreements(rank: int, names: list[str]) -> dict[str, str]:
    """What each rank is told where the last rank gives one argument another value."""
    transport, mine, told = TorchDist(timeout=PATIENCE), _shard(rank), {}
    plain: dict[str, Any] = {"pattern": Causal(), "layout": "contiguous", "schedule": "auto", "scale": 0.5}
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
    """Rank 1 leaves a handshake without a word, or sends what is no record."""
    transport, mine, told = TorchDist(timeout=PATIENCE), _shard(rank), []
    gather = transport.gather

    def leaves(record: bytes, stage: str) -> list[bytes]:
        raise KeyboardInterrupt

    def call(pattern: ra.Pattern) -> str:
        return told_by(lambda: ra.ring_attention(*mine, pattern, transport=transport, layout="zigzag"))

    if rank == 1:
        transport.gather = leaves  # type: ignore[method-assign]
    left = call(Window(1))
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
    compiled._calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(agreement, "_spell", lambda *arguments: b'["no", "fields"]')
        now = call(Window(5))
    compiled._calls.clear()  # rank 1 has kept a digest of this
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


# -- a group that NCCL would serve, with Gloo in its place

#: What waits for a device.
WAITS = ((torch.cuda, "synchronize"), (torch.Tensor, "item"), (torch.Tensor, "cpu"), (torch.Tensor, "cuda"))


class OnGpu(TorchDist):
    """A group that NCCL would serve: messages travel on Gloo, records as for NCCL."""

    connected = 0

    def __init__(self, group: Any = None, **options: Any) -> None:
        super().__init__(group, **{"timeout": PATIENCE, **options})
        self._backends = {"cuda": "nccl"}

    def check(self, device: torch.device) -> None:
        """CPU tensors stand for those of CUDA."""
        self._device = device

    def post(self, post: Post) -> list[tuple[Any, str]]:
        self._backends = {"cpu": "gloo"}
        try:
            return super().post(post)
        finally:
            self._backends = {"cuda": "nccl"}

    def _connect(self) -> None:
        self.connected += 1


def _raise(*_: object, **__: object) -> None:
    raise AssertionError("a handshake waits for a device")


def handshakes(rank: int, name: str) -> Any:
    """A case of this file whose records travel as for NCCL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TorchDist", OnGpu)
        return globals()[name](rank)


def calls(rank: int) -> tuple[list[str], int]:
    """(what each of some calls told this rank, how often NCCL was asked to connect the ranks)."""
    group, told = dist.new_group(), []
    ring = OnGpu(group)
    source = torch.Generator().manual_seed(rank)
    rows = TOKENS // dist.get_world_size()
    x = [torch.randn(1, 2, rows, 8, generator=source).requires_grad_() for _ in range(3)]

    def step(pattern: ra.Pattern) -> None:
        out = ra.ring_attention(*x, pattern, layout="contiguous", transport=ring, kernel="reference")
        torch.autograd.grad(out, x, torch.ones_like(out))

    told.append(told_by(lambda: step(Causal())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_connect", _raise)
        patch.setattr(dist, "all_gather", _raise)
        patch.setattr(dist, "all_gather_into_tensor", _raise)
        for owner, name in WAITS:
            patch.setattr(owner, name, _raise)
        for _ in range(3):
            told.append(told_by(lambda: step(Causal())))
        told.append(told_by(lambda: step(Window(5) if rank == 1 else Causal())))
        told.append(told_by(lambda: step(Causal())))
    dist.destroy_process_group(group)
    return told, ring.connected


def lifetimes(rank: int) -> list[bool]:
    """For some groups that are made, used and destroyed in turn: whether what carried their records lives on."""
    lives = []
    for _ in range(3):
        threads, group = threading.active_count(), dist.new_group()
        ring = OnGpu(group)
        ring.gather(b"record")
        dist.destroy_process_group(group)
        del group
        lives.append(threading.active_count() > threads)
    return lives


Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi
SIZE = 3
LOUD = 100.0


def test_equal_arguments_in_any_form_agree(run_ranks: Run) -> None:
    """All ranks pass the same number of exchanges: nobody remembers what another still compares."""
    told = run_ranks(forms, SIZE, timeout=LOUD)
    assert told[0] == told[1] == told[2]
    for stages in told[0]:
        assert stages.count("call") == 4 and len(stages) in (4, 8)
    # Only a partition by name and by object is compared in full.
    assert sum(len(stages) for stages in told[0]) == 9 * 4 + 4


def test_records_of_an_nccl_group_touch_no_device(run_ranks: Run) -> None:
    """Warm calls, forward and backward, wait for no device; a rank that diverges later is told by name."""
    for rank, (told, connected) in enumerate(run_ranks(calls, SIZE, timeout=LOUD)):
        assert told[:4] == ["fine"] * 4 and told[5] == "fine" and connected == 1
        assert "the ranks disagree about pattern" in told[4] and "on rank 1" in told[4], (rank, told)


def test_what_carries_records_ends_with_its_group(run_ranks: Run) -> None:
    assert run_ranks(lifetimes, SIZE, timeout=LOUD) == [[False] * 3] * SIZE


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        ("memory", "MemoryError: no room", "it raised MemoryError: no room. Look at that rank's"),
        ("interrupt", "KeyboardInterrupt: ", "it raised KeyboardInterrupt: "),
        ("ours", "Unsupported: not today", "not today"),
    ],
)
def test_any_exception_of_one_rank_is_told_to_all(run_ranks: Run, kind: str, own: str, others: str) -> None:
    told = run_ranks(exceptions, SIZE, kind, timeout=LOUD)
    for stage in told[0]:
        assert told[1][stage][0] == own and (told[1][stage][1] == "fine") is (stage not in ("plan", "rows")), stage
        for rank in (0, 2):
            now, after = told[rank][stage]
            assert now.startswith(f"Mismatch: rank 1 cannot take part: {others}"), (stage, now)
            # After the exchange of the handshake the others may wait for messages, so that an error is final.
            assert after == ("fine" if stage not in ("plan", "rows") else now), (stage, after)


def test_a_rank_that_leaves_after_the_agreement_finds_the_others_again(run_ranks: Run) -> None:
    left, stayed = [("MemoryError: no room", "fine"), ("KeyboardInterrupt: ", "fine")], [("fine", "fine")] * 2
    assert run_ranks(after_agreement, SIZE, timeout=LOUD) == [stayed, left, stayed]


def test_every_argument_is_compared(run_ranks: Run) -> None:
    """Also options that were added since: each has a value in `OTHERS`."""
    names = [*OPTION_NAMES, "pattern", "layout", "return_lse", "sinks", "key_padding_mask"]
    for told in run_ranks(disagreements, SIZE, names, timeout=LOUD):
        for name in names:
            assert told[name].startswith(f"Mismatch: the ranks disagree about {name}: "), (name, told[name])


def test_a_record_of_long_arguments_is_short_and_tells_them_apart() -> None:
    x = torch.zeros(1, 1, 4, 8)
    call = compiled.compile_call(x, x, x, Causal(), "contiguous", {})
    long = [replace(call, options=replace(call.options, schedule="s" * 20_000 + end)) for end in "ab"]
    made = [agreement._spell(one) for one in long]
    assert made[0] != made[1] and max(map(len, made)) < agreement.LIMIT


def test_what_is_no_option_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of other devices and releases, or of gradients on one rank only, have another record."""
    x = torch.zeros(1, 1, 4, 8)
    call = compiled.compile_call(x, x, x, Causal(), "contiguous", {})
    others: list[dict[str, Any]] = [{}, {"device": torch.device("meta")}, {"requires_grad": True}]
    others += [{"sizes": {**call.sizes, name: 9}} for name in call.sizes]
    others += [{"q_layout": layout} for layout in ("zigzag", "contiguous")]
    made = [agreement._spell(replace(call, **other)) for other in others]
    monkeypatch.setattr(agreement, "FORMAT", agreement.FORMAT + 1)
    made.append(agreement._spell(replace(call)))
    assert len({*made}) == len(made)


def test_exceptions_in_an_adaptive_module(run_ranks: Run) -> None:
    told = run_ranks(adaptive, SIZE, timeout=LOUD)
    for step, (now, after) in enumerate(told[1][:-1]):
        assert (now, after) == ("MemoryError: no room", "fine"), step
        for rank in (0, 2):
            assert told[rank][step][0].startswith("Mismatch: rank 1 cannot take part: it raised MemoryError"), step
            assert told[rank][step][1] == "fine", step
    for rank, blamed in enumerate(("rank 1 has blocks of 6", "rank 0 has blocks of 4", "rank 1 has blocks of 6")):
        assert blamed in told[rank][-1][0] and told[rank][-1][1] == "fine"


@pytest.mark.parametrize("nccl", [False, True])
def test_ranks_that_are_out_of_step_are_told_and_go_on(run_ranks: Run, nccl: bool) -> None:
    run = (handshakes, SIZE, "out_of_step") if nccl else (out_of_step, SIZE)
    told = run_ranks(*run, timeout=LOUD)
    for now, after in (of_rank[0] for of_rank in told):
        assert "about pattern: Window(left=1, right=0) on ranks 0, 2; Full() on rank 1" in now and after == "fine"
    words = (
        "sent 0 bytes where the ranks exchange",
        "sent 1 byte where the ranks exchange",
        "sent 1,400 bytes where",
        "speaks version 7",
        "sent 1 byte that cannot be decoded",
    )
    for number, word in enumerate(words, 1):
        for rank in (0, 2):
            now, after = told[rank][number]
            assert now.startswith("Mismatch: rank 1 ") and word in now and after == "fine"
        assert told[1][number] == ("-", "fine")
    for rank in range(SIZE):
        now, after = told[rank][-1]
        assert now.startswith("Mismatch: rank 1 sent 16 bytes that cannot be decoded") and after == "fine"


def test_the_timeout_is_that_of_the_group_and_errors_name_who_is_missing(run_ranks: Run) -> None:
    told = run_ranks(timeouts, SIZE, 3.0, timeout=LOUD)
    for rank in range(SIZE):
        assert told[rank]["timeout"] == [600.0, 2.0, 9.0]
        assert told[rank]["late"] == "fine"
    for rank in range(SIZE - 1):
        text = told[rank]["absent"]
        assert text.startswith(
            f"CommFailure: rank {rank} of 3: records of all ranks: rank 2: it has made no call on this group"
        )
