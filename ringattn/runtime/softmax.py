"""The merge of partial softmaxes, and what computes it: the only place in the package with this formula in torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from ..errors import InvalidInput, Unsupported

#: What computes merges and sums: "torch", "triton", or "auto", which is triton for CUDA tensors where Triton can run.
CHOICES = ("auto", "torch", "triton")
#: One choice for all threads: torch runs a backward on CUDA in threads of its own.
_choice = "auto"


@contextmanager
def merging(choice: str) -> Iterator[None]:
    """Merges and sums of gradients are computed by `choice` inside the with statement, in all threads.

    Raises InvalidInput for an unknown choice, and Unsupported for "triton" where Triton cannot run.
    """
    global _choice
    if choice not in CHOICES:
        raise InvalidInput(f"unknown choice {choice!r} for merges; expected {', '.join(CHOICES)}")
    if choice == "triton" and (reason := missing()):
        raise Unsupported(f"merges by triton: {reason}; or try merging('torch')")
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why Triton cannot run here; None if it can. Triton compiles a small C file for the Python that runs."""
    if find_spec("triton") is None:
        return "Triton is not installed; try pip install 'ringattn[triton]'"
    if _fused().INTERPRETED:
        return None
    if not ("CC" in os.environ or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler; install gcc, or set CC"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Triton needs Python.h; install the headers of Python, such as python3-dev"
    return None


def _fused() -> ModuleType:
    return import_module(".fused", __package__)


@lru_cache(maxsize=64)
def _by_triton(choice: str, device: torch.device) -> bool:
    """Whether Triton computes for tensors on this device."""
    if choice == "triton":
        if device.type != "cuda" and not _fused().INTERPRETED:
            raise Unsupported(f"merges by triton need tensors on a cuda device, got {device}; try merging('auto')")
        return True
    if choice == "torch" or device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and missing() is None


def add_(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add `part` to `total` in place; both are [B, H, n, D] with any strides, and part may have a narrower dtype."""
    if _by_triton(_choice, total.device):
        _fused().add_(total, part)
    else:
        total.add_(part)


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge the partial (part, part_lse) into (out, lse), in place.

    out [B, H, n, D] and lse [B, H, n] are fp32 or fp64 with any strides. lse may be wider than out; part may have a
    narrower dtype. lse is the natural log of the sum of exp(logits). lse is -inf for a row that saw no key, and out
    must then be finite. With s = sigmoid(part_lse - lse): out <- out + s * (part - out), and
    lse <- log(exp(lse) + exp(part_lse)).
    Source: the online softmax of Milakov and Gimelshein (2018), in a form that cannot overflow.
    """
    if _by_triton(_choice, out.device):
        return _fused().merge_(out, lse, part, part_lse)
    gate = torch.sigmoid(part_lse - lse)
    gate.masked_fill_(part_lse == -torch.inf, 0.0)  # if both saw no key, sigmoid(-inf + inf) is NaN
    out.lerp_(part.to(out.dtype), gate.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of two partials, as new tensors that are differentiable in all four; shapes as in `merge_`.

    Rows that are empty in both partials stay 0 and -inf, and their gradients are finite.
    """
    empty = (lse == -torch.inf) & (part_lse == -torch.inf)
    lse, part_lse = lse.masked_fill(empty, 0.0), part_lse.masked_fill(empty, 0.0)  # -inf minus -inf is NaN
    gate = torch.sigmoid(part_lse - lse).unsqueeze(-1).to(out.dtype)
    return torch.lerp(out, part, gate), torch.logaddexp(lse, part_lse).masked_fill(empty, -torch.inf)
