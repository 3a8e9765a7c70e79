"""Dropout of attention weights against dense softmaxes in fp64, whose dropped weights a scalar generator chooses."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from oracle import Case, Result, dense, errors, same_lse, solve
from rank_pool import told_by
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import Causal, Dilated, Documents, InvalidInput, Pattern, Unsupported, Window, mix
from ringattn.kernels import dropout as generator
from ringattn.kernels import reference, views

TOKENS, HEADS, KV_HEADS, BATCH, DIM = 31, 4, 2, 2, 8
DROPOUT = ra.Dropout(0.3, seed=(1 << 62) + 12_345)
Tensors = tuple[torch.Tensor, ...]


def splitmix(seed: int, index: int) -> int:
    """Number `index` of the generator SplitMix64 with this seed."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def dense_factors(dropout: ra.Dropout, tokens: int = TOKENS) -> torch.Tensor:
    """By what every weight is multiplied, fp64 [B, H, N, N], number by number."""
    assert dropout.seed is not None
    factors = torch.zeros(BATCH, HEADS, tokens, tokens, dtype=torch.float64)
    for element in range(BATCH):
        for head in range(HEADS):
            for query in range(tokens):
                stream = splitmix(splitmix(splitmix(dropout.seed, element), head), query)
                for key in range(tokens):
                    if splitmix(stream, key) % 2**64 >> 33 >= dropout.p * 2**31:
                        factors[element, head, query, key] = 1 / (1 - dropout.p)
    return factors


def make_case(dtype: torch.dtype = torch.float64) -> Case:
    return oracle.make_case(TOKENS, HEADS, KV_HEADS, dtype, batch=BATCH, dim=DIM, lse=True, seed=11)


def on_ranks(rank: int) -> dict[str, Any]:
    """How far real ranks are from virtual ones with the same seed, and what wrong calls are told."""
    size, found = dist.get_world_size(), {}
    whole, layout = make_case(), ra.make_layout("zigzag", tokens=TOKENS, ranks=size)

    def shard(x: torch.Tensor, dim: int = -2) -> torch.Tensor:
        return layout.shard_tensor(x.detach(), rank, dim).contiguous()

    assert whole.grad_lse is not None
    mine = Case(*map(shard, (*whole.inputs, whole.grad)), shard(whole.grad_lse, -1))
    local, grad = mine.leaves(), mine.grad

    def ring(dropout: Any, **options: Any) -> Tensors:
        result = solve(ra.ring_attention, mine, Causal(), layout="zigzag", dropout=dropout, **options)
        return result.out, result.lse, *result.grads

    def virtual(dropout: Any) -> Tensors:
        result = solve(ra.virtual_attention, whole, Causal(), ranks=size, layout="zigzag", dropout=dropout)
        return shard(result.out), shard(result.lse, -1), *map(shard, result.grads)

    def equal(a: Tensors, b: Tensors) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    found["given"] = equal(ring(DROPOUT), virtual(DROPOUT))
    torch.manual_seed(0)
    expected = virtual(0.3), virtual(0.3)
    torch.manual_seed(rank)  # the seeds are those of rank 0
    drawn = ring(0.3), ring(0.3)
    found["drawn"] = all(map(equal, drawn, expected)) and not equal(*drawn)
    module = ra.nn.RingAttention(ra.Causal(), group=dist.group.WORLD, layout="zigzag", dropout=0.3)
    torch.manual_seed(rank)
    out = checkpoint(module, *local, use_reentrant=False)
    found["recomputed"] = equal(torch.autograd.grad(out, local, grad), _plain(module, rank, local, grad))
    found["seeds"] = told_by(lambda: ring(ra.Dropout(0.3, seed=rank)))
    found["p"] = told_by(lambda: ring(ra.Dropout(0.3 + rank / 10, seed=1)))
    found["one"] = told_by(lambda: ring(DROPOUT if rank == 0 else 0.0))
    found["kernel"] = told_by(lambda: ring(DROPOUT, kernel="aten_cpu" if rank == 0 else "auto"))
    found["after"] = equal(ring(DROPOUT), virtual(DROPOUT))
    return found


