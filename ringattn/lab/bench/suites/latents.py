"""Suite "latents": keys and values of heads that travel, beside latents that are expanded where they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....call.functional import attention, ring_attention
from ....call.rows import Rows
from ....pattern import Causal
from ..calls import check_error, make_shards
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, Run, make_settings
from ..hosts import Cluster

#: Mbit/s of the link, and bytes per second of a link that holds nothing back.
RATE, FREE = 400, 1e10
#: The longest time with latents over this link, as a multiple of their time without a limit.
MOST = 1.2
#: A layer of DeepSeek-V2-Lite: numbers of the latent, of what its keys share, of a head's other keys, of its values.
HEADS, RANK, ROPE, NOPE, VALUE = 16, 512, 64, 128, 128
NOTES = (
    "the forward and the backward of attention in a layer of DeepSeek-V2-Lite, with the expansion of latents to keys "
    "and values, and with the gradients of queries, latents and weights; layout zigzag. heads: each rank expands its "
    "own rows, and keys and values travel; latents: 576 numbers a token travel, and each rank expands what it attends "
    f"to. _{RATE}: each host sends at most {RATE} Mbit/s, set at the start of every run; _free: the same link without "
    "a limit",
)
#: (out, and the gradients of q, latents, shared keys and weights).
Results = tuple[Tensor, ...]


def list_cases(tokens: int = 4096) -> list[BenchCase]:
    """A layer, each form over the link with and without a limit, in turn."""
    rates = {str(RATE): RATE * 1e6 / 8, "free": FREE}
    columns = [
        BenchColumn(f"{form}_{name}", 1, partial(_make, rows=form == "latents", rate=rate), weighed=False)
        for name, rate in rates.items()
        for form in ("heads", "latents")
    ]
    limited = f"latents_{RATE}"
    case = BenchCase(
        "v2_lite_step",
        2,
        make_settings(tokens, heads=HEADS, head_dim=NOPE + ROPE, layout="zigzag", pattern="Causal()"),
        tuple(columns),
        (
            Ratio(f"heads_{RATE}", limited),
            Ratio("latents_free", limited, 1 / MOST),
            Ratio("heads_free", "latents_free"),
        ),
        _check,
        cluster=Cluster(2, 1, FREE),
        notes=NOTES,
    )
    return [case]


def expand(c: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of latents."""
    k, v = (c.squeeze(1) @ weight).unflatten(-1, (HEADS, -1)).transpose(1, 2).split((NOPE, VALUE), -1)
    return torch.cat([k, rope.expand(-1, HEADS, -1, -1)], -1), v


def _inputs(settings: dict[str, Any]) -> list[Tensor]:
    """q, latents, shared keys and the gradient of out of the whole sequence, and the weight; equal on all ranks."""
    source, tokens = torch.Generator().manual_seed(1), settings["tokens"]
    shapes = ((HEADS, tokens, NOPE + ROPE), (1, tokens, RANK), (1, tokens, ROPE), (HEADS, tokens, VALUE))
    drawn = [torch.randn(1, *shape, generator=source, device="cpu") for shape in shapes]
    weight = torch.randn(RANK, HEADS * (NOPE + VALUE), generator=source, device="cpu") / RANK**0.5
    return [x.to(getattr(torch, settings["dtype"])) for x in (*drawn, weight)]


def _differentiate(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Results:
    q, c, rope, grad, weight = tensors
    inputs = [x.detach().requires_grad_() for x in (q, c, rope, weight)]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def _make(context: Context, *, rows: bool, rate: float) -> Run:
    *tensors, weight = _inputs(context.settings)
    tensors, hosts = make_shards(context, tensors), context.hosts

    def attend(q: Tensor, c: Tensor, rope: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"layout": "zigzag", "schedule": "ring"}
        if rows:
            return ring_attention(q, Rows(c, rope, expand=expand, weights=(weight,)), Causal(), **options)
        return ring_attention(q, *expand(c, rope, weight), Causal(), **options)

    def run() -> Results:
        if hosts is not None:
            hosts.hold(rate)
        return _differentiate(attend, (*tensors, weight))

    return run


def _check(context: Context, results: dict[str, Results]) -> dict[str, float]:
    """For each column, the largest relative error of this rank's rows, and of the gradient of the weight of all."""
    whole = [x.float() for x in _inputs(context.settings)]
    *exact, of_weight = _differentiate(lambda q, c, r, w: attention(q, *expand(c, r, w), Causal()), whole)
    exact, errors = make_shards(context, exact), {}
    for name, (*found, part) in results.items():
        total = part.float()
        dist.all_reduce(total)
        errors[name] = check_error(name, [*found, total.to(part.dtype)], [*exact, of_weight])
    return errors


def _conclude(records: list[CaseRecord]) -> tuple[str, bool | None]:
    """How much longer latents take over the link, and how much longer heads take than latents."""
    if not records or not records[0]["columns"]:
        return "nothing was measured", None
    times = {name: median(column["seconds"]) for name, column in records[0]["columns"].items()}
    longer = times[f"latents_{RATE}"] / times["latents_free"]
    heads = times[f"heads_{RATE}"] / times[f"latents_{RATE}"]
    text = (
        f"at {RATE} Mbit/s latents take {longer:.2f} times the time without a limit (at most {MOST}), and heads take "
        f"{heads:.2f} times the time of latents"
    )
    return text, longer <= MOST


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="Latents between two hosts",
    about=(
        f"Two hosts of one rank, network namespaces of one machine, whose link carries {RATE} Mbit/s or as much as it "
        "can: 4,096 tokens of a layer of DeepSeek-V2-Lite, forward and backward.",
    ),
)
