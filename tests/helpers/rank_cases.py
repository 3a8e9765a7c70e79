"""What the ranks of tests/multi run: module-level functions, importable by a spawned process."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Case, make_case
from rank_pool import told_by, wait_for_files

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, Pattern, Sinks, Strided, Window, global_local, mix
from ringattn.call.functional import get_transport
from ringattn.transport.base import Transport
from ringattn.transport.torchdist import TorchDist

TOKENS = 101
PATTERNS: tuple[Pattern, ...] = (
    Full(),
    Causal(),
    Causal() & Window(20),
    Window(5, 9),
    Causal() & Documents([[40, 1, 60], [101]]),
    Causal() & (Sinks(2) | Window(7)),
    mix(Causal(), Strided(3)),
    Dilated((16, 40), (2, 3)),
    Dilated((16, 40), (2, 3), causal=True, mix="group"),
    global_local(8, globals=1, blocks=1),
)


def messages_left(rank: int) -> list[int]:
    """The sizes of tensors that are alive after a forward and backward whose tensors are dropped."""
    q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))
    ra.ring_attention(q, k, v, Full(), layout="contiguous").sum().backward()
    del q, k, v
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance asks torch's lazy objects, some of which are deprecated
        return [x.numel() for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.numel() >= 4096]


def profiled_ranges(rank: int) -> list[str]:
    """The ranges of a forward and a backward that torch.profiler saw on this rank, in order."""
    q, k, v = (torch.randn(1, 2, 256, 8, requires_grad=True) for _ in range(3))
    with torch.profiler.profile() as profile:
        out = ra.ring_attention(q, k, v, Causal() & Window(200), layout="contiguous", schedule="ring")
        out.sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("rank ")]


def equals_virtual(rank: int, dtype: str, heads: tuple[int, int]) -> int:
    """A quarter of all patterns x layouts x schedules, so that all pairs meet: bit for bit the virtual ranks, and the
    planned bytes. Cells checked."""
    return compare_with_virtual(TorchDist(timeout=30), dtype, heads, PATTERNS)


def compare_with_virtual(
    transport: Transport, dtype: str, heads: tuple[int, int], patterns: tuple[Pattern, ...]
) -> int:
    """`equals_virtual` on any transport."""
    rank, size, cells = transport.rank, transport.size, 0

    def virtual(case: Case, pattern: Pattern, options: dict[str, Any]) -> list[torch.Tensor]:
        """What virtual ranks give: worked out by one rank, another one from cell to cell, and told to all."""
        told = b""
        if rank == cells % size:
            whole = case.leaves()
            out, lse = ra.virtual_attention(*whole, pattern, ranks=size, **options)
            assert case.grad_lse is not None
            grads = torch.autograd.grad((out, lse), whole, (case.grad, case.grad_lse.to(lse.dtype)))
            told = pickle.dumps([x.detach() for x in (out, lse, *grads)])
        return pickle.loads(transport.gather(told)[cells % size])

    schedules = ["ring", "direct", "allgather", f"double_ring({2 if size == 4 else 1})"]
    if size % 2 == 0 and heads[0] % 2 == 0:
        schedules[2:3] = ["ulysses(2)" if size == 2 else "ulysses(2, direct)"]
    for index, pattern in enumerate(patterns):
        for number, layout in enumerate(("contiguous", "zigzag", "striped", "striped(8)")):
            for place, schedule in enumerate(schedules):
                # Each pattern meets two layouts, others on another number of ranks, with a schedule each.
                if (index + number + place) % 4 or (index // 2 + number + size) % 2:
                    continue
                rotate = ("kv", "q")[(index + number // 2) % 2]
                dim = (16, 7, 20, 33)[cells % 4]  # rows that are no whole cache lines, too
                case = make_case(TOKENS, *heads, getattr(torch, dtype), dim=dim, lse=True)
                assert case.grad_lse is not None
                options = {"layout": layout, "schedule": schedule, "rotate": rotate, "return_lse": True}
                options |= {"scale": (0.25, -0.25)[cells % 2], "kernel": ("auto", "reference")[cells // 2 % 2]}
                if cells // 4 % 2:
                    options["sinks"] = torch.linspace(-2.0, 2.0, heads[0])
                out, lse, *grads = virtual(case, pattern, options)
                dlse = case.grad_lse.to(lse.dtype)
                made = ra.make_layout(layout, tokens=TOKENS, ranks=size)
                mine = [made.shard_tensor(x.detach(), rank).clone().requires_grad_() for x in case.inputs]
                plan = ra.make_plan(
                    pattern,
                    tokens=TOKENS,
                    ranks=size,
                    layout=layout,
                    schedule=schedule,
                    heads=heads[0],
                    kv_heads=heads[1],
                    head_dim=dim,
                    dtype=dtype,
                    batch=2,
                    rotate=rotate,
                )
                with torch.inference_mode():
                    before, _ = ra.ring_attention(*mine, pattern, transport=transport, **options)
                transport.counters.reset()
                found, found_lse = ra.ring_attention(*mine, pattern, transport=transport, **options)
                counted = transport.counters.sent_bytes, transport.counters.sent_messages
                assert counted == (plan.bytes_sent(rank), plan.messages(rank)), (pattern, layout, schedule)
                transport.counters.reset()
                cotangents = made.shard_tensor(case.grad, rank), made.shard_tensor(dlse, rank, -1)
                found_grads = torch.autograd.grad((found, found_lse), mine, cotangents)
                counted = transport.counters.sent_bytes, transport.counters.sent_messages
                assert counted == (plan.bytes_sent(rank, backward=True), plan.messages(rank, backward=True))

                assert torch.equal(before, found)
                assert torch.equal(found, made.shard_tensor(out, rank)), (pattern, layout, schedule)
                assert torch.equal(found_lse, made.shard_tensor(lse, rank, -1))
                for a, b in zip(found_grads, grads, strict=True):
                    assert torch.equal(a, made.shard_tensor(b, rank)), (pattern, layout, schedule)
                cells += 1
    return cells


def balanced_shards(rank: int) -> float:
    """Layers of two patterns on the shards of one balanced layout, then layouts that differ: the largest error."""
    size, worst = dist.get_world_size(), 0.0
    documents = Documents([60, 1, 9, 9, 9, 13])
    layout = ra.make_layout("balanced(8)", tokens=TOKENS, ranks=size, pattern=documents)
    assert layout.shard(0) != ra.make_layout("contiguous", tokens=TOKENS, ranks=size).shard(0)
    case = make_case(TOKENS, 4, 2, torch.float64)
    for pattern, name in ((documents, "balanced(8)"), (documents, layout), (Causal() & Window(20), layout)):
        whole = case.leaves()
        wanted = ra.attention(*whole, pattern)
        grads = torch.autograd.grad(wanted, whole, case.grad)
        mine = [layout.shard_tensor(x.detach(), rank).clone().requires_grad_() for x in whole]
        transport = get_transport(None, None)
        transport.counters.reset()
        found = ra.ring_attention(*mine, pattern, layout=name)
        plan = ra.make_plan(
            pattern, tokens=TOKENS, ranks=size, layout=name, heads=4, kv_heads=2, head_dim=16, dtype="float64", batch=2
        )
        assert transport.counters.sent_bytes == plan.bytes_sent(rank) > 0
        found_grads = torch.autograd.grad(found, mine, layout.shard_tensor(case.grad, rank))
        for a, b in zip((found, *found_grads), (wanted, *grads), strict=True):
            worst = max(worst, float((a - layout.shard_tensor(b, rank)).detach().abs().max()))
    # Same name, same rows, other partition: a rank that remembers its call must hear of it, too.
    rows = [list(run) for run in layout.runs]  # type: ignore[attr-defined]
    other = type(layout)(TOKENS, size, 8, tuple((first, size - 1 - owner) for first, owner in rows))  # type: ignore[call-arg]
    local = [layout.shard_tensor(x, rank) for x in case.inputs]
    with pytest.raises(ra.Mismatch, match=r"disagree about layout: balanced\(8\) \(partition \w+\) on rank 0"):
        ra.ring_attention(*local, documents, layout=layout if rank == 0 else other)
    return worst


def own_rows(rank: int) -> float:
    """`layout="rows"` on two unequal shards, of queries and of keys, against one device: the largest error."""
    case, worst = make_case(TOKENS, 4, 2, torch.float64), 0.0
    for of_queries, of_keys in (((41, 60), (41, 60)), ((70, 31), (41, 60)), ((41, 60), (0, 101))):
        whole = case.leaves()
        wanted = ra.attention(*whole, Causal())
        grads = torch.autograd.grad(wanted, whole, case.grad)
        q_layout, layout = (ra.make_layout(f"rows{x}", tokens=TOKENS, ranks=2) for x in (of_queries, of_keys))
        layouts = q_layout, layout, layout
        mine = [x.shard_tensor(y.detach(), rank).requires_grad_() for x, y in zip(layouts, whole, strict=True)]
        found = ra.ring_attention(
            *mine, Causal(), layout="rows", q_layout=None if of_queries == of_keys else "rows", schedule="ring"
        )
        found_grads = torch.autograd.grad(found, mine, q_layout.shard_tensor(case.grad, rank))
        for x, a, b in zip((q_layout, *layouts), (found, *found_grads), (wanted, *grads), strict=True):
            worst = max(worst, *(a - x.shard_tensor(b, rank)).detach().abs().flatten().tolist(), 0.0)
    return worst


def errors_on_every_rank(rank: int, transport: Transport | None = None) -> list[str]:
    """One wrong call after another; what this rank was told each time."""
    used = get_transport(None, None, transport)
    size, attend = used.size, partial(ra.ring_attention, transport=transport, layout="contiguous")
    x = torch.zeros(1, 2, 4, 8)
    odd = rank == size - 1
    calls = (
        lambda: attend(x[0] if odd else x, x, x, Causal()),
        lambda: attend(x, x.double() if odd else x, x, Causal()),
        lambda: attend(x, x, x, Window(3) if odd else Causal()),
        lambda: attend(*(torch.zeros(1, 2, 5 if odd else 4, 8) for _ in range(3)), Full(), layout="zigzag"),
        lambda: attend(*(torch.zeros(2 if odd else 1, 2, 4, 8) for _ in range(3)), Full()),
        lambda: attend(*(x.double() if odd else x for _ in range(3)), Full()),
        lambda: attend(x.clone().requires_grad_(odd), x, x, Full()),
        lambda: attend(x, x, x, Documents([7])),
        lambda: attend(x, x, x, Causal(), kernel="aten_cuda" if odd else "auto"),
        lambda: attend(x, x, x, Causal(), schedule="rong" if odd else "ring"),
        lambda: attend(x, x, x, Causal(), key_padding_mask=torch.zeros(1, 3 if odd else 4, dtype=torch.bool)),
        lambda: attend(x, x, x, Causal(), layout=None if odd else "zigzag"),
        lambda: attend(x, x, x, Causal(), layout=ra.make_layout("zigzag", tokens=4 * size + 4, ranks=size)),
        lambda: attend(x, x, x, Causal(), layout=ra.make_layout("zigzag", tokens=4 * size, ranks=size + 1)),
        lambda: attend(x, x, x, "Causl()" if odd else "Causal()"),
        *(
            partial(attend, x, x, make() if odd else x, Causal())
            for make in (x.to_sparse, partial(x.to, "meta"), partial(torch.nested.as_nested_tensor, [x[0]]))
        ),
    )
    told = []
    for call in calls:
        counters = used.counters
        counters.reset()
        told.append(told_by(call))
        assert counters.sent_messages == 0, "an error before the first message"
    # After all these the group still works.
    out = attend(x, x, x, Full())
    assert out.shape == x.shape
    return told


def varying_lengths(rank: int) -> float:
    """Calls whose lengths change from one to the next on some ranks only: the largest error against one device."""
    size, worst = dist.get_world_size(), 0.0
    cases = [("zigzag", (203, 202, 203)), ("contiguous", (200, 201, 200)), ("contiguous", (99, 101, 100, 101, 99))]
    for pattern in (Causal(), Dilated((7,), (7,)), Window(20, 3)):
        for layout, lengths in cases:
            for tokens in lengths:
                source = torch.Generator().manual_seed(tokens)
                q, k, v = (torch.randn(1, 2, tokens, 8, generator=source, dtype=torch.float64) for _ in range(3))
                made = ra.make_layout(layout, tokens=tokens, ranks=size)
                local = [made.shard_tensor(x, rank) for x in (q, k, v)]
                found = ra.ring_attention(*local, pattern, layout=layout)
                wanted = made.shard_tensor(ra.attention(q, k, v, pattern), rank)
                worst = max(worst, float((found - wanted).abs().max()))
    return worst


def _lost(how: str, folder: str, others: int) -> None:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_files(folder, others)
    raise ra.CommFailure("the rank that was away")


def one_rank_is_lost(rank: int, how: str, folder: str) -> None:
    """The last rank dies, or stays away, after the handshake; the others write down what they were told."""
    transport, others = TorchDist(timeout=2), dist.get_world_size() - 1
    x = torch.randn(1, 2, 64, 8)
    ra.ring_attention(x, x, x, Full(), transport=transport, layout="contiguous")
    if rank == others:
        transport.post = lambda post: _lost(how, folder, others)  # type: ignore[method-assign, assignment]
    try:
        ra.ring_attention(x, x, x, Full(), transport=transport, layout="contiguous")
    except ra.CommFailure as error:
        if rank < others:
            Path(folder, f"{rank}").write_text(str(error))
    wait_for_files(folder, others)  # a rank that ends is lost, too


def mesh_and_subgroup(rank: int) -> bool:
    """A DeviceMesh axis and a ProcessGroup of some ranks give what a whole world of that size gives."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(rank // 2)
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    wanted = ra.virtual_attention(q, k, v, Causal(), ranks=2, layout="zigzag")
    layout = ra.make_layout("zigzag", tokens=30, ranks=2)
    local = [layout.shard_tensor(x, rank % 2) for x in (q, k, v)]
    found = ra.ring_attention(*local, Causal(), mesh=mesh["cp"], layout="zigzag")
    group = ra.ring_attention(*local, Causal(), group=mesh["cp"].get_group(), layout="zigzag")
    with pytest.raises(ra.InvalidInput, match="mesh\\['cp'\\]"):
        ra.ring_attention(*local, Causal(), mesh=mesh, layout="zigzag")
    return torch.equal(found, layout.shard_tensor(wanted, rank % 2)) and torch.equal(found, group)


