"""Batches of whole sequences: a rank's part of one, the borders of its packed documents, and what ranks compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..call.functional import get_transport
from ..errors import InvalidInput, Mismatch, Unsupported
from ..layout import shift_labels
from ..layout.regular import Layout, make_layout
from ..pattern import Documents, Pattern
from ..train import NO_LABEL
from ..transport.records import ErrorReport
from ..transport.torchdist import place_group
from .encoder_decoder import DECODER
from .generation import layer_windows, make_pattern
from .ranks import digest_tensor, gather_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

#: Cumulative lengths [0, ..., N] for all rows, or one such list for each row.
Borders = Sequence[int] | Sequence[Sequence[int]] | Tensor
#: The key of a batch whose tensor, int64 [one per name], stands for the whole batch that all ranks must be given.
DIGEST = "batch_digest"
#: Labels of whole sequences: the first and the last token of an answer, [B].
ANSWERS = ("start_positions", "end_positions")
#: The tensors of a batch that are cut alike, and all that its digest covers.
OF_ROWS = ("input_ids", "attention_mask", "labels", "loss_weights", "position_ids", "token_type_ids")
COMPARED = ("cu_seqlens", *OF_ROWS, *ANSWERS)
#: Places in the digest after those of `COMPARED`: the labels of the whole batch, and its largest position.
COUNT, LARGEST = -2, -1
#: The first exchange of a model; `shard_batch` reports its errors there.
POSITIONS = "positions of a model"
Batch = Mapping[str, Tensor]
Tensors = dict[str, Tensor]
#: The borders of packed documents by the tensor that transformers passes to all layers: one copy to the host a batch.
_borders: Any = WeakIdKeyDictionary()


@dataclass(frozen=True)
class LayerMasks:
    """A layout that is made anew for the documents of each batch, for `layout=` of `parallelize` and `shard_batch`.

    `patterns` are the masks of the layers without documents, `weights` the number of layers of each.
    """

    patterns: tuple[Pattern, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks:
        """The masks of a model of transformers: its windows, and whether it is causal."""
        causal = all(getattr(module, "is_causal", True) for module in model.modules())
        layers = Counter(layer_windows(model))
        return cls(tuple(make_pattern(window, causal) for window in layers), tuple(layers.values()))

    def cut(self, borders: Tensor | Documents, ranks: int) -> Layout:
        """The Layout of the batch with these documents, which are `cu_seq_lens_q` of `shard_batch`'s result."""
        documents = borders if isinstance(borders, Documents) else read_borders(borders)
        patterns, tokens = [pattern & documents for pattern in self.patterns], documents.row(0).starts[-1]
        return make_layout("balanced", tokens=tokens, ranks=ranks, patterns=patterns, weights=self.weights)


def cut_batch(layout: str | Layout | LayerMasks, tokens: int, ranks: int, borders: Tensor | Documents | None) -> Layout:
    """The Layout of a batch, whose documents may be one for each row. Raises InvalidInput."""
    if isinstance(layout, LayerMasks):
        return layout.cut(Documents((tokens,)) if borders is None else borders, ranks)
    return make_layout(layout, tokens=tokens, ranks=ranks)


def check_rows(layout: Layout) -> None:
    """Raise InvalidInput where a rank has no row: models of transformers cannot compute an empty sequence."""
    if not all(map(layout.rows, range(layout.ranks))):
        raise InvalidInput(
            f"{layout.tokens} tokens leave a rank of {layout.ranks} without rows under layout {layout.name!r}; give "
            "each rank a token, or take fewer ranks"
        )


def shard_batch(
    batch: Batch,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str | Layout | LayerMasks,
    cu_seqlens: Borders | None = None,
    shift: int = True,
) -> dict[str, Tensor]:
    """This rank's part of a batch of whole sequences, as keyword arguments of the model.

    batch: `input_ids` [B, N], and where wanted `labels`, `attention_mask` (0 for padding, 1 for a token, or the number
        of its document), `position_ids`, `token_type_ids` and `loss_weights`, all [B, N] and equal on all ranks;
        `shift_labels` instead of `labels` if shifted already, and weights with them. Labels of sequences, [S] or of
        floats [S, classes], `start_positions` and `end_positions` [B] are not cut; S is B, or the number of all packed
        documents. `inputs_embeds` [B, N, d] beside `input_ids`, which then only count, are what the model is given;
        position_ids may be [3, B, N], or [4, B, N], those of the text first. `decoder_input_ids` [B, M] and
        `decoder_attention_mask` are of an encoder-decoder model, whose labels are [B, M].
    cu_seqlens: the borders of packed documents, [0, ..., N] for all rows or one such list for each row; default:
        `cu_seq_lens_q` of the batch, or where the numbers of the mask or of `seq_idx` change, or position_ids jump.
    shift: True for a causal language model, whose rows predict the next token, k for that k tokens on; False for a
        model whose labels belong to the token itself, such as a masked language model. Models refuse the other kind.

    The result has `input_ids` and `position_ids` of the rank's rows; `labels`, shifted before the cut so that no label
    is lost at a border of shards, none across documents, and then the same as `shift_labels`; `loss_weights`, shifted
    with them, 0 where no label is, for a loss of yours, as the model refuses them; `attention_mask` only if some rank
    has padding; `cu_seq_lens_q` for documents, [B, most borders] with N repeated where the rows differ; and
    `batch_digest`, by which the model compares the whole batches of the ranks, knows the number of their labels and
    their largest position, and which it takes away. Padding has no label (transformers lets the last padding before a
    row predict its first token). position_ids count from the first token that is not padding, in each document from 0.
    """
    if isinstance(batch, Mapping) and "decoder_input_ids" in batch:
        return _shard_both(batch, group, layout)
    return cut_rows(batch, group, layout, cu_seqlens, shift)


