"""The page of `ringattn play` as HTML, with the choices that it offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...machine.presets import PRESETS
from ..models.config import MODELS

#: The sizes of the examples, as of a large model, and of the one that the page shows first.
SIZES = {"heads": "32", "kv_heads": "8", "head_dim": "128", "dtype": "bfloat16", "machine": "h100_nvlink_ib"}


def _example(pattern: str, tokens: str, ranks: str, layout: str, schedule: str = "ring") -> dict[str, str]:
    return {"pattern": pattern, "tokens": tokens, "ranks": ranks, "layout": layout, "schedule": schedule, **SIZES}


#: Settings of plans to begin with, by name.
EXAMPLES = {
    "Causal": _example("Causal()", "64k", "8", "zigzag"),
    "Window": _example("Causal() & Window(4096)", "64k", "8", "contiguous"),
    "Packed": _example("Causal() & Documents(lengths=(20000, 30000, 15536))", "64k", "8", "balanced"),
    "Two nodes": _example("Causal()", "64k", "16", "zigzag", "double_ring"),
    "64 ranks": _example("Causal() & Window(16384) | Causal() & Sinks(64)", "1M", "64", "contiguous"),
    "1,024 ranks": _example("Causal() & Window(4096)", "4M", "1024", "contiguous"),
}
#: The first question of the other tab.
ADVICE = {"model": "llama3_8b", "tokens": "128k", "gpus": "8", "machine": "h100_nvlink_ib", "by": "time"}


def render(site: dict[str, Any] | None = None) -> str:
    """The page; on a site, `site` says where it finds Python and the answers that it shows at once."""
    machines = [name for name in PRESETS if name not in ("cpu", "cuda")]
    given = {"machines": machines, "models": [*MODELS], "examples": EXAMPLES, "advice": ADVICE, "site": site}
    page = Path(__file__).with_name("index.html").read_text(encoding="utf-8")
    # No text inside a script may end it.
    return page.replace("null/*given*/", json.dumps(given).replace("<", "\\u003c"))
