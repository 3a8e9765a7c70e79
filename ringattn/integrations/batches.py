"""Cut batches of whole sequences into shards, find document borders, and compare the batches of ranks."""

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
from ..call.planner import make_plans, simulate_layers
from ..errors import InvalidInput, Mismatch, Unsupported
from ..layout import shift_labels
from ..layout.leafwise import LEAVES
from ..layout.regular import Layout, make_layout
from ..pattern import Documents, Pattern
from ..train import NO_LABEL
from ..transport.records import ErrorReport
from ..transport.torchdist import place_group
from .encoder_decoder import DECODER
from .generation import layer_windows, make_pattern
from .ranks import digest_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

#: Cumulative lengths [0, ..., N] for all rows, or one such list for each row.
Borders = Sequence[int] | Sequence[Sequence[int]] | Tensor
#: The key of the digest in a batch: int64, one number per name; ranks compare it to check that they got one batch.
DIGEST = "batch_digest"
#: Labels of whole sequences: the first and the last token of an answer, [B].
ANSWERS = ("start_positions", "end_positions")
#: The tensors of a batch that are cut along the tokens, and everything that the digest covers.
OF_ROWS = ("input_ids", "attention_mask", "labels", "loss_weights", "position_ids", "token_type_ids")
COMPARED = ("cu_seqlens", *OF_ROWS, *ANSWERS)
#: Indices in the digest, after `COMPARED`: the number of labels, the largest position, whether padding has positions.
COUNT, LARGEST, HOLES = -3, -2, -1
#: The first exchange of a model; `shard_batch` reports its errors there.
POSITIONS = "positions of a model"
Batch = Mapping[str, Tensor]
Tensors = dict[str, Tensor]
#: Documents by their tensor of borders, which transformers passes to all layers, so it is copied to the host once.
_borders: Any = WeakIdKeyDictionary()
#: The layouts of packed batches by the masks that choose them, and the number of ranks.
_fastest: dict[tuple[LayerMasks, int], str] = {}


@dataclass(frozen=True)
class LayerMasks:
    """The masks of a model's layers: as `layout=`, it shards every packed batch so that ranks have equal work.

    For `parallelize` and `shard_batch`. Batches without documents are sharded by "zigzag".

    patterns: the distinct masks of the layers, without documents.
    weights: the number of layers with each mask.
    most_runs: the largest number of runs of adjacent tokens on a rank; None: no limit. Recurrent layers are faster with
        few runs.
    sizes: arguments of `make_plans`. With them, balanced shards are used only if the first batch is predicted to be
        faster with them than with contiguous and zigzag shards.
    """

    patterns: tuple[Pattern, ...]
    weights: tuple[int, ...]
    most_runs: int | None = None
    sizes: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks:
        """The masks of a transformers model, read from its windows and whether it is causal."""
        causal = all(getattr(module, "is_causal", True) for module in model.modules())
        layers = Counter(layer_windows(model).values()) or Counter([None])
        return cls(tuple(make_pattern(window, causal) for window in layers), tuple(layers.values()))

    def cut(self, borders: Tensor | Documents, ranks: int) -> Layout:
        """The Layout of a batch with these documents.

        `borders` are the documents, or `cu_seq_lens_q` from the result of `shard_batch`. Takes about 10 ms for 128k
        tokens on 64 ranks, once for all layers of a call.
        """
        documents = borders if isinstance(borders, Documents) else read_borders(borders)
        patterns, tokens = [pattern & documents for pattern in self.patterns], documents.row(0).starts[-1]
        common: dict[str, Any] = {"tokens": tokens, "ranks": ranks}

        def make(name: str) -> Layout:
            return make_layout(name, patterns=patterns, weights=self.weights, most_runs=self.most_runs, **common)

        if self.sizes and (self, ranks) not in _fastest:
            options = dict(self.sizes) | common

            def seconds(name: str) -> float:
                plans = make_plans(patterns, self.weights, layout=make(name), **options)
                return simulate_layers(plans, self.weights, options["machine"])

            _fastest[self, ranks] = min(("zigzag", "contiguous", "balanced"), key=seconds)
        return make(_fastest[self, ranks] if self.sizes else "balanced")


