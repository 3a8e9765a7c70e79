"""Heads that read whole sequences, such as classifiers, on models whose rows are spread over ranks.

A classification head reads one row of a sequence, or the mean of its rows. The ranks exchange only this row, and every
rank runs the model's own head on it as if it were a sequence of one token. `find_pooling` finds by trial which row a
head reads, so no list of classes can go out of date.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from ..call.functional import get_transport
from ..errors import InvalidInput, Unsupported
from ..kernels.base import wide
from ..train.loss import SumOverRanks
from ..transport.records import Exchange, compare_records
from ..transport.torchdist import place_group
from .batches import ANSWERS, cut_batch, read_borders
from .generation import STATE
from .ranks import GatherRows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from ..layout.regular import Layout
    from .batches import LayerMasks

#: How the rows of a sequence become one row.
POOLINGS = ("first", "last", "mean")
#: Tokens of the random sequence on which `find_pooling` tries a head.
ASKED = 5
#: Exceptions of a head that cannot run on hidden states alone.
FOREIGN = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
#: The arguments a head uses to find the row it reads; the model below it gets this rank's.
OF_ROWS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "cu_seq_lens_q", "inputs_embeds")
#: The labels of whole sequences.
LABELS = ("labels", *ANSWERS)


@dataclass(frozen=True)
class Sequences:
    """The sequences of a sharded batch, and which of them each row of this rank belongs to.

    A sequence is a row of the batch or, in a packed batch, a document.
    """

    #: [B, n]: the index of the sequence that each row of this rank belongs to.
    index: Tensor
    #: [B, n]: the position of each row in its sequence.
    positions: Tensor
    #: [B, n]: False for padding.
    real: Tensor
    number: int
    group: ProcessGroup

    def pool(self, rows: Tensor, how: str) -> Tensor:
        """Combine the rows [B, n, d] of all ranks into one vector per sequence, [sequences, d].

        `how` is "first", "last" or "mean". Differentiable, collective.
        """
        index, real = self.index.flatten(), self.real.flatten()
        weight = real.to(wide(rows.dtype))
        if how == "mean":
            count = weight.new_zeros(self.number).index_add(0, index, weight)
            dist.all_reduce(count, group=self.group)
            weight = weight / count.clamp(min=1)[index]
        else:
            place = self.positions.flatten().long() * (1 if how == "last" else -1)
            place = place.masked_fill(~real, torch.iinfo(torch.int64).min)
            best = torch.full_like(place, torch.iinfo(torch.int64).min)[:1].expand(self.number).contiguous()
            best = best.scatter_reduce(0, index, place, "amax")
            dist.all_reduce(best, dist.ReduceOp.MAX, group=self.group)
            real = real & (place == best[index])
        chosen = real.nonzero()[:, 0]
        mine = rows.flatten(0, 1)[chosen].to(weight.dtype) * weight[chosen, None]
        pooled = mine.new_zeros(self.number, mine.shape[1]).index_add(0, index[chosen], mine)
        return SumOverRanks.apply(pooled, self.group).to(rows.dtype)

    def unmask(self, ids: Tensor | None, cut: Layout, padding: int | None) -> Sequences:
        """The sequences as heads of one row see them, without the mask: "last" is the last id that is not `padding`.

        If all are, it is the first row. Without ids, or without `padding`, it is the last row.
        """
        places = torch.from_numpy(cut.positions(dist.get_rank(self.group))).to(self.index).expand_as(self.index)
        if ids is not None and padding is not None:
            places = places.where(ids != padding, -1 - places)
        return replace(self, positions=places, real=torch.ones_like(self.real))


def find_sequences(batch: Mapping[str, Tensor], group: ProcessGroup, layout: str | Layout | LayerMasks) -> Sequences:
    """Find the sequences to which the rows of this rank's shard belong; `batch` is the result of `shard_batch`."""
    positions, mask, borders = (batch.get(name) for name in ("position_ids", "attention_mask", "cu_seq_lens_q"))
    assert positions is not None
    positions = positions.reshape(-1, *positions.shape[-2:])[0]
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask.bool()
    batch_size = len(positions)
    if borders is None:
        index = torch.arange(batch_size, device=positions.device)[:, None].expand_as(positions)
        return Sequences(index, positions, real, batch_size, group)
    documents, found, number = read_borders(borders), [], 0
    cut = cut_batch(layout, documents.row(0).starts[-1], dist.get_world_size(group), documents)
    for row in range(batch_size):
        starts = np.unique(documents.row(row).starts)
        found.append(number + np.searchsorted(starts, cut.positions(dist.get_rank(group)), "right") - 1)
        number += len(starts) - 1
    return Sequences(torch.tensor(np.array(found), device=positions.device), positions, real, number, group)


