"""What an audit tries: features, each with the smallest problem that shows it, and smaller problems of a failure."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from ...errors import InvalidInput
from ...text import first_line

#: Keywords by which a target may take a mask or an option, see docs/audit.md.
KEYWORDS = ("causal", "window", "sinks", "documents", "padding_mask", "softcap", "sink_logits", "scale", "dropout")


@dataclass(frozen=True)
class Case:
    """One test case of an audit: the sizes of a whole sequence, a mask, and how the target is called.

    The target is the audited function; `mask` has its keyword arguments. `ways` may contain: lse (also return lse),
    no_dk (keys need no gradient), twice (run a second backward), again (call again with other values), strided (inputs
    are views), checkpoint, compile, and differ (rank 1 has another dtype).
    """

    feature: str
    tokens: int = 24
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    dtype: str = "float32"
    mask: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = ()

    @property
    def needs(self) -> set[str]:
        """The names of the keyword arguments that this case passes to the audited function."""
        needed = {"padding_mask" if name in ("left", "padding") else name for name in self.mask}
        return needed | ({"return_lse"} if "lse" in self.ways else set())

    @property
    def real(self) -> tuple[int, int]:
        """(first, end) of the tokens that are not padding."""
        return self.mask.get("left", 0), self.tokens - self.mask.get("padding", 0)

    def is_real(self, rows: Any) -> Any:
        """For token indices `rows`, whether each is not padding."""
        return (rows >= self.real[0]) & (rows < self.real[1])


def list_cases(ranks: int) -> Iterator[Case]:
    """One case for each feature, for sequences of 12 tokens a rank."""
    tokens = 12 * ranks
    cuts = (5, tokens // 2, tokens - tokens // 2 - 5)
    causal = {"causal": True}
    masks: dict[str, dict[str, Any]] = {
        "dense": {},
        "causal": causal,
        "window": {**causal, "window": 7},
        "window over ranks": {**causal, "window": 17},
        "window and sinks": {**causal, "window": 7, "sinks": 2},
        "documents": {**causal, "documents": cuts},
        "two-way documents": {"documents": cuts},
        "padding on the right": {"padding": 5},
        "padding on the left": {**causal, "left": 5},
        "softcap": {**causal, "softcap": 1.5},
        "learned sinks": {**causal, "sink_logits": True},
        "scale": {**causal, "scale": 0.5},
    }
    for name, mask in masks.items():
        yield Case(name, tokens, mask=mask)
    base = Case("causal", tokens, mask=causal)
    yield replace(base, feature="grouped heads", kv_heads=2)
    yield replace(base, feature="one key/value head", kv_heads=1)
    yield replace(base, feature="batch of 3", batch=3)
    yield replace(base, feature="head dim 24", head_dim=24)
    yield replace(base, feature="uneven length", tokens=tokens - 1)
    yield replace(base, feature="ranks without tokens", tokens=ranks - 1)
    yield replace(base, feature="bfloat16", dtype="bfloat16")
    yield replace(base, feature="float64", dtype="float64")
    yield replace(base, feature="dropout", mask={**causal, "dropout": 0.5}, head_dim=tokens, heads=16, kv_heads=16)
    for way, name in (
        ("lse", "log-sum-exp"),
        ("no_dk", "no gradient for keys"),
        ("twice", "a second backward"),
        ("again", "a second call"),
        ("strided", "strided inputs"),
        ("checkpoint", "checkpointing"),
        ("compile", "torch.compile"),
        ("differ", "ranks that differ"),
    ):
        yield replace(base, feature=name, ways=(way,))


def shrink(case: Case, ranks: int) -> Iterator[Case]:
    """Smaller cases that may fail in the same way: each has one size (batch, heads, head dim, tokens) halved."""
    if not case.mask.get("dropout"):
        heads, kv_heads = case.heads // 2, case.kv_heads // 2
        sizes: list[dict[str, Any]] = [{"batch": case.batch // 2}, {"heads": heads, "kv_heads": kv_heads}]
        sizes += [{"heads": heads}, {"kv_heads": kv_heads}, {"head_dim": case.head_dim // 2}]
        for size in sizes:
            smaller = replace(case, **size)
            grouped = smaller.heads > smaller.kv_heads, case.heads > case.kv_heads
            if min(size.values()) > 0 and smaller.heads % smaller.kv_heads == 0 and grouped[0] == grouped[1]:
                yield smaller
    tokens = case.tokens // 2
    if tokens >= 2 * ranks and not {"documents", "dropout"} & {*case.mask}:
        odd = case.tokens % ranks != 0
        tokens -= tokens % ranks - odd
        numbers: dict[str, Any] = {
            name: max(case.mask[name] // 2, 1) for name in ("window", "padding", "left", "sinks") if name in case.mask
        }
        yield replace(case, tokens=tokens, mask={**case.mask, **numbers})


def find_named(key: str, module: str, name: str) -> Any:
    """Import `module` and return its attribute `name`; None if it has no such attribute.

    Modules in the current folder are found, too. Raises InvalidInput, with a message that begins with `key`, if the
    module cannot be imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, SyntaxError) as error:
        raise InvalidInput(f"{key}: {first_line(error)}; install it, or run where it can be imported") from None


def accepts(target: Callable[..., Any]) -> set[str]:
    """The names of the keyword arguments that the audited function takes; none if it has no signature."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:
        return set()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return {*KEYWORDS, "return_lse", "group"}
    return {one.name for one in parameters}
