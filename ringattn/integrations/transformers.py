"""Hugging Face transformers: `parallelize` makes a model attend over a sequence that is sharded over ranks.

    model = parallelize(AutoModelForCausalLM.from_pretrained(...), group, layout="zigzag")
    batch = shard_batch({"input_ids": ids, "labels": labels}, group, layout="zigzag")
    logits = gather_logits(model(**batch).logits, group, layout="zigzag")

Every rank holds the whole model and its own rows of every sequence. transformers calls `_attend` in each layer, like
its own attention functions (transformers.AttentionInterface).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..call.arguments import AttentionOptions, check_option_names
from ..call.autograd import compilable
from ..call.functional import get_transport, ring_attention
from ..call.rows import Rows
from ..dtypes import dtype_name
from ..errors import InvalidInput, Unsupported
from ..layout.regular import Layout
from ..machine.presets import get_machine
from ..pattern import local_window
from ..recurrence.runs import MOST_RUNS
from ..train import NO_LABEL
from ..transport.records import ErrorReport, Exchange
from ..transport.torchdist import WeakGroup, place_group
from . import check_release
from .agreement import Agreement, check, check_rows
from .batches import (
    COUNT,
    DIGEST,
    HOLES,
    LARGEST,
    OF_ROWS,
    POSITIONS,
    Collator,
    LayerMasks,
    compare_batches,
    count_from_borders,
    cut_batch,
    read_borders,
    shard_batch,
)
from .choices import take_indexers
from .chunked import ChunkedCall, is_chunked, keep_rows
from .encoder_decoder import CROSS, attend_across
from .generation import CACHES, STATE, Generation, RingCache, begin, find_cache, generate, has_chunks, make_pattern
from .heads import HeadCall, Sequences, check_pooler, enter_base, enter_pooler, find_sequences, leave_base, pool
from .hybrids import enter_call, leave_call, take_layers
from .latents import take_latents
from .ranks import gather_logits
from .routers import balance_routers, has_routers, take_routers
from .supported import (
    check_model,
    drop_positions,
    first_position,
    rotates_by_length,
    scale_by_position,
    tell_positions,
    unwrap_adapters,
)
from .whole import WholeCall, cut_call, draw_alone

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from ..call.arguments import AttentionKeywords

#: The name under which transformers finds `_attend` and `_write_mask`.
NAME = "ringattn"
#: The functions of transformers.masking_utils that may make up a mask: `_attend` knows what they hide.
MASKS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay", "chunked_overlay", "and_masks",
    "sliding_window_bidirectional_overlay", "packed_sequence_mask_function", "remap_positions_for_packed_sequence",
    "partial",
}  # fmt: skip

#: Arguments that models pass to attention functions although they change no numbers, or repeat other arguments.
UNREAD = {
    "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "decoder_position_ids", "use_cache",
    "deterministic", "encoder_hidden_states", "shift_labels", "output_hidden_states", "return_dict",
    "output_router_logits",
}  # fmt: skip
#: Options of a call or a config that do not work over ranks, and why.
REFUSED = {
    "output_attentions": "no rank holds attention weights of whole rows; load a second model with attention 'eager'",
    "output_router_logits": "this model has no router loss like Mixtral's; in TRL set router_aux_loss_coef=0.0",
}


@dataclass
class _Call:
    """State that the hooks of a parallelized model share, about the running call or all calls."""

    #: Whether the model is being called.
    runs: bool = False
    #: The cache of the running `generate`.
    past: RingCache | None = None
    #: Whether calls with labels but without gradients return logits.
    logits: bool = False
    #: Whether the next call must run `check_rows`, because `parallelize` saw no weights.
    unseen: bool = False
    #: The number of calls in training mode so far.
    trained: int = 0
    #: The largest position of the whole batch.
    largest: Tensor | int = 0
    #: The positions of this rank's rows in the encoder and in the decoder.
    places: dict[str, Tensor] = field(default_factory=dict)
    #: The divisor of this rank's sum of losses, and the divisor of a loss that every rank computes in full.
    items: Any = None
    shares: int = 1
    #: The logits of this rank's routers, by layer.
    routers: tuple[Tensor, ...] | None = None
    #: The borders of packed documents, and whether any call so far had some.
    borders: Tensor | None = None
    packs: bool = False
    sequences: Sequences | None = None
    #: Set in a call from `generate`, of a head over whole sequences, with whole sequences, or whose loss is chunked.
    generation: Generation | None = None
    head: HeadCall | None = None
    whole: WholeCall | None = None
    chunks: ChunkedCall | None = None
    #: Open while this rank draws its own random numbers.
    numbers: ExitStack | None = None

    def end(self) -> None:
        """Clear the state of this forward; what gradient checkpointing needs to recompute the forward stays."""
        if self.numbers is not None:
            self.numbers.close()
        self.runs = False
        self.borders = self.sequences = self.generation = self.head = self.whole = self.numbers = self.routers = None
        self.chunks = None


@dataclass(frozen=True)
class _Ring:
    """Where the attention of a model runs, and how its sequences are cut."""

    place: WeakGroup
    layout: str | Layout | LayerMasks
    options: AttentionOptions
    #: The attention that the model had before.
    before: str
    #: Whether labels are those of the next token (else of the token itself); None: the model has no loss of rows.
    shift: bool | None
    #: Which rows a head over whole sequences reads, see `find_pooling`; None: the head runs on each row.
    pooling: str | None
    #: Whether the base model has a pooler.
    pools: bool
    #: Whether the model has an encoder and a decoder.
    crosses: bool
    #: The position that the model gives to the first token.
    first: int
    #: Whether its rope depends on the length of the sequence.
    stretches: bool
    #: Whether calls take whole sequences.
    whole: bool
    #: Whether the model has recurrent layers or convolutions that run over ranks.
    mixes: bool
    #: Whether the loss is computed in chunks of rows.
    chunked: bool
    call: _Call = field(default_factory=lambda: _Call(), compare=False)
    #: (shape, whether padded) of the last position_ids: if they repeat on CUDA, they are not copied to the host again.
    checked: list[tuple[torch.Size, bool]] = field(default_factory=list, compare=False)

    def __deepcopy__(self, memo: object) -> _Ring:
        return self


def parallelize(
    model: PreTrainedModel,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str | Layout | LayerMasks,
    whole: bool = False,
    loss: str = "whole",
    compare: bool = True,
    **options: Unpack[AttentionKeywords],
) -> PreTrainedModel:
    """Let the attention of a transformers model run over the ranks of `group`; returns `model`.

    Calls of the model are then collective.

    model: a transformers model, or PEFT's wrapper around one.
    group: a ProcessGroup, or one axis of a DeviceMesh; None: all processes.
    layout: how `shard_batch` or `Collator` cuts sequences: a name such as "zigzag", a Layout for batches of one length,
        or `LayerMasks.of(model)`, which balances the masks of all layers over the documents of each batch; with
        whole=True "balanced" does this, and "auto" does it if that is predicted to make the first packed batch faster
        than zigzag and contiguous shards. `generate()` cuts prompts by `layout` if that is a name other than these two,
        else by zigzag.
    whole: if True, calls take whole sequences, equal on all ranks, cut them, and return the loss and all rows on every
        rank, so that a program for one process runs unchanged. With labels they return no logits, which are large. All
        ranks must compute the same loss; the mean of their gradients, as DDP and FSDP take it, is its gradient.
    loss: "chunked" computes the loss of a call with labels, and its gradients, in chunks of rows, by the model's own
        head; such a call returns no logits, which for 131,072 rows of 262,144 classes take 128 GiB in fp32.
    compare: whether to run the model on a few tokens, without messages, to detect rows that mix outside of attention;
        with weights on the meta device the first call does this. `check` detects more.
    options: `schedule`, `kernel`, `machine`, `deterministic`, `comm_dtype` and `rotate`, see
        `call.arguments.AttentionOptions`. The model sets scale, softcap and dropout.

    Takes causal and masked language models, token and sequence classification (reward models), question answering, and
    models without a head. The model's loss is the sum over the labels of this rank's rows, divided by
    `num_items_in_batch`; without that argument, by (labels of the batch / ranks), so that the mean over the ranks is
    the loss of the batch. Logits of sequences, answers, the pooler's output, and losses of these are equal on all
    ranks: one row of logits per sequence or, if packed, per document. Padding is left out.

    Raises Unsupported, naming the feature, for heads that read other rows than the first, the last or the mean, and for
    models that attend outside of transformers' attention functions: linear attention, position bias, ALiBi or, with
    `compare`, convolutions and positions of their own. A call raises it for a mask that is not padding, a cache of
    earlier tokens, a router loss that is not Mixtral's, or a softcap or dropout that the kernel does not compute. The
    first call also checks the values of options.
    """
    check_release("transformers")
    check_option_names(options, sorted(set(AttentionOptions.__annotations__) - {"scale", "softcap", "dropout"}))
    wrapper, model = model, unwrap_adapters(model)
    shift, pooling = check_model(model)
    chunked = is_chunked(model, loss, shift)
    if whole and model.config.is_encoder_decoder:
        raise Unsupported(
            "whole=True does not support encoder-decoder models; leave it out, and cut batches with shard_batch"
        )
    pooler = check_pooler(model)
    layers = take_layers(model, options.get("reproducible"))
    cut = _balance(model, whole, layers, layout, options) if layout in ("auto", "balanced") else layout
    before = unparallelize(model).config._attn_implementation
    rotary = list(filter(rotates_by_length, model.modules()))
    ring = _Ring(
        place_group(group), cut, AttentionOptions(**options), before, shift, pooling, pooler is not None,
        model.config.is_encoder_decoder, first_position(model), bool(rotary), whole, layers, chunked,
    )  # fmt: skip
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not hasattr(part, STATE):
            part.register_forward_pre_hook(_prepare_call, with_kwargs=True)
            part.register_forward_hook(_scale_loss, with_kwargs=True)
            part.register_forward_hook(_leave_call, always_call=True)
    if not hasattr(model, STATE):
        for module in rotary:
            module.register_forward_pre_hook(_add_largest, with_kwargs=True)
            module.register_forward_hook(_drop_largest)
        tell_positions(model)
        if ring.crosses:
            attend_across(model)
        if pooler is not None:
            pooler.register_forward_pre_hook(enter_pooler)
        model.base_model.register_forward_hook(take_routers)
        model.base_model.register_forward_hook(keep_rows)
        if pooling is not None:
            model.base_model.register_forward_pre_hook(enter_base, with_kwargs=True)
            model.base_model.register_forward_hook(leave_base)
    take_latents(model)
    take_indexers(model)
    for module in model.modules():
        setattr(module, STATE, ring)
    _copy_config(wrapper, model.config)
    model.set_attn_implementation(NAME)
    model.generate = partial(generate, model)
    ring.call.unseen = compare and any(p.is_meta or not p.numel() for p in model.parameters())
    if compare and not ring.call.unseen:
        try:
            check_rows(model, ring, model)
        except Unsupported:
            unparallelize(model)
            raise
    return wrapper


def _balance(model: PreTrainedModel, whole: bool, recurrent: bool, layout: str, options: Any) -> LayerMasks:
    """The masks of all layers; those between recurrent layers have few runs of tokens on a rank."""
    if not whole:
        raise InvalidInput(
            f"layout={layout!r}: this layout is chosen by the masks of all layers; give LayerMasks.of(model) to both "
            "parallelize and shard_batch, or use parallelize(..., whole=True)"
        )
    masks = replace(LayerMasks.of(model), most_runs=MOST_RUNS if recurrent else None)
    if layout == "balanced":
        return masks
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    sizes = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or max(config.hidden_size // heads, 1),
        "dtype": dtype_name(model.dtype),
        "machine": get_machine(options.get("machine"), model.device.type),
        "schedule": options.get("schedule", "auto"),
    }
    return replace(masks, sizes=tuple(sizes.items()))


def _copy_config(model: nn.Module, config: Any) -> None:
    """Give the model its own copy of `config`, which names its attention and may be shared with other models."""
    configs: dict[int, Any] = {}
    deepcopy(config, configs)
    for module in model.modules():
        if (own := configs.get(id(getattr(module, "config", None)))) is not None:
            module.config = own


def unparallelize(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model` with the attention that it had before `parallelize`: each rank computes whole sequences again.

    The model may have been trained, and may be wrapped by DDP, FSDP or torch.compile.
    """
    for inner in model.modules():
        ring = getattr(inner, STATE, None) if _is_served(inner) else None
        if ring is not None:
            del inner.generate
            inner.set_attn_implementation(ring.before)
            for module in inner.modules():
                setattr(module, STATE, None)
    return model


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Rows,
    value: Tensor | None,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """(out [B, n, H, Dv], None) of query [B, H, n, D], key [B, K, n, D] and value [B, K, n, Dv], the rows of this rank.

    transformers passes these arguments to attention functions; a layer that attends through latents passes (Rows, None)
    for key and value, see `take_latents`. Raises Unsupported for any of `others` that is not None,
    False or in `UNREAD`.
    """
    ring = cast("_Ring | None", getattr(module, STATE, None))
    if ring is None:
        raise InvalidInput(
            f"{type(module).__name__} uses attn_implementation={NAME!r} but is not part of a parallelized model; call "
            "ringattn.integrations.transformers.parallelize(model, group, layout=...)"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    query = scale_by_position(module, query)
    name, window, mask, chunked = type(module).__name__, sliding_window, attention_mask, False
    chosen, block = None if indices is None else indices.unsqueeze(1), 1
    if not hasattr(module, "indexer"):
        others, chosen = {**others, "indices": indices, "block_indices": block_indices}, None
    elif block_indices is not None:  # of `choices._choose_blocks`
        indexer: Any = module.indexer
        chosen, block = block_indices, indexer.block_size if block_indices.shape[-1] == indexer.topk_blocks else 1
    given = (word for word, x in others.items() if x is not None and x is not False)
    unknown = ", ".join(f"{word}=" for word in given if word not in UNREAD)
    if mask is not None and mask.ndim > 2:
        if mask.dtype != torch.bool or mask.ndim != 4 or mask.stride(2):  # not from `_write_mask`
            raise Unsupported(
                f"{name} has a mask of its own, {tuple(mask.shape)} {mask.dtype}, which is more than padding; write it "
                "as a Pattern"
            )
        window, own, causal, chunked = mask.shape[2] - 2 or None, causal, mask.shape[1] != 2, mask.shape[1] == 3
        mask = mask[:, 0, 0] if mask.shape[3] else None
        # What one process reads instead of the mask: flash attention always the module, sdpa where no mask is needed.
        unmasked = ring.before == "sdpa" and mask is None and (cu_seq_lens_q is None or ring.call.whole is None)
        if causal != own and unmasked and window is not None:
            raise Unsupported(
                f"{name} has is_causal={own}, which sdpa reads only below its window; load it with 'eager'"
            )
        causal = own if unmasked or "flash" in ring.before else causal
    generation = ring.call.generation
    if generation is not None:
        if not causal or unknown or dropout:
            words = unknown or ("attention to later tokens" if not causal else "dropout of attention weights")
            raise Unsupported(f"generate: {name} has {words}; call model.eval() or unparallelize(model) first")
        options = {**ring.options.keywords(), "scale": scaling, "softcap": softcap}
        out = generation.attend(module, window, query, key, value, s_aux, chosen, options)
    else:
        out = _attend_ring(
            ring, name, query, key, value, mask, cu_seq_lens_q, s_aux, chosen, block, unknown, window, causal,
            getattr(module, CROSS, False), chunked, scale=scaling, softcap=softcap, dropout=dropout,
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


@compilable
def _attend_ring(
    ring: _Ring, name: str, q: Tensor, k: Tensor | Rows, v: Tensor | None, mask: Tensor | None,
    borders: Tensor | None, sinks: Tensor | None, chosen: Tensor | None, block: int, unknown: str, window: int | None,
    causal: bool, crosses: bool, chunked: bool, **options: Unpack[AttentionKeywords],
) -> Tensor:  # fmt: skip
    """out [B, H, n, Dv] of a layer of class `name`. Borders stay a tensor, so that a compiled graph takes new ones.

    crosses: whether keys and values come from another sequence, and queries attend all of them.
    chunked: whether `window` is the length of chunks, counted from the start of each document.
    """
    group = ring.place.group
    with ErrorReport(get_transport(group), "call"):
        if unknown:
            raise Unsupported(
                f"{name} gives its attention {unknown} which ringattn does not know; shard the batch instead"
            )
        keys = (k.tensors[0] if isinstance(k, Rows) else k).shape[2]
        if q.shape[2] != keys and not crosses:
            sizes = f"{q.shape[2]} queries, {keys} keys"
            raise Unsupported(f"a cache of earlier tokens is not supported: {sizes}; pass use_cache=False")
        if borders is None and ring.call.borders is not None:
            raise Unsupported(
                f"{name} is not given cu_seq_lens_q by its model, and would see across documents; give each document "
                "its own row"
            )
        layout, documents = ring.layout, None if borders is None else read_borders(borders)
        pattern = make_pattern(None if chunked or crosses else window, causal and not crosses)
        if chunked:
            assert window is not None
            pattern = pattern & (local_window(window, blocks=0) if documents is None else documents.split(window))
        elif documents is not None:
            pattern = pattern & documents
        if isinstance(layout, LayerMasks):
            layout = "zigzag" if borders is None else layout.cut(borders, dist.get_world_size(group))
        padding = None if mask is None else ~mask.to(device=q.device, dtype=torch.bool)
    return ring_attention(
        q, k, v, pattern, layout=layout, q_layout=layout if crosses else None, group=group,
        key_padding_mask=padding, sinks=sinks, chosen=chosen, block=block,
        **cast("AttentionKeywords", {**ring.options.keywords(), **options}),
    )  # fmt: skip


def _prepare_call(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments, without those that only our hooks read. Raises for a call that would give wrong results."""
    ring = cast("_Ring | None", getattr(model, STATE))
    if ring is None or (ring.call.runs and not _is_served(model)) or _is_replaced(model):
        return args, kwargs
    if not _is_served(model):
        with ErrorReport(get_transport(ring.place.group), POSITIONS):
            raise InvalidInput(
                f"{type(model).__name__} is a part of a parallelized model, and would treat this rank's rows as the "
                "whole sequence; call the model that parallelize returned, perhaps with output_hidden_states=True, or "
                "parallelize this part alone"
            )
    ring.call.end()  # if the last call ended in an exception
    if ring.call.unseen and not torch.compiler.is_compiling():
        with ErrorReport(get_transport(ring.place.group), POSITIONS):
            check_rows(cast("PreTrainedModel", model), ring, model.forward)
        ring.call.unseen = False
    ring.call.runs = True
    if args:
        args, kwargs = (), {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
    past = find_cache(kwargs)
    if isinstance(past, RingCache) or (past is None and ring.call.past is not None):
        return args, _enter_generation(cast("PreTrainedModel", model), ring, past, kwargs)
    if ring.whole and DIGEST not in kwargs:
        kwargs = cut_call(model, ring, kwargs)
    digest, items = kwargs.get(DIGEST), kwargs.get("num_items_in_batch")
    kept = {name: x for name, x in kwargs.items() if name not in (DIGEST, "num_items_in_batch")}
    lengths: list[int] = []
    if torch.compiler.is_compiling():
        if ring.pools or ring.pooling is not None or ring.chunked:
            raise Unsupported(
                "torch.compile supports neither loss='chunked' nor a head or pooler over whole sequences; compile only "
                "the layers"
            )
        _check_call(model, ring, kept, kwargs)  # without the exchange, which cannot be traced
    else:
        lengths = _check_positions(model, ring, kept, kwargs)
    ring.call.borders = kept.get("cu_seq_lens_q")
    ring.call.packs |= ring.call.borders is not None
    if kept.get("labels") is not None:
        ranks = 1 if ring.pooling else dist.get_world_size(ring.place.group)  # every rank has all labels then
        ring.call.items, ring.call.shares = items, ranks
        if digest is not None and items is None:  # the mean over the ranks is the loss, not the sum
            ring.call.items, ring.call.shares = digest[COUNT].clamp(min=1) / ranks, 1
    if ring.stretches:
        ring.call.largest = kwargs[DIGEST][LARGEST]
    return args, _enter_call(model, ring, kept, sum(lengths))


def _is_served(model: nn.Module) -> bool:
    """Whether this is the very model that `parallelize` got, not one of its parts."""
    return "generate" in vars(model)


def _is_replaced(model: Any) -> bool:
    """Whether a function that may call the model runs in place of its forward, as TRL sends losses through DDP."""
    replaced = _is_served(model) and "forward" in vars(model) and model.base_model is not model
    return replaced and "input_ids" not in inspect.signature(model.forward).parameters


def _leave_call(model: nn.Module, args: Any, result: Any) -> None:
    """End the call, also after an exception, and return to the random numbers that ranks share."""
    ring = cast("_Ring | None", getattr(model, STATE))
    if ring is not None and _is_served(model):
        ring.call.end()
        if ring.mixes:
            leave_call()


def _enter_call(model: nn.Module, ring: _Ring, kept: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The model's arguments, made from `kept`, for sequences of `tokens` tokens."""
    if ring.crosses:
        ring.call.places = {"encoder": kept["position_ids"][0], "decoder": kept["decoder_position_ids"][0]}
        taken = inspect.signature(model.forward).parameters
        kept = {name: x for name, x in kept.items() if name in taken or not name.endswith("position_ids")}
    if ring.pools or ring.pooling is not None:
        cut = cut_batch(ring.layout, tokens, dist.get_world_size(ring.place.group), kept.get("cu_seq_lens_q"))
        ring.call.sequences = sequences = find_sequences(kept, ring.place.group, ring.layout)
        if ring.pooling == "last":
            padding = cast("PreTrainedModel", model).config.get_text_config().pad_token_id
            ring.call.sequences = sequences.unmask(kept.get("input_ids"), cut, padding)
        elif ring.pooling in (None, "first", "rows") and ring.call.whole is not None and "cu_seq_lens_q" not in kept:
            ring.call.sequences = sequences.unmask(None, cut, None)
    if ring.first:
        kept["position_ids"] = kept["position_ids"] + ring.first
    if ring.mixes:
        kept = {"use_cache": False, **drop_positions(model, kept)}
        enter_call(model, ring, kept.get("attention_mask"))
    whole = ring.call.whole
    if whole is not None and whole.keep is not None:
        kept["logits_to_keep"] = whole.keep
    if ring.pooling is None:
        if ring.chunked and kept.get("labels") is not None and (torch.is_grad_enabled() or not ring.call.logits):
            ring.call.chunks = ChunkedCall(kept)
        return kept
    assert ring.call.sequences is not None
    ring.call.head = HeadCall(ring.pooling, ring.call.sequences, kept, cut)
    return ring.call.head.hide()


def _enter_generation(
    model: PreTrainedModel, ring: _Ring, past: RingCache | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The model's arguments in a call with a cache."""
    kwargs, ring.call.generation = begin(model, ring, past, kwargs)
    ring.call.largest = ring.call.generation.largest
    if model.training and ring.call.generation.note is None:  # ranks have different rows of the prompt
        draw_alone(ring)
    if ring.mixes:
        enter_call(model, ring)
        kwargs = drop_positions(model, kwargs)
    return kwargs


def _scale_loss(model: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The result, whose loss changes from a mean over labels to (sum of this rank's losses) / `items`."""
    ring = cast("_Ring | None", getattr(model, STATE))
    if ring is None or not _is_served(model) or not ring.call.runs:
        return result
    generation, head, whole, routers = ring.call.generation, ring.call.head, ring.call.whole, ring.call.routers
    chunks = ring.call.chunks
    ring.call.end()
    if generation is not None:
        return generation.finish(result, ring.place.group)
    if isinstance(result, tuple):
        raise Unsupported(f"{type(model).__name__} returns a tuple; set return_dict=True")
    if "pooler_output" in result and not ring.pools:
        raise Unsupported(
            f"{type(model).__name__} computes pooler_output from the whole sequence within its own forward, where it "
            "cannot be replaced; use a model without it, and pool last_hidden_state with pool(...)"
        )
    labels = kwargs.get("labels")
    if head is not None:
        result = head.finish(cast("PreTrainedModel", model), result)
        labels = None if whole is not None else head.labels.get("labels")  # the loss is transformers' own then
    balance = 0.0 if routers is None else balance_routers(model, result, routers, kwargs, ring.place.group)
    if chunks is not None:
        result, labels = chunks.finish(model, result), chunks.labels["labels"]
    if labels is not None:
        count = (labels != NO_LABEL).sum()
        result["loss"] = torch.where(count > 0, result["loss"] * count, 0.0) / ring.call.items
        result["loss"] = result["loss"] + balance / ring.call.shares
    return result if whole is None or head is not None else whole.finish(result, ring.place.group)


def _check_call(model: nn.Module, ring: _Ring, kwargs: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise InvalidInput or Unsupported for arguments with which the model would treat this rank's rows as sequences.

    `kwargs` go to the model, `given` came from the caller.
    """
    config = unwrap_adapters(model).config  # adapters may have been added since
    if config._attn_implementation != NAME:
        raise InvalidInput(
            f"attention {config._attn_implementation!r} was set after parallelize, so each rank would attend only to "
            "its own rows; call unparallelize(model) first"
        )
    for name, reason in REFUSED.items():
        served = name == "output_router_logits" and has_routers(model)
        if kwargs.get(name, getattr(config, name, False)) and not served:
            raise Unsupported(f"{name}=True: {reason}")
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep", 0)
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise Unsupported("attention_mask must be padding [batch, tokens]; write other masks as a Pattern")
    if isinstance(keep, Tensor) or keep:
        raise Unsupported(f"logits_to_keep={keep} would keep rows of this rank, not of the sequence; leave it out")
    if "loss_weights" in kwargs:
        raise Unsupported(
            "loss_weights: the model's own loss weighs all labels equally; pass neither labels nor loss_weights, and "
            "compute the loss yourself, see docs/models.md"
        )
    own = "decoder_position_ids" if ring.crosses else "position_ids"
    positions, labels, shifted = (kwargs.get(name) for name in (own, "labels", "shift_labels"))
    whole = "call model(**batch) with a batch of shard_batch or Collator"
    if positions is None:
        whole += " that has decoder_input_ids" * ring.crosses
        raise InvalidInput(f"{own} is missing: a rank's rows do not show their positions; {whole}")
    if DIGEST not in given and ring.stretches:
        raise InvalidInput(f"{DIGEST} is missing: this model's rope depends on the length of the batch; {whole}")
    if labels is None:
        return
    if (shifted is not None) is not (False if ring.pooling else ring.shift):
        wanted = {True: "shift=True", False: "shift=False", None: "no labels"}[ring.shift]
        kind = "not shifted" if shifted is None else "shifted"
        raise InvalidInput(
            f"labels are {kind} to the next token, which gives {type(model).__name__} a wrong loss or none; call "
            f"shard_batch or Collator with {wanted}"
        )
    if given.get("num_items_in_batch") is None and DIGEST not in given:
        raise InvalidInput(f"num_items_in_batch is missing: a rank does not know the others' labels; {whole}")


def _check_positions(model: nn.Module, ring: _Ring, kwargs: dict[str, Any], given: dict[str, Any]) -> list[int]:
    """The number of rows of each rank. Collective.

    Raises InvalidInput if position_ids do not match this rank's rows, Mismatch on every rank if digests of whole
    batches differ, and what `_check_call` raises.
    """
    with Exchange(get_transport(ring.place.group), POSITIONS) as rows:
        _check_call(model, ring, kwargs, given)
        positions, digest = kwargs["position_ids"], given.get(DIGEST)
        taken = set(inspect.signature(model.forward).parameters) - {*OF_ROWS, *CACHES, "inputs_embeds"}
        for name in sorted(taken & kwargs.keys()):
            found = [x for x in tree_leaves(kwargs[name]) if isinstance(x, Tensor) and x.ndim > 1]
            if any(x.shape[:2] != positions.shape[-2:] for x in found) and not ring.crosses:
                raise Unsupported(f"{name}= does not have this rank's rows, and shard_batch cannot cut it; omit it")
        kind = positions.shape, kwargs.get("attention_mask") is not None
        known = positions.is_cuda and ring.checked == [kind]
        numbers = [] if digest is None or known else digest[:COUNT].tolist()
        rows.mine = json.dumps([positions.shape[-1], *numbers]).encode()
    lengths = compare_batches(list(map(json.loads, rows.records)))
    if ring.first and ring.call.whole is None and digest is not None and digest[HOLES]:
        raise InvalidInput(f"{type(model).__name__} gives padding between tokens no position; use whole=True")
    ring.checked[:] = [kind]
    if kind[1] and has_chunks(model):
        with ErrorReport(get_transport(ring.place.group), "call"):
            places = cut_batch(ring.layout, sum(lengths), len(lengths), None).positions(dist.get_rank(ring.place.group))
            if not kwargs["attention_mask"][:, torch.from_numpy(np.flatnonzero(places == 0))].all():
                raise Unsupported("left padding is not supported if tokens attend in chunks; set padding_side='right'")
    if known or positions.ndim != 2 or kind[1] or ring.call.whole is not None:
        return lengths  # with padding, positions depend on the whole mask; whole sequences may have any
    with ErrorReport(get_transport(ring.place.group), "call"):
        rank, borders = dist.get_rank(ring.place.group), kwargs.get("cu_seq_lens_q")
        tokens = sum(lengths)
        place = cut_batch(ring.layout, tokens, len(lengths), borders).positions(rank)
        for row, counted in enumerate(positions.cpu().numpy()):
            expected = place if borders is None else count_from_borders(place, read_borders(borders), row)
            if counted.shape != expected.shape:
                return lengths  # attention's handshake reports the rank with too many or too few rows
            for i in np.flatnonzero((counted != expected) & (counted != place))[:1]:  # or counted over the whole row
                raise InvalidInput(
                    f"position_ids of rank {rank} do not match its rows under layout {ring.layout!r} of {tokens:,} "
                    f"tokens: element {row}, local row {i} has {counted[i]}, expected {expected[i]}; call "
                    "model(**batch) with a batch that shard_batch or Collator made for this layout"
                )
    return lengths


def _add_largest(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments (x, position_ids) of a rotary embedding, with the batch's largest position appended."""
    ring = cast("_Ring | None", getattr(module, STATE))
    if ring is None:
        return args, kwargs
    named = inspect.signature(module.forward).bind(*args, **kwargs)
    positions = named.arguments["position_ids"]
    largest = torch.as_tensor(ring.call.largest, device=positions.device).to(positions).expand(*positions.shape[:-1], 1)
    named.arguments["position_ids"] = torch.cat([positions, largest], -1)
    return named.args, named.kwargs


def _drop_largest(module: nn.Module, args: Any, result: Any) -> Any:
    """The cosines and sines [..., n, d], without the row that `_add_largest` appended."""
    return result if getattr(module, STATE) is None else tree_map(lambda x: x[..., :-1, :], result)


def _write_mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    batch_size: int = 1,
    device: torch.device | None = None,
    **others: Any,
) -> Tensor:
    """The mask of one kind of layers for `_attend`: padding [B, sides, 2 + keys a window shows on one side, n].

    Every [B, n] in it is the padding mask; n = 0: no padding. Sides: 1 causal, 2 not causal, 3 causal with chunks as
    windows. Without a window the third size is 2. The sizes carry this because in transformers the mask decides: not
    all models pass on `sliding_window`, and their `is_causal` may contradict it. Raises Unsupported for a mask made of
    more than causality, a window and documents.
    """
    rules = set() if torch.compiler.is_compiling() else _rules(mask_function)
    if torch.compiler.is_compiling() and getattr(others.get("config"), "attention_chunk_size", None) is not None:
        raise Unsupported("torch.compile does not support attention in chunks here; compile only the layers")
    if unknown := rules - MASKS:
        raise Unsupported(
            f"this model lays a mask of its own over the causal one ({', '.join(sorted(unknown))}), which ringattn "
            "cannot read; write the mask as a Pattern, or use attn_implementation='sdpa'"
        )
    if attention_mask is None:
        attention_mask = torch.ones(batch_size, 0, dtype=torch.bool, device=device)
    both = "allow_is_bidirectional_skip" in others
    keys = 0 if local_size is None else local_size + both  # includes the row's own
    sides = 3 if "chunked_overlay" in rules else 1 + both
    return attention_mask[:, None, None].expand(-1, sides, 2 + keys, -1)


def _rules(function: Callable[..., Any]) -> set[str]:
    """The names of the functions that make up a mask function of transformers."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if isinstance(function, partial):
        held = [function.func, *function.args, *function.keywords.values()]
    inside = [f for x in held for f in (x if isinstance(x, tuple) else (x,)) if callable(f)]
    return {getattr(function, "__qualname__", type(function).__qualname__).split(".")[0]}.union(*map(_rules, inside))


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _write_mask)


__all__ = [
    "Agreement", "Collator", "LayerMasks", "RingCache", "check", "gather_logits", "parallelize", "pool", "shard_batch",
    "unparallelize",
]  # fmt: skip
