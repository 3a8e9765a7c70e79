"""`generate()` of a parallelized model: the cache that transformers sees, and what a call with this cache computes.

Every rank generates the same tokens. A prompt, or a chunk of one, is cut over the ranks; new tokens go to all ranks.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from ..call.functional import get_transport
from ..call.rows import Rows
from ..errors import InvalidInput, Unsupported
from ..inference.cache import STEP_OPTIONS, KVCache
from ..inference.choice import Chooser
from ..layout.regular import make_layout
from ..pattern import Causal, Full, Pattern, Window
from ..transport.records import ErrorReport, Exchange, compare_records, digest
from .ranks import GatherRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

#: The attribute that `parallelize` sets on each module of a model: where its attention runs.
STATE = "_ringattn"
#: The name of the attention with which `check_rows` runs a model.
ROWS = "ringattn_rows"
#: With fewer tokens per rank than this, every rank computes the whole prompt: experts need rows on each rank.
LEAST_ROWS = 2
#: The exchange before a prompt, and the one after all tokens.
PROMPT, END = "prompt", "end of generate()"
#: The argument of models and of `generate` that takes the cache; its name depends on the release of transformers.
CACHES = ("cache", "past_key_values", "cache_params")
#: Settings of `generate` that do not work with a sharded cache, and why.
REFUSED = {
    "guidance_scale": "it generates a second sequence beside the first; leave it out",
    "assistant_early_exit": "it runs only the first layers, of which no cache is kept; give assistant_model=",
    "max_time": "ranks would stop after different numbers of tokens; give max_new_tokens=",
}


def find_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of a call, by any of its names; None if there is none."""
    return next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)


def _give_cache(model: nn.Module, kwargs: dict[str, Any], past: Any) -> dict[str, Any]:
    """The arguments with `past` as the cache, under the name that the model expects."""
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in CACHES if name in taken), CACHES[0])
    return {**{other: x for other, x in kwargs.items() if other not in CACHES}, name: past}


def has_chunks(model: Any) -> bool:
    """Whether layers of the model attend within chunks of the sequence."""
    return "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def chooses_keys(config: Any) -> bool:
    """Whether layers of a model attend to keys that an indexer of theirs chooses."""
    return "indexed_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())


def layer_windows(model: PreTrainedModel) -> dict[int, int | None]:
    """How many keys each attention layer sees, its own position included, by layer; None: no limit. From the config."""
    config = model.config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if kinds is None:
        slides = window is not None and getattr(config, "use_sliding_window", True)
        return dict.fromkeys(range(config.num_hidden_layers), window if slides else None)
    return {
        layer: window if kind in ("sliding_attention", "hybrid_sliding") else None
        for layer, kind in enumerate(kinds)
        if kind != "linear_attention" and ("hybrid" in kind or "attention" in kind)
    }


def make_pattern(window: int | None, causal: bool = True) -> Pattern:
    """The pattern of a layer that sees `window` keys, its own position included; None: no limit.

    `window` keys are Window(window - 1); if not causal, as many keys after a query are seen as before it.
    """
    pattern: Pattern = Causal() if causal else Full()
    return pattern if window is None else pattern & Window(window - 1, 0 if causal else window - 1)


