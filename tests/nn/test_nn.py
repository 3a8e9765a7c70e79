"""Modules: torch.nn.MultiheadAttention where that can say it, the functional form, one device where sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringattn as ra
from ringattn import Causal, Dilated, Full, InvalidInput, Unsupported, Window

F64 = torch.float64
E, H, N, B = 24, 4, 29, 3


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    a, b = a.detach(), b.detach()
    assert float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def jiggle(module: nn.Module) -> None:
    """Random values everywhere, biases too."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(normal(*parameter.shape, seed=100 + i) * 0.1)


def padding() -> torch.Tensor:
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[1, -7:], mask[2, 4:9] = True, True  # key 0 stays: torch gives NaN to rows that see nothing
    return mask


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("dims", [{}, {"kdim": 10, "vdim": 6}, {"bias": False}])
@pytest.mark.parametrize(("causal", "padded"), [(False, False), (True, False), (False, True), (True, True)])
def test_equals_torch(batch_first: bool, dims: dict[str, Any], causal: bool, padded: bool) -> None:
    options = {"batch_first": batch_first, "dtype": F64, **dims}
    theirs = nn.MultiheadAttention(E, H, **options)
    jiggle(theirs)
    ours = ra.nn.MultiheadRingAttention(E, H, Causal() if causal else Full(), **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    widths = (E, dims.get("kdim", E), dims.get("vdim", E))
    lead = (B, N) if batch_first else (N, B)
    pairs = [[normal(*lead, w, seed=i).requires_grad_() for i, w in enumerate(widths)] for _ in range(2)]
    mask = padding() if padded else None
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1) if causal else None
    wanted, _ = theirs(*pairs[0], key_padding_mask=mask, attn_mask=hidden, need_weights=False)
    found, weights = ours(*pairs[1], key_padding_mask=mask)
    assert weights is None
    close(found, wanted)
    grad = normal(*lead, E, seed=9)
    wanted.backward(grad)
    found.backward(grad)
    for a, b in zip((*ours.parameters(), *pairs[1]), (*theirs.parameters(), *pairs[0]), strict=True):
        assert a.grad is not None and b.grad is not None
        close(a.grad, b.grad)


def test_equals_torch_on_itself_unbatched_and_is_causal() -> None:
    theirs = nn.MultiheadAttention(E, H, dtype=F64)
    ours = ra.nn.MultiheadRingAttention(E, H, Full(), dtype=F64)
    ours.load_state_dict(theirs.state_dict())
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    for x, mask in ((normal(N, E), padding()[1]), (normal(N, B, E), padding())):
        wanted, _ = theirs(x, x, x, attn_mask=hidden, key_padding_mask=mask, need_weights=False)
        close(ours(x, key_padding_mask=mask, is_causal=True)[0], wanted)
        close(ours(x, x.clone(), key_padding_mask=mask, is_causal=True)[0], wanted)
    assert ours.core._pattern(True) is ours.core._pattern(True)


@pytest.mark.parametrize("dims", [{}, {"kdim": 10, "vdim": 6}])
def test_the_same_seed_gives_the_same_weights(dims: dict[str, int]) -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, H, **dims)
    torch.manual_seed(5)
    ours = ra.nn.MultiheadDilatedAttention(E, H, (8, 16), (1, 2), **dims)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for name, wanted in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], wanted), name


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_virtual_ranks_equal_one_device(ranks: int, recompute: str) -> None:
    options = {
        "kv_heads": 2, "rotary": True, "qk_norm": True, "layer_norm": True, "gamma_init": 2.0, "batch_first": True,
        "dtype": F64,
    }  # fmt: skip
    one = ra.nn.MultiheadDilatedAttention(E, H, (8, 30), (1, 3), causal=True, **options)
    jiggle(one)
    many = ra.nn.MultiheadDilatedAttention(
        E, H, (8, 30), (1, 3), causal=True, ranks=ranks, layout="zigzag", recompute=recompute, **options
    )
    many.load_state_dict(one.state_dict())
    x, y = (normal(B, N, E).requires_grad_() for _ in range(2))
    wanted, found = (m(t, key_padding_mask=padding())[0] for m, t in ((one, x), (many, y)))
    close(found, wanted)
    grad = normal(B, N, E, seed=3)
    wanted.backward(grad)
    found.backward(grad)
    for a, b in zip((*many.parameters(), y), (*one.parameters(), x), strict=True):
        assert a.grad is not None and b.grad is not None
        close(a.grad, b.grad)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="counts what torch does itself, which is more in torch 2.11")
