"""Calls of a parallelized model with whole sequences: each rank computes its rows, and gets the result of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import InvalidInput, Unsupported
from .batches import COUNT, DIGEST, cut_batch, shard_batch
from .generation import CACHES
from .ranks import GatherRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    Places = list[np.ndarray[Any, Any]]

#: What collators say of packed documents; the other tensors of a batch are known by their shape.
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def draw_alone(group: ProcessGroup, call: int) -> ExitStack:
    """Until it is closed, this rank draws random numbers of its own in call number `call`, such as for dropout.

    Then the numbers go on that all ranks of the group share, as if the call had drawn none: else those that drop fewer
    rows would part from the others, which draw their next batch.
    """
    alone = ExitStack()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    seed = crc32(torch.get_rng_state().numpy().tobytes()) + call * dist.get_world_size(group) + dist.get_rank(group)
    alone.enter_context(torch.random.fork_rng(cuda))
    torch.manual_seed(seed)
    return alone


@dataclass
class WholeCall:
    """A call of a model with whole sequences: what its hooks need."""

    #: By rank, the places of its rows in the result.
    places: Places
    #: The rows of this rank whose logits are wanted; None: all.
    keep: Tensor | None
    #: Whether the caller wants the loss, and gets no logits.
    loss: bool
    #: Whether results of one number for each label lack the last row, whose label nobody knows.
    short: bool

    def finish(self, result: Any, group: ProcessGroup) -> Any:
        """The result with the loss and the rows of all ranks. Collective."""

        def gather(x: Any) -> Any:
            return GatherRows.apply(x, self.places, group) if isinstance(x, Tensor) and x.ndim > 1 else x

        for name, x in list(result.items()):
            if name == "loss":
                each = [np.array([rank]) for rank in range(len(self.places))]
                result[name] = None if x is None else GatherRows.apply(x.reshape(1, 1), each, group).sum()
            elif name in CACHES or (self.loss and name in ("logits", "hidden_states")):
                result[name] = None
            elif name not in ("logits", "pooler_output") or x.ndim == 3:  # else pooled: of sequences, not of rows
                whole = tree_map(gather, x)
                result[name] = whole[:, :-1] if self.short and isinstance(whole, Tensor) and whole.ndim == 2 else whole
        return result


def cut_call(model: nn.Module, ring: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of this rank's part of a call with whole sequences, equal on all ranks; tells the hooks of it."""
    ids, keep, group = kwargs.get("input_ids"), kwargs.get("logits_to_keep", 0), ring.place.group
    if ids is None:
        raise InvalidInput("a call with whole sequences needs input_ids [batch, tokens]")
    if not isinstance(keep, int) or (keep and (kwargs.get("labels") is not None or kwargs.get("output_hidden_states"))):
        raise Unsupported(f"logits_to_keep={keep}: give the number of last rows, and no labels or output_hidden_states")
    batch = {
        name: x
        for name, x in kwargs.items()
        if x is not None and (name in BORDERS or (isinstance(x, Tensor) and x.shape[:2] == ids.shape))
    }
    if not ring.first and not batch.keys() & {"position_ids", "cu_seq_lens_q", "seq_idx"}:
        batch["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # padding counts, too
    others = {name: x for name, x in kwargs.items() if name not in (*batch, "logits_to_keep")}
    cut = shard_batch(batch, group, layout=ring.layout, shift=ring.shift is not False)
    if "labels" in cut and others.get("num_items_in_batch") is None:
        others["num_items_in_batch"] = cut[DIGEST][COUNT].clamp(min=1)
    first, ranks = max(ids.shape[1] - keep, 0) if keep else 0, dist.get_world_size(group)
    places = list(map(cut_batch(ring.layout, ids.shape[1], ranks, cut.get("cu_seq_lens_q")).positions, range(ranks)))
    kept = np.flatnonzero(places[dist.get_rank(group)] >= first)
    ring.call.whole = WholeCall(
        places=[rows[rows >= first] - first for rows in places],
        keep=torch.from_numpy(kept).to(ids.device) if first else None,
        loss="labels" in cut and (torch.is_grad_enabled() or not ring.call.logits),
        short="shift_labels" in cut and "shift_labels" not in kwargs,
    )
    if model.training:
        ring.call.trained += 1
        ring.call.numbers = draw_alone(group, ring.call.trained)
    return {**others, **cut}
