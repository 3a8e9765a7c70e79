"""A call that is looked up equals the same call compiled anew: bits, gradients, plans, records, errors and warnings."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringattn as ra
from ringattn.call import compile as compiled
from ringattn.call import planner
from ringattn.call.arguments import cast_inputs
from ringattn.call.compile import compile_call
from ringattn.call.functional import get_transport
from ringattn.call.handshake import _spell
from ringattn.errors import Unsupported
from ringattn.kernels import KERNELS
from ringattn.kernels.reference import Reference
from ringattn.nn.adaptive import SelectedBlocks

Run = Callable[..., list[Any]]
CALLS = 180


class Picky(Reference):
    """Computes what the global switches of torch, the strides and the gradients allow that `check` finds."""

    name = "picky"

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        found = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "contiguous": q.is_contiguous() == k.is_contiguous(),
            "gradient": v.requires_grad,
        }
        if found["deterministic"] or not found["flash"] or not found["contiguous"]:
            raise Unsupported(f"kernel picky: {found}")


def forget() -> None:
    """Forget every call and every plan."""
    compiled._calls.clear()
    planner._plans.clear()


#: Arguments of which each call takes one by chance; the first is the usual one. Some are wrong, and some only equal.
CHOICES: dict[str, list[Any]] = {
    "pattern": [ra.Causal(), "Causal()", ra.Window(5), "Window(5) & Causal()", ra.Full(), ra.Documents((9, 15)), 7],
    "layout": ["zigzag", "contiguous", " zigzag ", "striped(2)", "zagzig", None],
    "schedule": ["ring", "auto", "direct", "ulysses(2)", "rinng"],
    "kernel": ["auto", "reference", "aten_cuda"],
    "scale": [None, 1, 1.0, True, np.float32(1.0), -0.5, float("nan")],
    "deterministic": [False, True, 1, 0, np.bool_(True)],
    "rotate": ["auto", "kv", "q"],
    "softcap": [None, 5.0],
    "machine": [None, "cpu", "cuda", "nowhere"],
    "comm_dtype": [None, "bfloat16", torch.bfloat16, "float16"],
    "dropout": [0.0, ra.Dropout(0.25, 3), 1.5],
}
SHAPES = [(1, 2, 2, 24, 8, 8), (1, 4, 2, 24, 8, 4), (2, 2, 1, 24, 16, 8), (1, 2, 2, 16, 8, 8), (1, 264, 264, 24, 2, 2)]


def draw_call(source: random.Random) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, bool]]:
    """(q, k and v, the other arguments, the switches) of a call, in most of which few things are unusual."""
    unusual = {name for name in CHOICES if source.random() < 0.06}
    options = {name: source.choice(values) if name in unusual else values[0] for name, values in CHOICES.items()}
    options["return_lse"] = source.random() < 0.5
    if source.random() < 0.6:
        options["kernel"] = "picky"
    batch, heads, kv_heads, tokens, dim, value_dim = source.choice(SHAPES[: source.choice((2, 5))])
    dtype = source.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    made = torch.Generator().manual_seed(5)
    tensors = []
    for n, width in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim)):
        x = torch.randn(batch, n, tokens, width, generator=made).to(dtype)
        if source.random() < 0.1:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        tensors.append(x.requires_grad_(source.random() < 0.4))
    if source.random() < 0.05:
        tensors[1] = tensors[1][:, :, :-1]
    if source.random() < 0.1:
        options["sinks"] = torch.ones(heads, dtype=dtype, requires_grad=source.random() < 0.5)
    if source.random() < 0.1:
        options["key_padding_mask"] = torch.arange(tokens).expand(batch, tokens) > 20
    names = ("grad", "autocast", "deterministic", "flash", "inference")
    odds = (0.8, 0.1, 0.1, 0.9, 0.05)
    return tensors, options, {name: source.random() < odd for name, odd in zip(names, odds, strict=True)}


def vary(source: random.Random, tensors: list[torch.Tensor], options: dict[str, Any], switches: dict[str, bool]) -> Any:
    """The same call but for one thing: a switch, strides, who needs a gradient, or an option that is only equal."""
    kind, at = source.choice(("switch", "strides", "needs", "twin")), source.randrange(3)
    if kind == "switch":
        name = source.choice([*switches])
        return tensors, options, {**switches, name: not switches[name]}
    if kind == "twin":
        names = [name for name, value in options.items() if isinstance(value, bool | int) and value in (0, 1)]
        name = source.choice(names)
        return tensors, {**options, name: source.choice((int, bool, np.bool_))(options[name])}, switches
    x = tensors[at].detach()
    if kind == "strides":
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if x.is_contiguous() else x.contiguous()
    needs = tensors[at].requires_grad != (kind == "needs")
    return [x.requires_grad_(needs) if i == at else y for i, y in enumerate(tensors)], options, switches


def under(switches: dict[str, bool], call: Callable[[], Any]) -> Any:
    """What a call gives while torch's switches are as told; they are set back."""
    before = torch.backends.cuda.flash_sdp_enabled()
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        stack.callback(torch.backends.cuda.enable_flash_sdp, before)
        torch.use_deterministic_algorithms(switches["deterministic"])
        torch.backends.cuda.enable_flash_sdp(switches["flash"])
        stack.enter_context(torch.set_grad_enabled(switches["grad"]))
        if switches["autocast"]:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        if switches["inference"]:
            stack.enter_context(torch.inference_mode())
        return call()


