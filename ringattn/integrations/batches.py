"""A rank's part of a batch of whole sequences, and the logits of whole sequences from those of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import Unsupported
from ..functional import get_transport
from ..layout.regular import Layout
from ..pattern import Documents
from ..transport.records import ErrorReport
from ..transport.torchdist import place_group
from .borders import (
    COUNT,
    DIGEST,
    LayerMasks,
    check_rows,
    count_positions,
    cut_batch,
    digest_batch,
    find_documents,
    make_labels,
    read_batch,
    write_borders,
)
from .encoder_decoder import DECODER
from .ranks import gather_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .borders import Borders

    Batch = Mapping[str, torch.Tensor]

#: The first exchange of a model; `shard_batch` reports its errors there.
POSITIONS = "positions of a model"


def shard_batch(
    batch: Batch,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str | Layout | LayerMasks,
    cu_seqlens: Borders | None = None,
    shift: bool = True,
) -> dict[str, torch.Tensor]:
    """This rank's part of a batch of whole sequences, as keyword arguments of the model.

    batch: `input_ids` [B, N], and where wanted `labels`, `attention_mask` (1 for a token, 0 for padding) and
        `position_ids` and `token_type_ids`, all [B, N] and equal on all ranks; `shift_labels` instead of `labels` if
        shifted already. Labels of sequences, [S] or of floats [S, classes], `start_positions` and `end_positions` [B]
        are not cut; S is B, or the number of all packed documents. `inputs_embeds` [B, N, d] beside `input_ids`, which
        then only count, are what the model is given; position_ids may be [axes, B, N]. `decoder_input_ids` [B, M] and
        `decoder_attention_mask` are of an encoder-decoder model, whose labels are [B, M].
    cu_seqlens: the borders of packed documents, [0, ..., N] for all rows or one such list for each row; default:
        `cu_seq_lens_q` or `seq_idx` of the batch, or where position_ids begin anew in each row.
    shift: True for a causal language model, whose rows predict the next token; False for a model whose labels belong to
        the token itself, such as a masked language model. The model refuses the labels of the other kind.

    The result has `input_ids` and `position_ids` of the rank's rows; `labels`, shifted before the cut so that no label
    is lost at a border, and then the same as `shift_labels`; `attention_mask` only if some rank has padding;
    `cu_seq_lens_q` for documents, [B, most borders] with N repeated where the rows differ; and `batch_digest`, by which
    the model compares the whole batches of the ranks, knows the number of their labels and their largest position, and
    which it takes away. Padding has no label (transformers lets the last padding before a row predict its first
    token). position_ids count from the first token that is not padding, and in each document from 0.
    """
    if isinstance(batch, Mapping) and "decoder_input_ids" in batch:
        return _shard_both(batch, group, layout)
    place = place_group(group)
    with ErrorReport(get_transport(place.group), POSITIONS):
        batch, answers, borders = read_batch(batch)
        embeds = answers.pop("inputs_embeds", None)
        tokens = batch["input_ids"]
        rank, ranks = dist.get_rank(place.group), dist.get_world_size(place.group)
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        given = borders if cu_seqlens is None else cu_seqlens
        begins = positions if mask is None and positions is not None and positions.ndim == 2 else None
        documents = find_documents(tokens, begins, given)
        cut = cut_batch(layout, tokens.shape[1], ranks, documents)
        check_rows(cut)
        if positions is None:
            positions = count_positions(tokens, mask, documents)
        labels = make_labels(batch, documents, shift)
        if documents is not None and "start_positions" in answers:
            raise Unsupported("start_positions of packed documents are not defined; give a row to each document")
        if documents is None and isinstance(layout, LayerMasks):
            documents = Documents((tokens.shape[1],))  # from which the model makes the layout
    whole = {"input_ids": tokens, "position_ids": positions}
    whole |= {name: x for name, x in batch.items() if name == "token_type_ids"}
    if labels is not None:
        whole["labels"] = labels
    if mask is not None and not bool(mask.all()):
        whole["attention_mask"] = mask
    result = {name: cut.shard_tensor(x, rank, dim=-1).contiguous() for name, x in whole.items()}
    if embeds is not None:
        del result["input_ids"]
        result["inputs_embeds"] = cut.shard_tensor(embeds, rank, dim=1).contiguous()
    if labels is not None and (shift or "shift_labels" in batch):
        result["shift_labels"] = result["labels"]
    if documents is not None:
        result["cu_seq_lens_q"] = write_borders(documents, tokens)
    result |= answers
    result[DIGEST] = digest_batch({**batch, **whole, **answers}, documents)
    return result


def _shard_both(
    batch: Batch, group: ProcessGroup | DeviceMesh | None, layout: str | Layout | LayerMasks
) -> dict[str, torch.Tensor]:
    """`shard_batch` for an encoder and a decoder, whose sequences are cut each by itself; labels are the decoder's."""
    if not isinstance(layout, str):
        raise Unsupported("an encoder and a decoder have sequences of two lengths; give a name, such as 'zigzag'")
    given = {own: batch[name] for own, name in DECODER.items() if name in batch}
    rest = {name: x for name, x in batch.items() if name not in DECODER.values()}
    for x in (given, rest):  # such models count padding, too
        x["position_ids"] = torch.arange(x["input_ids"].shape[1], device=x["input_ids"].device).expand_as(
            x["input_ids"]
        )
    inner, result = (shard_batch(x, group, layout=layout, shift=False) for x in (given, rest))
    if "cu_seq_lens_q" in {**inner, **result}:
        raise Unsupported("packed documents of an encoder and a decoder: give a row to each document")
    result |= {DECODER.get(name, f"decoder_{name}"): x for name, x in inner.items() if name != DIGEST}
    result[DIGEST] = torch.cat([(result[DIGEST] + 3 * inner[DIGEST])[:COUNT], inner[DIGEST][COUNT:]])
    return result


@dataclass(frozen=True)
class Collator:
    """A data collator: `inner` makes a batch of whole sequences, and each rank gets its rows of the batch.

    All ranks of `group` must be given the same examples; let the sampler shard by data-parallel rank only. Where
    position_ids begin anew in a row, the row has packed documents; rows may have different ones.
    """

    inner: Any
    group: ProcessGroup | DeviceMesh | None = None
    layout: str | Layout | LayerMasks = "zigzag"
    shift: bool = True

    def __call__(self, examples: Any) -> dict[str, torch.Tensor]:
        """`shard_batch` of the batch that `inner` makes of these examples."""
        return shard_batch(self.inner(examples), self.group, layout=self.layout, shift=self.shift)


def gather_logits(
    logits: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None, *, layout: str | Layout
) -> torch.Tensor:
    """The logits [B, N, classes] of whole sequences from the ranks' [B, n, classes], on every rank. Collective.

    `layout` is that of the batch, with `LayerMasks` layout.cut(batch["cu_seq_lens_q"], ranks). Not differentiable: a
    loss is computed on the rows of each rank.
    """
    return gather_rows(logits, place_group(group).group, layout)
