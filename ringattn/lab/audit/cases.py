"""What an audit tries: features, each with a problem that should show it, and smaller problems of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .kit import NUMBERS, Case

#: Tokens of each rank: more than 64, the tile of many kernels; several of the largest tiles; and few, for many calls.
ROWS, TILES, FEW = 72, 320, 12


def list_cases(ranks: int) -> Iterator[Case]:
    """One case for each feature: what differs from a causal one."""
    tokens, few, most = ROWS * ranks, FEW * ranks, tuple(range(1, ranks))
    at_borders = (5, ROWS - 5, 1, ROWS // 2, tokens - 3 * ROWS // 2 - 1)
    across = (5, ROWS, 1, tokens - ROWS - 26, 20)

    together: dict[str, Any] = {"window": ROWS + 29, "sinks": 2, "documents": across, "softcap": 1.5, "scale": 0.5}
    together["sink_logits"] = True

    def causal(**mask: Any) -> dict[str, Any]:
        return {"mask": {"causal": True, **mask}}

    features: dict[str, dict[str, Any]] = {
        "dense": {"mask": {}},
        "causal": {},
        "window": causal(window=7),
        "window of a rank's rows": causal(window=ROWS),
        "window over ranks": causal(window=ROWS + 29),
        "window and sinks": causal(window=7, sinks=2),
        "documents": causal(documents=across),
        "two-way documents": {"mask": {"documents": at_borders}},
        "padding on the right": {"batch": 2, "mask": {"padding": 5}},
        "padding on the left": {"batch": 2, **causal(left=5)},
        "softcap": causal(softcap=1.5),
        "learned sinks": causal(sink_logits=True),
        "scale": causal(scale=0.5),
        "all of these at once": {"batch": 2, "heads": 4, "ways": ("offered",), **causal(**together)},
        "large logits": {"ways": ("large",), "calls": 3},
        "a component that all keys share": {"ways": ("shared",)},
        "several tiles": {"tokens": TILES * ranks, "calls": 1},
        "grouped heads": {"heads": 4},
        "one key/value head": {"heads": 3, "kv_heads": 1},
        "batch of 3": {"batch": 3},
        "head dim 24": {"head_dim": 24},
        "v of another width": {"value_dim": 24},
        "cross-attention": {"keys": tokens // 2, "mask": {}},
        "uneven length": {"tokens": tokens - 1},
        "ranks without tokens": {"tokens": ranks - 1},
        "bfloat16": {"dtype": "bfloat16"},
        "float64": {"dtype": "float64"},
        "dropout": {"tokens": few, "heads": 16, "kv_heads": 16, "head_dim": few, **causal(dropout=0.5)},
        "log-sum-exp": {"ways": ("lse",)},
        "gradient of log-sum-exp": {"ways": ("lse", "dlse")},
        "no gradients": {"ways": ("no_grad",)},
        "no gradient for keys": {"ways": ("no_dk",)},
        "a second backward": {"ways": ("twice",)},
        "a call before a backward": {"ways": ("crossed",)},
        "strided inputs": {"ways": ("strided",)},
        "checkpointing": {"ways": ("checkpoint",)},
        "torch.compile": {"ways": ("compile",)},
        "a cache with decode steps": {"tokens": tokens + 5, "ways": ("no_grad", "cache"), "calls": 6},
        "many calls": {"tokens": few, "calls": 300},
        "two groups": {"groups": (tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks)))},
        "a group of some ranks": {"groups": (most,)},
        "same bits": {"tokens": 192, "heads": 4, "ways": ("bits",), "calls": 1},  # 192: for 1 to 4 ranks
        "ranks that differ": {"tokens": few, "ways": ("differ",), "calls": 1},
    }
    for feature, changes in features.items():
        yield replace(Case(feature, tokens, mask={"causal": True}), **changes)


def list_model_cases(ranks: int) -> Iterator[Case]:
    """One case for each feature of a model, for batches of 12 tokens a rank."""
    tokens = 12 * ranks
    features: dict[str, dict[str, Any]] = {
        "whole sequences": {},
        "documents": {"mask": {"documents": (5, tokens // 2, tokens - tokens // 2 - 5)}},
        "padding on the right": {"mask": {"padding": 5}},
        "padding on the left": {"mask": {"left": 5}},
        "uneven length": {"tokens": tokens - 1},
        "bfloat16": {"dtype": "bfloat16"},
        "checkpointing": {"ways": ("checkpoint",)},
        "a second call": {"ways": ("again",)},
        "ranks that differ": {"ways": ("differ",)},
    }
    for feature, changes in features.items():
        yield replace(Case(feature, tokens, batch=2, calls=1), **changes)


def shrink(case: Case, ranks: int) -> Iterator[Case]:
    """Smaller cases that may fail in the same way: each has fewer calls, rows of a batch, heads, tokens, or columns."""
    if "cache" in case.ways or "dropout" in case.mask:
        return
    if case.calls > 2:
        yield replace(case, calls=1)
    for names in (("calls",), ("batch",), ("heads", "kv_heads"), ("heads",), ("kv_heads",), ("head_dim",)):
        size = {name: getattr(case, name) // 2 for name in names}
        smaller = replace(case, **size)
        grouped = smaller.heads > smaller.kv_heads, case.heads > case.kv_heads
        if min(size.values()) > 0 and smaller.heads % smaller.kv_heads == 0 and grouped[0] == grouped[1]:
            yield smaller
    tokens = case.tokens // 2
    if tokens >= 2 * ranks and not case.groups and not case.keys and "documents" not in case.mask:
        tokens -= tokens % ranks - (case.tokens % ranks != 0)
        numbers = {name: max(n // 2, 1) for name, n in case.mask.items() if name in NUMBERS}
        yield replace(case, tokens=tokens, mask={**case.mask, **numbers})