def cut_rows(
    batch: Batch, group: ProcessGroup | DeviceMesh | None, layout: str | Layout | LayerMasks,
    cu_seqlens: Borders | None, shift: int, alone: str | None = None, first: int = 0,
) -> Tensors:  # fmt: skip
    """`shard_batch` of tokens; but rows that are not packed have the loss of one process of the attention `alone`.

    That counts labels on padding, and where the model gives the first token the position 0, padding among positions.
    """
    place = place_group(group)
    with ErrorReport(get_transport(place.group), POSITIONS):
        batch, answers, borders = read_batch(batch)
        embeds = answers.pop("inputs_embeds", None)
        tokens, mask = batch["input_ids"], batch.get("attention_mask")
        rank, ranks = dist.get_rank(place.group), dist.get_world_size(place.group)
        documents = find_documents(batch, borders if cu_seqlens is None else cu_seqlens)
        cut = cut_batch(layout, tokens.shape[1], ranks, documents)
        check_rows(cut)
        whole = {"input_ids": tokens, **{name: x for name, x in batch.items() if name in OF_ROWS[-2:]}}
        hidden = None if alone and documents is None else mask
        whole.setdefault("position_ids", count_positions(tokens, mask if first else hidden, documents))
        whole |= make_labels(batch, documents, shift, hidden)
        padding = mask == 0 if mask is not hidden and alone != "sdpa" else None  # which rows may see no key
        if padding is not None and "labels" in whole and bool((whole["labels"] != NO_LABEL)[padding].any()):
            raise Unsupported(
                f"labels of rows of padding: attn_implementation={alone!r} has outputs of its own there; take 'sdpa', "
                "or set them to -100, and of padding in front that of the first token, too"
            )
        if documents is not None and "start_positions" in answers:
            raise Unsupported("start_positions of packed documents are not defined; give a row to each document")
        if documents is None and isinstance(layout, LayerMasks):
            documents = Documents((tokens.shape[1],))  # from which the model makes the layout
    if mask is not None and not bool(mask.all()):
        whole["attention_mask"] = mask.ne(0).to(mask.dtype)
    result = {name: cut.shard_tensor(x, rank, dim=-1).contiguous() for name, x in whole.items()}
    if embeds is not None:
        del result["input_ids"]
        result["inputs_embeds"] = cut.shard_tensor(embeds, rank, dim=1).contiguous()
    if "labels" in whole and (shift or "shift_labels" in batch):
        result["shift_labels"] = result["labels"]
    if documents is not None:
        result["cu_seq_lens_q"] = write_borders(documents, tokens)
    result |= answers
    result[DIGEST] = digest_batch({**batch, **whole, **answers}, documents)
    return result


def _shard_both(
    batch: Batch, group: ProcessGroup | DeviceMesh | None, layout: str | Layout | LayerMasks
) -> dict[str, Tensor]:
    """`shard_batch` for an encoder and a decoder, whose sequences are cut each by itself; labels are the decoder's."""
    if not isinstance(layout, str):
        raise Unsupported("an encoder and a decoder have sequences of two lengths; give a name, such as 'zigzag'")
    given = {own: batch[name] for own, name in DECODER.items() if name in batch}
    rest = {name: x for name, x in batch.items() if name not in DECODER.values()}
    for x in (given, rest):  # such models count padding, too
        x["position_ids"] = count_positions(x["input_ids"], None, None)
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
    shift: int = True

    def __call__(self, examples: Any) -> dict[str, Tensor]:
        """`shard_batch` of the batch that `inner` makes of these examples."""
        return shard_batch(self.inner(examples), self.group, layout=self.layout, shift=self.shift)