class RingCache(Cache):  # type: ignore[misc]
    """A cache for `generate` of a parallelized model: keys and values, sharded over its ranks.

    `model.generate(...)` makes one by default. Pass `past_key_values=RingCache(model)` to continue a conversation or to
    set options of `KVCache`; ranks and layout are those of the model.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        ring = getattr(model, STATE, None)
        if ring is None:
            raise InvalidInput("this model is not parallelized; call parallelize(model, group, layout=...) first")
        #: The states of recurrent layers and convolutions, whole on every rank.
        super().__init__(layers=DynamicCache(config=model.config).layers if ring.mixes else [])
        self.recurrent = [layer for layer in self.layers if hasattr(layer, "recurrent_states")]
        shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
        if shared:
            raise Unsupported(
                f"generate: {shared} layers of {type(model).__name__} share keys and values of others, which is not "
                "supported; call unparallelize(model) first"
            )
        if has_chunks(model) or getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
            raise Unsupported(
                "generate: attention in chunks or scaled by position is not supported; call unparallelize(model) first"
            )
        if "minimax_m3_sparse" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
            raise Unsupported(
                "generate: blocks of keys chosen by content are not supported in a sharded cache; call "
                "unparallelize(model) first"
            )
        self.windows = layer_windows(model)
        self.places = {layer: place for place, layer in enumerate(self.windows)}
        # A model that does not attend counts its tokens in a layer of one key.
        patterns = [make_pattern(window) for window in self.windows.values()] or [make_pattern(1)]
        self._layer, self._conv = 0, (0, 0)
        #: Whether the parallelized model is being called: only then may `update` be called.
        self.running = False
        #: Whether the running call has a shard of a prompt.
        self.sharded = False
        layout = ring.layout if isinstance(ring.layout, str) else "zigzag"
        self.cache = KVCache(patterns, layers=len(patterns), group=ring.place.group, layout=layout, **options)

    def __len__(self) -> int:
        return len(self.layers or self.windows)

    @property
    def place(self) -> int:
        """The index within `cache` of the layer for which `update` was called last."""
        return self.places[self._layer]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store new inputs of a convolution as transformers does, and return the stored ones.

        In a sharded prompt, nothing is stored and the new inputs are returned; `store_conv` later stores those at the
        end of the prompt.
        """
        if not self.sharded:
            return cast(Tensor, super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs))
        self._conv = layer_idx, state_idx
        return conv_states

    def conv_before(self, count: int) -> Tensor | None:
        """The last `count` inputs [B, C, count] of the running convolution before this prompt; None: there are none."""
        layer, place = self._conv
        before: Tensor | None = self.layers[layer].conv_states[place]  # 5.20 has no get_conv_state
        return None if before is None else before[..., before.shape[-1] - count :].clone()

    def store_conv(self, last: Tensor) -> None:
        """Store the last inputs [B, C, K - 1] of a prompt as the state of the convolution.

        transformers expects one column more, which it does not read.
        """
        super().update_conv_state(nn.functional.pad(last, (1, 0)), *self._conv, conv_kernel_size=last.shape[-1] + 1)

    def count(self, rows: int, logits: Tensor, note: str | None) -> None:
        """Count new tokens in the cache of a model without attention, of which `rows` are on this rank.

        logits are [B, ...]. `note` is the digest of a step's tokens, or None for a prompt.
        """
        none = torch.zeros(len(logits), 1, rows, 8, device=logits.device)
        if note is None:
            self.cache.prefill(0, none, none, none)
        else:
            self.cache.step(0, none, none, none, note=note)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Remember the layer, and return the new keys and values unchanged; attention stores them later.

        Raises InvalidInput if the cache belongs to another model.
        """
        if not self.running:
            raise InvalidInput("a RingCache works only with the model it was made for; make a new RingCache(model)")
        self._layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, padding included."""
        return self.cache.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(number of keys, index of the first key), for transformers' masks: always all keys, from index 0."""
        return self.cache.length + query_length, 0

    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer: even layers with a window report the length of all tokens."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer, whether it is a recurrent layer, which has no keys and values."""
        return [layer not in self.windows for layer in range(len(self))]

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works: not if the model has recurrent states that cannot return to an earlier token."""
        return all(layer.is_croppable for layer in self.recurrent)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -n tokens if n = tokens_to_remove is negative; keep only the first n if it is positive."""
        if self.recurrent and not self.is_croppable:
            raise Unsupported(
                "generate: recurrent states cannot be rolled back; leave out assistant_model= and prompt lookup"
            )
        for layer in self.recurrent:
            layer.crop(tokens_to_remove)
        if tokens_to_remove:
            self.cache.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows of the batch: the new row i continues the old row beam_idx[i]."""
        for layer in self.recurrent:
            layer.reorder_cache(beam_idx)
        self.cache.fork(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        self.reorder_cache(torch.arange(len(self.cache.lengths), device="cpu").repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.recurrent:
            layer.reset()
        self.cache.crop(-self.cache.length)


@dataclass
class Generation:
    """What attention and the hook after a model call need to know about a call with a cache."""

    past: RingCache
    #: The digest of a step's tokens, which ranks compare; None for a prompt.
    note: str | None
    #: The largest position so far, which some ropes depend on.
    largest: Tensor
    #: For a prompt: the slots whose logits are wanted, and by rank those of them that the rank has.
    wanted: np.ndarray[Any, Any]
    kept: list[np.ndarray[Any, Any]]
    #: The local rows of the wanted slots; None if the model returns no other rows.
    mine: Tensor | None
    #: The rows of this rank, and which of them are padding, bool [B, rows]; None: none is.
    rows: int
    padding: Tensor | None = None
    #: The tokens before it.
    before: int = 0
    #: The layers that have attended.
    attended: set[int] = field(default_factory=set)
    #: That of the indexer that ran last; None after its layer has attended, and filled its choice.
    chooser: Chooser | None = None

    def attend(
        self, module: nn.Module, window: int | None, q: Tensor, k: Any, v: Any, sinks: Tensor | None,
        chosen: Tensor | None, options: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of one layer with the cache: out [B, H, n, Dv]. `chosen`: its choice, or that of a layer before.

        Raises Unsupported if the layer attends twice in a call, or if its mask has another window than the config says.
        """
        layer, cache, place = self.past._layer, self.past.cache, self.past.place
        if layer in self.attended:
            raise Unsupported(
                f"generate: {type(module).__name__} attends twice in layer {layer}; call unparallelize(model) first"
            )
        self.attended.add(layer)
        if window != self.past.windows[layer]:
            raise Unsupported(
                f"generate: the mask of layer {layer} has a window of {window} keys, but the model's config one of "
                f"{self.past.windows[layer]}; call unparallelize(model) first"
            )
        given: dict[str, Any] = {"sinks": sinks, "chosen": chosen if self.chooser is None else self.chooser}
        self.chooser = None
        if self.note is None:
            return cache.prefill(place, q, k, v, **given, **options)
        given |= {"note": self.note, **{name: options[name] for name in STEP_OPTIONS if name in options}}
        if not isinstance(k, Rows):
            return cast(Tensor, cache.step(place, q, k, v, **given))
        # Queries and results go through the matrices of the projection, so that no cached row is expanded.
        assert k.expand is not None
        (rows,) = k.tensors
        every = torch.eye(rows.shape[3], dtype=q.dtype, device=q.device)[None, None]
        of_keys, of_values = k.expand(every, *k.weights)
        return cast(Tensor, cache.step(place, q @ of_keys.mT, rows, **given) @ of_values)

    def finish(self, result: Any, group: ProcessGroup) -> Any:
        """End the call; returns `result` with the logits of the positions that the caller asked for. Collective.

        The logits are gathered on every rank.
        """
        self.past.running = self.past.sharded = False
        if not self.past.windows:
            self.past.count(self.rows, result["logits"], self.note)
        if self.note is None:
            mine = result["logits"] if self.mine is None else result["logits"][:, self.mine]
            rows = GatherRows.apply(mine, self.kept, group)  # in order of their slots
            _, order = np.unique(self.wanted, return_inverse=True)
            result["logits"] = rows[:, torch.from_numpy(order).to(rows.device)]
        return result


