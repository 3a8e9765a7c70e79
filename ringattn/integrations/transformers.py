"""Hugging Face transformers: `parallelize` makes a model attend over a sequence that is sharded over ranks.

    model = parallelize(AutoModelForCausalLM.from_pretrained(...), group, layout="zigzag")
    batch = shard_batch({"input_ids": ids, "labels": labels}, group, layout="zigzag")
    logits = gather_logits(model(**batch).logits, group, layout="zigzag")

Every rank holds the whole model and its rows of every sequence. transformers calls `_attend` in each layer, as it calls
its own attention functions (transformers.AttentionInterface).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import InvalidInput, Mismatch, Unsupported
from ..functional import exchange, ring_attention, telling
from ..kernels import split_kernel
from ..layout.regular import make_layout
from ..machine.presets import get_machine
from ..pattern import Causal, Full, Pattern, Window
from ..plan.message_sizes import check_rotate
from ..plan.schedules import resolve
from ..runtime.autograd import compilable
from ..runtime.handshake import compare_records
from ..runtime.options import AttentionOptions, check_option_names
from ..train import NO_LABEL
from ..transport.torchdist import WeakGroup, check_group
from .borders import (
    DIGEST,
    check_rows,
    compare_batches,
    count_from_borders,
    count_positions,
    digest_batch,
    find_documents,
    gather_rows,
    read_batch,
    read_borders,
    write_borders,
)
from .comparison import Agreement, difference, evaluating, gradients_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

    from ..runtime.options import AttentionKeywords
    from .borders import Borders

    Batch = Mapping[str, torch.Tensor]

#: The name under which transformers finds `_attend` and `_pass_padding`.
NAME = "ringattn"
#: The kinds of layers whose whole attention is in the attention function.
LAYER_TYPES = ("full_attention", "sliding_attention")
#: The first exchange of a model; `shard_batch` reports its errors there.
POSITIONS = "positions of a model"
#: Attribute of an attention module that holds its `_Ring`.
_STATE = "_ringattn"


@dataclass(frozen=True)
class _Ring:
    """Where the attention of a model runs, and how the sequence was cut."""

    place: WeakGroup
    layout: str
    options: AttentionOptions
    #: On CUDA, the shape of the latest position_ids, and whether padded: the host copies none that equal both again.
    checked: list[tuple[torch.Size, bool]] = field(default_factory=list, compare=False)

    def check(self) -> None:
        """Raise InvalidInput for a name that no call could use: of a layout, schedule, kernel, machine or rotation."""
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
    layout: str,
    **options: Unpack[AttentionKeywords],
) -> PreTrainedModel:
    """The model itself, whose attention now runs over the ranks of `group`; collective calls from then on.

    group: a ProcessGroup, or one axis of a DeviceMesh; None: all processes.
    layout: the name of the layout by which `shard_batch` or `Collator` cuts sequences, such as "zigzag".
    options: `schedule`, `kernel`, `machine`, `deterministic`, `comm_dtype` and `rotate`, see
        `runtime.options.AttentionOptions`. Scale, softcap and dropout are those of the model.

    Sliding windows, layers of several kinds, packed documents (`cu_seq_lens_q`), padding, grouped heads, learned sinks,
    softcap, the scale of each layer, and in training dropout of attention weights are honoured. Raises Unsupported,
    with the name of the feature, for models whose attention is not all in transformers' attention function: linear or
    chunked attention, position bias, ALiBi, encoder-decoder models, an auxiliary loss of MoE routers. Raises
    Unsupported in a call with a mask that is not padding, a cache of earlier tokens, or a softcap or dropout that the
    named kernel does not compute.
    """
    check_option_names(options, sorted(set(AttentionOptions.__annotations__) - {"scale", "softcap", "dropout"}))
    layers = _find_attention(model)
    _check_model(model, layers)
    ring = _Ring(_place(group), layout, AttentionOptions(**options))
    ring.check()
    if not hasattr(layers[0], _STATE):
        model.register_forward_pre_hook(_check_call, with_kwargs=True)
    for layer in layers:
        setattr(layer, _STATE, ring)
    shared, own = model.config, deepcopy(model.config)  # models may share a config, which names their attention
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
    model.set_attn_implementation(NAME)
    model.generate = _refuse_generate  # a step of it would take the rows of a rank for the whole sequence
    return model


def shard_batch(
    batch: Batch,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    layout: str,
    cu_seqlens: Borders | None = None,
) -> dict[str, torch.Tensor]:
    """This rank's part of a batch of whole sequences, as keyword arguments of the model.

    batch: `input_ids` [B, N], and where wanted `labels`, `attention_mask` (1 for a token, 0 for padding) and
        `position_ids`, all [B, N] and equal on all ranks.
    cu_seqlens: the borders of packed documents, [0, ..., N] for all rows or one such list for each row; default:
        `cu_seq_lens_q` of the batch, or where position_ids begin anew in each row.

    The result has `input_ids` and `position_ids` of the rank's rows; `labels` and `shift_labels`, shifted before the
    cut so that no label is lost at a border; `attention_mask` only if some rank has padding; `cu_seq_lens_q` for
    documents, [B, most borders] with N repeated where the rows differ; and `batch_digest`, by which the model compares
    the whole batches of the ranks, and which it takes away. Padding has no label (transformers lets the
    last padding before a row predict its first token). position_ids count from the first token that is not padding,
    and in each document from 0.
    """
    place = _place(group)
    with telling(POSITIONS, group=place.group):
        batch, borders = read_batch(batch)
        tokens = batch["input_ids"]
        rank, ranks = dist.get_rank(place.group), dist.get_world_size(place.group)
        cut = make_layout(layout, tokens=tokens.shape[1], ranks=ranks)
        check_rows(cut)
        mask, positions = batch.get("attention_mask"), batch.get("position_ids")
        given = borders if cu_seqlens is None else cu_seqlens
        documents = find_documents(tokens, None if mask is not None else positions, given)
    if positions is None:
        positions = count_positions(tokens, mask, documents)
    result = {"input_ids": tokens, "position_ids": positions}
    if mask is not None and not bool(mask.all()):
        result["attention_mask"] = mask
    result = {name: cut.shard_tensor(x, rank, dim=1).contiguous() for name, x in result.items()}
    if "labels" in batch:
        labels = batch["labels"].clone()
        if documents is not None:
            for row, label in enumerate(labels):
                label[[start for start in documents.row(row).starts[1:-1] if start < len(label)]] = NO_LABEL
        labels = cut.shift(labels, rank, dim=1, fill=NO_LABEL)
        if mask is not None:
            labels = labels.masked_fill(cut.shard_tensor(mask, rank, dim=1) == 0, NO_LABEL)
        result["labels"] = result["shift_labels"] = labels.contiguous()
    if documents is not None:
        result["cu_seq_lens_q"] = write_borders(documents, tokens)
    result[DIGEST] = digest_batch(batch, documents)
    return result


@dataclass(frozen=True)
class Collator:
    """A data collator: `inner` makes a batch of whole sequences, and each rank gets its rows of the batch.

    All ranks of `group` must be given the same examples; let the sampler shard by data-parallel rank only. Where
    position_ids begin anew in a row, the row has packed documents; rows may have different ones.
    """

    inner: Any
    group: ProcessGroup | DeviceMesh | None = None
    layout: str = "zigzag"

    def __call__(self, examples: Any) -> dict[str, torch.Tensor]:
        """`shard_batch` of the batch that `inner` makes of these examples."""
        return shard_batch(self.inner(examples), self.group, layout=self.layout)


def gather_logits(logits: torch.Tensor, group: ProcessGroup | DeviceMesh | None = None, *, layout: str) -> torch.Tensor:
    """The logits [B, N, classes] of whole sequences from the ranks' [B, n, classes], on every rank. Collective.

    Not differentiable: a loss is computed on the rows of each rank.
    """
    place = _place(group)
    rows = gather_rows(logits, place.group)
    cut = make_layout(layout, tokens=sum(rows), ranks=len(rows))
    most = max(rows)
    mine = nn.functional.pad(logits.detach(), (0, 0, 0, most - logits.shape[1])).contiguous()
    shards = [torch.empty_like(mine) for _ in rows]
    dist.all_gather(shards, mine, group=place.group)
    return cut.unshard_tensor([shard[:, :n] for shard, n in zip(shards, rows, strict=True)], dim=1)


def check(model: PreTrainedModel, tokens: int = 64, *, seed: int = 0) -> Agreement:
    """Compare a parallelized model with its eager self on the ranks at hand, forward and backward. Collective.

    Two random packed documents of together `tokens` tokens run through the ring, and each document alone through the
    model's own eager attention, which is computed whole on every rank. Takes the memory of two copies of the gradients.
    A sliding window of W keys is tested only where the first document has more than W tokens: raises InvalidInput for
    fewer `tokens`. Raises Mismatch on every rank if logits or gradients differ by more than rounding, or if the ranks
    differ in `tokens` or `seed`.
    """
    ring, long = _get_ring(model), _longest_window(model)
    group, first = ring.place.group, max(tokens * 2 // 3, 1)
    with exchange("check", group=group) as given:
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
    weights = torch.randn((1, tokens, config.vocab_size), generator=generator, device="cpu").to(device)
    starts = [0, first, tokens]
    batch = shard_batch({"input_ids": ids}, group, layout=ring.layout, cu_seqlens=starts)
    cut = make_layout(ring.layout, tokens=tokens, ranks=dist.get_world_size(group))
    with evaluating(model):
        local = model(**batch, use_cache=False).logits
        mine = cut.shard_tensor(weights, dist.get_rank(group), dim=1)
        gradients = gradients_of(model, (local.float() * mine).sum() / tokens)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        logits = gather_logits(local, group, layout=ring.layout)
        model.set_attn_implementation("eager")
        try:
            parts = [model(ids[:, a:b], use_cache=False).logits for a, b in ((0, first), (first, tokens))]
            whole = torch.cat(parts, 1)
            expected = gradients_of(model, (whole.float() * weights).sum() / tokens)
        finally:
            model.set_attn_implementation(NAME)
    bound = 256 * max(torch.finfo(whole.dtype).eps, 2**-23)  # models of fp64, too, have their softmax in fp32
    result = Agreement(difference([logits], [whole.detach()]), difference(gradients, expected), bound, tokens)
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
    ring = cast("_Ring | None", getattr(module, _STATE, None))
    if ring is None:
        raise InvalidInput(
            f"{type(module).__name__} uses attn_implementation={NAME!r} but belongs to no parallelized model; call "
            "ringattn.integrations.transformers.parallelize(model, group, layout=...)"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = _check_window(module, sliding_window)
    name = type(module).__name__
    out = _attend_ring(
        ring, name, query, key, value, attention_mask, scaling, dropout, window, softcap, s_aux, position_bias, causal,
        cu_seq_lens_q,
    )  # fmt: skip
    return out.transpose(1, 2), None


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
) -> torch.Tensor:
    """out [B, H, n, Dv] of a layer of class `name`. The borders of documents are a tensor, which may change."""
    group = ring.place.group
    with telling("call", group=group):
        if position_bias is not None:
            raise Unsupported(f"{name} adds a position bias to its logits, which ringattn does not")
        if q.shape[2] != k.shape[2]:
            raise Unsupported(
                f"a cache of earlier tokens: {q.shape[2]} queries, {k.shape[2]} keys; pass use_cache=False"
            )
        pattern = _make_pattern(window, causal, borders)
        padding = None if mask is None else ~mask.to(device=k.device, dtype=torch.bool)
    given = {"scale": scaling, "softcap": softcap, "dropout": dropout}
    options = cast("AttentionKeywords", {**ring.options.keywords(), **given})
    return ring_attention(
        q, k, v, pattern, layout=ring.layout, group=group, key_padding_mask=padding, sinks=sinks, **options
    )


def _refuse_generate(*args: Any, **kwargs: Any) -> None:
    """Raise Unsupported."""
    raise Unsupported(
        "generate() of a parallelized model: a rank holds some rows of the sequence only; generate with a model of its "
        "own, loaded with attn_implementation='sdpa'"
    )


def _check_call(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments without the digest of the batch. Raises for wrong positions, batches, and attention weights."""
    config = cast("PreTrainedModel", model).config
    digest, kept = kwargs.get(DIGEST), {name: x for name, x in kwargs.items() if name != DIGEST}
    if config._attn_implementation != NAME:
        return args, kept
    if kwargs.get("output_attentions", config.output_attentions):
        raise Unsupported(
            "output_attentions=True: no rank holds the attention weights of whole rows; leave it out, or load another "
            "model with attn_implementation='eager'"
        )
    _check_positions(_get_ring(model), kept, digest)
    return args, kept