def pool(
    hidden: Tensor,
    batch: Mapping[str, Tensor],
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str | Layout | LayerMasks,
    how: str = "mean",
) -> Tensor:
    """One vector per sequence [S, d], equal on all ranks, such as the embedding of a text. Collective.

    hidden: the last hidden states [B, n, d] of this rank's rows.
    batch: the result of `shard_batch`; S is B or, if documents are packed, the number of all documents, in order.
    how: "first", "last" or "mean" of the tokens of a sequence, without padding.

    Differentiable: if each rank computes the same loss from the result, the mean of the ranks' gradients, as DDP and
    FSDP2 take it, is the gradient of the loss. Raises InvalidInput for shapes that do not fit and unknown names.
    """
    place = place_group(group).group
    with Exchange(get_transport(place), "pool") as ranks:
        if how not in POOLINGS:
            raise InvalidInput(f"how={how!r}: expected one of {', '.join(POOLINGS)}")
        if hidden.ndim != 3 or hidden.shape[:2] != batch["position_ids"].shape[-2:]:
            raise InvalidInput(
                f"hidden must be [batch, tokens, d], the rows of this rank, got {tuple(hidden.shape)}; pass "
                "model(**batch).last_hidden_state"
            )
        ranks.mine = json.dumps({"how": how, "batch": hidden.shape[0], "d": hidden.shape[2]}).encode()
    compare_records(ranks.records)
    return find_sequences(batch, place, layout).pool(hidden, how)


def find_pooling(model: PreTrainedModel, field: str) -> str:
    """Which rows the head of a model reads to compute `field` of its result.

    - "first", "last" or "mean": the head reads the first row, the last whose id is not padding, or the mean of rows.
    - "late": the head runs on each row, and its results are averaged.
    - "rows": the head runs on each row, and its results are returned for each row.

    To find out, a copy of the head with random weights runs on random rows. Raises Unsupported for a head that reads
    anything else.
    """
    pooler, below = _copy(getattr(model.base_model, "pooler", None)), nn.Identity()
    head = _copy(model, {id(model.base_model): below})
    head.config.get_text_config().pad_token_id = 1

    def run(hidden: Tensor) -> Tensor:
        pooled = None if pooler is None else pooler(hidden)
        result = BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)
        below.forward = lambda *args, **kwargs: result  # type: ignore[method-assign]
        ids = torch.zeros(1, hidden.shape[1], device="cpu", dtype=torch.int64)
        ids[:, 1:][:, -1:] = 1  # of several tokens, the last one is padding
        return cast(Tensor, head(input_ids=ids)[field])

    return _ask(model, f"head ({field})", run)


def check_pooler(model: PreTrainedModel) -> nn.Module | None:
    """The pooler module of a model, or None if it has none.

    Raises Unsupported for a pooler that reads other rows than the first of a sequence.
    """
    pooler = getattr(model.base_model, "pooler", None)
    if pooler is not None and (found := _ask(model, "pooler", _copy(pooler))) != "first":
        name = type(model).__name__
        raise Unsupported(
            f"{name} has a pooler that reads {found}, not the first row of a sequence; make the model with "
            "add_pooling_layer=False"
        )
    return cast("nn.Module | None", pooler)


def _copy(module: nn.Module | None, known: dict[int, Any] | None = None) -> Any:
    """An fp32 copy on the CPU with random weights, in eval mode. `known` (deepcopy's memo) replaces parts."""
    if module is None:
        return None
    parts = [part for part in module.children() if id(part) not in (known or {})]
    if any(hasattr(p, "full_tensor") for part in parts for p in part.parameters()):
        raise Unsupported(f"{type(module).__name__} is sharded already; call parallelize first, then fully_shard")
    made = deepcopy(module, known or {}).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    for part in made.modules():
        setattr(part, STATE, None)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * max(p.shape[-1:] or [1]) ** -0.5)
        for buffer in made.buffers():
            buffer.zero_()
    return made


