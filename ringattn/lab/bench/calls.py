"""The calls that cases time, their inputs and shards, and the errors of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ...call.functional import attention, ring_attention
from ...call.planner import make_plan
from ...dtypes import dtype_name
from ...layout.regular import Layout, make_layout
from ...machine.machine import Machine
from ...pattern import parse_pattern
from ...plan.plan import Plan
from ...transport.base import Transport
from .case import TOLERANCES, Context, Run

#: Work of a backward divided by that of its forward: five matrix products against two.
BACKWARD_WORK = 2.5
#: At most this many rows of an input are drawn; a longer input repeats them in blocks, with random signs.
DRAWN = 32768


def make_inputs(settings: dict[str, Any], count: int) -> list[torch.Tensor]:
    """Make `count` random tensors [B, H, N, D] of the whole sequence, equal on all ranks.

    Drawing a million rows would take longer than attention over them. Later blocks of rows therefore repeat the drawn
    rows, with random signs for the columns of each block and head.
    """
    source, dtype = torch.Generator().manual_seed(1), getattr(torch, settings["dtype"])
    batch, heads, width = settings["batch"], settings["heads"], settings["head_dim"]
    shape = (batch, heads, settings["tokens"], width)
    inputs = [torch.empty(shape, dtype=dtype, device="cpu") for _ in range(count)]  # allocate all before filling any
    for x in inputs:
        if x.shape[2] <= DRAWN:
            x.normal_(generator=source)
            continue
        drawn = torch.empty((batch, heads, DRAWN, width), dtype=dtype, device="cpu").normal_(generator=source)
        for block in x.split(DRAWN, 2):
            signs = torch.randint(0, 2, (batch, heads, 1, width), generator=source, device="cpu") * 2 - 1
            torch.mul(drawn[:, :, : block.shape[2]], signs.to(dtype), out=block)
    return inputs


def get_layout(context: Context, name: str | None = None) -> Layout:
    """The layout `name`, by default that of the settings, for the tokens and ranks of a case."""
    settings = context.settings
    sizes: Any = {"tokens": settings["tokens"], "ranks": context.ranks, "pattern": settings.get("pattern")}
    return make_layout(name or settings["layout"], **sizes)


def make_shards(context: Context, tensors: Sequence[torch.Tensor], layout: str | None = None) -> list[torch.Tensor]:
    """Copies of this rank's rows of whole-sequence tensors; the layout is that of `get_layout`."""
    return [get_layout(context, layout).shard_tensor(x, context.rank).clone() for x in tensors]


def gather(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The whole-sequence tensor, gathered from the shards of all ranks. Collective."""
    shards = [x.new_empty((*x.shape[:2], layout.rows(rank), x.shape[3])) for rank in range(layout.ranks)]
    dist.all_gather(shards, x.contiguous())
    return layout.unshard_tensor(shards)


def make_pass(attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor | None) -> Run:
    """A function that runs attend(q, k, v) and returns the output and, with `grad`, the gradients of the inputs."""
    inputs = [x.requires_grad_(grad is not None) for x in inputs]

    def run() -> tuple[torch.Tensor, ...]:
        out = attend(*inputs)
        return (out.detach(), *(() if grad is None else torch.autograd.grad(out, inputs, grad)))

    return run


def make_backward(attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> Run:
    """A function that runs only the backward of attend(q, k, v), on a retained graph; it returns the gradients."""
    inputs = [x.requires_grad_() for x in inputs]
    out = attend(*inputs)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def make_call(
    context: Context, attend: Callable[..., torch.Tensor], *, whole: bool = False, layout: str | None = None
) -> Run:
    """`make_pass` for this rank's shards, or with `whole` for the whole sequence, on random inputs.

    Computes gradients if the settings have backward=True.
    """
    inputs = make_inputs(context.settings, 4 if context.settings.get("backward") else 3)
    q, k, v, *grad = inputs if whole else make_shards(context, inputs, layout)
    return make_pass(attend, [q, k, v], grad[0] if grad else None)


def make_alone(context: Context, attend: Callable[..., torch.Tensor]) -> Run | None:
    """`make_call` for the whole sequence on rank 0; None on the other ranks, which wait."""
    return None if context.rank else make_call(context, attend, whole=True)


def make_single(context: Context) -> Run | None:
    """A function that runs torch's own attention, dense or causal, on rank 0; None on the other ranks."""
    return make_alone(context, partial(scaled_dot_product_attention, is_causal=context.settings["causal"]))


def make_ours(context: Context) -> Run | None:
    """A function that runs ringattn's attention of the whole sequence on rank 0; None on the other ranks."""
    return make_alone(context, partial(attention, pattern=parse_pattern(context.settings["pattern"])))


def make_ring(context: Context, schedule: str = "ring", transport: Transport | None = None) -> Run:
    """A function that runs ringattn's attention on all ranks, over `transport` or else Gloo."""
    pattern, layout = parse_pattern(context.settings["pattern"]), context.settings["layout"]
    options: Any = {"schedule": schedule, "transport": transport}
    return make_call(context, partial(ring_attention, pattern=pattern, layout=layout, **options))


def plan_ring(settings: dict[str, Any], ranks: int, schedule: str, machine: Machine | None = None) -> Plan:
    """The plan of the call that `make_ring` makes for the settings of a case."""
    names = ("pattern", "tokens", "layout", "heads", "kv_heads", "head_dim", "dtype", "batch")
    return make_plan(**{name: settings[name] for name in names}, ranks=ranks, schedule=schedule, machine=machine)


def compute_whole(context: Context) -> Any:
    """The results of a case for the whole sequence, computed by ringattn on one device."""
    return make_call(context, partial(attention, pattern=context.settings["pattern"]), whole=True)()


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest absolute difference, divided by the largest absolute entry of the exact tensor."""
    return float((result.double() - exact.double()).abs().max() / exact.double().abs().max())


def check_error(name: str, results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The largest relative error of some tensors. Raises AssertionError above the dtype's tolerance."""
    error = max(relative_error(x, y) for x, y in zip(results, exact, strict=True))
    assert error < TOLERANCES[dtype_name(results[0].dtype)], f"{name} is wrong by {error:.1e}"
    return error


def check_shards(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """For each column, the largest relative error of this rank's shards; exact results are those of one device."""
    exact = make_shards(context, compute_whole(context))
    return {name: check_error(name, result, exact) for name, result in results.items()}