def _check_positions(ring: _Ring, kwargs: dict[str, Any], digest: torch.Tensor | None) -> None:
    """Raise InvalidInput where position_ids are not those of this rank's rows, and Mismatch on the other ranks.

    Raises Mismatch on every rank where digests of whole batches differ. A model without position_ids would count the
    positions of its rows from 0, whatever the rank. Collective.
    """
    positions = kwargs.get("position_ids")
    if positions is not None and torch.compiler.is_compiling():
        return  # an exchange cannot be traced
    with exchange(POSITIONS, group=ring.place.group) as rows:
        if positions is None:
            raise InvalidInput(
                "position_ids is missing: the rows of a rank do not tell their positions; call model(**batch) with the "
                "batch that shard_batch or Collator has made"
            )
        kind = positions.shape, kwargs.get("attention_mask") is not None
        known = positions.is_cuda and ring.checked == [kind]
        numbers = [] if digest is None or known else digest.tolist()
        rows.mine = json.dumps([positions.shape[-1], *numbers]).encode()
    lengths = compare_batches(list(map(json.loads, rows.records)))
    ring.checked[:] = [kind]
    if known or positions.ndim != 2 or kind[1]:
        return  # where padding is, only the whole mask tells positions
    with telling("call", group=ring.place.group):
        rank, borders = dist.get_rank(ring.place.group), kwargs.get("cu_seq_lens_q")
        tokens = sum(lengths)
        place = make_layout(ring.layout, tokens=tokens, ranks=len(lengths)).positions(rank)
        for row, given in enumerate(positions.cpu().numpy()):
            expected = place if borders is None else count_from_borders(place, read_borders(borders), row)
            if given.shape != expected.shape:
                return  # the handshake of the attention says which rank has too many or too few rows
            for i in np.flatnonzero(given != expected)[:1]:
                raise InvalidInput(
                    f"position_ids of rank {rank} are not those of its rows under layout {ring.layout!r} of {tokens:,} "
                    f"tokens: element {row}, local row {i} has {given[i]}, expected {expected[i]}; call model(**batch) "
                    "with the batch that shard_batch or Collator has made for this layout"
                )