def resume(model: PreTrainedModel, past: RingCache, kwargs: dict[str, Any]) -> RingCache:
    """Empty the cache of the running `generate` and return it, for a call that recomputes all tokens.

    transformers makes such a call, without a cache, for Phi-3 when its rope changes. Raises Unsupported for any other
    call without a cache.
    """
    most, ids = getattr(model.config, "original_max_position_embeddings", None), kwargs.get("input_ids")
    if most is None or ids is None or not past.cache.length <= most < ids.shape[1]:
        raise Unsupported(
            f"generate: {type(model).__name__} passes no cache under a name that ringattn knows "
            f"({' or '.join(CACHES)}); install a release of transformers that ringattn supports"
        )
    past.reset()
    return past


def begin(
    model: PreTrainedModel, ring: Any, past: RingCache | None, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Generation]:
    """Prepare a model call with a cache: returns this rank's arguments and the `Generation`.

    past: the cache; None if the call did not get it, then the cache of the running `generate` is used.
    kwargs: the arguments for the whole batch, equal on all ranks. Without position_ids, positions count all tokens in
        the cache, padding included, as in transformers.

    Collective for a prompt. Raises Unsupported and InvalidInput.
    """
    group = ring.place.group
    ranks, transport = dist.get_world_size(group), get_transport(group)
    with ErrorReport(transport, PROMPT):
        past = resume(model, ring.call.past, kwargs) if past is None else past
        _check_call(model, kwargs)
        ids, mask, first = kwargs["input_ids"], kwargs.get("attention_mask"), past.cache.length
        tokens = ids.shape[1]
        if mask is not None and tuple(mask.shape) != (len(ids), first + tokens):
            raise Unsupported(
                f"attention_mask has shape {tuple(mask.shape)}; give a padding mask of all cached and new tokens, "
                f"{(len(ids), first + tokens)}"
            )
        padding = None if mask is None else ~mask[:, first:].bool()
        padding = None if padding is None or not padding.any() else padding
        if padding is not None and any(past.windows.values()) and _pads_behind(padding, past.cache.lengths):
            raise Unsupported("generate: padding on the right would be counted in windows; set padding_side='left'")
        positions = kwargs.get("position_ids")
        if positions is None:
            if ring.first:
                raise InvalidInput(
                    f"{type(model).__name__} counts positions from {ring.first}, not from 0; give position_ids="
                )
            positions = torch.arange(first, first + tokens, device=ids.device).expand_as(ids)
        largest = (positions[-3:] if positions.ndim > 2 else positions).max()  # the rope's axes, as in `digest_batch`
        past.running, past.sharded = True, False
        told = digest(ids.cpu().numpy().tobytes()).hex()
    kwargs = {name: x for name, x in kwargs.items() if name != "attention_mask"}  # the cache knows the padding
    kwargs = {**_give_cache(model, kwargs, past), "position_ids": positions}
    cut = make_layout(past.cache.layout, tokens=tokens, ranks=ranks)
    fewest = min(map(cut.rows, range(ranks)))
    if any(layer.record_past for layer in past.recurrent) or (fewest < LEAST_ROWS and padding is None):
        return kwargs, Generation(past, told, largest, np.arange(0), [], None, tokens)
    if fewest < (LEAST_ROWS if past.recurrent else 1):
        with ErrorReport(transport, PROMPT):
            raise Unsupported(
                f"generate: a padded prompt of length {tokens} is too short for {ranks} ranks; give longer ones"
            )
    with Exchange(transport, PROMPT) as exchange:
        name = "tokens (give every rank the whole prompt, not a shard)"
        exchange.mine = json.dumps({name: told, "shape": list(ids.shape), "layers": len(past)}).encode()
    compare_records(exchange.records)
    rows = past.cache.shard(tokens, padding) - first
    kwargs |= {
        name: kwargs[name].index_select(-1, rows.to(ids.device))
        for name in ("input_ids", "position_ids", "token_type_ids")
        if kwargs.get(name) is not None
    }
    keep = kwargs.get("logits_to_keep", 0)
    wanted = np.arange(tokens)[-keep:] if isinstance(keep, int) else keep.cpu().numpy() % tokens
    kept = [places[np.isin(places, wanted)] for places in map(cut.positions, range(ranks))]
    mine = torch.from_numpy(np.flatnonzero(np.isin(rows.numpy(), wanted))).to(ids.device)
    hidden, past.sharded = None if padding is None else padding[:, rows.to(ids.device)], True
    if "logits_to_keep" in kwargs:
        kwargs["logits_to_keep"] = mine
    chosen = None if "logits_to_keep" in kwargs else mine
    return kwargs, Generation(past, None, largest, wanted, kept, chosen, len(rows), hidden, first)


