"""Gradients whose derivative is an error: attention has no second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported


class Last(torch.autograd.Function):
    """The first `count` tensors, in a node of all tensors; the derivative by any of them is an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise Unsupported(
            "attention has no second derivative: a loss depends on a gradient that create_graph=True has made; detach "
            "the gradient, or compute with torch's scaled_dot_product_attention, sdpa_kernel(SDPBackend.MATH), instead"
        )


def make_last(found: Sequence[Any], *inputs: Tensor | None) -> Sequence[Any]:
    """Gradients of a function of `inputs`. With create_graph=True their derivative is an error; torch would take 0."""
    return Last.apply(len(found), *found, *inputs) if torch.is_grad_enabled() else found
