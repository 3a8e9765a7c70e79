"""Suite "patterns": what a sparse pattern costs on one thread, beside dense attention by the same library call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ...dtypes import ITEM_BYTES
from ...functional import attention, virtual_attention
from ...nn import MultiheadRingAttention
from ...numerics.row_oracle import oracle_rows, sampled_rows
from ...pattern import Causal, parse_pattern
from ...planner import make_plan
from ...runtime.checkpointing import keep_attention
from ...runtime.memory_pool import LIMIT, memory_pool
from .case import BenchCase, BenchColumn, Context, Ratio, Run

HEADS, DIM, TOKENS = 8, 64, 8192
#: A result that differs from the fp64 rows by more than this is wrong, and is not timed.
WRONG = 1e-5
#: A backward has five matrix products where the forward has two.
BACKWARD = 2.5
DILATED = "(2048, 4096, 8192), (1, 2, 4)"
#: Name, pattern, target of the useful rate over the dense rate.
RATES: tuple[tuple[str, str, float | None], ...] = (
    ("dilated_group", f"Dilated({DILATED}, mix='group')", 0.85),
    ("longnet", f"Dilated({DILATED})", 0.80),
    ("local_window_1_8", "local_window(128, density=0.125)", 0.70),
    ("strided_blocks_1_8", "strided_blocks(128, stride=8)", 0.70),
    ("dilated_blocks_1_8", "dilated_blocks(128, density=0.125)", 0.70),
    ("causal_blocks_1_4", "dilated_blocks(128, density=0.25) & Causal()", None),
    ("window_256", "Window(255)", 0.50),
    ("window_1024", "Window(1023)", None),
    ("documents_16", f"Documents({[512] * 16})", None),
)
LONG: tuple[tuple[str, str], ...] = (
    ("local_window", "local_window(128, blocks=2)"),
    ("dilated", f"Dilated({DILATED}, mix='group')"),
    ("longnet", f"Dilated({DILATED})"),
)
RATE_NOTE = (
    "useful rate: counted pairs of the pattern over the pairs of dense attention, times the ratio of times; the "
    "backward's is 2.5 times the time of its forward over its own, five matrix products against two; column backward: "
    "the backward alone, of a graph that is kept"
)
MEMORY_NOTE = (
    "memory: rise of VmHWM, reset by clear_refs, over VmRSS before the inputs exist, the worst of all rounds; "
    "formula: q, k, v and the output"
)
SCALING_NOTE = "linear: time of 8,192 tokens, times the ratio of lengths, over the time of the long sequence"
POOL_NOTE = "pool: one process, columns with the memory pool on and off (limit 0); above 1 the pool helps"


def cases() -> list[BenchCase]:
    """Targets are the project's promises."""
    found = [_rate(*row) for row in RATES]
    found += [_scaling(name, pattern) for name, pattern in LONG[:2]]  # the third would take minutes a round
    found += [_memory(name, pattern) for name, pattern in LONG]
    found += [
        _pool("pool_longnet_4", f"Dilated({DILATED})", ranks=4, dtype="float32"),
        _pool("pool_longnet_bfloat16", f"Dilated({DILATED})", ranks=1, dtype="bfloat16"),
        _pool("pool_window_8", "Window(255)", ranks=8, dtype="float32"),
    ]
    return found + [_checkpointed(kind) for kind in ("none", "projections", "all")]


def _settings(tokens: int, pattern: str, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {
        "batch": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": DIM, "dtype": dtype, "tokens": tokens,
        "pattern": pattern, **more,
    }  # fmt: skip


def _tensors(context: Context, count: int, tokens: int | None = None) -> list[torch.Tensor]:
    settings = context.settings
    source = torch.Generator().manual_seed(1)
    shape = (settings["batch"], HEADS, tokens or settings["tokens"], DIM)
    dtype: torch.dtype = getattr(torch, settings["dtype"])
    return [torch.empty(shape, dtype=dtype, device="cpu").normal_(generator=source) for _ in range(count)]


def _dense(context: Context) -> Run:
    q, k, v = _tensors(context, 3)
    return lambda: scaled_dot_product_attention(q, k, v)


def _forward(context: Context) -> Run:
    q, k, v = _tensors(context, 3)
    pattern = parse_pattern(context.settings["pattern"])
    return lambda: attention(q, k, v, pattern)


def _backward(context: Context) -> Run:
    q, k, v, grad = _tensors(context, 4)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, parse_pattern(context.settings["pattern"]))
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """Largest error of 16 rows against fp64 softmaxes over the pattern's dense mask rows."""
    tokens, (q, k, v) = context.settings["tokens"], _tensors(context, 3)
    rows = sampled_rows(tokens, 16)
    pattern = parse_pattern(context.settings["pattern"]).bind(HEADS, tokens)
    truth = oracle_rows(pattern, tokens, rows, DIM**-0.5, np.arange(tokens), q, k, v, lambda x, most: None)
    truth = truth * pattern.output_scale
    error = float((results["forward"][:, :, rows].double() - truth).abs().max() / truth.abs().max())
    assert error < WRONG, f"{context.settings['pattern']} is wrong by {error:.1e}"
    return {"forward": error}


