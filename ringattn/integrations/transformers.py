"""Hugging Face transformers: `parallelize` makes a model attend over a sequence that is sharded over ranks.

    model = parallelize(AutoModelForCausalLM.from_pretrained(...), group, layout="zigzag")
    batch = shard_batch({"input_ids": ids, "labels": labels}, group, layout="zigzag")
    logits = gather_logits(model(**batch).logits, group, layout="zigzag")

Every rank holds the whole model and its rows of every sequence. transformers calls `_attend` in each layer, as it calls
its own attention functions (transformers.AttentionInterface).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import InvalidInput, Mismatch, Unsupported
from ..functional import get_transport, ring_attention
from ..kernels import split_kernel
from ..layout.regular import Layout, make_layout
from ..machine.presets import get_machine
from ..pattern import Documents
from ..plan.schedules import resolve
from ..plan.steps import check_rotate
from ..runtime.autograd import compilable
from ..runtime.call import AttentionOptions, check_option_names
from ..train import NO_LABEL
from ..transport.records import ErrorReport, Exchange, compare_records
from ..transport.torchdist import WeakGroup, place_group
from .borders import (
    COUNT,
    DIGEST,
    LARGEST,
    LayerMasks,
    check_rows,
    compare_batches,
    count_from_borders,
    count_positions,
    cut_batch,
    digest_batch,
    find_documents,
    make_labels,
    read_batch,
    read_borders,
    write_borders,
)
from .encoder_decoder import CROSS, DECODER, attend_across
from .generation import STATE, Generation, RingCache, begin, generate, layer_windows, make_pattern
from .heads import HeadCall, Sequences, check_pooler, enter_base, enter_pooler, find_sequences, leave_base
from .heads import pool as pool
from .ranks import gather_rows
from .supported import check_model, first_position, rotates_by_length
from .whole import WholeCall, cut_call, draw_alone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

    from ..runtime.call import AttentionKeywords
    from .borders import Borders

    Batch = Mapping[str, torch.Tensor]

#: The name under which transformers finds `_attend` and `_write_mask`.
NAME = "ringattn"
#: The first exchange of a model; `shard_batch` reports its errors there.
POSITIONS = "positions of a model"
#: The functions of transformers.masking_utils that a mask may be made of: `_attend` knows what they say.
MASKS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay", "and_masks",
    "sliding_window_bidirectional_overlay", "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
}  # fmt: skip

#: Options of a call, or of a config, that no model over ranks can honour, and why.
REFUSED = {
    "output_attentions": "no rank holds the attention weights of whole rows; leave it out, or load another model with "
    "attn_implementation='eager'",
    "output_router_logits": "the auxiliary loss of routers is not a sum over tokens; leave it out, in TRL by "
    "router_aux_loss_coef=0.0",
}


@dataclass(frozen=True)
class Agreement:
    """How far a parallelized model is from its eager self: the largest differences of logits and of gradients.

    `logits` and `gradients` are relative to the largest value of the eager model; `bound` is what rounding explains.
    `unseen` is what the comparison did not look at.
    """

    logits: float
    gradients: float
    bound: float
    tokens: int
    unseen: tuple[str, ...]


@dataclass
class _Call:
    """What the hooks of a parallelized model tell each other of the call that runs, or of all calls."""

    #: The cache of the `generate` that runs.
    past: RingCache | None = None
    #: Whether calls with labels and without gradients return logits.
    logits: bool = False
    #: The calls in training so far.
    trained: int = 0
    #: The largest position of the whole batch.
    largest: torch.Tensor | int = 0
    #: The places of this rank's rows in the encoder and in the decoder.
    places: dict[str, torch.Tensor] = field(default_factory=dict)
    #: By what the sum of this rank's losses is divided.
    items: Any = None
    #: Whether the batch has packed documents.
    packed: bool = False
    sequences: Sequences | None = None
    #: What the call needs if it is one of `generate`, of a head over whole sequences, or with whole sequences.
    generation: Generation | None = None
    head: HeadCall | None = None
    whole: WholeCall | None = None
    #: While this rank draws random numbers of its own.
    numbers: ExitStack | None = None

    def end(self) -> None:
        """Forget what is of the call alone: the backward may recompute another one."""
        if self.numbers is not None:
            self.numbers.close()
        self.packed = False
        self.sequences = self.generation = self.head = self.whole = self.numbers = None


@dataclass(frozen=True)
class _Ring:
    """Where the attention of a model runs, and how the sequence was cut."""

    place: WeakGroup
    layout: str | Layout | LayerMasks
    options: AttentionOptions
    #: The attention that the model had before.
    before: str
    #: True: labels are those of the next token; False: of the token itself; None: the model has no loss.
    shift: bool | None
    #: What a head that reads whole sequences reads, see `find_pooling`; None: the head reads rows one by one.
    pooling: str | None
    #: Whether the base model has a pooler.
    pools: bool
    #: Whether the model has an encoder and a decoder.
    crosses: bool
    #: The position that the model gives to the first token.
    first: int
    #: Whether its rope depends on the length.
    stretches: bool
    #: Whether calls take whole sequences.
    whole: bool
    call: _Call = field(default_factory=lambda: _Call(), compare=False)
    #: On CUDA, the shape of the latest position_ids, and whether padded: the host copies none that equal both again.
    checked: list[tuple[torch.Size, bool]] = field(default_factory=list, compare=False)

    def check(self) -> None:
        """Raise InvalidInput for a name that no call could use: of a layout, schedule, kernel, machine or rotation."""
        if isinstance(self.layout, str):
            make_layout(self.layout, tokens=1, ranks=1)  # raises for a layout that needs a pattern, too
        resolve(self.options.schedule, dist.get_world_size(self.place.group))
        check_rotate(self.options.rotate)
        get_machine(self.options.machine)
        if self.options.kernel != "auto":
            split_kernel(self.options.kernel)

    def __deepcopy__(self, memo: object) -> _Ring:
        return self


def parallelize(
    model: PreTrainedModel,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str | Layout | LayerMasks,
    whole: bool = False,
    **options: Unpack[AttentionKeywords],
) -> PreTrainedModel:
    """The model itself, whose attention now runs over the ranks of `group`; collective calls from then on.

    group: a ProcessGroup, or one axis of a DeviceMesh; None: all processes.
    layout: that by which `shard_batch` or `Collator` cuts sequences: a name such as "zigzag", a Layout for batches of
        one length, or `LayerMasks.of(model)`, which balances the masks of all layers over the documents of each batch.
        `generate()` cuts prompts by zigzag where it is no name.
    whole: True: a call takes whole sequences, equal on all ranks, cuts them, and returns the loss and the rows of all
        ranks to each: a program for one process runs as it is. With labels it returns no logits, which are large. All
        ranks must compute the same loss, and the mean of their gradients, which DDP and FSDP take, is its gradient.
    options: `schedule`, `kernel`, `machine`, `deterministic`, `comm_dtype` and `rotate`, see
        `runtime.call.AttentionOptions`. Scale, softcap and dropout are those of the model.

    Causal and masked language models, token and sequence classification (reward models), question answering, and models
    without a head are taken. The loss of the model is the sum over the labels of this rank's rows, divided by
    `num_items_in_batch`; without this argument by the labels of the batch per rank, so that the mean over the ranks is
    the loss of the batch. Logits of sequences, answers and the pooler's output are equal on all ranks, and so is their
    loss: one logit row for each sequence, or where documents are packed for each document. Padding takes no part.

    Sliding windows, layers of several kinds, packed documents (`cu_seq_lens_q`), padding, grouped heads, learned sinks,
    softcap, the scale of each layer, rope that depends on the length, and in training dropout of attention weights are
    honoured. Raises Unsupported, with the name of the feature, for heads that read other rows than the first, the
    last or the mean, and for models whose attention is not all in transformers' attention function: linear or chunked
    attention, position bias, ALiBi, encoder-decoder models, an auxiliary loss of MoE routers. Raises Unsupported in a
    call with a mask that is not padding, a cache of earlier tokens, or a softcap or dropout that the named kernel does
    not compute.
    """
    check_option_names(options, sorted(set(AttentionOptions.__annotations__) - {"scale", "softcap", "dropout"}))
    shift, pooling = check_model(model)
    if whole and model.config.is_encoder_decoder:
        raise Unsupported("whole=True of a model with an encoder and a decoder; give it what shard_batch has made")
    pooler = check_pooler(model)
    before = unparallelize(model).config._attn_implementation
    rotary = list(filter(rotates_by_length, model.modules()))
    ring = _Ring(
        place_group(group), layout, AttentionOptions(**options), before, shift, pooling, pooler is not None,
        model.config.is_encoder_decoder, first_position(model), bool(rotary), whole,
    )  # fmt: skip
    ring.check()
    if not hasattr(model, STATE):
        model.register_forward_pre_hook(_prepare_call, with_kwargs=True)
        model.register_forward_hook(_scale_loss, with_kwargs=True)
        for module in rotary:
            module.register_forward_pre_hook(_add_largest, with_kwargs=True)
            module.register_forward_hook(_drop_largest)
        if ring.crosses:
            attend_across(model)
        if pooler is not None:
            pooler.register_forward_pre_hook(enter_pooler)
        if pooling is not None:
            model.base_model.register_forward_pre_hook(enter_base, with_kwargs=True)
            model.base_model.register_forward_hook(leave_base)
    for module in model.modules():
        setattr(module, STATE, ring)
    configs: dict[int, Any] = {}  # models may share a config, which names their attention
    deepcopy(model.config, configs)
    for module in model.modules():
        if (own := configs.get(id(getattr(module, "config", None)))) is not None:
            module.config = own
    model.set_attn_implementation(NAME)
    model.generate = partial(generate, model)
    return model


def unparallelize(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, which computes whole sequences again, by the attention that it had before `parallelize`.

    The model may be trained, and wrapped by DDP, FSDP or torch.compile.
    """
    for inner in model.modules():
        ring = getattr(inner, STATE, None) if "generate" in vars(inner) else None
        if ring is not None:
            del inner.generate
            inner.set_attn_implementation(ring.before)
            for module in inner.modules():
                setattr(module, STATE, None)
    return model


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


