"""Attention as an operator of torch's graphs: compiled programs against eager ones, bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from graph_cases import in_graphs
from oracle import note_passes
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ringattn as ra
from ringattn.cache import NUMBERED
from ringattn.call import graph_op
from ringattn.call.autograd import Runner, compilable

Leaves = tuple[torch.Tensor, ...]
PATTERN = ra.Causal() & ra.Window(9)
SELECT = partial(create_selective_checkpoint_contexts, ra.save_attention_policy())


def leaves(tokens: int = 24) -> Leaves:
    source = torch.Generator().manual_seed(0)
    shapes = [(2, 4, tokens, 8), (2, 2, tokens, 8), (2, 2, tokens, 6), (4,)]
    return tuple(torch.randn(shape, generator=source).requires_grad_() for shape in shapes)


def run(call: Callable[..., Any], *arguments: Any) -> list[torch.Tensor]:
    """The results of a call of fresh leaves, and the gradients."""
    x = leaves()
    results = call(*x, *arguments)
    results = results if isinstance(results, tuple) else (results,)
    loss = torch.stack(
        [(y * torch.arange(y.numel()).view(y.shape).sin()).nan_to_num(neginf=0.0).sum() for y in results]
    )
    found = torch.autograd.grad(loss.sum(), x, allow_unused=True)
    return [*results, *(g for g in found if g is not None)]


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, pattern: ra.Pattern, layout: Any) -> Any:
    padding = (torch.arange(24) > 19).expand(2, -1)
    return ra.virtual_attention(
        q.sin(), k, v, pattern, ranks=3, layout=layout, key_padding_mask=padding, scale=-0.3, return_lse=True
    )


def sinks_in_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> Any:
    """The pattern is made in the compiled function."""
    return ra.attention(q.sin(), k, v, ra.Causal() & ra.Documents([10, 14]), sinks=s.cos(), softcap=3.0)


@in_graphs
@pytest.mark.parametrize(
    ("call", "arguments"), [(masked, (PATTERN, ra.make_layout("zigzag", tokens=24, ranks=3))), (sinks_in_graph, ())]
)
def test_compiled_calls_are_eager_ones(call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert equal(run(compiled, *arguments), run(call, *arguments))


@in_graphs
def test_new_documents_and_layouts_do_not_compile_anew_and_nothing_is_kept() -> None:
    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, pattern: ra.Pattern, layout: ra.Layout
    ) -> torch.Tensor:
        return ra.virtual_attention(q, k, v, pattern, ranks=2, layout=layout)

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    before = len(NUMBERED)
    for first in range(1, 11):
        pattern = ra.Causal() & ra.Documents([first, 24 - first])
        layout = ra.make_layout("balanced(2)", tokens=24, ranks=2, pattern=pattern)
        assert equal(run(compiled, pattern, layout), run(call, pattern, layout))
    assert counters["stats"]["unique_graphs"] <= 2
    del pattern, layout
    gc.collect()
    assert not graph_op._records and len(NUMBERED) <= before + 64  # the plans that are cached


@in_graphs
def test_numbers_may_change_from_call_to_call() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, scale: float, softcap: float) -> Any:
        return ra.virtual_attention(q, k, v, PATTERN, ranks=2, scale=scale, softcap=softcap)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for scale, softcap in ((0.5, 5.0), (-0.25, 7.0)):  # torch compiles the second call anew, with numbers as inputs
        assert equal(run(compiled, scale, softcap), run(call, scale, softcap))


@in_graphs
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_ring_runs_once_where_a_checkpoint_selects_it(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = note_passes(monkeypatch, Runner, "forward")

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return ra.virtual_attention(q.sin(), k, v, PATTERN, ranks=3).cos()

    wanted = run(layer)
    for options, runs in (({}, 2), ({"context_fn": SELECT}, 1), ({"context_fn": ra.keep_attention}, 1)):
        call = partial(checkpoint, layer, use_reentrant=False, **options)
        if backend is not None:
            torch._dynamo.reset()
            call = torch.compile(lambda *x, call=call: call(*x), fullgraph=True, backend=backend)
        forwards.clear()
        assert equal(run(call), wanted)
        assert len(forwards) == runs


@in_graphs
def test_independent_calls_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward as in the program, backward the other way round, whatever torch's passes do."""
    passes = note_passes(monkeypatch, Runner, "forward", "backward")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        parts = [ra.virtual_attention(q * ranks, k, v, PATTERN, ranks=ranks) for ranks in (2, 1, 3)]
        return parts[2] + parts[0] * parts[1]

    torch._dynamo.reset()
    run(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert [(kind, runner.plan.ranks) for kind, runner in passes] == [("forward", n) for n in (2, 1, 3)] + [
        ("backward", n) for n in (3, 1, 2)
    ]


def test_opcheck() -> None:
    tensors = list(leaves()[:3])
    text = graph_op._write(
        "ringattn.call.functional:virtual_attention", ("q", "k", "v", "pattern"), ranks=2, return_lse=True
    )
    torch.library.opcheck(torch.ops.ringattn.attend.default, (tensors, [PATTERN.number], text, [True, True, False]))


@in_graphs
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v, s: ra.attention(q, k[:, :, :5], v, PATTERN), "same tokens"),
        (lambda q, k, v, s: ra.virtual_attention(q, k, v, "Causl()", ranks=2), "did you mean 'Causal'"),
    ],
)
def test_errors_of_users_are_those_of_the_call(call: Callable[..., Any], words: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(ra.InvalidInput, match=words):
        torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves())


@in_graphs
def test_a_layout_made_in_the_trace_is_refused() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return ra.virtual_attention(q, k, v, PATTERN, ranks=2, layout=ra.make_layout("zigzag", tokens=24, ranks=2))

    torch._dynamo.reset()
    with pytest.raises(Exception, match="a Zigzag cannot be made within a compiled"):  # torch wraps it
        torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves())


@in_graphs
def test_a_compiled_checkpoint_drops_the_same_weights_again() -> None:
    """Its gradient is that of the compiled call without a checkpoint, whose seed is the same."""
    module = ra.nn.RingAttention(PATTERN, dropout=0.4)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return module(q, q, q)

    def checkpointed(q: torch.Tensor) -> torch.Tensor:
        return checkpoint(attend, q, use_reentrant=False)

    found = []
    for function in (attend, checkpointed):
        x = leaves()[0]
        compiled = torch.compile(lambda q, f=function: f(q).sin(), fullgraph=True, backend="aot_eager")
        torch.manual_seed(5)
        found.append([out := compiled(x), *torch.autograd.grad(out.square().sum(), x)])
        assert not torch.equal(compiled(x), out), "the next call drops other weights"
    assert equal(*found)


def test_older_versions_of_torch_leave_attention_out_of_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(torch, "__version__", TorchVersion("2.11.0"))
        attend = compilable(ra.virtual_attention.__wrapped__)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return attend(q.sin(), k, v, PATTERN, ranks=3).cos()

    torch._dynamo.reset()
    counters.clear()
    assert equal(run(torch.compile(call, backend="aot_eager")), run(call))
    assert len(counters["graph_break"]) == 1
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.compile takes attention from torch 2\.12 on"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves())


def test_a_cuda_graph_takes_no_attention() -> None:
    """Its replay would launch the kernels of a call, and leave out what the ranks exchange."""
    for name in ("attend", "attend_backward", "positions"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.ringattn, name).default.tags