def test_recompute_keeps_its_inputs_only() -> None:
    """The input, as query, key and value, what the output projection needs, and no more."""
    module = ra.nn.MultiheadRingAttention(E, H, Causal(), recompute="all")
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        module(normal(N, B, E, dtype=torch.float32).requires_grad_())
    assert sorted(kept) == sorted([(B, N, E)] * 3 + [(B * N, E), (E, E)])


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, lambda q, k, v, p, **o: ra.attention(q, k, v, p, **o)),
        ({"ranks": 3, "layout": "zigzag", "schedule": "allgather"}, ra.virtual_attention),
        ({"scale": 0.2, "kernel": "reference", "deterministic": True}, ra.attention),
    ],
)
def test_cores_are_the_functional_form(options: dict[str, Any], call: Callable[..., Any]) -> None:
    q, k, v = normal(B, 4, N, 8), normal(B, 2, N, 8, seed=1), normal(B, 2, N, 5, seed=2)
    for core, pattern in (
        (ra.nn.RingAttention(Window(5), **options), Window(5)),
        (ra.nn.BlockSparseAttention(Window(5), **options), Window(5)),
        (ra.nn.DilatedAttention([8, 16], [1, 2], causal=True, **options), Dilated((8, 16), (1, 2), causal=True)),
        (ra.nn.DilatedAttention([8], [2], mix="group", **options), Dilated((8,), (2,), mix="group")),
    ):
        for extra in ({}, {"key_padding_mask": padding()}):
            out, lse = call(q, k, v, pattern, return_lse=True, **options, **extra)
            found, found_lse = core(q, k, v, return_lse=True, **extra)
            assert torch.equal(found, out) and torch.equal(found_lse, lse)
            assert torch.equal(core(q, k, v, **extra), out)
        assert torch.equal(core(q, k, v, is_causal=True), call(q, k, v, pattern & Causal(), **options))
        assert not list(core.parameters()) and repr(pattern) in repr(core)


def test_order_of_dimensions() -> None:
    q, k, v = (normal(B, 4, N, 8, seed=i) for i in range(3))
    core = ra.nn.RingAttention(Causal(), ranks=2, order="BNHD")
    out, lse = core(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), return_lse=True)
    wanted, wanted_lse = ra.virtual_attention(q, k, v, Causal(), ranks=2, return_lse=True)
    close(out.transpose(1, 2), wanted)
    close(lse, wanted_lse)
    assert repr(core) == "RingAttention(Causal(), ranks=2, layout='contiguous', schedule='auto', order='BNHD')"
    module = ra.nn.MultiheadRingAttention(E, H, Causal(), order="BNHD", dtype=F64)
    same = ra.nn.MultiheadRingAttention(E, H, Causal(), dtype=F64)
    same.load_state_dict(module.state_dict())
    assert torch.equal(module(normal(N, B, E))[0], same(normal(N, B, E))[0])


