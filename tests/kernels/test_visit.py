"""The kernel "visit" by Triton's interpreter, against dense attention in fp64."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from oracle import Case, Result, dense, error, errors, make_case, same_lse, solve

import ringattn as ra
from ringattn.kernels import merges, visit, visit_calls
from ringattn.kernels.visit import Config, KernelLaunch, Tiles, VisitPass, VisitTriton, self_test

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels are tested in test_on_device.py"),
]
Tensor = torch.Tensor
#: The largest errors, relative to the largest number: some roundings of the dtype.
BOUND = {torch.float32: 4e-6, torch.float16: 3 * 2.0**-11, torch.bfloat16: 3 * 2.0**-8}


def make_tiles(block: int, step: int) -> Tiles:
    config = Config(step, 4, 1)
    return Tiles(block, config, config, config)


def forget() -> None:
    for name in ("fused", "visit_triton"):
        sys.modules.pop(f"ringattn.kernels.{name}", None)
    merges.missing.cache_clear()
    merges._by_triton.cache_clear()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter, after which this process can compile nothing."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    forget()
    from triton.runtime import interpreter  # chooses when it is imported

    patched = set()

    def call(self: Any, *args: Any, **options: Any) -> Any:
        """The interpreter's own makes Triton's functions anew at each call of a function, which takes half the time."""
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*args, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(VisitTriton, "tiles", make_tiles(16, 16))
    with np.errstate(over="ignore"):  # of weights of hidden pairs, which are not used
        yield
    forget()


def triton_module() -> ModuleType:
    return visit._triton()


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is allocated uninitialized holds NaN, and so does the memory around it, which nothing overwrites."""
    around: list[Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: Any = None, *, before: int = 32) -> Tensor:
        count = int(np.prod(shape))
        whole = torch.empty(before + count + 32, dtype=dtype)
        whole.view(torch.uint8).fill_(255)  # NaN in every dtype
        around.extend((whole[:before], whole[before + count :]))
        return whole[before : before + count].view(tuple(shape))

    def empty_rows(shape: tuple[int, ...], dtype: torch.dtype, device: Any = None) -> Tensor:
        batch, heads, rows, *width = shape
        return empty((batch, rows, heads, *width), dtype).transpose(1, 2)

    for module in (visit, visit_calls):
        monkeypatch.setattr(module, "empty", empty)
        monkeypatch.setattr(module, "empty_rows", empty_rows)
    monkeypatch.setattr("ringattn.runtime.tensors.empty", lambda *args: empty(*args, before=0))
    yield
    assert around and all((x.view(torch.uint8) == 255).all() for x in around)


def placed(x: Tensor, how: int) -> Tensor:
    """x [B, H, N, D] as a view of a larger tensor full of NaN; its columns are apart in the last way."""
    batch, heads, rows, width = x.shape
    if how % 4 == 0:
        view = torch.full((batch, heads + 1, rows + 9, width), torch.nan, dtype=x.dtype)[:, 1:, 4 : 4 + rows]
    elif how % 4 == 1:
        view = torch.full((batch, rows + 9, heads + 2, width), torch.nan, dtype=x.dtype)[:, 4 : 4 + rows, 1:-1]
        view = view.transpose(1, 2)
    elif how % 4 == 2:
        view = torch.full((batch, heads, rows + 9, width + 7), torch.nan, dtype=x.dtype)[:, :, 4 : 4 + rows, 3:-4]
    else:
        view = torch.full((batch, heads, rows + 9, 2 * width), torch.nan, dtype=x.dtype)[:, :, 4 : 4 + rows, 1::2]
    view.copy_(x)
    return view


class Ring(NamedTuple):
    ranks: int
    layout: str = "contiguous"
    schedule: str = "ring"
    rotate: str = "kv"