def multihead(rank: int, kind: str, layout: str, recompute: str) -> float:
    """A sharded module with rotary embeddings, shared key heads and padding: the largest error of its output and of
    its parameters' gradients, summed over the ranks, against one device."""
    size, tokens = dist.get_world_size(), 45
    options = {"kv_heads": 2, "rotary": True, "qk_norm": True, "batch_first": True, "dtype": torch.float64}

    def make(**more: Any) -> ra.nn.MultiheadAttention:
        torch.manual_seed(0)
        if kind == "adaptive":
            return ra.nn.MultiheadAdaptiveAttention(32, 4, block=7, k=3, causal=True, **options, **more)
        return ra.nn.MultiheadRingAttention(32, 4, Causal(), **options, **more)

    # In evaluation: noise differs between two draws.
    whole, mine = make().eval(), make(group=dist.group.WORLD, layout=layout, recompute=recompute).eval()
    x, grad = torch.randn(2, 2, tokens, 32, dtype=torch.float64)
    mask = torch.zeros(2, tokens, dtype=torch.bool)
    mask[0, -9:] = mask[1, 5:8] = True
    wanted, _ = whole(x, key_padding_mask=mask)
    wanted.backward(grad)
    made = ra.make_layout(layout, tokens=tokens, ranks=size)
    error = 0.0
    for call in range(2):  # the second is answered from memory
        mine.zero_grad()
        shards = [made.shard_tensor(t, rank) for t in (x, grad)]
        found, _ = mine(shards[0], key_padding_mask=made.shard_tensor(mask, rank, -1))
        found.backward(shards[1])
        error = max(error, float((found - made.shard_tensor(wanted, rank)).detach().abs().max()))
        for (name, a), (_, b) in zip(mine.named_parameters(), whole.named_parameters(), strict=True):
            assert a.grad is not None and b.grad is not None, (name, call)
            dist.all_reduce(a.grad)
            error = max(error, float((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp(min=1)))
    return error


def fail(rank: int, how: str) -> str:
    """For the launcher's own tests."""
    if rank == 1 and how == "raise":
        raise ValueError("a bad day on rank one")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), 9)
    if rank == 1 and how == "hang":
        print("about to hang", flush=True)
        time.sleep(150)
    return f"rank {rank} of {dist.get_world_size()}, {torch.get_num_threads()} threads"


