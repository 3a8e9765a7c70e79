"""What ranks do with tensors that all of them hold, or hold rows of: compare and gather. For any model of torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Mismatch
from ..functional import get_transport
from ..kernels.dropout import finalize, key_steps
from ..transport.records import Exchange, compare

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Places = list[np.ndarray[Any, Any]]

#: How many values of a tensor ranks compare that holds no integers.
SAMPLED = 16


class GatherRows(torch.autograd.Function):
    """The rows [B, N, ...] of all ranks, from the rows [B, n, ...] of each. Collective; its backward is not.

    All ranks must compute the same loss of the result. The gradient of a rank's rows is that of the loss times the
    ranks, so that the mean of the parameters' gradients over the ranks, which DDP and FSDP take, is the gradient.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, places: Places, group: ProcessGroup) -> Tensor:
        """`places` are, by rank, the places of its rows in the result."""
        ctx.ranks = len(places)
        ctx.mine = torch.from_numpy(places[dist.get_rank(group)]).to(mine.device)
        assert mine.shape[1] == len(ctx.mine)
        most = max(map(len, places))
        padded = mine.new_zeros((len(mine), most, *mine.shape[2:]))
        padded[:, : mine.shape[1]] = mine
        parts = [torch.empty_like(padded) for _ in places]
        dist.all_gather(parts, padded, group=group)
        rows = torch.cat([part[:, : len(there)] for part, there in zip(parts, places, strict=True)], 1)
        return rows[:, torch.from_numpy(np.argsort(np.concatenate(places))).to(mine.device)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[:, ctx.mine] * ctx.ranks, None, None


def digest_tensor(x: Tensor) -> Tensor:
    """A number that stands for the values of a real tensor, and for their order: int64, on its device."""
    x = x.flatten()
    x = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return finalize(x + key_steps(torch.arange(len(x), device=x.device))).sum()


def compare_inputs(inputs: Sequence[Tensor], group: ProcessGroup) -> None:
    """Raise Mismatch on every rank if the inputs of the ranks differ in shape, or by more than rounding. Collective.

    All values of integers are compared, of other tensors some.
    """
    exact = [digest_tensor(x).item() for x in inputs if not (x.is_floating_point() or x.is_complex())]
    some = [v for x in inputs for v in x.detach().flatten()[:: 1 + x.numel() // SAMPLED].real.double().tolist()]
    with Exchange(get_transport(group), "inputs of a model") as ranks:
        ranks.mine = json.dumps([str([tuple(x.shape) for x in inputs]), exact, some]).encode()
    shapes, numbers, values = zip(*map(json.loads, ranks.records), strict=True)
    compare({rank: {"the shapes of the inputs": x} for rank, x in enumerate(shapes)})
    alike = all(x == exact for x in numbers) and np.allclose(values, values[0], rtol=0.1, atol=0.1, equal_nan=True)
    if not alike:
        raise Mismatch(
            "the ranks were given different inputs; draw noise, or batches, from generators of one seed on all ranks"
        )
