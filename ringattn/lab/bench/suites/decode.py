"""Suite "decode": a decode step over a sharded K/V cache, compared with one process that holds the whole cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ....inference.cache import KVCache
from ..calls import check_error, make_inputs
from ..case import BenchCase, BenchColumn, BenchSuite, Context, Ratio, Run, make_settings

#: Tokens in the cache.
CONTEXT = 1 << 16
NOTE = (
    "alone is scaled_dot_product_attention in one process of two threads, its keys and values in place; step is "
    "KVCache.step on two ranks of one thread, with its record (beside the messages, check=deferred), the new rows, the "
    "merge and a crop back. At least 0.8 is promised for one token: 0.87 was measured, the rest being what a step does "
    "besides its kernel"
)


def list_cases() -> list[BenchCase]:
    """Cases with one new token, and with four, as in speculative decoding."""
    return [_case("step_64k", 1, 0.8), _case("step_64k_4_tokens", 4, None)]


def _case(name: str, new: int, target: float | None) -> BenchCase:
    columns = (
        BenchColumn("alone", 2, _make_alone, weighed=False),
        BenchColumn("step", 1, _make_step, weighed=False),  # its prompt takes a minute and would be recomputed
    )
    settings = make_settings(CONTEXT, new_tokens=new)
    return BenchCase(name, 2, settings, columns, (Ratio("alone", "step", target),), _check, notes=(NOTE,))


def _inputs(context: Context) -> list[torch.Tensor]:
    """q, k and v for the context plus the new tokens."""
    settings = context.settings
    return make_inputs({**settings, "tokens": settings["tokens"] + settings["new_tokens"]}, 3)


def _make_alone(context: Context) -> Run | None:
    if context.rank:
        return None
    q, k, v = _inputs(context)
    new = context.settings["new_tokens"]
    mask = torch.ones(new, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - new) if new > 1 else None
    last = q[:, :, -new:].clone()
    return lambda: scaled_dot_product_attention(last, k, v, attn_mask=mask)


def _make_step(context: Context) -> Run:
    tokens, (q, k, v) = context.settings["tokens"], _inputs(context)
    cache = KVCache("Causal()", layers=1)
    mine = cache.shard(tokens)
    with torch.no_grad():
        cache.prefill(0, *(x[:, :, mine] for x in (q, k, v)))
    new = [x[:, :, tokens:].clone() for x in (q, k, v)]

    def run() -> torch.Tensor:
        out: torch.Tensor = cache.step(0, *new, check="deferred")
        cache.crop(tokens)
        return out

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """The error of a step, on the rank that has the reference result; empty elsewhere."""
    alone, step = results.get("alone"), results["step"]
    return {} if alone is None else {"step": check_error("step", [step], [alone])}


SUITE = BenchSuite(
    list_cases,
    title="A step over a sharded K/V cache",
    about=("Above 1, two single-thread ranks, each with half of the cache, are faster than one process.",),
)