WRONG = (
    (
        "InvalidInput: q must be a tensor [batch, heads, tokens, head_dim]",
        "Mismatch: rank 1 cannot take part: q must be",
    ),
    ("InvalidInput: q, k and v must have one dtype", "Mismatch: rank 1 cannot take part: q, k and v"),
    ("Mismatch: the ranks disagree about pattern: Causal() on rank 0; Window(left=3, right=0) on rank 1",) * 2,
    (
        "Mismatch: the shards do not fit the layout zigzag: the ranks hold 4 on rank 0; 5 on rank 1; for these 9 "
        "tokens the layout gives 5 on rank 0; 4 on rank 1",
    )
    * 2,
    ("Mismatch: the ranks disagree about batch: 1 on rank 0; 2 on rank 1",) * 2,
    ("Mismatch: the ranks disagree about dtype: float32 on rank 0; float64 on rank 1",) * 2,
    ("Mismatch: the ranks disagree about requires_grad: False on rank 0; True on rank 1",) * 2,
    ("InvalidInput: Documents: the 1 lengths sum to 7, the sequence has 8 tokens",) * 2,
    ("Unsupported: kernel aten_cuda needs tensors on a cuda device", "Mismatch: rank 1 cannot take part: kernel aten"),
    ("InvalidInput: unknown schedule 'rong'; did you mean 'ring'", "Mismatch: rank 1 cannot take part: unknown sched"),
    (
        "InvalidInput: key_padding_mask must be [batch, tokens] = (1, 4)",
        "Mismatch: rank 1 cannot take part: key_padding",
    ),
    (
        "InvalidInput: layout=None: the rows of a shard do not show",
        "Mismatch: rank 1 cannot take part: layout=None: the",
    ),
    ("InvalidInput: the layout zigzag was made for 12 tokens over 2 ranks, the call has 8 tokens over 2",) * 2,
    ("InvalidInput: the layout zigzag was made for 8 tokens over 3 ranks, the call has 8 tokens over 2",) * 2,
    (
        "InvalidInput: pattern 'Causl()': unknown name 'Causl'; did you mean 'Causal'",
        "Mismatch: rank 1 cannot take part: pat",
    ),
    *(
        (f"InvalidInput: {words}", "Mismatch: rank 1 cannot")
        for words in (
            "v must be a tensor [batch, heads, tokens, head_dim], got a torch.sparse_coo tensor; try to_dense()",
            "q, k and v must have one dtype and one device, got",
            "v must be a tensor [batch, heads, tokens, head_dim], got a nested tensor",
        )
    ),
)