def attend(case: Case, pattern: ra.Pattern, ring: Ring, how: int = 0, kernel: str = "visit", **options: Any) -> Result:
    """The results of virtual ranks, as `oracle.solve` finds them, from views of larger tensors."""
    q, k, v, grad = (placed(x, how + i) for i, x in enumerate((*case.inputs, case.grad)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ra.virtual_attention(
        *leaves, pattern, kernel=kernel, return_lse=True, scale=case.scale, **ring._asdict(), **options
    )
    results, cotangents = [out], [grad]
    if case.grad_lse is not None:
        results, cotangents = [out, lse], [grad, case.grad_lse.to(lse.dtype)]
    if options.get("sinks") is not None:
        leaves.append(options["sinks"])
    return Result(out.detach(), lse.detach(), torch.autograd.grad(results, leaves, cotangents))


def check(found: Result, truth: Result, dtype: torch.dtype) -> None:
    assert max(errors(found, truth)) <= BOUND[dtype], errors(found, truth)
    same_lse(found.lse, truth.lse, 2e-6)


def mask_of(case: Case, pattern: ra.Pattern, padding: Tensor | None) -> Tensor:
    mask = torch.from_numpy(np.ascontiguousarray(pattern.mask(case.q.shape[2], case.q.shape[1])))
    return mask if padding is None else mask * ~padding[:, None, None]


SPARSE = np.random.default_rng(1).random((2, 7, 7)) < 0.4
SPARSE[:, 2] = False  # rows without keys
LONGNET = ra.Dilated((8, 24, 40), (1, 2, 3))
#: Masks, rings, tokens, heads and key/value heads, dtypes, head dims, and options, so that pairs of these meet.
CASES: dict[str, tuple[Any, ...]] = {
    "full": (ra.Full(), Ring(1), 37, (1, 1), "float32", (16, 16), {"lse": True, "tiles": (16, 8)}),
    "full-q": (ra.Full(), Ring(2, rotate="q"), 40, (1, 1), "bfloat16", (24, 16), {"sinks": True, "how": 1}),
    "causal-zigzag": (ra.Causal(), Ring(2, "zigzag"), 41, (2, 1), "float32", (24, 40), {"lse": True, "how": 3}),
    "causal-far": (ra.Causal(), Ring(2), 70, (1, 1), "float32", (16, 16), {"how": 2}),
    "causal-4": (ra.Causal(), Ring(4, "contiguous", "ring", "q"), 33, (1, 1), "bfloat16", (16, 24), {"lse": True}),
    "causal-4-kv": (ra.Causal(), Ring(4, "striped"), 33, (1, 1), "float16", (40, 16), {"sinks": True, "how": 2}),
    "window": (ra.Causal() & ra.Window(9), Ring(3, rotate="q"), 40, (2, 2), "float32", (16, 16), {"softcap": 2.0}),
    "two-sided": (ra.Window(7, 4), Ring(3, "zigzag", rotate="q, kv"), 31, (1, 1), "float16", (16, 16), {"lse": True}),
    "sinks-or-window": (
        *(ra.Causal() & (ra.Sinks(3) | ra.Window(6)), Ring(2, "striped(3)"), 23, (2, 1), "float32", (16, 24)),
        {"dropout": 0.4, "how": 1, "lse": True},
    ),
    "documents": (
        *(ra.Causal() & ra.Documents([9, 1, 0, 14]), Ring(2, "zigzag"), 24, (1, 1), "float32", (24, 16)),
        {"padding": True, "batch": 2, "lse": True, "sinks": True},
    ),
    "documents-q": (
        *(ra.Documents([9, 1, 14]), Ring(2, rotate="q"), 24, (2, 1), "float32", (16, 16)),
        {"padding": True, "softcap": 3.0, "how": 3},
    ),
    "blocks": (ra.BlockSparse(5, SPARSE), Ring(2, "zigzag"), 33, (2, 2), "float32", (16, 16), {"how": 2, "lse": True}),
    "blocks-q": (
        *(ra.BlockSparse(5, SPARSE), Ring(2, rotate="q"), 33, (2, 1), "float16", (16, 40)),
        {"dropout": 0.5, "lse": True, "sinks": True},
    ),
    "longnet": (LONGNET, Ring(2), 32, (3, 1), "float32", (16, 16), {"lse": True, "tiles": (8, 8)}),
    "longnet-q": (LONGNET, Ring(2, "zigzag", rotate="q"), 25, (2, 2), "float32", (16, 16), {"tiles": (16, 8)}),
    "groups": (
        *(ra.Dilated((16, 40), (2, 3), causal=True, mix="group"), Ring(2, schedule="allgather"), 40, (2, 1)),
        *("bfloat16", (16, 16), {"padding": True, "tiles": (8, 8), "how": 1}),
    ),
    "union": (
        *(ra.Strided(3) & ra.Causal() | ra.Window(2, 2), Ring(3, "balanced(5)", "direct"), 23, (1, 1), "float32"),
        *((16, 16), {"softcap": 1.5, "dropout": 0.3, "lse": True}),
    ),
    "mix": (
        *(ra.pattern.mix(ra.Causal(), ra.Window(5, 5)), Ring(2, "striped", "ulysses(2)"), 24, (2, 2), "float32"),
        *((24, 24), {"sinks": True, "lse": True}),
    ),
    "columns": (ra.Causal(), Ring(2), 23, (1, 1), "bfloat16", (16, 16), {"how": 3}),
    "dropout-heads": (
        *(ra.Causal(), Ring(2, schedule="ulysses(2)"), 20, (2, 2), "float32", (16, 16)),
        {"dropout": 0.4, "how": 2, "lse": True},
    ),
    "one-row": (ra.Causal(), Ring(1), 1, (2, 1), "float32", (16, 16), {"lse": True, "how": 3}),
    "few-rows": (ra.Causal(), Ring(4, "zigzag", rotate="q"), 3, (1, 1), "float32", (5, 8), {"lse": True, "batch": 2}),
    "empty-rows": (
        *(ra.Sinks(2) & ra.Documents([3, 10]), Ring(3), 13, (2, 1), "float32", (16, 16)),
        {"padding": True, "lse": True},
    ),
    "hidden": (ra.Causal(), Ring(2, rotate="q"), 20, (1, 1), "float16", (8, 16), {"padding": True, "dropout": 0.3}),
    "large": (ra.Causal(), Ring(2), 34, (2, 2), "float32", (16, 16), {"large": True, "how": 2, "lse": True}),
    "large-q": (ra.Causal(), Ring(2, rotate="q"), 22, (2, 1), "float32", (16, 16), {"large": True, "how": 1}),
    "leaves": (ra.Causal(), Ring(3, "zigzag", "allgather"), 45, (2, 1), "float32", (16, 24), {"lse": True, "how": 1}),
    "leaves-blocks": (
        *(ra.Causal() & ra.BlockSparse(5, SPARSE), Ring(2), 33, (2, 2), "bfloat16", (24, 16)),
        {"softcap": 2.0, "how": 2},
    ),
    "leaves-documents": (
        *(ra.Causal() & ra.Documents([20, 1, 12]), Ring(2, "contiguous", "direct"), 33, (2, 1), "float32", (16, 16)),
        {"dropout": 0.4, "padding": True, "lse": True, "sinks": True, "how": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name: str, canaries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, ring, tokens, (heads, kv_heads), kind, (dim, value_dim), given = CASES[name]
    asked, dtype = dict(given), getattr(torch, kind)
    monkeypatch.setattr(VisitTriton, "tiles", make_tiles(*asked.pop("tiles", (16, 16))))
    how, lse, batch, large = (asked.pop(key, 0) for key in ("how", "lse", "batch", "large"))
    case = make_case(
        *(tokens, heads, kv_heads, dtype), batch=batch or 1, dim=dim, value_dim=value_dim, lse=bool(lse), seed=len(name)
    )
    source = torch.Generator().manual_seed(1)
    if large:  # all keys share a large part
        case.k.add_(12 * torch.randn(1, kv_heads, 1, dim, generator=source))
    padding, options = None, {}
    if asked.pop("padding", False):
        padding = torch.rand(batch or 1, tokens, generator=source) < 0.4
        padding[:, :2] = True  # the first rows of causal masks see nothing
        case.v.masked_fill_(padding[:, None, :, None], torch.nan)
        options["key_padding_mask"] = padding
    if asked.pop("sinks", False):
        options["sinks"] = torch.linspace(-1, 2, heads).requires_grad_()
    if "dropout" in asked:
        asked["dropout"] = ra.Dropout(asked["dropout"], seed=1 << 40)
    if name.startswith("leaves"):
        asked["reproducible"] = 16
    found = attend(case, pattern, ring, how, **asked, **options)
    if "reproducible" in asked:
        one = attend(case, pattern, Ring(1), **asked, **options)
        pairs = zip((found.out, found.lse, *found.grads[:3]), (one.out, one.lse, *one.grads[:3]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    if padding is not None:
        case.v.nan_to_num_()
    if "dropout" in asked:  # its random numbers are tested in runtime/test_dropout.py
        exact = Case(*(x.double() for x in (*case.inputs, case.grad)), case.grad_lse)
        if "sinks" in options:
            options["sinks"] = options["sinks"].detach().double().requires_grad_()
        truth = solve(ra.virtual_attention, exact, pattern, ranks=1, kernel="reference", **asked, **options)
    else:
        sinks, mask = options.get("sinks"), mask_of(case, pattern, padding)
        scale = pattern.bind(heads, tokens).output_scale
        truth = dense(case, mask, scale, softcap=asked.get("softcap"), sinks=sinks)
    check(found, truth, dtype)


def watch(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[VisitPass, list[KernelLaunch]], Any]
) -> list[tuple[str, int]]:
    """The (kernel, number of visits) of each launch from now on; `run` stands for the launch."""
    launches: list[tuple[str, int]] = []

    def noted(self: VisitPass, group: list[KernelLaunch]) -> None:
        launches.append((group[0].name, len(group)))
        assert all(launch.name == group[0].name for launch in group)
        run(self, group)

    monkeypatch.setattr(VisitPass, "_run", noted)
    return launches


@pytest.mark.parametrize(
    ("pattern", "layout", "ranks", "rotate", "visits", "launches"),
    [
        (ra.Causal(), "zigzag", 8, "kv", 64, 8),
        (ra.Causal(), "zigzag", 8, "q", 64, 8),
        (ra.Causal() & ra.Window(7), "contiguous", 8, "kv", 15, 2),
        (ra.Causal(), "zigzag", 1, "kv", 1, 1),
    ],
)
def test_a_visit_is_one_launch_and_ready_visits_of_all_ranks_are_one(
    pattern: ra.Pattern, layout: str, ranks: int, rotate: str, visits: int, launches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    counted = watch(monkeypatch, lambda *_: None)
    case = make_case(128, 4, 2, torch.float32, dim=8, batch=1)
    solve(ra.virtual_attention, case, pattern, **Ring(ranks, layout, "ring", rotate)._asdict(), kernel="visit")
    for name in ("forward", "dq", "dkv"):
        counts = [count for kernel, count in counted if kernel == name]
        assert (len(counts), sum(counts)) == (launches, visits)
    assert len(counted) == 3 * launches


@pytest.mark.parametrize("rotate", ["kv", "q"])
def test_equal_bits_whatever_shares_a_launch(rotate: str, canaries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the same, with ranks in another order, and each alone."""
    case = make_case(26, 1, 1, torch.float32, lse=True, batch=1)
    options = {"dropout": ra.Dropout(0.2, seed=3)}
    ring, run, pick = Ring(3, rotate=rotate), VisitPass._run, random.Random(0)
    results = []
    for change in (
        lambda self, group: run(self, group),
        lambda self, group: run(self, pick.sample(group, len(group))),
        lambda self, group: [run(self, [one]) for one in group[::-1]],
    ):
        launches = watch(monkeypatch, change)
        found = attend(case, ra.Causal() & ra.Window(17), ring, 1, **options)
        assert any(count > 1 for _, count in launches)
        results.append((found.out, found.lse, *found.grads))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_cotangents_that_torch_expands(canaries: None) -> None:
    """The gradient of a sum has no memory of its own for its columns."""
    case = make_case(19, 2, 1, torch.float32, batch=1)
    case = Case(*case.inputs, torch.ones_like(case.grad))
    leaves = case.leaves()
    out = ra.virtual_attention(*leaves, ra.Causal(), ranks=1, kernel="visit")
    truth = dense(case, mask_of(case, ra.Causal(), None))
    for found, true in zip(torch.autograd.grad(out.sum(), leaves), truth.grads, strict=True):
        assert error(found, true) <= BOUND[torch.float32]


def test_more_queries_than_keys(canaries: None) -> None:
    """The rows of queries and keys are counted apart."""
    case = make_case(37, 1, 1, torch.float32, batch=1)
    for rotate, queries in (("kv", 37), ("q", 5)):
        q, k, v = (
            x.requires_grad_() for x in (placed(case.q[:, :, :queries], 0), *(placed(x, 0) for x in case.inputs[1:]))
        )
        k2, v2 = k[:, :, :11], v[:, :, :11]
        ring = {"ranks": 2, "schedule": "ring", "rotate": rotate, "layout": "contiguous"}
        out = ra.virtual_attention(q, k2, v2, ra.Full(), q_layout="contiguous", kernel="visit", **ring)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        weights = (exact[0] @ exact[1][:, :, :11].mT * case.factor).softmax(-1)
        true = weights @ exact[2][:, :, :11]
        grad = case.grad[:, :, :queries]
        truths = true, *torch.autograd.grad(true, exact, grad.double())
        for found, truth in zip((out, *torch.autograd.grad(out, (q, k, v), grad)), truths, strict=True):
            assert error(found, truth.detach()) <= BOUND[torch.float32]


FAULTS: dict[str, Callable[[ModuleType], tuple[str, Any]]] = {
    "a bound": lambda triton: ("_inside", lambda table, at, own, other, n: other[None, :] <= own[:, None]),
    "a distance": lambda triton: ("_next", lambda entries, i, distance, stride, sub: triton.tl.load(entries)),
    "a product": lambda triton: ("_dot", lambda a, b: triton.tl.dot(a, b) * 1.01),
    "base": lambda triton: ("LN2", 0.7),
    "NaN": lambda triton: ("_dot_add", lambda a, b, c: c * float("nan")),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_wrong_kernel_is_refused(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the self-test, which runs forward and backward of two visits, in a launch each."""
    launches = watch(monkeypatch, VisitPass._run)
    triton = triton_module()
    if fault is not None:
        monkeypatch.setattr(triton, *FAULTS[fault](triton))
    reason = self_test.__wrapped__(torch.device("cpu"), torch.float32, 16, make_tiles(16, 16))
    if fault is None:
        assert reason is None
        assert sorted(launches) == sorted([("forward", 1), ("dq", 1), ("dkv", 1)] * 2)
    else:
        assert reason is not None and "self-test on cpu found" in reason and "of its largest number" in reason


def test_what_the_kernel_does_not_compute_is_refused() -> None:
    case = make_case(5, 1, 1, torch.float64, batch=1)
    with pytest.raises(ra.Unsupported, match="kernel visit does not compute float64; try kernel=reference"):
        solve(ra.virtual_attention, case, ra.Full(), ranks=1, kernel="visit")
    wide = make_case(2, 1, 1, torch.float32, dim=272, batch=1)
    with pytest.raises(ra.Unsupported, match="head dims up to 256, got 272"):
        solve(ra.virtual_attention, wide, ra.Full(), ranks=1, kernel="visit")