def cut_batch(layout: str | Layout | LayerMasks, tokens: int, ranks: int, borders: Tensor | Documents | None) -> Layout:
    """The Layout of a batch; `borders` are its document borders, or None if each row is one document.

    Raises InvalidInput.
    """
    if isinstance(layout, LayerMasks) and borders is not None:
        return layout.cut(borders, ranks)
    name, documents = "zigzag" if isinstance(layout, LayerMasks) else layout, None
    if borders is not None and isinstance(name, str) and name.startswith(LEAVES):
        documents = borders if isinstance(borders, Documents) else read_borders(borders)
    return make_layout(name, tokens=tokens, ranks=ranks, pattern=documents)


def shard_batch(
    batch: Batch,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str | Layout | LayerMasks,
    cu_seqlens: Borders | None = None,
    shift: int = True,
) -> dict[str, Tensor]:
    """This rank's shard of a batch of whole sequences, as keyword arguments of the model.

    batch: `input_ids` [B, N], and optionally `labels`, `attention_mask` (0 for padding; for a token 1, or the number of
        its document), `position_ids`, `token_type_ids` and `loss_weights`, all [B, N] and equal on all ranks;
        `shift_labels` in place of `labels` if labels and weights are already shifted. Labels per sequence, [S] or
        floats [S, classes], and `start_positions` and `end_positions` [B] stay whole; S is B, or the number of packed
        documents. If `inputs_embeds` [B, N, d] are given, the model gets them, and `input_ids` only set the shape.
        position_ids may be [3, B, N], or [4, B, N] with the text's at index 0. `decoder_input_ids` [B, M] and
        `decoder_attention_mask` are for an encoder-decoder model, whose labels are [B, M].
    cu_seqlens: the borders of packed documents, [0, ..., N] for all rows or one such list per row. Default:
        `cu_seq_lens_q` of the batch; without it, a document starts where the numbers of the mask or of `seq_idx` change
        or position_ids jump.
    shift: True for a causal language model, whose rows predict the next token; k to predict the token k places later;
        False if a label belongs to its own token, as in a masked language model. A model raises an error for a batch
        with the wrong `shift`.

    The result has `input_ids` and `position_ids` of this rank's rows, and:

    - `labels`, shifted before the cut, so that no label is lost between shards or crosses documents; shifted labels
      also appear as `shift_labels`;
    - `loss_weights`, shifted alike, 0 without a label; models do not take them: pop them, for a loss of your own;
    - `attention_mask`, only if some rank has padding;
    - `cu_seq_lens_q` for documents, [B, the most borders of a row], other rows filled up with N;
    - `batch_digest`: the model reads the number of labels and the largest position from it, and checks by it that all
      ranks were given the same batch.

    Padding has no label (in transformers, unlike here, the last token of left padding predicts the first real token).
    position_ids count all tokens from the first one that is not padding, and from 0 in each document.
    """
    if isinstance(batch, Mapping) and "decoder_input_ids" in batch:
        return _shard_both(batch, group, layout)
    return cut_rows(batch, group, layout, cu_seqlens, shift)


