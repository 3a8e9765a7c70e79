"""What an audit tries: features, each with a problem that should show it, and smaller problems of a failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .kit import Case

#: Tokens of each rank: more than 64, the tile of many kernels; several of the largest tiles; and few, for many calls.
ROWS, TILES, FEW = 72, 320, 12


def list_cases(ranks: int) -> Iterator[Case]:
    """One case for each feature."""
    tokens = ROWS * ranks
    at_borders = (5, ROWS - 5, 1, ROWS // 2, tokens - 3 * ROWS // 2 - 1)
    across = (5, ROWS, 1, tokens - ROWS - 26, 20)
    causal = {"causal": True}
    masks: dict[str, dict[str, Any]] = {
        "dense": {},
        "causal": causal,
        "window": {**causal, "window": 7},
        "window of a rank's rows": {**causal, "window": ROWS},
        "window over ranks": {**causal, "window": ROWS + 29},
        "window and sinks": {**causal, "window": 7, "sinks": 2},
        "documents": {**causal, "documents": across},
        "two-way documents": {"documents": at_borders},
        "padding on the right": {"padding": 5},
        "padding on the left": {**causal, "left": 5},
        "softcap": {**causal, "softcap": 1.5},
        "learned sinks": {**causal, "sink_logits": True},
        "scale": {**causal, "scale": 0.5},
    }
    for name, mask in masks.items():
        yield Case(name, tokens, mask=mask)
    base = Case("causal", tokens, mask=causal)
    yield replace(base, feature="large logits", ways=("large",), calls=3)
    yield replace(base, feature="a component that all keys share", ways=("shared",))
    yield replace(base, feature="several tiles", tokens=TILES * ranks, heads=1, kv_heads=1, calls=1)
    yield replace(base, feature="grouped heads", heads=4)
    yield replace(base, feature="one key/value head", heads=3, kv_heads=1)
    yield replace(base, feature="batch of 3", batch=3)
    yield replace(base, feature="head dim 24", head_dim=24)
    yield replace(base, feature="v of another width", value_dim=24)
    yield Case("cross-attention", tokens, keys=tokens // 2)
    yield replace(base, feature="uneven length", tokens=tokens - 1)
    yield replace(base, feature="ranks without tokens", tokens=ranks - 1)
    yield replace(base, feature="bfloat16", dtype="bfloat16")
    yield replace(base, feature="float64", dtype="float64")
    few = FEW * ranks
    dropped = {**causal, "dropout": 0.5}
    yield Case("dropout", few, heads=16, kv_heads=16, head_dim=few, mask=dropped, calls=1)
    for ways, name in (
        (("lse",), "log-sum-exp"),
        (("lse", "dlse"), "gradient of log-sum-exp"),
        (("no_grad",), "no gradients"),
        (("no_dk",), "no gradient for keys"),
        (("twice",), "a second backward"),
        (("crossed",), "a call before a backward"),
        (("strided",), "strided inputs"),
        (("checkpoint",), "checkpointing"),
        (("compile",), "torch.compile"),
    ):
        yield replace(base, feature=name, ways=ways)
    yield replace(base, feature="many calls", tokens=few, calls=300)
    most = tuple(range(1, ranks))
    yield replace(base, feature="two groups", groups=(tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks))))
    yield replace(base, feature="a group of some ranks", groups=(most,))
    yield replace(base, feature="same bits", tokens=192, heads=4, ways=("bits",), calls=1)  # 192: for 1 to 4 ranks
    yield replace(base, feature="ranks that differ", tokens=few, ways=("differ",), calls=1)


def list_model_cases(ranks: int) -> Iterator[Case]:
    """One case for each feature of a model, for batches of 12 tokens a rank."""
    tokens = 12 * ranks
    base = Case("whole sequences", tokens, 2, 1, 1, 2, calls=1)
    yield base
    yield replace(base, feature="documents", mask={"documents": (5, tokens // 2, tokens - tokens // 2 - 5)})
    yield replace(base, feature="padding on the right", mask={"padding": 5})
    yield replace(base, feature="padding on the left", mask={"left": 5})
    yield replace(base, feature="uneven length", tokens=tokens - 1)
    yield replace(base, feature="bfloat16", dtype="bfloat16")
    for way, name in (("checkpoint", "checkpointing"), ("again", "a second call"), ("differ", "ranks that differ")):
        yield replace(base, feature=name, ways=(way,))


def shrink(case: Case, ranks: int) -> Iterator[Case]:
    """Smaller cases that may fail in the same way: each has fewer calls, rows of a batch, heads, tokens, or columns."""
    sizes: list[dict[str, Any]] = [{"calls": 1}, {"calls": case.calls // 2}] if case.calls > 1 else []
    if not case.mask.get("dropout"):
        heads, kv_heads = case.heads // 2, case.kv_heads // 2
        sizes += [{"batch": case.batch // 2}, {"heads": heads, "kv_heads": kv_heads}]
        sizes += [{"heads": heads}, {"kv_heads": kv_heads}, {"head_dim": case.head_dim // 2}]
    for size in sizes:
        smaller = replace(case, **size)
        grouped = smaller.heads > smaller.kv_heads, case.heads > case.kv_heads
        if min(size.values()) > 0 and smaller.heads % smaller.kv_heads == 0 and grouped[0] == grouped[1]:
            yield smaller
    tokens = case.tokens // 2
    if tokens >= 2 * ranks and not case.groups and not case.keys and not {"documents", "dropout"} & {*case.mask}:
        odd = case.tokens % ranks != 0
        tokens -= tokens % ranks - odd
        numbers: dict[str, Any] = {
            name: max(case.mask[name] // 2, 1) for name in ("window", "padding", "left", "sinks") if name in case.mask
        }
        yield replace(case, tokens=tokens, mask={**case.mask, **numbers})
