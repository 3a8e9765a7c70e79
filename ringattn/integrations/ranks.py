"""Compare tensors that every rank holds whole, and gather those whose rows are spread over ranks. Any torch model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..call.functional import get_transport
from ..errors import InvalidInput, Mismatch
from ..kernels.dropout import finalize, key_steps
from ..layout.regular import make_layout
from ..transport.records import Exchange, compare, compare_records
from ..transport.torchdist import place_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..layout.regular import Layout

    Places = list[np.ndarray[Any, Any]]

#: Roughly how many values of each floating-point input, and of each weight, the ranks compare.
SAMPLED, SAMPLED_WEIGHTS = 16, 2


class GatherRows(torch.autograd.Function):
    """Autograd function that gathers rows [B, n, ...] from all ranks into [B, N, ...]. Only its forward is collective.

    All ranks must compute the same loss from the result. The backward multiplies the gradient of a rank's rows by the
    number of ranks: the mean of the parameters' gradients over the ranks, as DDP and FSDP compute it, is then the
    gradient of the loss.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, places: Places, group: ProcessGroup) -> Tensor:
        """Gather the rows; `places[r]` are the indices in the result at which the rows of rank r are stored."""
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


def gather_logits(logits: Tensor, group: ProcessGroup | DeviceMesh | None = None, *, layout: str | Layout) -> Tensor:
    """The logits [B, N, classes] of whole sequences from the ranks' [B, n, classes], on every rank. Collective.

    `layout` is that of the batch; for `LayerMasks` give layout.cut(batch["cu_seq_lens_q"], ranks). Not differentiable:
    each rank computes the loss of its own rows. Raises InvalidInput for logits of another shape, and Mismatch on all
    ranks if batch sizes or classes differ.
    """
    place = place_group(group).group
    with Exchange(get_transport(place), "logits") as ranks:
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InvalidInput(f"logits must be [batch, tokens, classes], got {got}; pass model(**batch).logits")
        batch, rows, classes = logits.shape
        ranks.mine = json.dumps({"batch": batch, "rows": rows, "classes": classes}).encode()
    lengths = [fields["rows"] for fields in compare_records(ranks.records)]
    cut = make_layout(layout, tokens=sum(lengths), ranks=len(lengths))
    places = list(map(cut.positions, range(len(lengths))))
    return cast(Tensor, GatherRows.apply(logits.detach(), places, place))


def digest_tensor(x: Tensor) -> Tensor:
    """A hash of the values of a real tensor and their order: an int64 scalar on its device."""
    x = x.flatten()
    x = x.double().view(torch.int64) if x.is_floating_point() else x.long()
    return finalize(x + key_steps(torch.arange(len(x), device=x.device))).sum()


def compare_inputs(inputs: Sequence[Tensor], group: ProcessGroup, weights: Sequence[Tensor] = ()) -> None:
    """Raise Mismatch on every rank if inputs or weights differ in shape or by more than rounding. Collective.

    Integer tensors are compared in full, others by a sample of their values.
    """
    exact = [digest_tensor(x).item() for x in inputs if not (x.is_floating_point() or x.is_complex())]
    some, few = _sample(inputs, SAMPLED), _sample(weights, SAMPLED_WEIGHTS)
    with Exchange(get_transport(group), "inputs of a model") as ranks:
        ranks.mine = json.dumps([[str([tuple(x.shape) for x in inputs]), len(few)], exact, some, few]).encode()
    sizes, numbers, values, samples = zip(*map(json.loads, ranks.records), strict=True)
    names = "the shapes of the inputs", "the number of weights"
    compare({rank: dict(zip(names, x, strict=True)) for rank, x in enumerate(sizes)})
    alike = all(x == exact for x in numbers) and np.allclose(values, values[0], rtol=0.1, atol=0.1, equal_nan=True)
    if not alike:
        raise Mismatch("the ranks got different inputs; draw noise and batches with the same seed on all ranks")
    if not np.allclose(samples, samples[0], rtol=1e-3, atol=1e-6, equal_nan=True):
        raise Mismatch(
            "the ranks have different weights; load or seed them alike, and in training wrap the model in DDP or FSDP, "
            "or average the gradients over the ranks"
        )


def _sample(tensors: Sequence[Tensor], count: int) -> list[float]:
    """About `count` values of each tensor, copied to the host at once."""
    flat = [x.detach().flatten() for x in tensors]
    some = [x[:: 1 + len(x) // count].real.to(flat[0].device, torch.float64) for x in flat]
    return torch.cat(some).tolist() if some else []