def _plain(module: ra.nn.RingAttention, rank: int, local: Tensors, grad: torch.Tensor) -> Tensors:
    """The gradients without checkpointing, from the same state of torch's generator."""
    torch.manual_seed(rank)
    return torch.autograd.grad(module(*local), local, grad)


PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "window": Causal() & Window(9),
    "documents": Causal() & Documents([9, 1, 14, 7]),
    "dilated": Dilated((8, 20), (1, 3), mix="lse"),
    "dilated-groups": Dilated((8, 16), (1, 2), causal=True, mix="group"),
    "mix": mix(Causal(), Window(4, 2)),
    "blocks": ra.BlockSparse(4, np.random.default_rng(2).random((HEADS, 8, 8)) < 0.6),
}
#: Ranks, layout, schedule, and what rotates.
RINGS = (
    (1, "contiguous", "ring", "kv"),
    (2, "zigzag", "ring", "q"),
    (2, "striped", "ulysses(2)", "kv"),
    (3, "balanced(5)", "direct", "kv"),
    (3, "striped(4)", "direct", "q"),
    (4, "contiguous", "double_ring(2)", "kv"),
    (4, "zigzag", "allgather", "q"),
    (4, "striped(2)", "ulysses(2)", "q"),
)
factors_of = cache(dense_factors)


@cache
def truth(name: str) -> Result:
    visible = torch.from_numpy(PATTERNS[name].mask(TOKENS, HEADS))
    factors = factors_of(DROPOUT)
    return dense(make_case(), visible, PATTERNS[name].output_scale, factors=factors)


def check(found: Result, expected: Result, tolerance: float = 1e-12) -> None:
    assert max(errors(found, expected)) <= tolerance
    same_lse(found.lse, expected.lse, tolerance)


def test_the_generator_is_splitmix64() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix(1234567, i) for i in range(4)] == published
    for seed in (0, 1234567, DROPOUT.seed, (1 << 63) - 1):
        steps = generator.key_steps(torch.tensor([0, 1, 5, 10**12]))
        found = generator.finalize(torch.tensor(seed) + steps).tolist()
        assert [x % 2**64 for x in found] == [splitmix(seed, i) for i in (0, 1, 5, 10**12)]


@pytest.mark.parametrize("name", PATTERNS)
def test_equals_a_dense_softmax_whatever_the_ranks(name: str) -> None:
    for ranks, layout, schedule, rotate in RINGS:
        options = {"ranks": ranks, "layout": layout, "schedule": schedule, "rotate": rotate, "dropout": DROPOUT}
        check(solve(ra.virtual_attention, make_case(), PATTERNS[name], **options), truth(name))


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_with_padding_sinks_and_softcap(rotate: str) -> None:
    case, mask = make_case(), torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    mask[0, :5], mask[1, -4:] = True, True  # the first rows of element 0 see nothing but a sink
    visible = torch.from_numpy(PATTERNS["window"].mask(TOKENS, HEADS)) * ~mask[:, None, None]
    learned = torch.linspace(-2, 2, HEADS, dtype=torch.float64, requires_grad=True)
    options = {"ranks": 3, "layout": "zigzag", "rotate": rotate, "dropout": DROPOUT, "key_padding_mask": mask}
    for sinks in (learned, None):
        found = solve(ra.virtual_attention, case, PATTERNS["window"], softcap=1.5, sinks=sinks, **options)
        check(found, dense(case, visible, factors=factors_of(DROPOUT), softcap=1.5, sinks=sinks))


@pytest.mark.parametrize(
    ("dtype", "comm_dtype", "tolerance"),
    [(torch.float32, None, 1e-5), (torch.bfloat16, None, 3e-2), (torch.float32, "bfloat16", 3e-2)],
)
def test_narrow_numbers(dtype: torch.dtype, comm_dtype: str | None, tolerance: float) -> None:
    case = make_case(dtype)
    expected = dense(case, torch.from_numpy(PATTERNS["causal"].mask(TOKENS, HEADS)), factors=factors_of(DROPOUT))
    for rotate in ("kv", "q"):
        options = {"ranks": 3, "rotate": rotate, "comm_dtype": comm_dtype, "dropout": DROPOUT}
        check(solve(ra.virtual_attention, case, Causal(), **options), expected, tolerance)