def gather_logits(logits: Tensor, group: ProcessGroup | DeviceMesh | None = None, *, layout: str | Layout) -> Tensor:
    """The logits [B, N, classes] of whole sequences from the ranks' [B, n, classes], on every rank. Collective.

    `layout` is that of the batch, with `LayerMasks` layout.cut(batch["cu_seq_lens_q"], ranks). Not differentiable: a
    loss is computed on the rows of each rank.
    """
    return gather_rows(logits, place_group(group).group, layout)


def read_batch(batch: Batch) -> tuple[Tensors, Tensors, Borders | None]:
    """(the tensors of a batch that are cut alike, labels of sequences and embeddings, borders of documents).

    Raises InvalidInput for what cannot be cut.
    """
    if not isinstance(batch, Mapping):
        raise InvalidInput(f"a batch is a dict of tensors such as {{'input_ids': ids}}, got {type(batch).__name__}")
    kept = {name: x for name, x in batch.items() if name not in ("cu_seq_lens_k", "max_length_q", "max_length_k")}
    borders = kept.pop("cu_seq_lens_q", None)
    whole = {name: kept.pop(name) for name in ("labels", *ANSWERS) if _is_of_sequences(name, kept)}
    if "inputs_embeds" in kept:
        whole["inputs_embeds"] = kept.pop("inputs_embeds")
    _check_batch(kept)
    return kept, whole, borders


def _is_of_sequences(name: str, batch: Tensors) -> bool:
    """Whether the batch has a tensor of this name with one entry for each sequence: classes [S] or [S, classes]."""
    x, tokens = batch.get(name), batch.get("input_ids")
    if not isinstance(x, Tensor) or not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return False
    return x.ndim == 1 or (x.is_floating_point() and x.ndim == 2)