def cut_rows(
    batch: Batch, group: ProcessGroup | DeviceMesh | None, layout: str | Layout | LayerMasks,
    cu_seqlens: Borders | None, shift: int, alone: str | None = None, first: int = 0,
) -> Tensors:  # fmt: skip
    """The part of `shard_batch` for models without a decoder.

    `alone` names the attention implementation, such as "sdpa", that one process would use. Then rows without packed
    documents get the loss that one process would compute with it. This loss includes labels on padding. If the model's
    first position is 0, positions count all tokens, else all but those of padding, by their ids.
    """
    place = place_group(group)
    with ErrorReport(get_transport(place.group), POSITIONS):
        batch, answers, borders = read_batch(batch)
        embeds = answers.pop("inputs_embeds", None)
        tokens, mask = batch["input_ids"], batch.get("attention_mask")
        rank, ranks = dist.get_rank(place.group), dist.get_world_size(place.group)
        documents = find_documents(batch, borders if cu_seqlens is None else cu_seqlens, restarts=bool(alone))
        cut = cut_batch(layout, tokens.shape[1], ranks, documents)
        if not all(map(cut.rows, range(ranks))):  # transformers models cannot run on an empty sequence
            raise InvalidInput(
                f"under layout {cut.name!r}, {cut.tokens} tokens leave at least one of {ranks} ranks without rows; use "
                "fewer ranks"
            )
        whole = {"input_ids": tokens, **{name: x for name, x in batch.items() if name in OF_ROWS[-2:]}}
        hidden = None if alone and documents is None else mask
        counted = count_positions(tokens, hidden, documents)
        if alone and first and documents is None:  # as RoBERTa counts, which skips its token of padding
            counted = (real := tokens.ne(first - 1).long()).cumsum(-1) * real - 1
        whole.setdefault("position_ids", counted)
        whole |= make_labels(batch, documents, shift, hidden)
        padding = mask == 0 if mask is not hidden and alone != "sdpa" else None  # rows that may attend no key
        if padding is not None and "labels" in whole and bool((whole["labels"] != NO_LABEL)[padding].any()):
            raise Unsupported(
                f"some labels belong to padding, whose outputs with attn_implementation={alone!r} cannot be reproduced "
                "over ranks; use 'sdpa', or set these labels to -100 (after left padding, that of the first token, "
                "too)"
            )
        if documents is not None and "start_positions" in answers:
            raise Unsupported("start_positions are undefined for packed documents; give each document its own row")
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
    """`shard_batch` for an encoder and a decoder: cuts each sequence separately; labels belong to the decoder."""
    if not isinstance(layout, str):
        raise Unsupported(
            "an encoder and a decoder have sequences of two lengths, and a Layout object fits only one; give the name "
            "of a layout, such as 'zigzag'"
        )
    given = {own: batch[name] for own, name in DECODER.items() if name in batch}
    rest = {name: x for name, x in batch.items() if name not in DECODER.values()}
    for x in (given, rest):  # these models count padding as positions
        x["position_ids"] = count_positions(x["input_ids"], None, None)
    inner, result = (shard_batch(x, group, layout=layout, shift=False) for x in (given, rest))
    if "cu_seq_lens_q" in {**inner, **result}:
        raise Unsupported("an encoder-decoder model cannot take packed documents; give each document its own row")
    result |= {DECODER.get(name, f"decoder_{name}"): x for name, x in inner.items() if name != DIGEST}
    result[DIGEST] = torch.cat([(result[DIGEST] + 3 * inner[DIGEST])[:COUNT], inner[DIGEST][COUNT:]])
    return result


@dataclass(frozen=True)
class Collator:
    """A data collator: `inner` makes a batch of whole sequences, of which the Collator returns this rank's rows.

    All ranks of `group` must be given the same examples, so the sampler must distribute them by data-parallel rank
    only. A packed document begins where position_ids restart within a row; rows may have different documents.
    """

    inner: Any
    group: ProcessGroup | DeviceMesh | None = None
    layout: str | Layout | LayerMasks = "zigzag"
    shift: int = True

    def __call__(self, examples: Any) -> dict[str, Tensor]:
        """`shard_batch` of the batch that `inner` makes from these examples."""
        return shard_batch(self.inner(examples), self.group, layout=self.layout, shift=self.shift)


