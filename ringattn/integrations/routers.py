"""The load-balancing loss of a model's experts, over the rows of all ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .generation import STATE

#: The arguments of the loss that `balance_routers` computes.
ROUTED = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def has_routers(model: nn.Module) -> bool:
    """Whether the model computes the same router loss as Mixtral, which balances the load of its experts."""
    loss = inspect.unwrap(type(model).forward).__globals__.get("load_balancing_loss_func")
    given = [] if loss is None else list(inspect.signature(loss).parameters)
    return given == ROUTED and hasattr(model, "router_aux_loss_coef") and hasattr(model, "num_experts_per_tok")


def take_routers(base: nn.Module, args: Any, result: Any) -> None:
    """Hook: keep the router logits [B * n, experts] of each layer for `balance_routers`.

    The result keeps detached copies, so that the model's own router loss has no gradient.
    """
    ring = getattr(base, STATE)
    if ring is not None and getattr(result, "router_logits", None) is not None:
        ring.call.routers = result["router_logits"]
        result["router_logits"] = tuple(x.detach() for x in ring.call.routers)


def balance_routers(model: Any, result: Any, logits: tuple[torch.Tensor, ...], kwargs: Any, group: Any) -> torch.Tensor:
    """Compute the router loss over the rows of all ranks, except padding, and store it in `result`. Collective.

    Returns it times the model's coefficient. If every rank adds this to its own loss, the mean of the gradients over
    the ranks is the gradient of the total loss.
    """
    mask, top, ranks = kwargs.get("attention_mask"), model.num_experts_per_tok, dist.get_world_size(group)
    real = torch.ones_like(logits[0][:, 0]).float() if mask is None else mask.flatten().float()
    weights = [layer.softmax(-1).float() for layer in logits]
    likely = torch.stack([real @ x for x in weights]).sum(0)
    chosen = torch.stack([real @ torch.zeros_like(x).scatter(1, x.topk(top).indices, 1.0) for x in weights]).sum(0)
    total = torch.stack([likely.detach(), chosen, (real.sum() * len(weights)).expand_as(chosen)])
    dist.all_reduce(total, group=group)
    likely = total[0] + (likely - likely.detach()) * ranks
    whole = len(likely) * (likely / total[2] * (total[1] / total[2])).sum()
    if "router_logits" in result:  # TRL's own head returns none
        result["router_logits"] = logits
    if result.get("loss") is not None:
        result["loss"] = result["loss"] - model.router_aux_loss_coef * result["aux_loss"]
    result["aux_loss"] = whole
    return model.router_aux_loss_coef * whole