def _pads_behind(padding: Tensor, lengths: list[int]) -> bool:
    """Whether any padding [B, T] follows a token of its row; `lengths` counts the tokens each row already has."""
    begun = (~padding).cumsum(1) + torch.tensor(lengths or [0] * len(padding), device=padding.device)[:, None]
    return bool((padding & (begun > 0)).any())


def _check_call(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise Unsupported for an argument that does not work with a sharded cache, InvalidInput without input_ids."""
    for name in ("output_attentions", "output_hidden_states"):
        if kwargs.get(name, getattr(model.config, name, False)):
            raise Unsupported(f"generate: {name}=True: each rank has only its own rows; leave it out")
    for name in ("inputs_embeds", "labels", "cu_seq_lens_q"):
        if kwargs.get(name) is not None:
            raise Unsupported(f"generate: {name} is not supported; give input_ids alone")
    if kwargs.get("input_ids") is None:
        raise InvalidInput("a call with a RingCache needs the input_ids [batch, tokens] of the whole batch")
    if not kwargs["input_ids"].numel():
        raise InvalidInput(f"generate: input_ids {tuple(kwargs['input_ids'].shape)} has no token; give at least one")


def generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Run `generate` of the model's class with a `RingCache`, by default a new one. All ranks stop at the same token.

    The RingCache replaces the cache that the checkpoint's generation_config names. Raises Unsupported for another cache
    in the call, and for settings that run without a cache or need a second one.
    """
    ring = getattr(model, STATE)
    transport = get_transport(ring.place.group)
    numbers: Any = torch if model.device.type == "cpu" else getattr(torch, model.device.type)
    with Exchange(transport, "generate") as begun:
        begun.mine = numbers.get_rng_state().numpy().tobytes()
        past = find_cache(kwargs)
        if model.config.is_encoder_decoder:
            raise Unsupported("generate: encoder-decoder models are not supported; call unparallelize(model) first")
        mask = kwargs.get("attention_mask")
        if mask is not None and (mask.any(1) & (mask[:, -1] == 0)).any():
            raise Unsupported("generate: a row ends in padding; set padding_side='left' of the tokenizer")
        config = kwargs.get("generation_config", *args[1:2])
        others = {name: x for name, x in kwargs.items() if name != "generation_config"}
        settings, _ = model._prepare_generation_config(config, **others)
        if settings.use_cache is False:
            raise Unsupported("generate: use_cache=False; a parallelized model generates only with its cache")
        for name, reason in REFUSED.items():
            value = getattr(settings, name, None)
            if value is not None and (name, value) != ("guidance_scale", 1):
                raise Unsupported(f"generate: {name}={value}: {reason}")
        other = kwargs.get("cache_implementation")
        if settings.cache_implementation == "quantized":  # other kinds hold the same numbers
            other = "quantized"
        if other is not None or not isinstance(past, RingCache | None):
            raise Unsupported(
                f"generate: {other or type(past).__name__} is not a RingCache; leave it out, or give "
                "past_key_values=RingCache(model)"
            )
        past = RingCache(model) if past is None else past
        kwargs = _give_cache(model, kwargs, past)
        if settings.cache_implementation is not None:
            kwargs["cache_implementation"] = None
    with Exchange(transport, END, once=True) as ended:
        # Rank 0's state: all ranks sample the same tokens.
        numbers.set_rng_state(torch.frombuffer(bytearray(begun.records[0]), dtype=torch.uint8))
        ring.call.past = past
        try:
            result = type(model).generate(model, *args, **kwargs)
        finally:
            ring.call.past = None
        tokens = getattr(result, "sequences", result)
        told = digest(tokens.cpu().numpy().tobytes()).hex() if isinstance(tokens, Tensor) else None
        ended.mine = json.dumps({"generated tokens": told}).encode()
    compare_records(ended.records)
    return result
