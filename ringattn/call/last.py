"""Gradients whose derivative is an error: attention has no second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported


class Last(torch.autograd.Function):
    """Autograd function that returns its first `count` tensors unchanged, and raises Unsupported in its backward."""

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
    """Return the gradients `found`, marked as functions of `inputs` that cannot be differentiated again.

    A second differentiation raises Unsupported. Without the mark, torch would silently take the second derivative as 0.
    """
    return Last.apply(len(found), *found, *inputs) if torch.is_grad_enabled() else found