def check(model: PreTrainedModel, tokens: int = 64, *, seed: int = 0) -> Agreement:
    """Compare a parallelized model with its eager self on the ranks at hand, forward and backward. Collective.

    Of a model without a head the last hidden states are compared in place of logits. `Agreement.unseen` names what is
    not compared.

    Two random packed documents of together `tokens` tokens run through the ring, and each document alone through the
    model's own eager attention, which is computed whole on every rank (an encoder is given one document, its decoder
    two thirds of it). Takes the memory of two copies of the gradients. A sliding window of W keys is tested only where
    the first document has more than W tokens: raises InvalidInput for fewer `tokens`. Raises Mismatch on every rank if
    logits or gradients differ by more than rounding, or if the ranks
    differ in `tokens` or `seed`.
    """
    ring, long = cast("_Ring | None", getattr(model, STATE, None)), max(filter(None, layer_windows(model)), default=0)
    if ring is None:
        raise InvalidInput("this model is not parallelized; call parallelize(model, group, layout=...) first")
    group, first = ring.place.group, max(tokens * 2 // 3, 1)
    with Exchange(get_transport(group), "check") as given:
        if tokens < 3:
            raise InvalidInput(f"check: {tokens} tokens are too few for two documents; try tokens=64")
        if first <= long:
            raise InvalidInput(
                f"check: a window of {long:,} keys hides nothing in a document of {first:,} tokens; "
                f"try tokens={3 * (long + 2) // 2 + 1}"
            )
        given.mine = json.dumps({"tokens": tokens, "seed": seed}).encode()
    compare_records(given.records)
    config, device = model.config.get_text_config(), next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=generator, device="cpu").to(device)
    ids[ids == config.pad_token_id] = config.vocab_size // 2  # some models give no position to this token
    borders, decoded, rows = [0, first, tokens], {}, tokens
    if ring.crosses:
        borders, decoded, rows = [0, tokens], {"decoder_input_ids": ids.flip(1)[:, :first]}, first
    packed = None if ring.crosses else Documents(cu_seqlens=borders)
    batch = shard_batch(
        {"input_ids": ids, **decoded}, group, layout=ring.layout, cu_seqlens=None if ring.crosses else borders
    )
    cut = cut_batch(ring.layout, rows, dist.get_world_size(group), packed)
    whole = [module for module in model.modules() if not rotates_by_length(module)]
    training, sequences = model.training, ring.pooling not in (None, "rows")
    model.eval()
    try:
        local = _rows_of(model(**batch, use_cache=False))
        shape = local.shape if sequences else (1, rows, local.shape[-1])
        weights = torch.randn(shape, generator=generator, device="cpu").to(device)
        if ring.pooling is None:
            mine = cut.shard_tensor(weights, dist.get_rank(group), dim=1)
            logits = gather_logits(local, group, layout=cut)
        else:  # every rank has them all
            mine, logits = weights / cut.ranks, local.detach()
        gradients = _gradients(model, (local.float() * mine).sum() / tokens)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        model.set_attn_implementation("eager")
        for module in whole:  # the others keep theirs: rope takes the length of the batch
            setattr(module, STATE, None)
        parts = [_rows_of(model(ids[:, a:b], use_cache=False, **decoded)) for a, b in pairwise(borders)]
        right = torch.cat(parts, 0 if sequences else 1)
        expected = _gradients(model, (right.float() * weights).sum() / tokens)
    finally:
        for module in whole:
            setattr(module, STATE, ring)
        model.set_attn_implementation(NAME)
        model.train(training)
    unseen = "padding", "labels and loss", "dropout", "gradient checkpointing", "generate", *["the pooler"] * ring.pools
    bound = 256 * max(torch.finfo(right.dtype).eps, 2**-23)  # models of fp64, too, have their softmax in fp32
    result = Agreement(_difference([logits], [right.detach()]), _difference(gradients, expected), bound, tokens, unseen)
    worst: list[float] = [0.0] * dist.get_world_size(group)
    dist.all_gather_object(worst, max(result.logits, result.gradients), group=group)
    if not max(worst) <= bound:
        raise Mismatch(
            f"the parallelized model is not its eager self: logits differ by {result.logits:.2g}, gradients by "
            f"{result.gradients:.2g} of the largest, rounding explains {bound:.2g}; do not train with this model"
        )
    return result


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """(out [B, n, H, Dv], None) of query [B, H, n, D], key [B, K, n, D] and value [B, K, n, Dv], the rows of this rank.

    The arguments are those that transformers passes to attention functions. `unused` are for other functions.
    """
    ring = cast("_Ring | None", getattr(module, STATE, None))
    if ring is None:
        raise InvalidInput(
            f"{type(module).__name__} uses attn_implementation={NAME!r} but belongs to no parallelized model; call "
            "ringattn.integrations.transformers.parallelize(model, group, layout=...)"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    name, window, mask = type(module).__name__, sliding_window, attention_mask
    if mask is not None and mask.ndim > 2:
        if mask.dtype != torch.bool or mask.ndim != 4 or mask.stride(2):  # not of `_write_mask`
            raise Unsupported(
                f"{name} has a mask of its own, {tuple(mask.shape)} of {mask.dtype}, which is not padding"
            )
        window, causal = mask.shape[2] - 2 or None, mask.shape[1] == 1
        mask = mask[:, 0, 0] if mask.shape[3] else None
    generation = ring.call.generation
    if generation is not None:
        if not causal:
            raise Unsupported(f"generate: rows of {name} see later tokens; call unparallelize(model) first")
        options = {**ring.options.keywords(), "scale": scaling, "softcap": softcap}
        out = generation.attend(module, window, query, key, value, s_aux, options)
        return out.transpose(1, 2).contiguous(), None
    out = _attend_ring(
        ring, name, query, key, value, mask, scaling, dropout, window, softcap, s_aux, position_bias, causal,
        cu_seq_lens_q, getattr(module, CROSS, False),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


@compilable
def _attend_ring(
    ring: _Ring,
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    causal: bool,
    borders: torch.Tensor | None,
    crosses: bool,
) -> torch.Tensor:
    """out [B, H, n, Dv] of a layer of class `name`. The borders of documents are a tensor, which may change.

    crosses: keys and values are rows of another sequence than the queries, all of which are seen.
    """
    group = ring.place.group
    with ErrorReport(get_transport(group), "call"):
        if position_bias is not None:
            raise Unsupported(f"{name} adds a position bias to its logits, which ringattn does not")
        if q.shape[2] != k.shape[2] and not crosses:
            raise Unsupported(
                f"a cache of earlier tokens: {q.shape[2]} queries, {k.shape[2]} keys; pass use_cache=False"
            )
        if borders is None and (ring.call.packed or isinstance(ring.layout, LayerMasks)):
            raise Unsupported(f"{name} is not given cu_seq_lens_q by its model, and would see across documents")
        pattern, layout = make_pattern(None, False) if crosses else make_pattern(window, causal), ring.layout
        if borders is not None:
            pattern = pattern & read_borders(borders)
        if isinstance(layout, LayerMasks):
            layout = layout.cut(cast(torch.Tensor, borders), dist.get_world_size(group))
        padding = None if mask is None else ~mask.to(device=k.device, dtype=torch.bool)
    given = {"scale": scaling, "softcap": softcap, "dropout": dropout}
    options = cast("AttentionKeywords", {**ring.options.keywords(), **given})
    return ring_attention(
        q, k, v, pattern, layout=layout, q_layout=layout if crosses else None, group=group,
        key_padding_mask=padding, sinks=sinks, **options,
    )  # fmt: skip


def _prepare_call(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments without what only the hooks of a parallelized model read. Raises for a call that would be wrong."""
    ring = cast("_Ring | None", getattr(model, STATE))
    if ring is None:
        return args, kwargs
    ring.call.end()  # one that ended with an exception
    past = ring.call.past
    if past is not None and kwargs.get("past_key_values") is None:  # Phi-3 computes all again where its rope changes
        past.reset()
        kwargs = {**kwargs, "past_key_values": past}
    if isinstance(kwargs.get("past_key_values"), RingCache):
        kwargs, ring.call.generation = begin(cast("PreTrainedModel", model), ring.place.group, kwargs)
        ring.call.largest = ring.call.generation.largest
        return args, kwargs
    if ring.whole and DIGEST not in kwargs:
        args, kwargs = (), _cut_call(model, ring, args, kwargs)
    digest, items = kwargs.get(DIGEST), kwargs.get("num_items_in_batch")
    kept = {name: x for name, x in kwargs.items() if name not in (DIGEST, "num_items_in_batch")}
    lengths: list[int] = []
    if torch.compiler.is_compiling():
        if ring.pools or ring.pooling is not None:
            raise Unsupported("torch.compile of a head or pooler over whole sequences; compile the layers alone")
        _check_call(model, ring, kept, kwargs)  # an exchange cannot be traced
    else:
        lengths = _check_positions(model, ring, kept, kwargs)
    ring.call.packed = kept.get("cu_seq_lens_q") is not None
    if kept.get("labels") is not None:
        ranks = 1 if ring.pooling else dist.get_world_size(ring.place.group)  # each rank has all labels of sequences
        ring.call.items = items if digest is None or items is not None else digest[COUNT].clamp(min=1) / ranks
    return args, _enter_call(model, ring, kept, kwargs, lengths)


def _cut_call(model: nn.Module, ring: _Ring, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of this rank's part of a call with whole sequences."""
    kwargs = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
    shard = partial(shard_batch, group=ring.place.group, layout=ring.layout, shift=ring.shift is not False)
    loss_only = torch.is_grad_enabled() or not ring.call.logits
    kwargs, ring.call.whole = cut_call(
        kwargs, shard, ring.layout, ring.place.group, counts=not ring.first, loss_only=loss_only
    )
    if model.training:
        ring.call.trained += 1
        ring.call.numbers = draw_alone(ring.place.group, ring.call.trained)
    return kwargs


def _enter_call(
    model: nn.Module, ring: _Ring, kept: dict[str, Any], kwargs: dict[str, Any], lengths: list[int]
) -> dict[str, Any]:
    """The arguments that the model is given, of those `kept` of `kwargs`; `lengths` are the rows of each rank."""
    if ring.stretches:
        ring.call.largest = kwargs[DIGEST][LARGEST]
    if ring.crosses:
        ring.call.places = {"encoder": kept["position_ids"][0], "decoder": kept["decoder_position_ids"][0]}
        taken = inspect.signature(model.forward).parameters
        kept = {name: x for name, x in kept.items() if name in taken or not name.endswith("position_ids")}
    if ring.pools or ring.pooling is not None:
        ring.call.sequences = find_sequences(kept, ring.place.group, ring.layout)
    if ring.first:
        kept["position_ids"] = kept["position_ids"] + ring.first
    whole = ring.call.whole
    if whole is not None and whole.keep is not None:
        kept["logits_to_keep"] = whole.keep
    if ring.pooling is not None:
        assert ring.call.sequences is not None
        borders = kept.get("cu_seq_lens_q")
        cut = cut_batch(ring.layout, sum(lengths), len(lengths), None if borders is None else read_borders(borders))
        ring.call.head = HeadCall(ring.pooling, ring.call.sequences, kept, cut)
        kept = ring.call.head.hide()
    return kept


def _scale_loss(model: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The result with the sum of this rank's losses over `items` as its loss, which is the mean over their labels."""
    ring = cast("_Ring | None", getattr(model, STATE))
    if ring is None:
        return result
    generation, head, whole = ring.call.generation, ring.call.head, ring.call.whole
    ring.call.end()
    if generation is not None:
        return generation.finish(result, ring.place.group)
    if isinstance(result, tuple):
        raise Unsupported(f"{type(model).__name__} returns a tuple; take return_dict=True")
    if "pooler_output" in result and not ring.pools:
        raise Unsupported(
            f"{type(model).__name__} makes pooler_output of rows of the whole sequence without a module of its own; "
            "take a model without it, and pool(...) of its last_hidden_state"
        )
    labels = kwargs.get("labels")
    if head is not None:
        result, labels = head.finish(cast("PreTrainedModel", model), result), head.labels.get("labels")
    if labels is not None:
        count = (labels != NO_LABEL).sum()
        result["loss"] = torch.where(count > 0, result["loss"] * count, 0.0) / ring.call.items
    return result if whole is None or head is not None else whole.finish(result, ring.place.group)


def _check_call(model: nn.Module, ring: _Ring, kwargs: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise InvalidInput or Unsupported for arguments with which rows of this rank would be taken for whole sequences.

    `kwargs` are those for the model, `given` those of the caller.
    """
    config = cast("PreTrainedModel", model).config
    if config._attn_implementation != NAME:
        raise InvalidInput(
            f"attention {config._attn_implementation!r} was set after parallelize: each rank would attend to its own "
            "rows; call unparallelize(model) first"
        )
    _check_options(kwargs, config)
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep", 0)
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        raise Unsupported("attention_mask is not padding [batch, tokens]; write other masks as a Pattern")
    if isinstance(keep, torch.Tensor) or keep:
        raise Unsupported(f"logits_to_keep={keep} keeps rows of this rank, not of the sequence; leave it out")
    own = "decoder_position_ids" if ring.crosses else "position_ids"
    positions, labels, shifted = (kwargs.get(name) for name in (own, "labels", "shift_labels"))
    whole = "call model(**batch) with the batch that shard_batch or Collator has made"
    if positions is None:
        more = " of input_ids and decoder_input_ids" if ring.crosses else ""
        raise InvalidInput(f"{own} is missing: the rows of a rank do not tell their positions; {whole}{more}")
    if DIGEST not in given and ring.stretches:
        raise InvalidInput(f"{DIGEST} is missing: rope of this model depends on the length of the batch; {whole}")
    if labels is None and shifted is None:
        return
    if labels is None:
        raise InvalidInput("shift_labels without labels: who took the labels would shift them again; leave out both")
    if ring.pooling is None and labels.shape[-1] != positions.shape[-1]:
        raise InvalidInput(f"labels of {labels.shape[-1]} tokens for {positions.shape[-1]} rows of this rank; {whole}")
    if (shifted is not None) is not (False if ring.pooling else ring.shift):
        wanted = {True: "shift=True", False: "shift=False", None: "no labels"}[ring.shift]
        kind = "not shifted" if shifted is None else "shifted"
        raise InvalidInput(
            f"labels {kind} to the next token, of which {type(model).__name__} makes a wrong loss or none; call "
            f"shard_batch or Collator with {wanted}"
        )
    if given.get("num_items_in_batch") is None and DIGEST not in given:
        raise InvalidInput(f"num_items_in_batch is missing: a rank does not know the labels of the others; {whole}")


def _check_options(kwargs: dict[str, Any], config: Any) -> None:
    """Raise Unsupported for an option of `REFUSED`, in a call or in the config."""
    for name, reason in REFUSED.items():
        if kwargs.get(name, getattr(config, name, False)):
            raise Unsupported(f"{name}=True: {reason}")


def _check_positions(model: nn.Module, ring: _Ring, kwargs: dict[str, Any], given: dict[str, Any]) -> list[int]:
    """The number of rows of each rank.

    Raises InvalidInput where position_ids are not those of this rank's rows, and Mismatch on the other ranks.

    Raises Mismatch on every rank where digests of whole batches differ, and all errors of `_check_call`. Collective.
    """
    with Exchange(get_transport(ring.place.group), POSITIONS) as rows:
        _check_call(model, ring, kwargs, given)
        positions, digest = kwargs["position_ids"], given.get(DIGEST)
        kind = positions.shape, kwargs.get("attention_mask") is not None
        known = positions.is_cuda and ring.checked == [kind]
        numbers = [] if digest is None or known else digest[:COUNT].tolist()
        rows.mine = json.dumps([positions.shape[-1], *numbers]).encode()
    lengths = compare_batches(list(map(json.loads, rows.records)))
    ring.checked[:] = [kind]
    if known or positions.ndim != 2 or kind[1]:
        return lengths  # where padding is, only the whole mask tells positions
    with ErrorReport(get_transport(ring.place.group), "call"):
        rank, borders = dist.get_rank(ring.place.group), kwargs.get("cu_seq_lens_q")
        tokens = sum(lengths)
        documents = None if borders is None else read_borders(borders)
        place = cut_batch(ring.layout, tokens, len(lengths), documents).positions(rank)
        for row, counted in enumerate(positions.cpu().numpy()):
            expected = place if documents is None else count_from_borders(place, documents, row)
            if counted.shape != expected.shape:
                return lengths  # the handshake of the attention says which rank has too many or too few rows
            for i in np.flatnonzero(counted != expected)[:1]:
                raise InvalidInput(
                    f"position_ids of rank {rank} are not those of its rows under layout {ring.layout!r} of {tokens:,} "
                    f"tokens: element {row}, local row {i} has {counted[i]}, expected {expected[i]}; call "
                    "model(**batch) with the batch that shard_batch or Collator has made for this layout"
                )
    return lengths


def _add_largest(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments (x, position_ids) of a rotary embedding, the largest position of the batch beside the others."""
    ring = cast("_Ring | None", getattr(module, STATE))
    if ring is None:
        return args, kwargs
    named = inspect.signature(module.forward).bind(*args, **kwargs)
    positions = named.arguments["position_ids"]
    largest = torch.as_tensor(ring.call.largest, device=positions.device).to(positions).expand(*positions.shape[:-1], 1)
    named.arguments["position_ids"] = torch.cat([positions, largest], -1)
    return named.args, named.kwargs


def _drop_largest(module: nn.Module, args: Any, result: Any) -> Any:
    """The cosines and sines [..., n, d] without those of the largest position."""
    return result if getattr(module, STATE) is None else tree_map(lambda x: x[..., :-1, :], result)


def _write_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    batch_size: int = 1,
    device: torch.device | None = None,
    **others: Any,
) -> torch.Tensor:
    """The mask of a kind of layers for `_attend`: padding [B, sides, 2 + keys that a window shows to a side, n].

    Every [B, n] of it is the padding mask; n = 0: no padding. One side: causal; two: not. Without a window the size is
    2. The sizes carry both, since the mask decides in transformers: the keyword `sliding_window` is not passed by all
    models, and their `is_causal` may say something else.
    Raises Unsupported for a mask that is made of more than causality, a window and documents.
    """
    if not torch.compiler.is_compiling() and (unknown := _rules(mask_function) - MASKS):
        raise Unsupported(
            f"this model lays a mask of its own over the causal one ({', '.join(sorted(unknown))}), which ringattn "
            "cannot read; write the mask as a Pattern, or use attn_implementation='sdpa'"
        )
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, 0, dtype=torch.bool, device=device)
    both = "allow_is_bidirectional_skip" in others
    keys = 0 if local_size is None else local_size + both  # the row's own, too
    return attention_mask[:, None, None].expand(-1, 1 + both, 2 + keys, -1)


def _rules(function: Callable[..., Any]) -> set[str]:
    """The names of the functions that a mask function of transformers is made of."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inside = [f for x in held for f in (x if isinstance(x, tuple) else (x,)) if callable(f)]
    return {function.__qualname__.split(".")[0]}.union(*map(_rules, inside))


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _write_mask)


def _gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """d loss / d parameter of every parameter that the loss reaches or could reach."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def _difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, as a fraction of the largest value of all of `theirs`."""
    largest = max(float(x.abs().max()) for x in theirs)
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / max(largest, 1e-30)


def _rows_of(result: Any) -> torch.Tensor:
    """What a model says of each row or sequence: its logits, without a head its last hidden states."""
    if "start_logits" in result:
        return torch.stack([result["start_logits"], result["end_logits"]], -1)
    return cast(torch.Tensor, result["logits" if "logits" in result else "last_hidden_state"])


__all__ = [
    *("Agreement", "Collator", "LayerMasks", "RingCache", "check", "gather_logits", "parallelize", "pool"),
    *("shard_batch", "unparallelize"),
]
