"""Gradients whose derivative is an error: attention has no second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported


class Last(torch.autograd.Function):
    """Returns the first `count` of its tensors unchanged; differentiating them again raises Unsupported."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise Unsupported(
            "attention has no second derivative: the loss depends on a gradient made with create_graph=True; detach "
            "the gradient, or compute with torch's scaled_dot_product_attention, sdpa_kernel(SDPBackend.MATH), instead"
        )


def make_last(found: Sequence[Any], *inputs: Tensor | None) -> Sequence[Any]:
    """Returns gradients `found` as depending on `inputs`, so that differentiating them raises; torch would take 0."""
    return Last.apply(len(found), *found, *inputs) if torch.is_grad_enabled() else found