def test_norms_and_grouped_heads_written_out() -> None:
    module = ra.nn.MultiheadBlockSparseAttention(
        E, H, Causal(), kv_heads=2, layer_norm=True, qk_norm=True, batch_first=True, dtype=F64
    )
    jiggle(module)
    x = normal(B, N, E)
    q, k, v = (
        nn.functional.linear(x, w, b)
        for w, b in zip(
            (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight),
            module.in_proj_bias.split((E, E // 2, E // 2)),
            strict=True,
        )
    )
    q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (t.unflatten(-1, (-1, E // H)).transpose(1, 2) for t in (q, k, v))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = module.out_proj(module.norm(mixed.transpose(1, 2).flatten(2)))
    close(module(x)[0], wanted)
    assert {"norm.weight", "q_norm.weight", "k_norm.bias"} <= set(module.state_dict())


def test_autocast_and_no_tokens() -> None:
    module = ra.nn.MultiheadRingAttention(E, H, Causal(), qk_norm=True, layer_norm=True, rotary=True)
    x = normal(N, B, E, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = module(x, key_padding_mask=padding())
    assert found.dtype == torch.bfloat16
    close(found.float(), module(x, key_padding_mask=padding())[0], 0.02)
    assert module(x[:0], key_padding_mask=padding()[:, :0])[0].shape == (0, B, E)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_magneto(kv_heads: int) -> None:
    torch.manual_seed(0)
    wide, gamma = 512, 3.0
    module = ra.nn.MultiheadRingAttention(wide, 8, Full(), gamma_init=gamma, kv_heads=kv_heads)
    gains = (1.0, 1.0, gamma, gamma)
    for weight, gain in zip((*module._weights(), module.out_proj.weight), gains, strict=True):
        weight = weight.detach()
        wanted = gain * math.sqrt(2.0 / sum(weight.shape))
        assert abs(float(weight.std()) / wanted - 1) < 0.02
        assert abs(float(weight.mean())) < 0.02 * wanted
        assert float(weight.abs().max()) > 3.5 * wanted  # normal, not uniform
    assert not module.in_proj_bias.any() and not module.out_proj.bias.any()


def test_rotary_turns_pairs_and_keeps_relative_positions() -> None:
    x = normal(1, 1, 5, 8)
    places = torch.tensor([0, 1, 7, 10**6, 10**9])
    turned = ra.nn.rotate(x, places)
    for row, p in enumerate(places.tolist()):
        for i in range(4):
            pair = complex(x[0, 0, row, i], x[0, 0, row, i + 4])
            angle = p * 10000.0 ** (-2 * i / 8)
            wanted = pair * complex(math.cos(angle), math.sin(angle))
            assert abs(complex(turned[0, 0, row, i], turned[0, 0, row, i + 4]) - wanted) < 1e-9
    q, k = normal(1, 1, 1, 64).float(), normal(1, 1, 1, 64, seed=1).float()

    def product(first: int) -> float:
        a, b = (ra.nn.rotate(t, torch.tensor([p]), 500.0) for t, p in ((q, first + 11), (k, first)))
        return float((a * b).sum())

    # fp64 angles are good to 1e9 * 2**-53, and the rest is fp32.
    assert max(abs(product(p) - product(0)) for p in (1000, 999_999_937, 10**9)) < 2e-5
    assert ra.nn.rotate(x.bfloat16(), places).dtype == torch.bfloat16


def test_rotary_in_a_module_only_sees_distances() -> None:
    module = ra.nn.MultiheadRingAttention(E, 2, Window(3), rotary=500.0, batch_first=True, dtype=F64)
    block = normal(1, 7, E)
    x = torch.cat([torch.zeros(1, 9, E, dtype=F64), block], 1)
    close(module(x)[0][:, -3:], module(torch.cat([block, block], 1))[0][:, -3:])
    plain = ra.nn.MultiheadRingAttention(E, 2, Window(3), batch_first=True, dtype=F64)
    plain.load_state_dict(module.state_dict())
    assert not torch.allclose(module(block)[0], plain(block)[0])
    assert "rotary=500" in repr(module) and "Window(left=3" in repr(module)


def test_learned_sinks() -> None:
    """As `ra.attention` has them, and their gradients."""
    module = ra.nn.MultiheadRingAttention(E, H, Window(5), sinks=True, batch_first=True, ranks=2, dtype=F64)
    assert torch.equal(module.sinks, torch.zeros(H, dtype=F64)) and "sinks=True" in repr(module)
    assert module.state_dict().keys() - make()().state_dict().keys() == {"sinks"}
    jiggle(module)
    x = normal(B, N, E)
    q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (x @ module.in_proj_weight.T).split(E, -1))
    q, k, v = (y + b.view(H, 1, -1) for y, b in zip((q, k, v), module.in_proj_bias.split(E), strict=True))
    mixed = ra.attention(q, k, v, Window(5), sinks=module.sinks)
    wanted = module.out_proj(mixed.transpose(1, 2).flatten(2))
    found = module(x)[0]
    close(found, wanted)
    weight = normal(B, N, E, seed=9)
    for a, b in zip(*(torch.autograd.grad(y, list(module.parameters()), weight) for y in (found, wanted)), strict=True):
        close(a, b)


def make(**options: Any) -> Callable[[], Any]:
    return lambda: ra.nn.MultiheadRingAttention(E, H, Full(), **options)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (make(dropout=1.5), InvalidInput, "dropout must be a number p with 0 <= p < 1"),
        (make(add_bias_kv=True), Unsupported, "add_bias_kv"),
        (make(add_zero_attn=True), Unsupported, "add_zero_attn"),
        (make(kv_heads=3), InvalidInput, "multiple of kv_heads"),
        (make(rotary=-1.0), InvalidInput, "base of rotary"),
        (make(recompute="al"), InvalidInput, "did you mean 'all'"),
        (make(recompte="all"), InvalidInput, "did you mean 'recompute'"),
        (make(layout="zigzag"), InvalidInput, "runs on one device"),
        (make(group=object()), InvalidInput, "give layout='zigzag' or another name"),
        (make(transport=object()), InvalidInput, "layout is missing: on the ranks of a group"),
        (make(mesh=object()), InvalidInput, "or the Layout that cut it"),
        (make(schedule="ring"), InvalidInput, "runs on one device"),
        (make(order="BNHd"), InvalidInput, "did you mean 'BNHD'"),
        (make(ranks=2, group=object()), InvalidInput, "ranks=2 asks for virtual ranks, group="),
        (make(transport=object(), group=object(), layout="zigzag"), InvalidInput, "leave out group="),
        (lambda: ra.nn.MultiheadRingAttention(25, 4, Full()), InvalidInput, "multiple of num_heads"),
        (lambda: ra.nn.MultiheadRingAttention(12, 4, Full(), rotary=True), InvalidInput, "head_dim=3 is odd"),
        (lambda: ra.nn.MultiheadAttention(E, H, core=Full()), InvalidInput, "core must be a ringattn.nn"),
        (lambda: ra.nn.RingAttention("causl()"), InvalidInput, "unknown name 'causl'"),
        (lambda: ra.nn.RingAttention(3), InvalidInput, "pattern must be"),
        (lambda: ra.nn.MultiheadDilatedAttention(E, H, (8, 4), (1,)), InvalidInput, "2 segments but 1 rates"),
        (lambda: ra.nn.RingAttention(Full(), order="BNHD")(normal(3), normal(3), normal(3)), InvalidInput, "q must be"),
    ],
)
def test_errors_at_construction(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"need_weights": True}, Unsupported, "need_weights"),
        ({"attn_mask": torch.zeros(N, N)}, Unsupported, "give a pattern"),
        ({"key_padding_mask": torch.zeros(B, N)}, InvalidInput, "bool tensor"),
        ({"key_padding_mask": torch.zeros(N, B) > 0}, InvalidInput, "key_padding_mask must be [batch, tokens]"),
        ({"key": normal(N + 1, B, E)}, InvalidInput, "the same batch and length"),
        ({"value": normal(N, B, E + 1)}, InvalidInput, "value must be a tensor [N, E] or [N, B, E] with 24 columns"),
        ({"key": normal(N, E)}, InvalidInput, "key must be a tensor"),
    ],
)
def test_errors_of_a_call(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    module = ra.nn.MultiheadRingAttention(E, H, Full(), dtype=F64)
    with pytest.raises(kind) as caught:
        module(normal(N, B, E), **options)
    assert words in str(caught.value)