def read_batch(batch: Batch) -> tuple[Tensors, Tensors, Borders | None]:
    """Split a batch into (tensors to shard along tokens, all other tensors, document borders). Raises InvalidInput.

    The other tensors are labels per sequence and embeddings. Borders are None if the batch has none.
    """
    if not isinstance(batch, Mapping):
        raise InvalidInput(f"a batch is a dict of tensors such as {{'input_ids': ids}}, got {type(batch).__name__}")
    kept = {name: x for name, x in batch.items() if name not in ("cu_seq_lens_k", "max_length_q", "max_length_k")}
    borders = kept.pop("cu_seq_lens_q", None)
    whole = {name: kept.pop(name) for name in ("labels", *ANSWERS) if _is_of_sequences(name, kept)}
    if "inputs_embeds" in kept:
        whole["inputs_embeds"] = kept.pop("inputs_embeds")
    if unknown := set(kept) - {*OF_ROWS, "shift_labels", "seq_idx"}:
        raise InvalidInput(
            f"{sorted(unknown)} cannot be cut by shard_batch; cut tensors with Layout.shard_tensor, and give document "
            "borders as cu_seq_lens_q in the batch, or as cu_seqlens="
        )
    if "input_ids" not in kept:
        raise InvalidInput(f"a batch needs input_ids [batch, tokens], got {sorted(kept) or 'nothing'}")
    for name, x in kept.items():
        if not isinstance(x, Tensor):
            raise InvalidInput(
                f"{name} must be a tensor [batch, tokens], got {type(x).__name__}; try torch.tensor(...), a tokenizer "
                "with return_tensors='pt', or leave it out if the model does not need it"
            )
    tokens = kept["input_ids"]
    if tokens.ndim != 2:
        raise InvalidInput(f"input_ids must be [batch, tokens], got {tuple(tokens.shape)}; try input_ids.unsqueeze(0)")
    sizes = {name: tuple(x.shape[-2:] if name == "position_ids" else x.shape) for name, x in kept.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidInput(
            f"the tensors of a batch must have one shape [batch, tokens], got {sizes}; with labels of a decoder, give "
            "decoder_input_ids, too"
        )
    return kept, whole, borders


def _is_of_sequences(name: str, batch: Tensors) -> bool:
    """Whether the batch has a tensor of this name with one entry per sequence: classes [S], [S, 1] or [S, classes]."""
    x, tokens = batch.get(name), batch.get("input_ids")
    if not isinstance(x, Tensor) or not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return False
    return x.ndim < 2 or (x.ndim == 2 and (x.is_floating_point() or x.shape[1] == 1 < tokens.shape[1]))


def digest_batch(batch: Batch, documents: Documents | None) -> Tensor:
    """Numbers by which ranks compare a whole batch, int64 [n], on the device of the batch.

    They are a hash of each tensor (0 if it is absent), and the numbers at `COUNT`, `LARGEST` and `HOLES`. Because they
    stay on the device, the host need not wait for them.
    """
    tokens = batch["input_ids"]
    whole = dict(batch) if documents is None else {**batch, "cu_seqlens": write_borders(documents, tokens)}
    none = torch.zeros((), dtype=torch.int64, device=tokens.device)
    numbers = [digest_tensor(whole[name].to(tokens.device)) if name in whole else none for name in COMPARED]
    count = (batch["labels"] != NO_LABEL).sum() if "labels" in batch else none
    largest = batch["position_ids"].reshape(-1, *tokens.shape)[-3:].max()  # the rope's axes, see `_find_begins`
    real = batch.get("attention_mask", torch.ones_like(tokens)) != 0
    holes = (batch["position_ids"].where(real, -1).amax(-1) >= real.sum(-1)).any().long()
    return torch.stack([*numbers, *(x.to(tokens.device) for x in (count, largest, holes))])


def make_labels(batch: Batch, documents: Documents | None, shift: int, mask: Tensor | None) -> Tensors:
    """The shifted labels [B, N] and the loss weights of a whole batch; padding has no label. Raises InvalidInput."""
    tokens, labels, weights = batch["input_ids"], batch.get("labels"), batch.get("loss_weights")
    if "shift_labels" in batch:
        labels, shift = batch["shift_labels"], False
    if labels is None:
        if weights is not None:
            raise InvalidInput("the batch has loss_weights but no labels; give both")
        return {}
    padding = torch.zeros_like(labels, dtype=torch.bool) if mask is None else mask == 0
    labels, distance = labels.masked_fill(padding, NO_LABEL), 1 if shift is True else shift
    if shift:
        given = (labels != NO_LABEL)[:, :-1]
        now, following = labels[:, :-1][given], tokens[:, 1:][given]
        if torch.equal(now, following) and not torch.equal(now, tokens[:, :-1][given]):
            raise InvalidInput(
                "labels are shifted already: each is the next token; name them shift_labels in the batch, or put the "
                "label of each token at the token's own place"
            )
        labels = shift_labels(labels, distance, documents, NO_LABEL).masked_fill(padding, NO_LABEL)
    found = {"labels": labels}
    if weights is not None:
        weights = shift_labels(weights, distance, documents, 0) if shift else weights
        found["loss_weights"] = weights.where(labels != NO_LABEL, 0)
    return found


def compare_batches(records: list[list[int]]) -> list[int]:
    """Check that all ranks were given the same batch; returns the number of rows of each rank.

    `records` has for each rank [rows] or [rows, *numbers of `digest_batch`]. Raises Mismatch on every rank if these
    numbers differ; ranks without them are not compared.
    """
    first, *others = [rank for rank, record in enumerate(records) if len(record) > 1] or [0]
    for rank in others:
        for name, one, other in zip(COMPARED, records[first][1:], records[rank][1:], strict=True):
            if one != other:
                raise Mismatch(
                    f"{name} of the whole batch differ between rank {first} and rank {rank}: all ranks of a cp "
                    "group must read one batch, which shard_batch cuts; give the sampler the dp rank and the number "
                    "of dp groups, not the rank and the number of all processes"
                )
    return [record[0] for record in records]


def read_borders(borders: Tensor) -> Documents:
    """The Documents with these borders, a tensor in the format of `write_borders`.

    The same tensor is copied to the host only once.
    """
    if borders not in _borders:
        _borders[borders] = Documents(cu_seqlens=borders.tolist())
    return cast(Documents, _borders[borders])


def write_borders(documents: Documents, tokens: Tensor) -> Tensor:
    """The borders as `cu_seq_lens_q`: int32 [L], or [B, L] if rows differ, filled up with N."""
    by_row = [documents.row(row).starts for row in range(documents.rows or 1)]
    most = max(map(len, by_row))
    padded = [[*starts, *[tokens.shape[1]] * (most - len(starts))] for starts in by_row]
    return torch.tensor(padded if documents.rows else padded[0], dtype=torch.int32, device=tokens.device)


def count_from_borders(places: np.ndarray, documents: Documents, row: int) -> np.ndarray:
    """Positions within their documents, for tokens at `places` of a row."""
    starts = np.array(documents.row(row).starts)
    return places - starts[np.searchsorted(starts, places, "right") - 1]


def find_documents(batch: Batch, cu_seqlens: Borders | None, restarts: bool) -> Documents | None:
    """The packed documents of a batch, which may differ between rows; None: one document per row."""
    tokens = batch["input_ids"]
    if cu_seqlens is None:
        told = tokens.numel() and batch.keys() & {"attention_mask", "seq_idx", "position_ids"}
        if not told or not bool((begins := _find_begins(batch, restarts)).any()):
            return None
        cu_seqlens = [[0, *(row.nonzero().flatten() + 1).tolist(), len(row) + 1] for row in begins]
    documents = Documents(cu_seqlens=cu_seqlens)
    documents.check(tokens.shape[1], 1)
    if documents.rows not in (None, len(tokens)):
        raise InvalidInput(f"cu_seqlens has {documents.rows} rows, input_ids {len(tokens)}; give borders for each row")
    return documents


def _find_begins(batch: Batch, restarts: bool) -> Tensor:
    """Document borders per row, bool [B, N - 1]; [b, i]: token i + 1 starts a document.

    It does if its number in the mask or seq_idx differs from that of the last real token before it, or if its position
    is not the next one; with `restarts`, only if it is the lowest. Positions may count the padding between the tokens.
    """
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = places.where(mask != 0, -1)[:, :-1].cummax(1).values
    real, before = (mask[:, 1:] != 0) & (before >= 0), before.clamp(min=0)
    jumps = [x[:, 1:] != x.gather(1, before) for x in (mask, batch.get("seq_idx", mask))]
    positions = batch.get("position_ids", places).reshape(-1, *mask.shape)
    if len(positions) != 3:  # as in transformers: three axes are the rope's; of four, the first shows borders
        step = positions[0, :, 1:] - positions[0].gather(1, before)
        jump = (step != 1) & (step != places[:, 1:] - before) & real
        ahead = jump & (positions[0, :, 1:] > positions[0].where(mask != 0, positions.max()).amin()) & restarts
        if "attention_mask" not in batch and ahead.any():
            raise InvalidInput("position_ids jump ahead: give attention_mask to attend across, else cu_seq_lens_q")
        jumps.append(jump & ~ahead)
    return torch.stack(jumps).any(0) & real


def count_positions(tokens: Tensor, mask: Tensor | None, documents: Documents | None) -> Tensor:
    """Position ids [B, N] that count all tokens from the first one of each document or row that is not padding."""
    places, starts = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens), torch.zeros_like(tokens)
    if documents is not None:
        counted = [count_from_borders(places[0].cpu().numpy(), documents, row) for row in range(len(tokens))]
        starts = places - torch.tensor(np.array(counted), device=tokens.device)
    real = places if mask is None else places.where(mask != 0, tokens.shape[1])
    return (places - real.flip(-1).cummin(-1).values.flip(-1).gather(1, starts.long())).clamp(min=0)