def _rate(name: str, pattern: str, target: float | None) -> BenchCase:
    plan = make_plan(parse_pattern(pattern), tokens=TOKENS, ranks=1, heads=HEADS)
    return BenchCase(
        name, 1, _settings(TOKENS, pattern, density=plan.density),
        (BenchColumn("dense", 1, _dense), BenchColumn("forward", 1, _forward), BenchColumn("backward", 1, _backward)),
        (
            Ratio("dense", "forward", target, work=plan.density),
            Ratio("forward", "backward", 0.8 if target else None, work=BACKWARD),
        ),
        _check, notes=(RATE_NOTE,),
    )  # fmt: skip


def _scaling(name: str, pattern: str, longest: int = 1 << 20) -> BenchCase:
    def make(tokens: int) -> Callable[[Context], Run]:
        def run(context: Context) -> Run:
            q, k, v = _tensors(context, 3, tokens)
            chosen = parse_pattern(pattern)
            return lambda: attention(q, k, v, chosen)

        return run

    return BenchCase(
        f"scaling_{name}", 1, _settings(longest, pattern, "bfloat16"),
        (BenchColumn("short", 1, make(TOKENS)), BenchColumn("long", 1, make(longest))),
        (Ratio("short", "long", 0.9, work=longest / TOKENS),),
        rounds=3, notes=(SCALING_NOTE,),
    )  # fmt: skip


def _memory(name: str, pattern: str) -> BenchCase:
    def formula(context: Context) -> int:
        settings = context.settings
        return 4 * settings["tokens"] * HEADS * DIM * ITEM_BYTES[settings["dtype"]]

    def make(context: Context) -> Run:
        q, k, v = _tensors(context, 3)
        return lambda: attention(q, k, v, parse_pattern(pattern))

    return BenchCase(
        f"memory_{name}", 1, _settings(1 << 20, pattern, "bfloat16"), (BenchColumn("forward", 1, make),),
        memory=formula, limit=1.25, rounds=2, notes=(MEMORY_NOTE,),
    )  # fmt: skip


def _pool(name: str, pattern: str, *, ranks: int, dtype: str) -> BenchCase:
    def make(limit: int) -> Callable[[Context], Run]:
        def run(context: Context) -> Run:
            q, k, v, grad = _tensors(context, 4)
            inputs, chosen = [x.requires_grad_() for x in (q, k, v)], parse_pattern(pattern)

            def step() -> tuple[torch.Tensor, ...]:
                memory_pool().limit = limit
                memory_pool().clear() if not limit else None
                out = virtual_attention(q, k, v, chosen, ranks=ranks)
                return torch.autograd.grad(out, inputs, grad)

            return step

        return run

    return BenchCase(
        name, 1, _settings(TOKENS, pattern, dtype, virtual_ranks=ranks),
        (BenchColumn("on", 1, make(LIMIT)), BenchColumn("off", 1, make(0))), (Ratio("off", "on"),), notes=(POOL_NOTE,),
    )  # fmt: skip


def _checkpointed(kind: str, *, layers: int = 4, tokens: int = 16384) -> BenchCase:
    """Forward and backward of some layers, with what is kept in between: peak over the bytes that q, k, v, the outputs
    and inputs of all layers take, which is what `none` keeps."""

    def formula(context: Context) -> int:
        return layers * 6 * context.settings["tokens"] * HEADS * DIM * 4

    def make(context: Context) -> Run:
        torch.manual_seed(0)
        size = HEADS * DIM
        stack = [
            MultiheadRingAttention(
                size, HEADS, parse_pattern("local_window(128, blocks=1)") & Causal(), batch_first=True
            )
            for _ in range(layers)
        ]
        x = torch.randn(1, context.settings["tokens"], size, requires_grad=True, device="cpu")

        def layer(module: torch.nn.Module, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(module(y)[0]) + y

        def run() -> None:
            y = x
            for module in stack:
                if kind == "none":
                    y = layer(module, y)
                else:
                    keep: dict[str, Any] = {"context_fn": keep_attention} if kind == "projections" else {}
                    y = checkpoint(layer, module, y, use_reentrant=False, **keep)
            y.square().sum().backward()

        return run

    return BenchCase(
        f"checkpoint_{kind}", 1, _settings(tokens, "local_window(128, blocks=1) & Causal()", layers=layers, recompute=kind),
        (BenchColumn("step", 1, make),), memory=formula,
        notes=("checkpoint: forward and backward of 4 layers, formula: input, q, k, v, output and result of every layer",),
    )  # fmt: skip
