"""Keys chosen by content: the choice against a stable sort, and attention to chosen keys against dense attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from latent_cases import HEADS, LatentCase, distance, make_latents
from rank_pool import told_by
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.call import compile as compiling
from ringattn.kernels import chosen as choosing
from ringattn.kernels.aten_cpu import AtenCpu
from ringattn.runtime.program import RankProgram

EXACT = 1e-12
PATTERNS: dict[str, ra.Pattern] = {
    "causal": ra.Causal(),
    "documents": ra.Causal() & ra.Documents([20, 37, 1, 25]),
    "full": ra.Full(),
    "window": ra.Causal() & ra.Window(6),
    "sinks": ra.Causal() & (ra.Sinks(2) | ra.Window(9)),
}
TOKENS = 83


def by_rule(q: Tensor, k: Tensor, weights: Tensor, count: int, visible: Tensor) -> Tensor:
    """The choice by a stable sort of all scores in fp64; equal keys have equal scores, as no matrix product is used."""
    q, k, weights = q.double(), k.double(), weights.double()
    groups = k.shape[1]
    products = (q.unsqueeze(3) * k.repeat_interleave(q.shape[1] // groups, 1).unsqueeze(2)).sum(-1)
    scores = torch.relu(products) * weights.unsqueeze(-1)
    scores = scores.unflatten(1, (groups, -1)).sum(2).masked_fill(~visible, -torch.inf)
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    chosen = torch.where(best.values == -torch.inf, -1, best.indices)[..., :count]
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)


def seen(pattern: ra.Pattern, tokens: int, heads: int = 1) -> Tensor:
    return torch.from_numpy(pattern.mask(tokens, heads)) > 0


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("dtype", "groups"), [(torch.float64, 1), (torch.float32, 2), (torch.bfloat16, 1)])
def test_choices_are_those_of_a_stable_sort(name: str, dtype: torch.dtype, groups: int) -> None:
    """Small integers: most rows have ties at the last place, and scores of 0."""
    source = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=source).to(dtype)

    q, k, weights = draw(2, 4, TOKENS, 8), draw(2, groups, TOKENS, 8), draw(2, 4, TOKENS)
    wanted = by_rule(q, k, weights, 12, seen(PATTERNS[name], TOKENS))
    for ranks, layout in ((1, "contiguous"), (2, "zigzag"), (3, "striped"), (4, "zigzag"), (5, "contiguous")):
        for schedule in ("ring", "allgather"):
            found = ra.top_keys(q, k, weights, 12, PATTERNS[name], layout=layout, ranks=ranks, schedule=schedule)
            assert found.dtype == torch.int32 and torch.equal(found.long(), wanted), (ranks, layout)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_choice_does_not_depend_on_the_ranks(dtype: torch.dtype) -> None:
    """Scores have the same bits wherever their row and key lie in a shard: repeated keys tie exactly."""
    source = torch.Generator().manual_seed(4)
    tokens = 270
    q, k, weights = (
        torch.randn(1, *shape, generator=source) for shape in ((8, tokens, 32), (1, tokens, 32), (8, tokens))
    )
    k[:, :, 1::3] = k[:, :, ::3]
    q, k, weights = q.to(dtype), k.to(dtype), weights.to(dtype)
    wanted = ra.top_keys(q, k, weights, 64, ra.Causal(), layout="contiguous", ranks=1)
    assert torch.equal(wanted.long(), by_rule(q, k, weights, 64, seen(ra.Causal(), tokens)))
    for ranks, layout in ((3, "striped"), (4, "zigzag"), (7, "contiguous")):
        assert torch.equal(ra.top_keys(q, k, weights, 64, ra.Causal(), layout=layout, ranks=ranks), wanted)


def test_queries_at_other_positions() -> None:
    q, k, weights = torch.randn(1, 2, 10, 8), torch.randn(1, 1, 50, 8), torch.rand(1, 2, 10)
    visible = torch.arange(50)[None] <= torch.arange(40, 50)[:, None]
    wanted = by_rule(q, k, weights, 9, visible)
    options: dict[str, Any] = {"ranks": 3, "layout": "zigzag", "q_layout": "shifted(contiguous, 40)"}
    assert torch.equal(ra.top_keys(q, k, weights, 9, ra.Causal(), **options).long(), wanted)
    heads = torch.randn(1, 4, 10, 8, dtype=torch.float64), *torch.randn(2, 1, 2, 50, 8, dtype=torch.float64)
    found = ra.virtual_attention(*heads, ra.Causal(), chosen=wanted, **options)
    mask = torch.zeros(1, 1, 10, 50, dtype=torch.bool).scatter_(-1, wanted, True)
    k, v = (x.repeat_interleave(2, 1) for x in heads[1:])
    assert distance(found, torch.nn.functional.scaled_dot_product_attention(heads[0], k, v, attn_mask=mask)) < EXACT


def draw_chosen(seed: int, kind: str | None = None) -> LatentCase:
    """A case with random choices, which may name keys that a query does not see, or none at all."""
    pick, source = random.Random(seed), torch.Generator().manual_seed(seed)
    pattern = PATTERNS[pick.choice([*PATTERNS])]
    case = make_latents(kind or pick.choice(("mla", "absorbed", "gqa", "int8")), TOKENS, pattern, seed=seed)
    groups, case.block, count = pick.choice((1, 1, 2, 3)), pick.choice((1, 1, 8)), pick.choice((1, 5, 20))
    most = -(-TOKENS // case.block)
    case.chosen = torch.rand(2, groups, TOKENS, most, generator=source).argsort(-1)[..., :count]
    case.chosen[torch.rand(case.chosen.shape, generator=source) < 0.2] = -1
    case.chosen[:, :, 7] = -1  # a row without a key
    if pick.random() < 0.3:
        case.sinks = torch.randn(HEADS, generator=source, dtype=torch.float64)
    if pick.random() < 0.3:
        case.mask = torch.rand(2, TOKENS, generator=source) < 0.2
    case.chunk = pick.choice((None, 7, 30))
    case.options = {
        **({"softcap": 3.0} if pick.random() < 0.2 else {}),
        "ranks": pick.randint(1, 5),
        "layout": pick.choice(("zigzag", "contiguous", "striped")),
        "schedule": pick.choice(("auto", "ring", "direct", "allgather")),
    }
    return case


@pytest.mark.parametrize("seed", range(24))
def test_attention_to_chosen_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In odd cases calls have few rows and copied keys; in the others these few tokens are joined to masked tiles."""
    if seed % 2:
        for name, value in {"ROWS": 3, "SPLIT_ROWS": 17, "CALL_FLOPS": 0, "COPY_FLOPS": 1}.items():
            monkeypatch.setattr(choosing, name, value)
    case = draw_chosen(seed)
    assert case.error(case.solve()) < EXACT, (case.options, case.pattern)


