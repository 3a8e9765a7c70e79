"""How far a model over ranks is from its eager self: what `check` of an integration computes and returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Agreement:
    """How far a parallelized model is from its eager self: the largest differences of logits and of gradients.

    `logits` and `gradients` are relative to the largest value of the eager model; `bound` is what rounding explains.
    """

    logits: float
    gradients: float
    bound: float
    tokens: int


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context without dropout, in which gradients are not those of the program: they come back after it."""
    was = model.training
    model.eval()
    kept = [(p, p.grad) for p in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        model.train(was)
        for parameter, gradient in kept:
            parameter.grad = gradient


def gradients_of(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """d loss / d parameter of every parameter that the loss reaches or could reach."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of a tensor, as a fraction of the largest value of its partner or of all."""
    largest = max(float(x.abs().max()) for x in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / max(largest, 1e-30)