def test_one_device_streams_and_small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ({}, {"offload": "host", "chunk": 7}):
        for name in ("documents", "blocks"):
            check(solve(ra.attention, make_case(), PATTERNS[name], dropout=DROPOUT, **stream), truth(name))
    monkeypatch.setattr(reference, "ROWS", 4)
    monkeypatch.setattr(views, "BATCH_ROWS", 16)
    # A plan remembers its calls: a pattern of another spelling has a plan of its own.
    pattern, options = Causal() & Window(9, 1), {"ranks": 2, "layout": "striped", "dropout": DROPOUT}
    check(solve(ra.virtual_attention, make_case(), pattern, **options), truth("window"))


def test_no_dropout_costs_nothing() -> None:
    leaves = make_case().leaves()
    plain = ra.virtual_attention(*leaves, Causal(), ranks=2)
    state = torch.get_rng_state()
    for none in (0, 0.0, ra.Dropout(0.0), ra.Dropout(0, seed=3)):
        assert torch.equal(ra.virtual_attention(*leaves, Causal(), ranks=2, dropout=none), plain)
        ra.attention(*leaves, Causal(), dropout=none, kernel="aten_cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_is_drawn_for_each_call() -> None:
    leaves = make_case().leaves()
    for draw in (
        lambda: ra.attention(*leaves, Causal(), dropout=0.5),
        lambda: ra.attention(
            *leaves,
            Causal(),
            dropout=ra.Dropout(0.5),
            key_padding_mask=torch.zeros(BATCH, TOKENS, dtype=torch.bool),
            offload="host",
            chunk=9,
        ),
        lambda: ra.virtual_attention(*leaves, Causal(), ranks=3, dropout=0.5),
    ):
        torch.manual_seed(7)
        first, second = draw(), draw()
        assert not torch.equal(first, second)
        torch.manual_seed(7)
        assert torch.equal(first, draw())
        torch.manual_seed(7)
        ra.Dropout(0.5).seeded()  # a call takes one number
        assert torch.equal(second, draw())


def test_statistics() -> None:
    """Rates, and correlations of neighbours along each axis, within 5 standard deviations."""
    p, size = 0.1, 192
    positions = torch.arange(size)[None] + 10**9
    kept = []
    for seed in (0, 1, 2):
        streams = generator.row_streams(seed, 3, torch.arange(4), positions)
        steps = generator.key_steps(positions).expand(3, 2, -1).unsqueeze(-1)
        kept.append(generator.weight_factors(p, streams, steps, torch.float64) * (1 - p))
    x = torch.stack(kept)  # [seed, batch, head, query, key]
    assert set(x.unique().tolist()) == {0.0, 1.0}
    z = (x - (1 - p)) / math.sqrt(p * (1 - p))
    assert abs(float(z.mean())) < 5 / math.sqrt(z.numel())
    for axis in range(5):
        for distance in (1, 2):
            count = z.shape[axis] - distance
            product = z.narrow(axis, 0, count) * z.narrow(axis, distance, count)
            assert abs(float(product.mean())) < 5 / math.sqrt(product.numel()), axis
        rest = tuple(other for other in range(5) if other != axis)
        sums = z.sum(rest) / math.sqrt(z.numel() / z.shape[axis])  # each about normal
        assert float(sums.abs().max()) < 5, axis
    transposed = (z * z.mT).triu(1).sum((-2, -1))
    assert float(transposed.abs().max()) < 5 * math.sqrt(size * (size - 1) / 2)


@pytest.mark.parametrize(
    ("dropout", "options", "error", "words"),
    [
        (1.0, {}, InvalidInput, "dropout must be a number p with 0 <= p < 1"),
        (-0.1, {}, InvalidInput, "dropout must be a number p with 0 <= p < 1"),
        (math.nan, {}, InvalidInput, "got nan"),
        (True, {}, InvalidInput, "dropout=True: expected float"),
        ("a lot", {}, InvalidInput, "dropout='a lot': expected float"),
        (0.1, {"kernel": "aten_cpu"}, Unsupported, "aten_cpu has no dropout.*p=0.1.*kernel='reference'"),
        (0.1, {"kernel": "aten_cuda:flash"}, Unsupported, "aten_cuda:flash has no dropout"),
    ],
)
def test_errors_say_what_to_try(dropout: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    leaves = make_case().leaves()
    for call in (ra.attention, lambda *given, **named: ra.virtual_attention(*given, ranks=2, **named)):
        with pytest.raises(error, match=words):
            call(*leaves, Causal(), dropout=dropout, **options)
    if error is InvalidInput:
        with pytest.raises(error, match=words):
            ra.nn.RingAttention(Causal(), dropout=dropout)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.0, True])
