"""Recurrent calls that fail on one rank, and steps of a cache that one refuses: what all ranks are told, and after."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from recurrence_cases import KINDS, RecurrentCase, draw, run_rank
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn as ra
from ringattn.call.functional import get_transport
from ringattn.recurrence import exchange, functions

#: What a call may raise.
ERRORS = (ra.RingAttentionError, MemoryError, KeyboardInterrupt, RuntimeError, TypeError, AttributeError)
#: Faults before the first message, after which the group makes further calls.
EARLY = ("none", "keyword", "dtype", "layout", "size", "no layout", "interrupt before")
#: Exceptions of the function that computes pieces, by whether the forward or the backward raises.
LATE = ("user", "memory", "interrupt", "torch memory", "backward", "backward interrupt", "backward of torch")
#: Seconds within which all ranks are told: far below the timeout of the group, on a busy machine, too.
SOON = 20.0


def told_by(call: Callable[[], Any]) -> str:
    """What a call raised, or "fine". Waits less than a timeout."""
    begun, text = time.monotonic(), "fine"
    try:
        call()
    except ERRORS as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - begun < SOON, text
    return text


class _Fail(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


def _broken(function: Callable[..., Any], fault: str) -> Callable[..., Any]:
    """A function that computes pieces, with a fault."""
    error = {
        "memory": MemoryError("no room"), "interrupt": KeyboardInterrupt(), "backward interrupt": KeyboardInterrupt(),
        "torch memory": torch.OutOfMemoryError("no room"),
    }.get(fault, LookupError("a bad day"))  # fmt: skip

    def compute(*args: Any, **options: Any) -> Any:
        if not fault.startswith("backward"):
            raise RuntimeError("a bad day") if fault == "user" else error
        result = function(*args, **options)
        out, *rest = result if isinstance(result, tuple) else (result,)
        if fault == "backward of torch":
            out = out.exp()
            out.add_(1.0)  # which the backward of exp needed unchanged
        else:
            out = _Fail.apply(out, error if "interrupt" in fault else RuntimeError("a bad day"))
        return (out, *rest) if isinstance(result, tuple) else out

    return compute


def break_function(patch: pytest.MonkeyPatch, kind: str, fault: str) -> None:
    """Give a fault to the function that computes pieces."""
    name = {"kda": "gated_delta_rule", "matrix": "affine_scan"}.get(kind, kind)
    patch.setattr(functions, name, _broken(getattr(functions, name), fault))


def attempt(case: RecurrentCase, rank: int, group: Any, fault: str = "", *, backward: bool = True) -> None:
    """A forward, and a backward, of this rank's part of a call, with a fault."""
    cut, layout = {"S", "A", "weight", "bias"}, case.layout
    leaves: dict[str, Any] = {
        name: (x if name in cut else layout.shard_tensor(x, rank, case.dim)).clone().requires_grad_()
        for name, x in case.tensors.items()
    }
    padding = None if case.padding is None else layout.shard_tensor(case.padding, rank, 1)
    more, given, last = dict[str, Any](), dict(leaves), next(x for x in reversed(leaves) if x not in cut)
    given |= {"none": {last: None}, "dtype": {last: leaves[last].float()}}.get(fault, {})
    more |= {
        "keyword": {"chunk": 3}, "no layout": {"layout": None},
        "layout": {"layout": "contiguous" if layout.name == "zigzag" else "zigzag"},
        "size": {"layout": ra.make_layout("contiguous", tokens=layout.tokens + 7, ranks=layout.ranks)},
    }.get(fault, {})  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if fault in LATE:
            break_function(patch, case.kind, fault)
        if fault == "interrupt before":
            patch.setattr(exchange, "spell_layout", _broken(len, "interrupt"))
        results = [x for x in case.call(given, padding, group=group, **more) if x.requires_grad]
        if backward:
            torch.autograd.grad(results, list(leaves.values()), [x.detach() + 1 for x in results], allow_unused=True)