def _check_batch(batch: Batch) -> None:
    """Raise InvalidInput for what cannot be cut into shards."""
    if unknown := set(batch) - {*OF_ROWS, "shift_labels", "seq_idx"}:
        raise InvalidInput(
            f"{sorted(unknown)} cannot be cut into shards; shard these by Layout.shard_tensor, and give borders as "
            "cu_seq_lens_q, or as cu_seqlens= of shard_batch"
        )
    if "input_ids" not in batch:
        raise InvalidInput(f"a batch needs input_ids [batch, tokens], got {sorted(batch) or 'nothing'}")
    for name, x in batch.items():
        if not isinstance(x, Tensor):
            raise InvalidInput(
                f"{name} must be a tensor [batch, tokens], got {type(x).__name__}; try torch.tensor(...), a tokenizer "
                "with return_tensors='pt', or leave out what the model does not need"
            )
    tokens = batch["input_ids"]
    if tokens.ndim != 2:
        raise InvalidInput(f"input_ids must be [batch, tokens], got {tuple(tokens.shape)}; try input_ids.unsqueeze(0)")
    sizes = {name: tuple(x.shape[-2:] if name == "position_ids" else x.shape) for name, x in batch.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidInput(f"the tensors of a batch must have one shape [batch, tokens], got {sizes}")


def digest_batch(batch: Batch, documents: Documents | None) -> Tensor:
    """A number for each tensor of a whole batch, 0 for one that it lacks, its labels, and its largest position; int64.

    The numbers stay on the device of the batch, so that the host does not wait for the device.
    """
    tokens = batch["input_ids"]
    whole = dict(batch) if documents is None else {**batch, "cu_seqlens": write_borders(documents, tokens)}
    none = torch.zeros((), dtype=torch.int64, device=tokens.device)
    numbers = [digest_tensor(whole[name].to(tokens.device)) if name in whole else none for name in COMPARED]
    count = (batch["labels"] != NO_LABEL).sum() if "labels" in batch else none
    largest = batch["position_ids"].reshape(-1, *tokens.shape)[-3:].max()  # of the rope: see `_find_begins`
    return torch.stack([*numbers, count.to(tokens.device), largest.to(tokens.device)])


def make_labels(batch: Batch, documents: Documents | None, shift: int, mask: Tensor | None) -> Tensors:
    """The labels [B, N] of the rows of a whole batch and their weights; none where mask is 0. Raises InvalidInput."""
    tokens, labels, weights = batch["input_ids"], batch.get("labels"), batch.get("loss_weights")
    if "shift_labels" in batch:
        labels, shift = batch["shift_labels"], False
    if labels is None:
        if weights is not None:
            raise InvalidInput("loss_weights are those of labels, which the batch lacks; give both")
        return {}
    padding = torch.zeros_like(labels, dtype=torch.bool) if mask is None else mask == 0
    labels, distance = labels.masked_fill(padding, NO_LABEL), 1 if shift is True else shift
    if shift:
        given = (labels != NO_LABEL)[:, :-1]
        now, following = labels[:, :-1][given], tokens[:, 1:][given]
        if torch.equal(now, following) and not torch.equal(now, tokens[:, :-1][given]):
            raise InvalidInput(
                "labels are shifted already: each is the next token; name them shift_labels in the batch, or give "
                "labels at the places of their tokens"
            )
        labels = shift_labels(labels, distance, documents, NO_LABEL).masked_fill(padding, NO_LABEL)
    found = {"labels": labels}
    if weights is not None:
        weights = shift_labels(weights, distance, documents, 0) if shift else weights
        found["loss_weights"] = weights.where(labels != NO_LABEL, 0)
    return found


def compare_batches(records: list[list[int]]) -> list[int]:
    """The number of rows of each rank. The record of a rank is [rows] or [rows, *numbers of `digest_batch`].

    Raises Mismatch on every rank where numbers differ; ranks without numbers are not compared.
    """
    first, *others = [rank for rank, record in enumerate(records) if len(record) > 1] or [0]
    for rank in others:
        for name, one, other in zip(COMPARED, records[first][1:], records[rank][1:], strict=True):
            if one != other:
                raise Mismatch(
                    f"{name} of the whole batch are not the same on rank {first} and rank {rank}: ranks of one cp "
                    "group must read the same batch, of which shard_batch takes their rows; give the sampler the dp "
                    "rank and the number of dp groups, not the rank and the number of all processes"
                )
    return [record[0] for record in records]


def read_borders(borders: Tensor) -> Documents:
    """The documents with these borders; read once."""
    if borders not in _borders:
        _borders[borders] = Documents(cu_seqlens=borders.tolist())
    return cast(Documents, _borders[borders])


def write_borders(documents: Documents, tokens: Tensor) -> Tensor:
    """The borders for a model's `cu_seq_lens_q`: int32 [L], or [B, L] where rows differ, with N repeated at the end."""
    by_row = [documents.row(row).starts for row in range(documents.rows or 1)]
    most = max(map(len, by_row))
    padded = [[*starts, *[tokens.shape[1]] * (most - len(starts))] for starts in by_row]
    return torch.tensor(padded if documents.rows else padded[0], dtype=torch.int32, device=tokens.device)


def count_from_borders(places: np.ndarray, documents: Documents, row: int) -> np.ndarray:
    """The positions of a row of a batch counted from the begin of the document of each."""
    starts = np.array(documents.row(row).starts)
    return places - starts[np.searchsorted(starts, places, "right") - 1]


def find_documents(batch: Batch, cu_seqlens: Borders | None) -> Documents | None:
    """The packed documents of a batch, which may differ between its rows; None for one document per row."""
    tokens = batch["input_ids"]
    if cu_seqlens is None:
        told = tokens.numel() and batch.keys() & {"attention_mask", "seq_idx", "position_ids"}
        if not told or not bool((begins := _find_begins(batch)).any()):
            return None
        cu_seqlens = [[0, *(row.nonzero().flatten() + 1).tolist(), len(row) + 1] for row in begins]
    documents = Documents(cu_seqlens=cu_seqlens)
    documents.check(tokens.shape[1], 1)
    if documents.rows not in (None, len(tokens)):
        raise InvalidInput(f"cu_seqlens has {documents.rows} rows, input_ids {len(tokens)}; give borders for each row")
    return documents


def _find_begins(batch: Batch) -> Tensor:
    """Which tokens but the first begin a document, [B, N - 1]: their number in the mask or seq_idx, or position jumps.

    Each is compared with the token before it that is not padding; positions may count the padding between them.
    """
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = places.where(mask != 0, -1)[:, :-1].cummax(1).values
    real, before = (mask[:, 1:] != 0) & (before >= 0), before.clamp(min=0)
    jumps = [x[:, 1:] != x.gather(1, before) for x in (mask, batch.get("seq_idx", mask))]
    positions = batch.get("position_ids", places).reshape(-1, *mask.shape)
    if len(positions) != 3:  # as in transformers, three axes are those of the rope, and of four the first tells borders
        step = positions[0, :, 1:] - positions[0].gather(1, before)
        jumps.append((step != 1) & (step != places[:, 1:] - before))
    return torch.stack(jumps).any(0) & real


def count_positions(tokens: Tensor, mask: Tensor | None, documents: Documents | None) -> Tensor:
    """Positions [B, N]: of each document, or row, from the first token that is not padding."""
    real = torch.ones_like(tokens) if mask is None else mask.ne(0).long()
    counted = real.cumsum(-1)
    if documents is not None:
        places = np.arange(tokens.shape[1])
        starts = [places - count_from_borders(places, documents, row) for row in range(len(tokens))]
        counted -= (counted - real).gather(1, torch.tensor(np.array(starts), device=tokens.device))
    return (counted - 1).clamp(min=0)
