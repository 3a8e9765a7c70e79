"""Batches of whole sequences: a rank's part of one, the borders of its packed documents, and what ranks compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidInput, Mismatch, Unsupported
from ..functional import get_transport
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
Borders = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor
#: The key of a batch whose tensor, int64 [one per name], stands for the whole batch that all ranks must be given.
DIGEST = "batch_digest"
#: Labels of whole sequences: the first and the last token of an answer, [B].
ANSWERS = ("start_positions", "end_positions")
#: The tensors of a batch that its digest covers.
COMPARED = ("input_ids", "attention_mask", "cu_seqlens", "labels", "position_ids", "token_type_ids", *ANSWERS)
#: Places in the digest after those of `COMPARED`: the labels of the whole batch, and its largest position.
COUNT, LARGEST = -2, -1
#: The first exchange of a model; `shard_batch` reports its errors there.
POSITIONS = "positions of a model"
Batch = Mapping[str, torch.Tensor]
Tensors = dict[str, torch.Tensor]
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

    def cut(self, borders: torch.Tensor | Documents, ranks: int) -> Layout:
        """The Layout of the batch with these documents, which are `cu_seq_lens_q` of `shard_batch`'s result."""
        documents = borders if isinstance(borders, Documents) else read_borders(borders)
        patterns, tokens = [pattern & documents for pattern in self.patterns], documents.row(0).starts[-1]
        return make_layout("balanced", tokens=tokens, ranks=ranks, patterns=patterns, weights=self.weights)


def cut_batch(
    layout: str | Layout | LayerMasks, tokens: int, ranks: int, borders: torch.Tensor | Documents | None
) -> Layout:
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
    index = kept.pop("seq_idx", None)
    if index is None:
        return kept, whole, borders
    return kept, whole, _list_borders(index[:, 1:] != index[:, :-1])


def _is_of_sequences(name: str, batch: Tensors) -> bool:
    """Whether the batch has a tensor of this name with one entry for each sequence: classes [S] or [S, classes]."""
    x, tokens = batch.get(name), batch.get("input_ids")
    if not isinstance(x, torch.Tensor) or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        return False
    return x.ndim == 1 or (x.is_floating_point() and x.ndim == 2)


def _check_batch(batch: Batch) -> None:
    """Raise InvalidInput for what cannot be cut into shards."""
    of_rows = {"input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_idx", "token_type_ids"}
    if unknown := set(batch) - of_rows:
        raise InvalidInput(
            f"{sorted(unknown)} cannot be cut into shards; shard these by Layout.shard_tensor, and give borders as "
            "cu_seq_lens_q, or as cu_seqlens= of shard_batch"
        )
    if "input_ids" not in batch:
        raise InvalidInput(f"a batch needs input_ids [batch, tokens], got {sorted(batch) or 'nothing'}")
    for name, x in batch.items():
        if not isinstance(x, torch.Tensor):
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


def digest_batch(batch: Batch, documents: Documents | None) -> torch.Tensor:
    """A number for each tensor of a whole batch, 0 for one that it lacks, its labels, and its largest position; int64.

    The numbers stay on the device of the batch, so that the host does not wait for the device.
    """
    tokens = batch["input_ids"]
    whole = dict(batch) if documents is None else {**batch, "cu_seqlens": write_borders(documents, tokens)}
    numbers = [torch.zeros((), dtype=torch.int64, device=tokens.device)] * len(COMPARED)
    for i, name in enumerate(COMPARED):
        if name in whole:
            numbers[i] = digest_tensor(whole[name].to(tokens.device))
    count = (batch["labels"] != NO_LABEL).sum() if "labels" in batch else torch.zeros_like(numbers[0])
    return torch.stack([*numbers, count.to(tokens.device), batch["position_ids"].max().to(tokens.device)])


def make_labels(batch: Batch, documents: Documents | None, shift: bool) -> torch.Tensor | None:
    """The labels [B, N] of the rows of a whole batch, if it has some. Raises InvalidInput for labels shifted twice."""
    labels, tokens, mask = batch.get("shift_labels"), batch["input_ids"], batch.get("attention_mask")
    if labels is None and shift and "labels" in batch:
        labels = batch["labels"].clone() if mask is None else batch["labels"].masked_fill(mask == 0, NO_LABEL)
        if documents is not None:
            for row, label in enumerate(labels):
                label[[start for start in documents.row(row).starts[1:-1] if start < len(label)]] = NO_LABEL
        given = (labels != NO_LABEL)[:, :-1]
        now, following = labels[:, :-1][given], tokens[:, 1:][given]
        if torch.equal(now, following) and not torch.equal(now, tokens[:, :-1][given]):
            raise InvalidInput(
                "labels are shifted already: each is the next token; name them shift_labels in the batch, or give "
                "labels at the places of their tokens"
            )
        labels = F.pad(labels[:, 1:], (0, 1), value=NO_LABEL)
    elif labels is None:
        labels = batch.get("labels")
    return labels if labels is None or mask is None else labels.masked_fill(mask == 0, NO_LABEL)


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


def read_borders(borders: torch.Tensor) -> Documents:
    """The documents with these borders; read once."""
    if borders not in _borders:
        _borders[borders] = Documents(cu_seqlens=borders.tolist())
    return cast(Documents, _borders[borders])


def write_borders(documents: Documents, tokens: torch.Tensor) -> torch.Tensor:
    """The borders for a model's `cu_seq_lens_q`: int32 [L], or [B, L] where rows differ, with N repeated at the end."""
    by_row = [documents.row(row).starts for row in range(documents.rows or 1)]
    most = max(map(len, by_row))
    padded = [[*starts, *[tokens.shape[1]] * (most - len(starts))] for starts in by_row]
    return torch.tensor(padded if documents.rows else padded[0], dtype=torch.int32, device=tokens.device)


def count_from_borders(places: np.ndarray, documents: Documents, row: int) -> np.ndarray:
    """The positions of a row of a batch counted from the begin of the document of each."""
    starts = np.array(documents.row(row).starts)
    return places - starts[np.searchsorted(starts, places, "right") - 1]


def _list_borders(begins: torch.Tensor) -> list[list[int]]:
    """The borders in each row of a batch, of whose tokens but the first `begins` [B, N - 1] says where one begins."""
    return [[0, *(row.nonzero().flatten() + 1).tolist(), begins.shape[1] + 1] for row in begins]


def find_documents(
    tokens: torch.Tensor, positions: torch.Tensor | None, cu_seqlens: Borders | None
) -> Documents | None:
    """The packed documents of a batch, which may differ between its rows; None for one document per row."""
    if cu_seqlens is None:
        if positions is None:
            return None
        begins = positions[:, 1:] != positions[:, :-1] + 1
        if not bool(begins.any()):
            return None
        cu_seqlens = _list_borders(begins)
    documents = Documents(cu_seqlens=cu_seqlens)
    documents.check(tokens.shape[1], 1)
    if documents.rows not in (None, len(tokens)):
        raise InvalidInput(f"cu_seqlens has {documents.rows} rows, input_ids {len(tokens)}; give borders for each row")
    return documents


def count_positions(tokens: torch.Tensor, mask: torch.Tensor | None, documents: Documents | None) -> torch.Tensor:
    """Positions [B, N]: from the first token that is not padding, and in each document from 0."""
    if documents is not None:
        places = np.arange(tokens.shape[1])
        rows = [count_from_borders(places, documents, row) for row in range(len(tokens))]
        return torch.tensor(np.array(rows), device=tokens.device).view_as(tokens)
    if mask is not None:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