def test_wrong_seeds(seed: Any) -> None:
    with pytest.raises(InvalidInput, match="the seed of dropout must be an integer from 0"):
        ra.Dropout(0.1, seed=seed)


def test_modules_drop_in_training_and_are_copied_with_their_options() -> None:
    leaves = make_case().leaves()
    module = ra.nn.RingAttention(Causal(), ranks=2, dropout=DROPOUT)
    expected = ra.virtual_attention(*leaves, Causal(), ranks=2, dropout=DROPOUT)
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same(*leaves), expected) and repr(DROPOUT) in repr(same)
    plain = ra.virtual_attention(*leaves, Causal(), ranks=2)
    assert torch.equal(module.eval()(*leaves), plain)
    assert ra.nn.RingAttention(Causal(), dropout=0.1, kernel="aten_cpu").eval()(*leaves).shape == plain.shape


MODULES: dict[str, Callable[..., Any]] = {
    "ring": lambda dropout, recompute: ra.nn.MultiheadRingAttention(
        32, 4, Causal(), kv_heads=2, ranks=2, dropout=dropout, rotary=True, recompute=recompute
    ),
    "adaptive": lambda dropout, recompute: ra.nn.MultiheadAdaptiveAttention(
        32, 4, block=8, k=2, causal=True, noise=0.0, ranks=2, dropout=dropout, recompute=recompute
    ),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("dropout", "ways"),
    [
        (0.4, ("none", "all", "checkpoint")),
        (DROPOUT, ("none", "projections")),  # without a seed, attention that is kept draws another number
    ],
    ids=["drawn", "given"],
)
def test_recomputation_drops_the_same_weights(name: str, dropout: Any, ways: tuple[str, ...]) -> None:
    x = torch.randn(TOKENS, 2, 32, generator=torch.Generator().manual_seed(4))
    gradients = []
    for recompute in ways:
        torch.manual_seed(5)
        module = MODULES[name](dropout, "none" if recompute == "checkpoint" else recompute)
        # Numbers that are drawn between forward and backward do not matter.
        out = checkpoint(module, x, use_reentrant=False)[0] if recompute == "checkpoint" else module(x)[0]
        torch.rand(3)
        gradients.append(torch.autograd.grad(out.square().sum(), list(module.parameters())))
        if recompute == "none":
            assert torch.equal(module(x)[0], out) == (dropout is DROPOUT)
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def test_a_multihead_module_has_the_dropout_of_its_core() -> None:
    core = ra.nn.RingAttention(Causal(), dropout=0.2)
    ra.nn.MultiheadAttention(32, 4, 0.2, core=core)
    with pytest.raises(InvalidInput, match=r"dropout=0.1, but the core has dropout=0.2.*give dropout= to the core"):
        ra.nn.MultiheadAttention(32, 4, 0.1, core=core)


def test_real_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, found in enumerate(run_ranks(on_ranks, 3, timeout=240)):
        assert [found[name] for name in ("given", "drawn", "recomputed", "after")] == [True] * 4
        seeds = "Mismatch: the ranks disagree about the seed of dropout: 0 on rank 0; 1 on rank 1; 2 on rank 2"
        assert found["seeds"].startswith(seeds)
        assert "disagree about dropout: 0.3 by a given seed on rank 0; 0.4 by a given seed on rank 1" in found["p"]
        assert "disagree about dropout: 0.3 by a given seed on rank 0; None on ranks 1, 2" in found["one"]
        own = (
            "Unsupported: kernel aten_cpu has no dropout" if rank == 0 else "Mismatch: rank 0 cannot take part: kernel"
        )
        assert found["kernel"].startswith(own)
