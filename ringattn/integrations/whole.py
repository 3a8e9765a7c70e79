"""Calls of a parallelized model with whole sequences: each rank computes its rows and gets the results of all."""

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
from .batches import ANSWERS, COUNT, DIGEST, cut_batch, cut_rows
from .generation import CACHES
from .ranks import GatherRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .ranks import Places

#: Positions, and what collators add for packed documents; other tensors of a batch are recognized by their shape.
OWN = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def draw_alone(ring: Any) -> None:
    """Give this rank random numbers of its own, for dropout in a model call, until `ring.call.numbers` is closed.

    Then the random generators continue as if the call had drawn nothing. Without this, ranks that draw numbers for
    fewer rows would get out of step with the others, and draw a different next batch.
    """
    ring.call.trained, ring.call.numbers, group = ring.call.trained + 1, ExitStack(), ring.place.group
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    seed = crc32(torch.get_rng_state().numpy().tobytes()) + ring.call.trained * dist.get_world_size(group)
    ring.call.numbers.enter_context(torch.random.fork_rng(cuda))
    torch.manual_seed(seed + dist.get_rank(group))


@dataclass
class WholeCall:
    """What the hooks after a model need to know about a call that was given whole sequences."""

    #: By rank, the indices of its rows in the result.
    places: Places
    #: The rows of this rank whose logits are wanted; None: all.
    keep: Tensor | None
    #: Whether the caller wants the loss and no logits.
    loss: bool
    #: Whether results with one number per label drop the last row, whose label is unknown.
    short: bool

    def finish(self, result: Any, group: ProcessGroup) -> Any:
        """Complete the model's result: the sum of the ranks' losses, and the rows of all ranks. Collective."""

        def gather(x: Any) -> Any:
            return GatherRows.apply(x, self.places, group) if isinstance(x, Tensor) and x.ndim > 1 else x

        for name, x in list(result.items()):
            if name == "loss":
                each = [np.array([rank]) for rank in range(len(self.places))]
                result[name] = None if x is None else GatherRows.apply(x.reshape(1, 1), each, group).sum()
            elif name in (*CACHES, "router_logits") or (self.loss and name in ("logits", "hidden_states")):
                result[name] = None
            elif name not in ("logits", "pooler_output") or x.ndim == 3:  # others are pooled per sequence
                whole = tree_map(gather, x)
                result[name] = whole[:, :-1] if self.short and isinstance(whole, Tensor) and whole.ndim == 2 else whole
        return result


def cut_call(model: nn.Module, ring: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Select this rank's part of the arguments of a call that was given whole sequences.

    Also stores the `WholeCall` of the call in `ring.call.whole`.
    """
    ids, keep, group = kwargs.get("input_ids"), kwargs.get("logits_to_keep", 0), ring.place.group
    if ids is None:
        raise InvalidInput("a call with whole sequences needs input_ids [batch, tokens]")
    if not isinstance(keep, int) or (keep and (kwargs.get("labels") is not None or kwargs.get("output_hidden_states"))):
        raise Unsupported(
            f"logits_to_keep={keep}: give the number of last rows to keep, and leave out labels and "
            "output_hidden_states"
        )
    of_sequences = (*OWN, *ANSWERS, *["labels"] * (ring.pooling is not None))
    batch = {
        name: x
        for name, x in kwargs.items()
        if x is not None and (name in of_sequences or (isinstance(x, Tensor) and x.shape[:2] == ids.shape))
    }
    positions = batch.get("position_ids")
    if isinstance(positions, Tensor) and positions.shape[-2:-1] in ((1,), (len(ids),)):
        batch["position_ids"] = positions.expand(*positions.shape[:-2], len(ids), -1) - ring.first
    others = {name: x for name, x in kwargs.items() if name not in (*batch, "logits_to_keep")}
    cut = cut_rows(batch, group, ring.layout, None, ring.shift is not False, ring.before, ring.first)
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
        draw_alone(ring)
    return {**others, **cut}
