"""The loss of a language model whose tokens are sharded over ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import compress
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ..call.functional import get_transport
from ..errors import InvalidInput
from ..kernels.base import wide
from ..transport.records import Exchange, compare_records
from ..transport.torchdist import WeakGroup, check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: The label of rows without a loss, as in torch and transformers.
NO_LABEL = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    ignore_index: int = NO_LABEL,
    total: Tensor | int | None = None,
    chunk: int = 512,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T + bias` over the tokens of all ranks; a scalar. Collective, differentiable.

    hidden [..., d] are the last hidden states of this rank's rows, weight [classes, d], bias [classes]; labels [...]
    are int64, shifted before the sequence was cut (`Layout.shift`, `integrations.transformers.shard_batch`). Logits
    and their gradients are computed for `chunk` rows at a time: memory grows with chunk * classes, not with the number
    of tokens. A backward of the backward is not supported.

    Ranks hold different numbers of labels, so a rank must not divide by its own number. The result is (sum of this
    rank's losses) * ranks / (labels of all ranks). The mean of the results over the ranks is therefore the loss, and
    the mean of their gradients, as DDP and FSDP2 take it, is its gradient. If your program sums gradients instead,
    divide the result by the number of ranks.

    group: all ranks that DDP or FSDP2 averages over: on a dp x cp mesh all dp * cp ranks. None: the default group, or
        a single process if there is none.
    total: the number of labels to divide by, in place of those of this call on all ranks. For gradient accumulation
        give the `count_labels` of all micro-batches of the step; then the results of the micro-batches add up.

    With FSDP2 call this function in the forward of a wrapped module, where the weight is whole.

    Raises InvalidInput for shapes, dtypes or labels that do not fit. Raises Mismatch if those of another rank do not
    fit, or if the ranks differ in ignore_index or the number of classes. With `total` the ranks exchange nothing, and
    only the rank with the error raises.
    """
    check = partial(_check, hidden, weight, labels, bias, ignore_index, chunk)
    if total is None:
        total = _sum_labels("loss", check, group)
    else:
        check()
        _check_total(total)

    def part(rows: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(rows, weight, bias)
        logits = logits.to(wide(logits.dtype))
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")

    weights, rows = [weight, *[bias] * (bias is not None)], hidden.flatten(0, -2)
    losses = SumInChunks.apply(part, chunk, torch.is_grad_enabled(), rows, labels.flatten(), *weights)
    total = torch.as_tensor(total, device=losses.device)
    return losses * (_find_ranks(group)[1] / total.clamp(min=1).to(losses.dtype))


def count_labels(
    labels: Tensor, *, group: ProcessGroup | DeviceMesh | None = None, ignore_index: int = NO_LABEL
) -> Tensor:
    """The number of labels other than `ignore_index` on all ranks, an int64 scalar. Collective.

    Raises InvalidInput for labels that are not int64, and Mismatch if those of another rank are not.
    """
    total = _sum_labels("labels of a loss", partial(_count, labels, ignore_index), group)
    return torch.tensor(total, device=labels.device)


def _sum_labels(stage: str, describe: Callable[[], dict[str, int]], group: ProcessGroup | DeviceMesh | None) -> int:
    """The sum of the field "labels" over the ranks, in one exchange. `describe` returns this rank's fields.

    Raises Mismatch if `describe` raised on another rank, or if its other fields differ between ranks.
    """
    place, size = _find_ranks(group)
    if size == 1:
        return describe()["labels"]
    with Exchange(get_transport(place), stage) as ranks:
        ranks.mine = json.dumps(describe()).encode()
    return sum(fields["labels"] for fields in compare_records(ranks.records))


def mean_over_ranks(x: Tensor, *, group: ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """The mean of a scalar over the ranks, detached; for results of `linear_cross_entropy` the loss. Collective."""
    mean = x.detach().clone()
    place, size = _find_ranks(group)
    if size > 1:
        dist.all_reduce(mean, group=place)
    return mean / size


class SumInChunks(torch.autograd.Function):
    """The sum of `part(rows, labels)` over chunks of `chunk` rows [n, d]; `weights` are other tensors that `part` uses.

    The forward computes the gradients, too, so that nothing is computed twice, and sums those of the weights in fp32:
    a sum of many chunks in bf16 would lose their last bits.
    """

    @staticmethod
    def forward(ctx: Any, part: Any, chunk: int, grad: bool, rows: Tensor, labels: Tensor, *weights: Tensor) -> Tensor:
        """The sum; `grad`: whether gradients are wanted."""
        leaves = list(compress(weights, ctx.needs_input_grad[5:]))
        sums = [torch.zeros_like(weight, dtype=wide(weight.dtype)) for weight in leaves] if grad else []
        total, gradients = rows.new_zeros((), dtype=wide(rows.dtype)), list[Tensor]()
        for some, targets in zip(rows.split(chunk), labels.split(chunk), strict=True):
            # What is saved is used at once: hooks that move it, such as to the host, must not see it.
            with torch.set_grad_enabled(grad), saved_tensors_hooks(lambda x: x, lambda x: x):
                some = some.detach().requires_grad_()
                loss = part(some, targets)
            total += loss.detach()
            if grad:
                first, *others = torch.autograd.grad(loss, [some, *leaves], materialize_grads=True)
                gradients.append(first)
                for mine, more in zip(sums, others, strict=True):
                    mine += more
        ctx.save_for_backward(*map(torch.cat, [gradients] * grad), *sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the forward, times `gradient`."""
        rows, *sums = (x * gradient for x in ctx.saved_tensors)
        return None, None, None, rows, None, *(sums.pop(0) if needed else None for needed in ctx.needs_input_grad[5:])


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over the ranks, on every rank; the backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """The sum, as a new tensor."""
        ctx.group = WeakGroup(group)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The sum of the ranks' gradients."""
        return SumOverRanks.apply(gradients[0], ctx.group.group), None


def _find_ranks(group: ProcessGroup | DeviceMesh | None) -> tuple[ProcessGroup | None, int]:
    """The ProcessGroup (None: the default one) and its number of ranks; 1 without torch.distributed.

    A group may also be a mesh axis, or a mesh of all ranks.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None, 1
    if group is not None:
        check_group(group)
    if isinstance(group, dist.device_mesh.DeviceMesh):
        group = None if group.ndim > 1 and group.size() == dist.get_world_size() else WeakGroup(group).group
    return group, dist.get_world_size(group)


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, ignore_index: int, chunk: int
) -> dict[str, int]:
    """The fields of this rank for `_sum_labels`. Raises InvalidInput for arguments that do not fit each other."""
    fields = _count(labels, ignore_index)
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
            f"label {int(labels[wrong][0])} is not among the {classes:,} classes of weight; use ignore_index "
            f"({ignore_index}) for rows without a label"
        )
    return {**fields, "number of classes": classes}


def _check_total(total: object) -> None:
    """Raise InvalidInput unless `total` is one finite number >= 0, or a tensor of one element."""
    number = isinstance(total, int | float | np.number) and not isinstance(total, bool) and 0 <= total < inf
    if not number and not (isinstance(total, Tensor) and total.numel() == 1 and not total.is_complex()):
        shown = f"a tensor {tuple(total.shape)}" if isinstance(total, Tensor) else repr(total)
        raise InvalidInput(f"total must be the number of labels of all ranks, got {shown}; try count_labels(labels)")


def _count(labels: Tensor, ignore_index: int) -> dict[str, int]:
    """The number of labels other than `ignore_index`, and `ignore_index`. Raises InvalidInput for non-integers."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int | np.integer):
        raise InvalidInput(
            f"ignore_index, the label of rows without a loss, must be an integer, got {ignore_index!r}; try -100"
        )
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        kind = str(labels.dtype) if isinstance(labels, Tensor) else type(labels).__name__
        raise InvalidInput(f"labels must be an int64 tensor of classes, got {kind}; try labels.long()")
    return {"labels": int((labels != ignore_index).sum()), "ignore_index": int(ignore_index)}