def solve(attend: Callable[..., Any], tensors: list[torch.Tensor], options: dict[str, Any]) -> list[Any]:
    """What a call gives: its results and gradients as bytes, or its error, and its warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = attend(*tensors, **options)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            return [type(error), str(error), *(str(x.message) for x in warned)]
    results = result if isinstance(result, tuple) else (result,)
    leaves = [x for x in (*tensors, options.get("sinks")) if x is not None and x.requires_grad]
    grads: Any = ()
    if results[0].requires_grad:
        grads = torch.autograd.grad(sum(x.float().cos().sum() for x in results), leaves, allow_unused=True)
    found = [None if x is None else (x.dtype, x.detach().double().numpy().tobytes()) for x in (*results, *grads)]
    return [*found, *(str(x.message) for x in warned)]


def describe(tensors: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """What `compile_call` makes of the arguments, as values that compare."""
    named = {name: options[name] for name in ("sinks", "key_padding_mask", "return_lse") if name in options}
    rest = {name: x for name, x in options.items() if name not in (*named, "pattern", "layout")}
    try:
        call = compile_call(*cast_inputs(*tensors), options["pattern"], options["layout"], rest, **named)
    except (ValueError, NotImplementedError) as error:
        return type(error), str(error)
    kept = {name: getattr(call, name) for name in ("rows", "sizes", "device", "requires_grad", "scale", "floor")}
    return _spell(call), call.kernel.key, call.kernel.padded, call.options, call.pattern, kept


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel "picky", as if an installed package offered it."""
    point = SimpleNamespace(load=lambda: Picky)
    monkeypatch.setitem(vars(KERNELS), "installed", {**KERNELS.installed, "picky": point})


@pytest.mark.filterwarnings("ignore:.*is read as")
@pytest.mark.usefixtures("picky")
@pytest.mark.parametrize("seed", range(2))
def test_a_call_that_is_looked_up_equals_a_fresh_one(seed: int) -> None:
    source = random.Random(seed)
    drawn = [draw_call(source)]
    forget()
    errors = 0
    for number in range(CALLS):
        if source.random() < 0.2:
            drawn.append(draw_call(source))
        else:
            drawn.append(vary(source, *source.choice(drawn[-3:])))
        tensors, options, switches = drawn[-1]

        def call(tensors: Any = tensors, options: Any = options) -> Any:
            return solve(ra.virtual_attention, tensors, {**options, "ranks": 2}), describe(tensors, options)

        known = len(compiled._calls)
        looked_up = under(switches, call)
        kept = compiled._calls, planner._plans
        compiled._calls, planner._plans = (type(kept[0])(cache.limit, cache._size, grows=True) for cache in kept)
        try:
            fresh = under(switches, call)
        finally:
            compiled._calls, planner._plans = kept
        assert looked_up == fresh, (number, options, switches)
        refused = isinstance(looked_up[1][0], type)
        errors += refused
        assert not refused or len(compiled._calls) == known, "a call that is refused is not kept"
    assert CALLS // 30 < errors < CALLS * 4 // 5, "both kinds are there"
    assert 0 < len(compiled._calls) < CALLS


