"""The loss of a language model whose tokens are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..errors import InvalidInput, Mismatch
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

    With FSDP2 call this function in the forward of a wrapped module, where its weight is whole.

    Raises InvalidInput for shapes, dtypes and labels that do not fit, and Mismatch where that is so on another rank.
    With `total` the ranks exchange nothing, and only the rank of the error raises.
    """
    count = partial(_check, hidden, weight, labels, bias, ignore_index, chunk)
    if total is None:
        total = _sum_counts(count, group, getattr(labels, "device", None))
    else:
        count()
    losses = _sum_losses(hidden.flatten(0, -2), weight, labels.flatten(), bias, ignore_index, chunk)
    total = torch.as_tensor(total, device=losses.device)
    return losses * (_count_ranks(group) / total.clamp(min=1).to(losses.dtype))


def count_labels(
    labels: torch.Tensor, *, group: ProcessGroup | DeviceMesh | None = None, ignore_index: int = NO_LABEL
) -> torch.Tensor:
    """The number of labels other than `ignore_index` on all ranks, an int64 scalar. Collective.

    Raises InvalidInput for labels that are not int64, and Mismatch where those of another rank are not.
    """
    total = _sum_counts(partial(_count, labels, ignore_index), group, getattr(labels, "device", None))
    return torch.tensor(total, device=labels.device)


def _sum_counts(count: Callable[[], int], group: ProcessGroup | DeviceMesh | None, device: torch.device | None) -> int:
    """The sum over the ranks of `count()`, in one exchange. Raises Mismatch if `count` has raised on another rank."""
    if _count_ranks(group) == 1:
        return count()
    group = _get_group(group)
    sums = torch.tensor([0, 1, dist.get_rank(group)], device=device or "cpu")  # labels, ranks that raise, their sum
    try:
        sums = torch.tensor([count(), 0, 0], device=sums.device)
    finally:
        dist.all_reduce(sums, group=group)
    total, wrong, rank = sums.tolist()
    if wrong:
        who = f"rank {rank} of the group" if wrong == 1 else f"{wrong} ranks of the group"
        raise Mismatch(f"{who} cannot compute the loss; look at the error that is raised there")
    return int(total)


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
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    chunk: int,
) -> int:
    """The number of labels of this rank. Raises InvalidInput for arguments that do not fit each other."""
    count = _count(labels, ignore_index)
    if hidden.ndim < 2 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or labels.shape != hidden.shape[:-1]:
        raise InvalidInput(
            f"hidden must be [..., d], weight [classes, d] and labels [...], got {tuple(hidden.shape)}, "
            f"{tuple(weight.shape)} and {tuple(labels.shape)}; pass hidden states, not logits"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInput(f"bias must be [classes] = ({weight.shape[0]},), got {tuple(bias.shape)}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InvalidInput(f"chunk must be a number of rows >= 1, got {chunk!r}; try 512")
    if hasattr(weight, "placements"):
        raise InvalidInput("weight is a DTensor, a shard; call the loss in the forward of the module that FSDP2 wraps")
    dtypes = [x.dtype for x in (hidden, weight, bias) if x is not None]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(hidden.device.type):
        raise InvalidInput(
            f"hidden, weight and bias must have one dtype, got {', '.join(map(str, dtypes))}; use torch.autocast, or "
            "hidden.to(weight.dtype)"
        )
    classes = weight.shape[0]
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        raise InvalidInput(
            f"label {int(labels[wrong][0])} is none of the {classes:,} classes of weight; use ignore_index "
            f"({ignore_index}) for rows without a label"
        )
    return count


def _count(labels: torch.Tensor, ignore_index: int) -> int:
    """The labels of this rank other than `ignore_index`. Raises InvalidInput unless the labels are int64."""
    if not isinstance(labels, torch.Tensor) or labels.dtype != torch.int64:
        kind = str(labels.dtype) if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise InvalidInput(f"labels must be an int64 tensor of classes, got {kind}; try labels.long()")
    return int((labels != ignore_index).sum())


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
