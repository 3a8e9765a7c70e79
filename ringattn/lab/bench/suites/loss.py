"""Suite "loss": memory and time of the chunked loss against a cross entropy of all logits, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from ....train import linear_cross_entropy
from ..calls import relative_error
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, Run

TOKENS, CLASSES, WIDTH = 16384, 32000, 64
#: The promised ratio: the peak with all logits over the peak by chunks.
TARGET = 5.0
#: Largest allowed relative error of loss and gradients between the two.
TOLERANCE = 1e-4
NOTE = (
    "peak: rise of VmHWM, reset by clear_refs, over VmRSS before hidden states, weight and labels exist, forward and "
    "backward, fp32, one thread; plain: F.cross_entropy of F.linear(hidden, weight)"
)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss from all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {"plain": _plain, "chunks": linear_cross_entropy}


def list_cases(tokens: int = TOKENS, classes: int = CLASSES, width: int = WIDTH) -> list[BenchCase]:
    """The single case of this suite, with a small vocabulary."""
    return [
        BenchCase(
            "memory",
            1,
            {"tokens": tokens, "classes": classes, "width": width, "dtype": "float32"},
            tuple(BenchColumn(name, 1, partial(_make, loss=loss)) for name, loss in LOSSES.items()),
            (Ratio("plain", "chunks"),),
            _check,
            notes=(NOTE,),
            rounds=3,
            summarise=_summarise,
        )
    ]


def _make(context: Context, loss: Callable[..., torch.Tensor]) -> Run:
    tokens, classes, width = (context.settings[name] for name in ("tokens", "classes", "width"))
    source = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=source, device="cpu")
    leaves = [draw(tokens, width).requires_grad_(), draw(classes, width).requires_grad_()]
    labels = torch.randint(classes, (tokens,), generator=source, device="cpu")

    def run() -> list[torch.Tensor]:
        value = loss(*leaves, labels)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    return run


def _check(context: Context, results: dict[str, Any]) -> dict[str, float]:
    """The largest relative error of loss and gradients between the two."""
    error = max(relative_error(a, b) for a, b in zip(*results.values(), strict=True))
    assert error < TOLERANCE, f"the losses differ by {error:.1e}"
    return {"chunks": error}


def _summarise(record: CaseRecord) -> dict[str, Any]:
    """Peaks in MiB, and the ratios (all logits over chunks) of peak and time."""
    peaks = {name: column["peaks"]["process"] for name, column in record["columns"].items()}
    return {
        **{f"{name}_peak_mib": value / 2**20 for name, value in peaks.items()},
        "peak_ratio": peaks["plain"] / peaks["chunks"],
        "time_ratio": record["ratios"][0]["median"],
    }


def _conclude(records: list[CaseRecord]) -> tuple[str, bool]:
    """Whether the peak by chunks is at most a fifth of the peak with all logits."""
    ratio = min((record["summary"]["peak_ratio"] for record in records if "summary" in record), default=0.0)
    return f"the loss by chunks takes 1 / {ratio:.0f} of the peak memory of all logits", ratio >= TARGET


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="The loss by chunks against all logits at once",
    bars=("peak memory in MiB", {"all logits at once": "plain_peak_mib", "by chunks": "chunks_peak_mib"}),
)