def test_what_is_kept() -> None:
    """Equal arguments in new objects are one call. A selected pattern is never kept, a warning comes every time."""
    forget()
    x = torch.zeros(1, 2, 8, 4)
    calls = [compile_call(x.clone(), x, x, ra.Window(len("abc")), "zigzag", {"scale": 2.0}) for _ in range(2)]
    assert calls[0] is calls[1] and len(compiled._calls) == 1
    assert compile_call(x, x, x, ra.Window(3), "zigzag", {"scale": 2}) is not calls[0]
    with pytest.raises(ra.InvalidInput, match="scale"):
        compile_call(x, x, x, ra.Window(3), "zigzag", {"scale": [2.0]})
    known = len(compiled._calls)
    compile_call(x, x, x, SelectedBlocks(2, np.tril(np.ones((2, 4, 4), dtype=bool))), "zigzag", {})
    many = torch.zeros(1, 512, 8, 2)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is read as"):
            compile_call(many, many, many, ra.Causal(), "zigzag", {})
    assert len(compiled._calls) == known


def test_calls_are_bounded() -> None:
    limit, compiled._calls.limit = compiled._calls.limit, 1 << 16
    try:
        forget()
        for tokens in range(2, 60):
            x = torch.zeros(1, 1, tokens, 4)
            ra.virtual_attention(x, x, x, ra.Causal(), ranks=2, schedule="ring")
        assert len(compiled._calls) < 30 and compiled._calls.bytes <= 1 << 16
    finally:
        compiled._calls.limit = limit
        forget()


def groups_come_and_go(rank: int, seed: int) -> list[Any]:
    """On groups that are destroyed and made anew: pairs of a call looked up, and the same one compiled anew."""
    source, told, group = random.Random(seed), [], dist.new_group()
    numbers = torch.Generator().manual_seed(rank)
    forget()
    for number in range(20):
        if source.random() < 0.2:
            old = group
            dist.destroy_process_group(group)
            group = dist.new_group()
            with pytest.raises(ra.InvalidInput, match="destroyed"):
                get_transport(old)
        rows, needs = source.choice((6, 8)), [source.random() < 0.5 for _ in range(3)]
        x = [torch.randn(1, 2, rows, 4, generator=numbers, requires_grad=need) for need in needs]
        options = {
            "layout": source.choice(("zigzag", "rows", ra.make_layout("contiguous", tokens=2 * rows, ranks=2))),
            "pattern": source.choice((ra.Causal(), ra.Window(3), "Full()")),
            "schedule": source.choice(("ring", "direct")),
            "scale": source.choice((None, 1, 1.0)),
        }
        if source.random() < 0.2:
            options["scale"] = float(2 + rank)
        found = []
        for fresh in (False, False, True):
            if fresh:
                forget()
            found.append(solve(ra.ring_attention, x, {**options, "group": group}))
        told.append((found[0] == found[1] == found[2], number, found[0][:2]))
    dist.destroy_process_group(group)
    return told


def test_groups_that_are_made_anew(run_ranks: Run) -> None:
    for told in run_ranks(groups_come_and_go, 2, 3, timeout=120):
        assert all(same for same, *_ in told), [entry for entry in told if not entry[0]]
        assert any(found[0] is ra.Mismatch for *_, found in told), "some calls differ between the ranks"