def _pass_padding(
    *, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **unused: Any
) -> torch.Tensor | None:
    """The padding mask [B, n] for `_attend`. Raises Unsupported for a mask that a model lays over its causal mask."""
    if use_vmap:
        raise Unsupported(
            "this model lays a mask of its own over the causal one (bidirectional image tokens, for example), which "
            "ringattn cannot read; write the mask as a Pattern, or use attn_implementation='sdpa'"
        )
    return attention_mask


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _pass_padding)


def _check_window(module: nn.Module, window: int | None) -> int | None:
    """The number of keys that a row of the layer sees; None: all. Raises Unsupported where the layer contradicts it."""
    kind = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
    if (kind == "sliding_attention" and window is None) or (kind == "full_attention" and window is not None):
        raise Unsupported(
            f"layer {getattr(module, 'layer_idx', '?')} is {kind}, but transformers passes sliding_window={window}; "
            "this version of transformers cannot be read"
        )
    return window


def _make_pattern(window: int | None, causal: bool, borders: torch.Tensor | None) -> Pattern:
    """Which keys a row sees. A window of W keys counts the row's own: Window(W - 1); without causal on both sides."""
    pattern: Pattern = Causal() if causal else Full()
    if window is not None:
        pattern = pattern & Window(window - 1)
    if borders is None:
        return pattern
    return pattern & read_borders(borders)