def _ask(model: PreTrainedModel, part: str, run: Callable[[Tensor], Tensor]) -> str:
    """Which of the hidden states [1, n, d] `run`, a part of a model, reads: a name as in `find_pooling`."""
    width = model.config.get_text_config().hidden_size
    hidden = torch.randn(1, ASKED, width, generator=torch.Generator().manual_seed(1), device="cpu", dtype=torch.float)
    words = f"{type(model).__name__} has a {part} that does not read the first, the last token or the mean of the rows"
    try:
        with torch.no_grad():
            whole, middle = run(hidden)[0], run(hidden.mean(1, keepdim=True))[0]
            alone = [run(row) for row in hidden.split(1, 1)]
    except FOREIGN as error:
        raise Unsupported(f"{words}: {type(error).__name__}: {error}") from error
    known = {"first": alone[0][0], "last": alone[-2][0], "mean": middle}
    known |= {"late": torch.cat(alone).mean(0), "rows": torch.cat(alone, 1)[0]}
    for name, right in known.items():
        if right.shape == whole.shape and torch.allclose(right, whole, atol=1e-5):
            return name
    raise Unsupported(f"{words}; pool the rows of its base model with ringattn.integrations.transformers.pool")


class HeadCall:
    """The state of one call of a model whose head reads whole sequences.

    pooling: which rows the head reads, see `find_pooling`.
    kwargs: the arguments of the call for this rank's rows, which the layout `cut` selected.
    """

    def __init__(self, pooling: str, sequences: Sequences, kwargs: dict[str, Any], cut: Layout) -> None:
        self.pooling, self.sequences, self.cut = pooling, sequences, cut
        given = {name: x for name, x in kwargs.items() if x is not None}
        #: Arguments that only the loss reads.
        self.labels = {name: given.pop(name) for name in LABELS if name in given}
        #: Arguments for the model below the head.
        self.rows = {name: given.pop(name) for name in OF_ROWS if name in given}
        self.others = given

    def hide(self) -> dict[str, Any]:
        """The arguments of the call as the head gets them.

        `input_ids` have one token for each vector that the head reads.
        """
        index = self.sequences.index
        shape = {"rows": index.shape, "late": (index.numel(), 1)}.get(self.pooling, (self.sequences.number, 1))
        return {**self.others, "input_ids": index.new_ones(shape)}

    def pooled(self, hidden: Tensor) -> Tensor:
        """The hidden states that the head reads, computed from the hidden states [B, n, d] of this rank's rows."""
        if self.pooling == "rows":
            return hidden
        if self.pooling == "late":
            return hidden.flatten(0, 1)[:, None]
        return self.sequences.pool(hidden, self.pooling)[:, None]

    def finish(self, model: PreTrainedModel, result: Any) -> Any:
        """Complete the head's result: every rank gets it for whole sequences, with the loss if there are labels."""
        if self.pooling == "rows":
            for name in ("start_logits", "end_logits"):
                rows = result[name].masked_fill(~self.sequences.real, torch.finfo(result[name].dtype).min)
                places = list(map(self.cut.positions, range(self.cut.ranks)))
                result[name] = GatherRows.apply(rows, places, self.sequences.group)
            given = {name: result[name] for name in ("start_logits", "end_logits")}
        else:
            if self.pooling == "late":
                rows = result["logits"].view(*self.sequences.index.shape, -1)
                result["logits"] = self.sequences.pool(rows, "mean")
            given = {"pooled_logits": result["logits"], "config": model.config}
        return type(result)(loss=model.loss_function(**given, **self.labels), **result) if self.labels else result


def enter_base(base: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook before the model below a head: returns arguments that contain this rank's rows."""
    ring = getattr(base, STATE)
    call: HeadCall | None = None if ring is None else ring.call.head
    if call is None:
        return args, kwargs
    bound = inspect.signature(base.forward).bind(*args, **kwargs)
    named = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    return (), {name: x for name, x in named.items() if name not in ("kwargs", *OF_ROWS)} | call.rows


def leave_base(base: nn.Module, args: Any, result: Any) -> Any:
    """Hook after the model below a head: replaces the hidden states in its result by those that the head reads."""
    ring = getattr(base, STATE)
    call: HeadCall | None = None if ring is None else ring.call.head
    if call is not None:
        result["last_hidden_state"] = call.pooled(result["last_hidden_state"])
        if ring.call.numbers and call.pooling in POOLINGS:  # all ranks run the head with the same dropout
            ring.call.numbers.close()
    return result


def enter_pooler(pooler: nn.Module, args: Any) -> Any:
    """Hook before the pooler: replaces this rank's rows [B, n, d] by the first row of every sequence, [S, 1, d]."""
    ring = getattr(pooler, STATE)
    if ring is None:
        return args
    if ring.call.sequences is None:
        raise InvalidInput(f"{type(pooler).__name__}: call the model that parallelize returned, not one of its parts")
    return (ring.call.sequences.pool(args[0], "first")[:, None], *args[1:])
