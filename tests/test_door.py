"""What a call accepts at its door: layouts, written patterns, packed documents, autocast, shapes that look
transposed."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import error
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn import Causal, Dilated, Documents, Full, InvalidInput, Window
from ringattn.call import arguments as options
from ringattn.call.functional import positions
from ringattn.layout.regular import DEFAULT_LAYOUT
from ringattn.nn import core

CONF = Path(__file__).resolve().parents[1] / "conf"
TEXT, PATTERN = "Causal() & Window(15)", Causal() & Window(15)


def tensors(tokens: int = 48, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, tokens, 16, generator=source).to(dtype) for heads in (4, kv_heads, kv_heads)]


# Layouts


def test_a_layout_is_asked_for_where_tensors_are_shards_and_is_the_same_elsewhere() -> None:
    """The reported call, shards of zigzag without a layout, was wrong by 0.66 and silent; now it cannot be made."""
    for function in (ra.ring_attention, positions):
        assert inspect.signature(function).parameters["layout"].default is inspect.Parameter.empty
    for function in (ra.make_plan, ra.virtual_attention):
        assert inspect.signature(function).parameters["layout"].default == DEFAULT_LAYOUT
    for verb in ("plan", "run", "simulate"):
        assert f"\n  - layout: {DEFAULT_LAYOUT}\n" in (CONF / f"{verb}.yaml").read_text(), verb
    module = ra.nn.RingAttention(Causal(), ranks=2)
    assert f"layout={DEFAULT_LAYOUT!r}" in repr(module)


def _modules(rank: int) -> None:
    """On 2 ranks: modules and factories without a layout, then right results by a name and by the Layout."""
    group = torch.distributed.group.WORLD
    made: tuple[Callable[..., Any], ...] = (
        partial(ra.nn.RingAttention, Causal(), group=group),
        partial(ra.nn.MultiheadRingAttention, 8, 2, Causal(), group=group),
        partial(ra.nn.AdaptiveAttention, 2, 8, k=2, group=group),
        partial(ra.create_dilated_attention, "ring", segment_lengths=[8], dilation_rates=[1]),
        partial(ra.create_block_sparse_attention, "base"),
    )
    for make in made:
        with pytest.raises(InvalidInput, match="give layout='zigzag' or another name"):
            make()
        make(layout="zigzag")
    layout = ra.make_layout("zigzag", tokens=48, ranks=2)
    shards = [layout.shard_tensor(x, rank) for x in tensors()]
    wanted = layout.shard_tensor(ra.attention(*tensors(), PATTERN), rank)
    for given in ("zigzag", layout):
        for pattern in (PATTERN, TEXT):
            assert torch.allclose(ra.ring_attention(*shards, pattern, layout=given), wanted, atol=1e-6)
            assert torch.allclose(ra.nn.RingAttention(pattern, group=group, layout=given)(*shards), wanted, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        low = ra.ring_attention(*shards[:2], shards[2].bfloat16(), PATTERN, layout=layout)
        assert positions(*shards[:2], shards[2].bfloat16(), PATTERN, layout=layout).tolist() == [
            p for r in layout.shard(rank) for p in r
        ]
    assert torch.equal(low, ra.ring_attention(*(x.bfloat16() for x in shards), PATTERN, layout=layout))


@pytest.mark.multi
def test_modules_on_a_group_ask_for_the_layout(run_ranks: Callable[..., list[None]]) -> None:
    run_ranks(_modules, 2, timeout=60)


# Options


def test_what_type_checkers_are_told_is_what_modules_take() -> None:
    """A keyword that a TypedDict lists and the class does not take, or the other way round, would be a trap."""
    assert inspect.signature(options.AttentionOptions).parameters.keys() == set(options.OPTION_NAMES)
    taken = inspect.signature(ra.nn.RingAttention).parameters.keys() - {"pattern", "options"}
    assert taken | set(options.OPTION_NAMES) == set(core.CoreKeywords.__annotations__)


@pytest.mark.parametrize("name", options.OPTION_NAMES)
def test_each_option_has_its_type(name: str) -> None:
    """What is neither a number, a name nor True is not read by its truth."""
    for value in ([], {}, b"", *(() if name == "deterministic" else (False, True))):
        for call in (
            partial(ra.virtual_attention, *tensors(), Full(), ranks=2),
            partial(ra.nn.RingAttention, Full(), ranks=2),
        ):
            with pytest.raises(InvalidInput, match=f"{name}={re.escape(repr(value))}: expected "):
                call(**{name: value})
    for given in ({"return_lse": None}, {"scale": "1"}, {"deterministic": "yes"}):
        for attend in (ra.attention, partial(ra.attention, offload="host")):
            with pytest.raises(InvalidInput, match=f"{next(iter(given))}=.*: expected "):
                attend(*tensors(), Full(), **given)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_numbers_of_numpy_are_numbers(kind: type[np.floating[Any]]) -> None:
    q, k, v = tensors()
    for name, value in (("scale", 0.5), ("softcap", 8.0), ("dropout", ra.Dropout(0.5, 3))):
        other = ra.Dropout(kind(0.5), np.int64(3)) if name == "dropout" else kind(value)
        plain = ra.attention(q, k, v, Full(), **{name: value})
        assert torch.equal(ra.attention(q, k, v, Full(), **{name: other}), plain)
        assert torch.equal(ra.nn.RingAttention(Full(), **{name: other})(q, k, v), plain)
    assert ra.attention(q, k, v, Full(), dropout=kind(0.5)).shape == q.shape
    with pytest.raises(InvalidInput, match=r"scale=Parameter.*expected float \| None; try scale=scale.item\(\)"):
        ra.attention(q, k, v, Full(), scale=torch.nn.Parameter(torch.tensor(0.5)))


def test_options_that_a_call_cannot_use_are_refused() -> None:
    q, k, v = tensors()
    for call in (
        partial(ra.virtual_attention, q, k, v, Full(), ranks=2),
        partial(ra.nn.RingAttention, Full(), ranks=2),
        partial(ra.nn.MultiheadRingAttention, 64, 4, Full()),
        partial(ra.nn.MultiheadAdaptiveAttention, 64, 4, k=2),
    ):
        with pytest.raises(InvalidInput, match="unknown option 'schedul'; did you mean 'schedule'"):
            call(schedul="ring")
    for option in ({"schedule": "ring"}, {"comm_dtype": "bfloat16"}, {"rotate": "kv"}, {"machine": "cpu"}):
        with pytest.raises(InvalidInput, match=f"{next(iter(option))}='.*' is about how ranks share work, but this"):
            ra.nn.RingAttention(Full(), **option)
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            ra.attention(q, k, v, Full(), **option)  # type: ignore[call-overload]


def test_modules_pass_on_all_options() -> None:
    q, k, v = tensors()
    given: dict[str, Any] = {
        "schedule": "direct", "kernel": "reference", "machine": "cuda", "scale": 0.3, "deterministic": True,
        "comm_dtype": "bfloat16", "rotate": "q", "softcap": 4.0,
        "dropout": ra.Dropout(0.1, seed=3),
    }  # fmt: skip
    assert given.keys() | {"check", "reproducible"} == set(options.AttentionKeywords.__annotations__)
    with pytest.raises(InvalidInput, match="check='now': virtual ranks share one process"):
        ra.virtual_attention(q, k, v, Causal(), ranks=3, check="now")
    module = ra.nn.RingAttention(Causal(), ranks=3, layout="zigzag", **given)
    wanted = ra.virtual_attention(q, k, v, Causal(), ranks=3, layout="zigzag", return_lse=True, **given)
    assert all(torch.equal(a, b) for a, b in zip(module(q, k, v, return_lse=True), wanted, strict=True))
    assert not torch.equal(wanted[0], ra.virtual_attention(q, k, v, Causal(), ranks=3))
    shown = "kernel='reference', machine='cuda', scale=0.3, deterministic=True, comm_dtype='bfloat16', rotate='q'"
    options_shown = f"schedule='direct', {shown}, softcap=4.0, dropout=Dropout(p=0.1, seed=3)"
    assert repr(module) == f"RingAttention(Causal(), ranks=3, layout='zigzag', {options_shown})"


# Patterns


def _calls() -> dict[str, Callable[[Any], Any]]:
    q, k, v = tensors(dtype=torch.float64)
    x = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1))

    def multihead(pattern: Any) -> torch.Tensor:
        torch.manual_seed(0)
        out: torch.Tensor = ra.nn.MultiheadRingAttention(64, 4, pattern, batch_first=True, kv_heads=2)(x)[0]
        return out

    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    return {
        "attention": lambda p: ra.attention(q, k, v, p),
        "offloaded": lambda p: ra.attention(q, k, v, p, offload="host", chunk=16, device="cpu"),
        "virtual": lambda p: ra.virtual_attention(q, k, v, p, ranks=3),
        "plan": lambda p: ra.make_plan(p, tokens=48, ranks=3).hash,
        "layout": lambda p: ra.make_layout("balanced(4)", tokens=48, ranks=3, pattern=p),
        "module": lambda p: ra.nn.RingAttention(p, ranks=2)(q, k, v),
        "multihead": multihead,
        "factory": lambda p: ra.create_block_sparse_attention(pattern=p)(*swapped),
    }


@pytest.mark.parametrize("name", _calls())
def test_a_pattern_may_be_written(name: str) -> None:
    call = _calls()[name]
    found, wanted = call(TEXT), call(PATTERN)
    assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted
    with pytest.raises(InvalidInput, match="did you mean 'Causal'"):
        call("Causl() & Window(15)")
    if name != "factory":
        with pytest.raises(InvalidInput, match=r"pattern must be a ringattn pattern such as Causal\(\), or its text"):
            call(15)


def test_documents_of_tensors() -> None:
    wanted, lengths, ends = Documents([20, 0, 28]), [20, 0, 28], [0, 20, 20, 48]
    for kind in (torch.int32, torch.int64):
        assert Documents(torch.tensor(ends, dtype=kind)) == wanted
        assert Documents(torch.tensor(lengths, dtype=kind)) == wanted
    assert Documents(np.array(ends)) == Documents(np.array(lengths)) == wanted
    for given in (ends, tuple(ends), torch.tensor(ends), np.array(ends)):
        assert Documents(cu_seqlens=given) == wanted  # type: ignore[arg-type]
    assert hash(Documents(torch.tensor(ends))) == hash(wanted) and all(type(n) is int for n in wanted.lengths)
    assert ra.parse_pattern(repr(wanted)) == wanted == ra.parse_pattern("Documents(cu_seqlens=[0, 20, 20, 48])")
    # A list holds lengths, whatever it begins with; and a tensor that begins with 0 holds ends.
    assert Documents([0, 20, 28]).lengths == (0, 20, 28) == Documents(torch.tensor([0, 20, 28]).tolist()).lengths
    assert Documents(torch.tensor([0, 20, 28])).lengths == (20, 8)
    assert Documents([]) == Documents(torch.tensor([], dtype=torch.int32)) == Documents(cu_seqlens=[0])
    q, k, v = tensors(dtype=torch.float64)
    mask = torch.from_numpy(wanted.mask(48)[0]).bool()
    truth = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = ra.virtual_attention(q, k, v, Documents(torch.tensor(ends, dtype=torch.int32)), ranks=3)
    assert error(found, truth) < 1e-12


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Documents, "either lengths or cu_seqlens"),
        (lambda: Documents([1], cu_seqlens=[0, 1]), "either lengths or cu_seqlens"),
        (lambda: Documents(cu_seqlens=[1, 5]), "begin with 0, never decrease"),
        (lambda: Documents(cu_seqlens=[]), "begin with 0, never decrease"),
        (lambda: Documents(torch.tensor([0, 9, 5])), "got [0, 9, 5]"),
        (lambda: Documents(torch.tensor([4.0, 5.0])), "one-dimensional tensor of integers"),
        (lambda: Documents(torch.tensor([[[4, 5]]])), "one-dimensional tensor of integers"),
        (lambda: Documents(torch.tensor([True])), "one-dimensional tensor of integers"),
        (lambda: Documents(torch.tensor(7)), "give the list of lengths"),
        (lambda: Documents("7"), "give the list of lengths"),  # type: ignore[arg-type]
        (lambda: Documents(torch.tensor([3, -1])), "a length=-1 must be an integer >= 0"),
        (lambda: ra.make_plan(Documents([0, 20, 48]), tokens=48, ranks=2), "try Documents(cu_seqlens=...)"),
    ],
)
def test_documents_that_are_none(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()
    assert words in str(caught.value)


# Shapes


def test_transposed_tensors_get_a_hint() -> None:
    q, k, v = (x.transpose(1, 2) for x in tensors())
    for call in (ra.attention, partial(ra.virtual_attention, ranks=2)):
        with pytest.raises(InvalidInput, match=r"if the tensors are \[batch, tokens, heads, head_dim\], pass x\.trans"):
            call(q, k, v, Full())
    # The other way round: a module that takes [B, N, H, D] is given [B, H, N, D].
    with pytest.raises(InvalidInput, match="order='BNHD'"):
        ra.nn.RingAttention(Full(), order="BNHD")(*tensors())
    for wrong in (tensors(48)[0], tensors(47)[0]):  # nothing suggests it
        with pytest.raises(InvalidInput) as caught:
            ra.attention(wrong, *(x[:, :, :-2] for x in tensors()[1:]), Full())
        assert "transpose" not in str(caught.value)


def test_as_many_key_heads_as_query_heads_and_transposed() -> None:
    """Nothing is wrong with such shapes, but no model has 600 heads."""
    x = torch.randn(1, 600, 8, 16)
    with pytest.warns(UserWarning, match=r"600 heads of 8 tokens; if the tensors are \[batch, tokens, heads"):
        ra.attention(x, x, x, Full())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ra.attention(*(x.transpose(1, 2) for _ in range(3)), Full())
        ra.attention(*(torch.randn(1, 300, 40, 8) for _ in range(3)), Full())


# Autocast


def _entries() -> dict[str, Callable[..., torch.Tensor]]:
    def adaptive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        module = ra.nn.AdaptiveAttention(4, 16, block=8, k=2, kv_heads=2, causal=True, dtype=torch.bfloat16).eval()
        out: torch.Tensor = module(q, k, v)
        return out

    padding = torch.zeros(2, 48, dtype=torch.bool)
    padding[0, 30:] = True
    return {
        "attention": partial(ra.attention, pattern=PATTERN),
        "reference": partial(ra.attention, pattern=PATTERN, kernel="reference"),
        "padded": partial(ra.attention, pattern=PATTERN, key_padding_mask=padding),
        "offloaded": partial(ra.attention, pattern=PATTERN, offload="host", chunk=16, device="cpu"),
        "virtual": partial(ra.virtual_attention, pattern=PATTERN, ranks=3),
        "virtual reference": partial(ra.virtual_attention, pattern=PATTERN, ranks=3, kernel="reference"),
        "ulysses": partial(ra.virtual_attention, pattern=PATTERN, ranks=2, schedule="ulysses(2)"),
        "module": ra.nn.RingAttention(PATTERN, ranks=2),
        "adaptive": adaptive,
    }


@pytest.mark.parametrize("name", _entries())
def test_autocast_is_a_cast_at_the_door_and_nothing_else(name: str) -> None:
    """As torch's own attention: fp32 queries and keys, such as after rotary embeddings, beside bf16 values."""
    run = _entries()[name]
    given = [x.requires_grad_() for x in tensors()]
    mixed = [given[0], given[1], given[2].detach().bfloat16().requires_grad_()]
    plain = [x.detach().bfloat16().requires_grad_() for x in given]
    if name == "adaptive":  # the scorer's own products are autocast's business
        with torch.autocast("cpu", torch.bfloat16):
            wanted = run(*plain)
    else:
        wanted = run(*plain)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    truth = torch.autograd.grad(wanted, plain, grad)
    for inputs in (given, mixed, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found = run(*inputs)
            inside = torch.autograd.grad(found, inputs, grad, retain_graph=True)
        outside = torch.autograd.grad(found, inputs, grad)
        assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
        for a, b, c, x in zip(inside, outside, truth, inputs, strict=True):
            assert a.dtype == x.dtype and torch.equal(a.bfloat16(), c) and torch.equal(b.bfloat16(), c)


def test_autocast_is_that_of_torchs_attention() -> None:
    q, k, v = tensors(kv_heads=4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert ra.attention(q, k, v, Full()).dtype == scaled_dot_product_attention(q, k, v).dtype == dtype
            x = q.double()
            assert scaled_dot_product_attention(x, x, x).dtype == torch.float64
            for kernel in ("auto", "reference"):
                found = ra.attention(x, x, x, Full(), kernel=kernel)
                assert found.dtype == torch.float64 and error(found, scaled_dot_product_attention(x, x, x)) < 1e-12
            with pytest.raises(InvalidInput, match="must have one dtype"):
                ra.attention(x, k, v, Full())
        with torch.autocast("cpu", enabled=False):
            assert ra.attention(q, k, v, Full()).dtype == torch.float32
    with pytest.raises(InvalidInput, match="must have one dtype"):  # without autocast nothing is cast
        ra.attention(q, k, v.bfloat16(), Full())


# Schedules and checkpoints


@pytest.mark.parametrize(
    ("name", "plain"), [("", "ring"), (", direct", "direct"), (", double_ring(2)", "double_ring(2)")]
)
def test_ulysses_groups_of_one_are_the_schedule_between_them(name: str, plain: str) -> None:
    options: dict[str, Any] = {"tokens": 48, "ranks": 4, "heads": 4, "kv_heads": 2, "head_dim": 16}
    plan = ra.make_plan(PATTERN, schedule=f"ulysses(1{name})", **options)
    assert plan == ra.make_plan(PATTERN, schedule=plain, **options)
    assert ra.Plan.from_json(plan.to_json()) == plan
    q, k, v = tensors(dtype=torch.float64)
    found = ra.virtual_attention(q, k, v, PATTERN, ranks=4, schedule=f"ulysses(1{name})")
    assert error(found, ra.attention(q, k, v, PATTERN)) < 1e-12


@pytest.mark.parametrize("ranks", [1, 3])
def test_keep_attention_of_tensors_without_gradients(ranks: int) -> None:
    """The number of groups divides the output; that used to be done to the tensor that is kept."""
    q, k, v = tensors(dtype=torch.float64)
    weight = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    pattern = Dilated((16, 32), (1, 2), mix="group")

    def layer(weight: torch.Tensor) -> torch.Tensor:
        return ra.virtual_attention(q, k, v, pattern, ranks=ranks) * weight

    wanted = ra.attention(q, k, v, pattern)
    out = checkpoint(layer, weight, use_reentrant=False, context_fn=ra.keep_attention)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out.backward(grad)
    assert error(out, 2 * wanted) < 1e-12
    assert float(weight.grad) == pytest.approx(float((grad * wanted).sum()), rel=1e-12)  # type: ignore[arg-type]


# Factories


def test_multihead_attention_by_the_name_block_sparse() -> None:
    options: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "segment_lengths": [32], "dilation_rates": [2]}
    torch.manual_seed(0)
    module = ra.create_multihead_dilated_attention("block_sparse", density=0.2, block=16, **options)
    torch.manual_seed(0)
    same = ra.create_block_sparse_attention("multihead", density=0.2, block=16, **options)
    x = torch.randn(1, 100, 64)
    assert torch.equal(module(x)[0], same(x)[0])
    for name in ("v2", "production"):
        assert ra.create_multihead_dilated_attention(name, **options).core.ranks == 1