def run_faults(rank: int, seeds: list[int]) -> list[tuple[str, int, str, str, str]]:
    """(kind, rank, fault, what this rank is told, and in the next call) of random calls that fail on one rank.

    Each is followed by a call that is right bit for bit, on the same group, or on a new one after a fault in flight.
    """
    size, group, told = dist.get_world_size(), dist.new_group(), []
    run_rank(draw(0, "kda", ranks=size), rank, group=group)  # imports what a first call imports
    for seed in seeds:
        rng = np.random.default_rng(seed)
        kind, fault = KINDS[seed % len(KINDS)], (EARLY + LATE)[seed // len(KINDS) % len(EARLY + LATE)]
        odd, case = int(rng.integers(size)), draw(seed, kind, ranks=size)
        if fault == "size":
            case.layout = ra.make_layout("contiguous", tokens=case.layout.tokens, ranks=size)
        now = told_by(lambda: attempt(case, rank, group, fault if rank == odd else ""))
        after = told_by(lambda: attempt(case, rank, group))
        told.append((kind, odd, fault, now, after))
        if fault in LATE:
            dist.destroy_process_group(group)
            group = dist.new_group()
        mine, theirs = run_rank(case, rank, group=group)
        assert all(torch.equal(x, theirs[name]) for name, x in mine.items()), (seed, kind, fault)
    return told


def check_faults(of_ranks: list[list[tuple[str, int, str, str, str]]]) -> int:
    """The number of calls that failed as they should: on all ranks, which name the rank and why."""
    failed = 0
    for same in zip(*of_ranks, strict=True):
        odd, fault = same[0][1:3]
        own, own_after = same[odd][3:]
        others = [(now, after) for rank, (*_, now, after) in enumerate(same) if rank != odd]
        if fault in LATE and own == "fine":  # a rank without rows computes nothing
            assert {*others} == {("fine", "fine")} and own_after == "fine", same
            continue
        failed += 1
        assert own != "fine", same
        for now, after in others:
            if fault in EARLY:
                assert re.search(f"Mismatch: .*ranks? .*{odd}", now) and after == own_after == "fine", same
                continue
            why = "ended its backward" if fault.startswith("backward") else own.partition(":")[0]
            assert now == "fine" or re.match(f"Mismatch: rank {odd} cannot take part: .*{why}", now), same
            assert re.match(f"Mismatch: rank {odd} cannot take part: .*{why}", after), same
            assert "left an earlier call by an error" in own_after, same
    return failed


def second_thread(rank: int) -> list[list[str]]:
    """What each of two threads is told that call at once on the last rank, and one after the other elsewhere."""
    odd, group, told = rank == dist.get_world_size() - 1, dist.new_group(), []
    case = draw(2, "ssd", ranks=dist.get_world_size())
    begun, function = threading.Event(), functions.ssd
    answers: dict[str, str] = {}

    def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        time.sleep(0.2)
        return function(*args, **options)

    def call(name: str) -> None:
        # Without a backward, which the first thread would begin before or after the refusal of the second.
        answers[name] = told_by(lambda: attempt(case, rank, group, backward=False))

    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setattr(functions, "ssd", slow)
        first = threading.Thread(target=call, args=("first",))
        first.start()
        begun.wait() if odd else first.join()
        call("second")
        first.join()
    call("third")
    told.append([answers[x] for x in ("first", "second", "third")])
    return told


def checkpointed(rank: int) -> bool:
    """Whether gradients are those of a call that is not recomputed, and the next call is fine, too."""
    case, found = draw(2, "ssd", ranks=dist.get_world_size()), []
    for _ in range(2):
        for again in (True, False):
            leaves = {
                name: (x if name in ("A", "S") else case.layout.shard_tensor(x, rank, 1)).clone().requires_grad_()
                for name, x in case.tensors.items()
            }
            padding = None if case.padding is None else case.layout.shard_tensor(case.padding, rank, 1)

            def run(*given: Tensor, padding: Tensor | None = padding, names: tuple[str, ...] = tuple(leaves)) -> Any:
                return case.call(dict(zip(names, given, strict=True)), padding)

            out, _ = checkpoint(run, *leaves.values(), use_reentrant=False) if again else run(*leaves.values())
            found.append(torch.autograd.grad(out.square().sum(), list(leaves.values())))
    return all(torch.equal(x, y) for other in found for x, y in zip(found[0], other, strict=True))


#: What refuses a step in a later layer.
REFUSALS: dict[str, Callable[[tuple[Tensor, ...]], tuple[Any, ...]]] = {
    "option": lambda x: x, "layer": lambda x: x, "done": lambda x: x, "prefill": lambda x: x,
    "heads": lambda x: (x[0][:, :1], *x[1:]), "tokens": lambda x: tuple(torch.cat([y, y], 2) for y in x),
    "none": lambda x: (None, *x[1:]),
    "gradient": lambda x: (x[0].clone().requires_grad_(), *x[1:]),
}  # fmt: skip


def run_refusals(rank: int, seeds: list[int]) -> list[tuple[int | None, str, str]]:
    """(rank, refusal, what this rank is told) of steps that one rank, or all of them (None), refuses in a later layer.

    Every layer is then called again as it should be, and has the bits of virtual ranks.
    """
    size, ring, told = dist.get_world_size(), get_transport(), []
    for seed in seeds:
        rng, source = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        refusal = [*REFUSALS][seed % len(REFUSALS)]
        odd = None if rng.random() < 0.3 else int(rng.integers(size))
        layers, steps = int(rng.integers(2, 5)), int(rng.integers(1, 4))
        wrong = int(rng.integers(steps)), int(rng.integers(1, layers))
        options: dict[str, Any] = {"layers": layers, "page": 2, "merge": ("gather", "scatter")[seed % 2]}
        mine, whole = ra.KVCache("Causal() & Window(5)", **options), ra.KVCache(
            "Causal() & Window(5)", **options, ranks=size
        )  # fmt: skip
        for number in range(steps):
            tokens = int(rng.integers(1, 4))
            for layer in range(layers):
                new = tuple(torch.randn(2, 2, tokens, 4, generator=source) for _ in range(3))
                if (number, layer) == wrong:
                    if odd in (None, rank):
                        at = {"layer": 99, "done": layer - 1}.get(refusal, layer)
                        more = {"schedule": "ring"} if refusal == "option" else {}
                        given = REFUSALS[refusal](new)
                        run = mine.prefill if refusal == "prefill" else mine.step
                        text = told_by(lambda: run(at, *given, **more))
                        alone = whole.prefill if refusal == "prefill" else whole.step
                        assert told_by(lambda: alone(at, *given, **more)) == text
                    else:
                        text = told_by(lambda: mine.step(layer, *new))
                    told.append((odd, refusal, text))
                assert torch.equal(mine.step(layer, *new), whole.step(layer, *new)), (seed, refusal)
        assert ring.gather(b"") == [b""] * size
    return told


def check_refusals(of_ranks: list[list[tuple[int | None, str, str]]]) -> int:
    """The number of steps that were refused on all ranks."""
    for same in zip(*of_ranks, strict=True):
        odd = same[0][0]
        for rank, (_, _, text) in enumerate(same):
            own = odd in (None, rank)
            assert re.match("(InvalidInput|Unsupported): " if own else f"Mismatch: rank {odd} cannot take", text), same
    return len(of_ranks[0])
