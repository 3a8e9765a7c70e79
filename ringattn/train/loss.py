"""The loss of a language model whose tokens are sharded over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import InvalidInput
from ..kernels.base import wide
from ..transport.torchdist import WeakGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: Label of a row without a loss, as in torch and transformers.
NO_LABEL = -100


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    ignore_index: int = NO_LABEL,
    total: torch.Tensor | int | None = None,
    chunk: int = 512,
) -> torch.Tensor:
    """Cross entropy of `hidden @ weight.T + bias` over the tokens of all ranks; a scalar. Collective, differentiable.

    hidden [..., d] are the last hidden states of this rank's rows, weight [classes, d], bias [classes]; labels [...]
    are int64, shifted before the sequence was cut (`Layout.shift`, `integrations.transformers.shard_batch`). Logits
    exist for `chunk` rows at a time: the memory of forward and backward grows with chunk * classes, not with tokens.

    Ranks hold different numbers of labels, so no rank can divide by its own number. The result is (sum of this rank's
    losses) * ranks / (labels of all ranks). Therefore the mean over the ranks of the results is the loss, and the mean
    over the ranks of their gradients, which DDP and FSDP2 compute, is its gradient. `group` has all ranks that the
    wrapper averages over: of a dp x cp mesh all dp * cp ranks. None: the default group, or one process without one.
    A program that sums gradients instead divides the result by the number of ranks.

    total: the labels of all ranks to divide by, instead of those of this call: with gradient accumulation
        `count_labels` of all micro-batches of the step. The results of the micro-batches then add up.

    Raises InvalidInput for shapes that do not fit, before the ranks communicate.
    """
    _check(hidden, weight, labels, bias, chunk)
    if total is None:
        total = count_labels(labels, group=group, ignore_index=ignore_index)
    losses = _sum_losses(hidden.flatten(0, -2), weight, labels.flatten(), bias, ignore_index, chunk)
    total = torch.as_tensor(total, device=losses.device)
    return losses * (_count_ranks(group) / total.clamp(min=1).to(losses.dtype))


def count_labels(
    labels: torch.Tensor, *, group: ProcessGroup | DeviceMesh | None = None, ignore_index: int = NO_LABEL
) -> torch.Tensor:
    """The number of labels other than `ignore_index` on all ranks, an int64 scalar. Collective."""
    count = (labels != ignore_index).sum()
    if _count_ranks(group) > 1:
        dist.all_reduce(count, group=_get_group(group))
    return count


def mean_over_ranks(x: torch.Tensor, *, group: ProcessGroup | DeviceMesh | None = None) -> torch.Tensor:
    """The mean of a detached scalar over the ranks: of results of `linear_cross_entropy` the loss. Collective."""
    mean = x.detach().clone()
    if _count_ranks(group) > 1:
        dist.all_reduce(mean, group=_get_group(group))
    return mean / _count_ranks(group)


def _get_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The ProcessGroup of a group, of one axis of a DeviceMesh, or of a mesh of all ranks (None: the default group)."""
    if group is not None and not isinstance(group, dist.ProcessGroup | dist.device_mesh.DeviceMesh):
        raise InvalidInput(f"group={group!r}: expected a ProcessGroup, a DeviceMesh, or None for all ranks")
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim > 1 and group.size() == dist.get_world_size():
            return None
        found: ProcessGroup = WeakGroup(group).group
        return found
    return group


def _count_ranks(group: ProcessGroup | DeviceMesh | None) -> int:
    """The ranks of the group; 1 in a process without torch.distributed."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(_get_group(group))


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None, chunk: int
) -> None:
    """Raise InvalidInput for shapes that do not fit each other."""
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or labels.shape != hidden.shape[:-1]:
        raise InvalidInput(
            f"hidden must be [..., d], weight [classes, d] and labels [...], got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}; pass hidden states, not logits"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInput(f"bias must be [classes] = ({weight.shape[0]},), got {tuple(bias.shape)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InvalidInput(f"chunk must be a number of rows >= 1, got {chunk!r}; try 512")


def _sum_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    chunk: int,
) -> torch.Tensor:
    """The sum of the losses of hidden [n, d]. Logits exist for `chunk` rows; the backward computes them anew."""

    def part(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(rows, weight, bias)
        logits = logits.to(wide(logits.dtype))
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")

    pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    sums = [checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
    return torch.stack(sums).sum() if sums else hidden.sum() * 0.0


__all__ = ["count_labels", "linear_cross_entropy", "mean_over_ranks"]
