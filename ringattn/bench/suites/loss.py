"""Suite "loss": memory and time of the loss by chunks against a cross entropy of all logits, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from ...runtime import peak_memory
from ...train import linear_cross_entropy
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, compare_with_target, relative_error

TOKENS, CLASSES, WIDTH = 16384, 32000, 64
#: The promise: the peak of all logits over the peak by chunks.
TARGET = 5.0
#: Most relative error of loss and gradients between the two; a result with a larger error is wrong.
TOLERANCE = 1e-4
NOTE = (
    "peak: rise of VmHWM, reset by clear_refs, over VmRSS beside hidden states, weight and labels, forward and "
    "backward, fp32, one thread; plain: F.cross_entropy of F.linear(hidden, weight)"
)


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of logits that exist all at once."""
    return F.cross_entropy(F.linear(hidden, weight), labels)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {"plain": _plain, "chunks": linear_cross_entropy}


def list_cases() -> list[BenchCase]:
    """One case, of the sizes of a small vocabulary."""
    return [
        BenchCase(
            "memory",
            1,
            {"tokens": TOKENS, "classes": CLASSES, "width": WIDTH, "dtype": "float32"},
            tuple(BenchColumn(name, 1, lambda context: None) for name in LOSSES),
            (Ratio("plain", "chunks"),),
            notes=(NOTE,),
            rounds=3,
            summarise=_summarise,
            measure=measure,
        )
    ]


def measure(context: Context, repeat: int) -> dict[str, Any]:
    """Seconds and peaks of both losses in alternating rounds after a warm-up of few tokens, and the largest error."""
    peak_memory.return_freed()
    torch.set_num_threads(1)
    tokens, classes, width = (context.settings[name] for name in ("tokens", "classes", "width"))
    source = torch.Generator().manual_seed(1)
    draw = partial(torch.randn, generator=source, device="cpu")
    leaves = [draw(tokens, width).requires_grad_(), draw(classes, width).requires_grad_()]
    labels = torch.randint(classes, (tokens,), generator=source, device="cpu")
    times: dict[str, list[float]] = {name: [] for name in LOSSES}
    peaks: dict[str, list[int]] = {name: [] for name in LOSSES}
    errors: dict[str, float] = {}
    for number in range(repeat + 1):
        rows = tokens if number else min(tokens, 64)  # the first round loads libraries
        results = {}
        for name, loss in LOSSES.items():
            base, began = peak_memory.resident(), time.perf_counter()
            peak_memory.reset_peak()
            value = loss(leaves[0][:rows], leaves[1], labels[:rows])
            results[name] = [value.detach(), *torch.autograd.grad(value, leaves)]
            if number:
                times[name].append(time.perf_counter() - began)
                peaks[name].append(peak_memory.peak() - base)
        errors = {"chunks": max(relative_error(a, b) for a, b in zip(*results.values(), strict=True))}
        assert errors["chunks"] < TOLERANCE, errors
    return {"times": times, "errors": errors, "details": {"peak_bytes": peaks}}


def _summarise(record: CaseRecord) -> dict[str, Any]:
    """Peaks in MiB, and the ratios of peak and of time of all logits over chunks."""
    peaks = {name: median(values) for name, values in record["details"]["peak_bytes"].items()}
    return {
        **{f"{name}_peak_mib": value / 2**20 for name, value in peaks.items()},
        "peak_ratio": peaks["plain"] / peaks["chunks"],
        "time_ratio": record["ratios"][0]["median"],
    }


def _conclude(records: list[CaseRecord]) -> dict[str, Any]:
    """Whether the peak by chunks is at most a fifth of the peak of all logits."""
    ratio = min(record["summary"]["peak_ratio"] for record in records)
    text = f"the loss by chunks takes 1 / {ratio:.0f} of the peak memory of all logits"
    return compare_with_target(text, ratio, TARGET)


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="The loss by chunks beside all logits at once",
    bars=(
        "peak memory in MiB",
        lambda case: {
            "all logits": case["summary"]["plain_peak_mib"],
            "by chunks": case["summary"]["chunks_peak_mib"],
        },
    ),
)