def _place(group: ProcessGroup | DeviceMesh | None) -> WeakGroup:
    """A weak reference to the group."""
    if group is not None:
        check_group(group)
    return WeakGroup(dist.group.WORLD if group is None else group)


def _find_attention(model: nn.Module) -> list[nn.Module]:
    """The attention modules that call transformers' attention functions."""
    return [m for m in model.modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")]


def _get_ring(model: nn.Module) -> _Ring:
    """The state of a parallelized model."""
    for layer in _find_attention(model):
        if hasattr(layer, _STATE):
            return cast(_Ring, getattr(layer, _STATE))
    raise InvalidInput("this model is not parallelized; call parallelize(model, group, layout=...) first")


def _check_model(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Raise Unsupported, with the name of the feature, if ring attention cannot be all of the model's attention."""
    if not hasattr(model, "set_attn_implementation"):
        raise InvalidInput(
            f"{type(model).__name__} is no model of transformers; parallelize a PreTrainedModel, before DDP, FSDP or "
            "torch.compile wrap it, and give models of your own ringattn.nn.RingAttention"
        )
    config, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    refused = {
        f"layers of type {', '.join(sorted(kinds))}": bool(kinds),
        "an encoder and a decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "attention in chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None) is not None,
        "ALiBi": bool(getattr(config, "alibi", False)),
        "an auxiliary loss of its routers (output_router_logits), which is not a sum over tokens": bool(
            getattr(config, "output_router_logits", False)
        ),
        "attention outside of transformers' attention functions": not layers or not model._supports_attention_backend,
    }
    for feature, present in refused.items():
        if present:
            raise Unsupported(f"{name} has {feature}; ringattn cannot compute its attention over ranks")
    if config is not model.config:
        raise Unsupported(f"{name} has inputs besides text; parallelize its language model alone")


def _longest_window(model: nn.Module) -> int:
    """The most keys that a sliding window of the model lets a row see; 0 without windows."""
    config = cast("PreTrainedModel", model).config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds is not None else getattr(config, "use_sliding_window", True)
    return int(getattr(config, "sliding_window", None) or 0) if slides else 0


__all__ = ["Agreement", "Collator", "check", "gather_logits", "parallelize", "shard_batch"]