def drift(tokens: int, count: int) -> Tensor:
    """Choices int32 [1, 1, tokens, count] of keys so far, of which each query exchanges one."""
    pick, rows, here = random.Random(1), [], list[int]()
    for token in range(tokens):
        if len(here) < count:
            here.append(token)
        elif (new := pick.randint(0, token)) not in here:
            here[pick.randrange(count)] = new
        rows.append(here + [-1] * (count - len(here)))
    return torch.tensor(rows, dtype=torch.int32)[None, None]


def test_few_pairs_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 134 million visible pairs a head, the choices name 8.3 million."""
    tokens, count, heads, pairs = 1 << 14, 512, 4, {"forward": 0, "backward": 0}

    def count_pairs(name: str, inner: Callable[..., Any]) -> None:
        def counting(kernel: AtenCpu, *args: Any) -> Any:
            q, k = args[:2] if name == "forward" else args[1:3]
            pairs[name] += q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
            return inner(kernel, *args)

        monkeypatch.setattr(AtenCpu, name, counting)

    for name in pairs:
        count_pairs(name, getattr(AtenCpu, name))
    q, k, v = (torch.randn(1, n, tokens, 64, requires_grad=True) for n in (heads, 1, 1))
    chosen = drift(tokens, count)
    out = ra.virtual_attention(q, k, v, ra.Causal(), ranks=4, layout="zigzag", chosen=chosen)
    named = int((chosen >= 0).sum()) * heads
    assert named <= pairs["forward"] < 1.6 * named and pairs["forward"] < 0.1 * heads * tokens * (tokens + 1) // 2
    rows = torch.arange(99, tokens, 1111)
    marks = chosen[0, 0, rows].long()
    mask = torch.zeros(len(rows), tokens + 1, dtype=torch.bool).scatter_(1, marks.where(marks >= 0, tokens), True)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, rows].double(), k.double(), v.double(), attn_mask=mask[:, :-1], enable_gqa=True
    )
    assert distance(out[:, :, rows].double(), wanted) < 1e-5
    out.sum().backward()
    assert pairs["backward"] == pairs["forward"]


def test_batch_rows_with_documents_of_their_own() -> None:
    documents = ra.Documents([[20, 11], [4, 27]])
    pattern = ra.Causal() & documents
    options: dict[str, Any] = {"ranks": 3, "layout": "zigzag"}
    q, k, weights = torch.randn(2, 4, 31, 8), torch.randn(2, 1, 31, 8), torch.rand(2, 4, 31)
    visible = torch.stack([seen(ra.Causal() & documents.row(i), 31) for i in range(2)])
    chosen = ra.top_keys(q, k, weights, 5, pattern, **options)
    assert torch.equal(chosen.long(), by_rule(q, k, weights, 5, visible))
    heads = torch.randn(3, 2, 4, 31, 8, dtype=torch.float64)
    for block in (1, 4):
        marks = torch.where(chosen < 0, -1, chosen // block)
        found = ra.virtual_attention(*heads, pattern, chosen=marks, block=block, **options)
        blocks = torch.zeros(2, 1, 31, 32, dtype=torch.bool).scatter_(
            -1, torch.where(marks < 0, 31, marks).long(), True
        )
        mask = blocks[..., torch.arange(31) // block] & visible
        assert distance(found, torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)) < EXACT


def test_keys_and_values_dropout_and_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, heads, 40, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    every = torch.arange(40).expand(2, 1, 40, 40)
    options: dict[str, Any] = {"layout": "zigzag", "dropout": ra.Dropout(0.3, seed=1), "kernel": "reference"}
    wanted = ra.virtual_attention(q, k, v, ra.Causal(), ranks=1, **options)
    found = ra.virtual_attention(q, k, v, ra.Causal(), ranks=3, chosen=every, **options)
    assert distance(found, wanted) < EXACT
    documents = torch.arange(40)[:, None] // 8 * 8 + torch.arange(8)  # of 8 tokens
    wanted = ra.virtual_attention(q, k, v, ra.Causal() & ra.Documents([8] * 5), ranks=1, **options)
    monkeypatch.setattr(choosing, "ROWS", 8)
    monkeypatch.setattr(choosing, "CALL_FLOPS", 0)
    own = documents.expand(2, 1, 40, 8)
    assert distance(ra.virtual_attention(q, k, v, ra.Causal(), ranks=3, chosen=own, **options), wanted) < EXACT
    first = every[..., :3].contiguous()

    def attend(q: Tensor) -> Tensor:
        return ra.virtual_attention(q * 1.0, k, v, ra.Causal(), ranks=3, layout="zigzag", chosen=first)

    (grad,) = torch.autograd.grad(attend(q).square().sum(), q)
    for more in ({}, {"context_fn": ra.keep_attention}):
        (again,) = torch.autograd.grad(checkpoint(attend, q, use_reentrant=False, **more).square().sum(), q)
        assert torch.equal(again, grad)
    if torch.__version__ >= "2.12":
        compiled: Any = torch.compile(attend, backend="aot_eager", fullgraph=True)
        (again,) = torch.autograd.grad(compiled(q).square().sum(), q)
        assert distance(again, grad) < EXACT


def test_choices_are_in_no_plan() -> None:
    """Other choices of the same shape use the plan and the programs that are there."""
    q, k, v = torch.randn(3, 1, 2, 32, 8)
    compiling._calls.clear()
    for _ in range(3):
        chosen = torch.randint(0, 32, (1, 1, 32, 4))
        ra.virtual_attention(q, k, v, ra.Causal(), ranks=2, chosen=chosen)
    (call,) = compiling._calls.values()
    (plan,) = [value for value in call.cache.values() if isinstance(value, ra.Plan)]
    assert sum(isinstance(value, RankProgram) for value in plan.cache.values()) == 2  # one of each rank


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    with pytest.raises((ra.InvalidInput, ra.Unsupported)) as told:
        call(*arguments, **options)
    return str(told.value)


def test_what_is_refused() -> None:
    q, k, v = torch.randn(3, 1, 4, 16, 8)
    chosen = torch.zeros(1, 1, 16, 2, dtype=torch.int32)
    for options, text in (
        ({"kernel": "aten_cuda"}, "kernel aten_cuda has no chosen"),
        ({"schedule": "ulysses(2)"}, "with chosen= would move the choices"),
        ({"rotate": "q"}, "with chosen= would move the choices"),
        ({"block": 0}, "block"),
        ({"chosen": chosen.float()}, "must be int32 or int64"),
        ({"chosen": chosen[:, :, 1:]}, "does not fit the queries"),
        ({"chosen": chosen.expand(1, 3, 16, 2)}, "does not fit the queries"),
    ):
        assert text in refused(ra.virtual_attention, q, k, v, "Causal()", ranks=2, **{"chosen": chosen, **options})
    keys = torch.randn(1, 1, 16, 8)
    for arguments, options, text in (
        ((q, keys, torch.rand(1, 4, 15), 2, "Causal()"), {}, "and weights [batch, heads, tokens]"),
        ((q, keys, torch.rand(1, 4, 16), 0, "Causal()"), {}, "count"),
        ((q, keys, torch.rand(1, 4, 16), 2, "Causal()"), {"schedule": "ulysses(2)"}, "splits the heads"),
        ((q, keys[..., :4], torch.rand(1, 4, 16), 2, "Causal()"), {}, "same head dim"),
    ):
        assert text in refused(ra.top_keys, *arguments, layout="zigzag", ranks=2, **options)


def on_ranks(rank: int) -> dict[str, Any]:
    """Whether real ranks choose and compute as virtual ones, and what ranks with other counts are told."""
    size, found = dist.get_world_size(), {}
    layout = ra.make_layout("zigzag", tokens=TOKENS, ranks=size)
    source = torch.Generator().manual_seed(5)
    whole = [torch.randn(*shape, generator=source) for shape in ((1, 4, TOKENS, 8), (1, 1, TOKENS, 8), (1, 4, TOKENS))]
    q, k, weights = layout.shard_tensor(whole[0], rank), layout.shard_tensor(whole[1], rank), None
    weights = layout.shard_tensor(whole[2], rank, -1)
    chosen = ra.top_keys(q, k, weights, 9, ra.Causal(), layout="zigzag")
    every = ra.top_keys(*whole, 9, ra.Causal(), layout="zigzag", ranks=size)
    found["chosen"] = torch.equal(chosen, layout.shard_tensor(every, rank))
    out = ra.ring_attention(q, k, k, ra.Causal(), layout="zigzag", chosen=chosen)
    wanted = ra.virtual_attention(whole[0], whole[1], whole[1], ra.Causal(), layout="zigzag", ranks=size, chosen=every)
    found["out"] = torch.equal(out, layout.shard_tensor(wanted, rank))
    found["counts"] = told_by(lambda: ra.top_keys(q, k, weights, 2 + rank, ra.Causal(), layout="zigzag"))
    given = chosen if rank else None
    found["one"] = told_by(lambda: ra.ring_attention(q, k, k, ra.Causal(), layout="zigzag", chosen=given))
    return found


def test_real_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(on_ranks, 3, timeout=240):
        assert found["chosen"] and found["out"]
        assert "Mismatch" in found["counts"] and "count=" in found["counts"]
        assert "Mismatch" in found["one"] and "chosen keys" in found["one"]