def check_told(told: list[list[str]]) -> None:
    """What two ranks were told in `errors_on_every_rank`."""
    for good, bad, (on_bad, on_good) in zip(*told, WRONG, strict=True):
        assert bad.startswith(on_bad)
        assert good.startswith(on_good)


def same_bits(rank: int, transport: Transport | None = None) -> list[str]:
    """What differs from one process with `reproducible`, over layouts and schedules; sent bytes are those of plans."""
    transport, wrong = transport or TorchDist(timeout=30), list[str]()
    size, pattern = transport.size, Causal() & Documents([30, 71])
    case = make_case(TOKENS, 4, 2, torch.float32, lse=True)
    assert case.grad_lse is not None
    whole = case.leaves()
    results = ra.attention(*whole, pattern, reproducible=16, return_lse=True)
    one = (*results, *torch.autograd.grad(results, whole, (case.grad, case.grad_lse.float())))
    for name, schedule in (("leaves(zigzag, 16)", "direct"), ("leaves(striped(1), 16)", "ring")):
        layout = ra.make_layout(name, tokens=TOKENS, ranks=size, pattern=pattern)
        sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "batch": 2, "schedule": schedule}
        plan = ra.make_plan(pattern, tokens=TOKENS, ranks=size, layout=layout, reproducible=16, **sizes)
        mine = [layout.shard_tensor(x.detach(), rank).clone().requires_grad_() for x in case.inputs]
        options: dict[str, Any] = {"transport": transport, "layout": layout, "schedule": schedule}
        found = ra.ring_attention(*mine, pattern, reproducible=16, return_lse=True, **options)
        transport.counters.reset()
        cotangents = layout.shard_tensor(case.grad, rank), layout.shard_tensor(case.grad_lse.float(), rank, -1)
        grads = torch.autograd.grad(found, mine, cotangents)
        if transport.counters.sent_bytes != plan.bytes_sent(rank, backward=True):
            wrong.append(f"{name}, {schedule}: {transport.counters.sent_bytes} bytes")
        for index, (got, wanted) in enumerate(zip((*found, *grads), one, strict=True)):
            if not torch.equal(got, layout.shard_tensor(wanted, rank, -1 if index == 1 else -2)):
                wrong.append(f"{name}, {schedule}: result {index}")
    return wrong
