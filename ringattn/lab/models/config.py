"""Model sizes, by name or from a Hugging Face config; time, memory and parameters follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...errors import InvalidInput
from ...files import Count, Positive, as_kind, check_fields, load
from ...text import did_you_mean
from .recurrence import Recurrence

#: Sizes from published configs, by model name.
MODELS = load(Path(__file__).with_name("models.yaml"), dict[str, dict[str, Any]], "models")
#: What a layer may have, see ModelConfig.kinds.
KINDS = {"am", "rm", "arm", "a", "r", "m"}
#: Number of layers, bounded because each layer stores an entry.
Layers = Annotated[int, Meta(ge=1, le=1 << 16)]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: a token keeps a latent, from which each head makes its key and its value."""

    #: Numbers of the latent, and those of each key that all heads share, which carry the position.
    rank: Count
    rope: Count
    #: Columns of a head's value.
    value: Count
    #: Numbers of the latent that queries are made of; None: they are made of the layer's input.
    queries: Count | None = None
    #: (heads, head dim, keys) of an indexer that chooses so many keys for each query; None: queries attend to all.
    index: tuple[Count, Count, Count] | None = None

    @property
    def kept(self) -> int:
        """The numbers that a token keeps in a layer, those for the indexer included."""
        return self.rank + self.rope + (0 if self.index is None else self.index[1])

    def inputs(self, hidden: int, columns: int) -> list[tuple[int, int, bool]]:
        """(columns, inner size, whether heads split it) of the products before attention, without the expanding one.

        `columns` are those of all queries.
        """
        heads, dim = (0, 0) if self.index is None else self.index[:2]
        inner = self.queries or hidden
        found = [(self.rank + self.rope + (self.queries or 0) + dim + heads, hidden, False), (columns, inner, True)]
        return [*found, *([(heads * dim, inner, False)] if heads else [])]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder-only language model. Raises InvalidInput for inconsistent sizes."""

    name: str
    layers: Layers
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    #: Columns of the MLP, or of each expert.
    mlp: Count
    vocab: Count
    experts: Count = 1
    experts_per_token: Count = 1
    #: Whether the MLP has a gate: three matrices instead of two.
    gated: bool = True
    #: For each layer that attends how many keys a query sees, its own included. None: all before it; (): all None.
    windows: tuple[Count | None, ...] = ()
    sinks: bool = False
    softcap: Positive | None = None
    #: Whether the output matrix is the embedding.
    tied: bool = False
    #: Parameters per layer besides its matrices (norms, biases, sinks), without those of experts; and per expert.
    vectors: int = 0
    expert_vectors: int = 0
    #: Bytes per weight as stored for inference: of the matrices of experts (of the MLP), and of attention; None: as for
    #: the activations. Training holds weights in the dtype of the activations.
    mlp_item: float | None = None
    attention_item: float | None = None
    #: How many of the experts compute all tokens, on every rank.
    shared: int = 0
    #: Whether attention's output has a gate of as many columns as the queries.
    gates_output: bool = False
    #: The recurrence of layers that have one.
    recurrence: Recurrence | None = None
    #: What each layer has: "a" attention, "r" a recurrence, "m" an MLP, as in "arm"; (): attention and an MLP.
    kinds: tuple[str, ...] = ()
    #: What layers keep of a token instead of keys and values; `head_dim` is then that of queries and keys.
    latent: Latent | None = None
    #: How many of the first layers have an MLP without experts, and its columns.
    dense: int = 0
    dense_mlp: int = 0

    def __post_init__(self) -> None:
        check_fields(self, f"model {self.name}")
        if self.heads % self.kv_heads:
            raise InvalidInput(
                f"model {self.name}: {self.heads} heads cannot share {self.kv_heads} key/value heads evenly; give a "
                "divisor of the heads"
            )
        if self.experts_per_token > self.experts:
            raise InvalidInput(
                f"model {self.name}: experts_per_token={self.experts_per_token} exceeds the {self.experts} experts; "
                "give at most that many"
            )
        if {*self.kinds} <= {"am"}:
            object.__setattr__(self, "kinds", ("am",) * self.layers)
        if (
            len(self.kinds) != self.layers
            or not {*self.kinds} <= KINDS
            or (self.having["r"] and self.recurrence is None)
        ):
            raise InvalidInput(
                f"model {self.name}: kinds must name what each of {self.layers} layers has, one of "
                f"{', '.join(sorted(KINDS))} (with recurrence= for r); got {len(self.kinds)}"
            )
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.having["a"])
        if len(self.windows) != self.having["a"]:
            raise InvalidInput(
                f"model {self.name}: windows must be {self.having['a']} numbers or None, one a layer that attends; "
                f"got {len(self.windows)}"
            )

    @cached_property
    def having(self) -> dict[str, int]:
        """The number of layers that have attention "a", a recurrence "r", one of these "ar", or an MLP "m"."""
        return {part: sum(any(one in kind for one in part) for kind in self.kinds) for part in ("a", "r", "ar", "m")}

    @property
    def expert_layers(self) -> int:
        """The number of layers whose MLP has experts, or that have an MLP, if none has."""
        return self.having["m"] - self.dense

    def work(self, tokens: int) -> list[float]:
        """FLOPs of each layer in a forward for the last of `tokens` tokens."""
        windows, dense = iter(self.windows), self.dense
        wide, found = 2.0 * self.heads * (self.head_dim + self.value_dim), []
        router = 2.0 * self.hidden * self.experts * (self.experts > 1)
        own = {part: 2.0 * self._size(part) for part in "armd"}
        for kind in self.kinds:
            flops = own["r"] + self.recurrence.flops(summary=False) if "r" in kind and self.recurrence else 0.0
            if "a" in kind:
                flops += own["a"] + wide * min(next(windows) or self.chosen or tokens, tokens)
            if "m" in kind:
                flops += own["d"] if dense > 0 else own["m"] + router
                dense -= 1
            found.append(flops)
        return found

    def part(self, start: int, stop: int) -> ModelConfig:
        """The model with only the layers from number `start` to number `stop` - 1."""
        before, here = ("".join(self.kinds[span]) for span in (slice(start), slice(start, stop)))
        first, dense = before.count("a"), max(self.dense - before.count("m"), 0)
        windows, dense = self.windows[first : first + here.count("a")], min(dense, here.count("m"))
        return replace(self, layers=stop - start, kinds=self.kinds[start:stop], windows=windows, dense=dense)

    def matrices(self, part: str) -> list[tuple[int, int, int, int]]:
        """(how many, how many a token uses, inputs, outputs) of the matrices of a part of one layer.

        A part is attention "a", a recurrence "r", an MLP with experts, if the model has any, "m", or without "d".
        """
        h, one, up = self.hidden, self.recurrence, 2 if self.gated else 1
        if part == "r":
            return [] if one is None else [(1, 1, h, one.projected), (1, 1, one.output, h)]
        if part in "md":
            n, used, wide = (self.experts, self.experts_per_token, self.mlp) if part == "m" else (1, 1, self.dense_mlp)
            return [(up * n, up * used, h, wide), (n, used, wide, h)]
        queries, keys, out = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.heads * self.value_dim
        if self.latent is None:
            return [(1, 1, h, queries * (1 + self.gates_output)), (2, 2, h, keys), (1, 1, out, h)]
        made = [(1, 1, inner, wide) for wide, inner, _ in self.latent.inputs(h, queries)]
        return [*made, (1, 1, self.latent.rank, self.heads * self.expanded), (1, 1, out, h)]

    def layered(self, count: Callable[[int, int, int, int], float]) -> float:
        """The sum over all matrices of layers of a number made of the four of `matrices`."""
        layers = {"a": self.having["a"], "r": self.having["r"], "m": self.expert_layers, "d": self.dense}
        return sum(n * sum(count(*one) for one in self.matrices(part)) for part, n in layers.items())

    def adapters(self, rank: int) -> float:
        """The number of parameters of adapters of this rank, two small matrices beside each matrix of a layer."""
        return self.layered(lambda count, used, inputs, outputs: count * rank * (inputs + outputs))

    @property
    def value_dim(self) -> int:
        """Columns of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def chosen(self) -> int | None:
        """How many keys a query chooses at most; None: it attends to all that it sees."""
        return None if self.latent is None or self.latent.index is None else self.latent.index[2]

    @property
    def expanded(self) -> int:
        """Columns of a head's key and value that are made of the latent."""
        return 0 if self.latent is None else self.head_dim - self.latent.rope + self.latent.value

    @cached_property
    def mixers(self) -> int:
        """The number of parameters, over all layers, in attention and in recurrent layers."""
        own = 0 if self.recurrence is None else self.having["r"] * self.recurrence.own
        return own + self.having["a"] * self._size("a") + self.having["r"] * self._size("r")

    def _size(self, part: str) -> int:
        """The parameters of the matrices of a part of one layer, which a token uses, see `matrices`."""
        return sum(used * inputs * outputs for _, used, inputs, outputs in self.matrices(part))

    @property
    def expert(self) -> int:
        """The number of parameters of one expert, or of the MLP where there are no experts."""
        return self.hidden * self.mlp * (3 if self.gated else 2) + self.expert_vectors

    @property
    def routed(self) -> float:
        """The number of parameters of one layer's experts; the mean over layers."""
        return self.expert_layers / self.layers * self.experts * self.expert

    @cached_property
    def mlps(self) -> int:
        """The number of parameters of all experts and MLPs."""
        plain = self.dense * self.hidden * self.dense_mlp * (3 if self.gated else 2)
        return self.expert_layers * self.experts * self.expert + plain

    @property
    def table(self) -> int:
        """The number of parameters of the embedding; the output matrix has as many."""
        return self.vocab * self.hidden

    @property
    def layer(self) -> int:
        """The number of parameters of one layer with all its experts; of layers that differ, the mean."""
        return self._layers // self.layers

    @cached_property
    def _layers(self) -> int:
        """The number of parameters of all layers."""
        routed = self.expert_layers if self.experts > 1 else 0
        # Only in Qwen3-Next, whose attention has one, too, does a shared expert have a gate.
        columns = self.experts - (0 if self.gates_output else self.shared)
        return self.mixers + self.mlps + routed * self.hidden * columns + self.layers * self.vectors

    @cached_property
    def parameters(self) -> int:
        """The number of all parameters: layers, final norm, embedding, and the output matrix unless tied to it."""
        return self._layers + self.hidden + self.table * (1 if self.tied else 2)

    def stored_bytes(self, item: int) -> float:
        """Bytes of all weights as stored for inference; a weight that is not quantized takes `item` bytes."""
        mlp = self.mlps - self.expert_layers * self.experts * self.expert_vectors
        attention = self.mixers
        fewer = mlp * (item - (self.mlp_item or item)) + attention * (item - (self.attention_item or item))
        return item * self.parameters - fewer

    @cached_property
    def active_parameters(self) -> int:
        """The number of parameters used for each token, without the embedding and the experts that are not chosen."""
        unused = self.expert_layers * (self.experts - self.experts_per_token) * self.expert
        return self._layers - unused + self.hidden + self.table


class Quantization(Struct):
    """How a Hugging Face config says that the weights are stored in fewer bits."""

    quant_method: str


class LinearAttention(Struct):
    """The recurrent layers of Kimi Linear, numbered from 1."""

    kda_layers: list[int]
    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Count = 4


class HuggingFaceConfig(Struct):
    """Those keys of a Hugging Face config that determine sizes; null in the file is the same as a missing key."""

    model_type: str
    hidden_size: Count
    num_hidden_layers: Layers
    num_attention_heads: Count
    intermediate_size: Count
    vocab_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    moe_intermediate_size: Count | None = None
    num_local_experts: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    sliding_window: Count | None = None
    sliding_window_pattern: Count = 6
    max_window_layers: int = 0
    use_sliding_window: bool = False
    layer_types: (
        list[Literal["full_attention", "sliding_attention", "linear_attention", "indexed_attention"]] | None
    ) = None
    shared_expert_intermediate_size: int = 0
    full_attention_interval: Count = 4
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count = 4
    attn_layer_indices: list[int] | None = None
    linear_attn_config: LinearAttention | None = None
    layers_block_type: list[Literal["mamba", "linear_attention", "attention", "full_attention", "mlp"]] | None = None
    hybrid_override_pattern: Annotated[str, Meta(pattern=r"^[M*-]+$")] | None = None
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_rope_head_dim: Count | None = None
    qk_nope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    index_n_heads: Count | None = None
    index_head_dim: Count | None = None
    index_topk: Count | None = None
    indexer_types: list[Literal["full"]] | None = None
    mamba_n_heads: Count | None = None
    mamba_n_groups: Count = 1
    mamba_d_state: Count | None = None
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_d_ssm: Count | None = None
    mamba_rms_norm: bool = False
    mamba_num_heads: Count | None = None
    mamba_head_dim: Count | None = None
    ssm_state_size: Count | None = None
    n_groups: Count = 8
    conv_kernel: Count = 4
    attn_logit_softcapping: Positive | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    quantization_config: Quantization | None = None


#: Defaults of transformers for keys that published configs leave out, by model type.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_experts_per_tok": 8},
    "bamba": {"mamba_n_heads": 128, "mamba_d_state": 256, "num_key_value_heads": 8},
}
#: Keys that can change the model in ways that are not modelled, each with the values that change nothing.
_PLAIN: dict[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu", "gelu", "gelu_pytorch_tanh"),
    "mlp_bias": (None, False),
    "decoder_sparse_step": (None, 1),
    "moe_layer_freq": (None, 1),
    "mlp_only_layers": (None, []),
    "use_bidirectional_attention": (None, False),
}
#: By quant_method: bytes per stored weight of the MLP's matrices, and of attention's.
_STORED: dict[str | None, tuple[float | None, float | None]] = {
    None: (None, None),
    "mxfp4": (17 / 32, None),  # 32 numbers of 4 bits share a scale of 8 bits (OCP Microscaling Formats 1.0)
    "fp8": (1 + 4 / 128**2, 1 + 4 / 128**2),  # blocks of 128 x 128 share an fp32 scale
}


def _llama_vectors(c: HuggingFaceConfig, q: int, kv: int, d: int) -> int:
    """Parameters of two norms and, with attention_bias, of the biases of q, k, v and the output."""
    return 2 * c.hidden_size + (q + 2 * kv + c.hidden_size if c.attention_bias else 0)


def _latent_vectors(c: HuggingFaceConfig, q: int, kv: int, d: int) -> int:
    """Parameters of four norms, and of the norm of an indexer's keys; with attention_bias, of three biases."""
    made = (c.q_lora_rank or 0) + (c.kv_lora_rank or 0)
    index = 0 if c.index_topk is None else 2 * (c.index_head_dim or 0)
    biased = made + (c.qk_rope_head_dim or 0) + c.hidden_size if c.attention_bias else 0
    return 2 * c.hidden_size + made + index + biased


#: Model types that keep latents; those with an indexer choose keys.
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_linear", *_INDEXED)
#: By model type: parameters of a layer besides its matrices, from the config, the columns of q and k, and head dim.
_VECTORS: dict[str, Callable[[HuggingFaceConfig, int, int, int], int]] = {
    "llama": _llama_vectors,
    **dict.fromkeys(("mistral", "mixtral", "phi3"), lambda c, q, kv, d: 2 * c.hidden_size),
    "qwen2": lambda c, q, kv, d: 2 * c.hidden_size + q + 2 * kv,
    "qwen3": lambda c, q, kv, d: _llama_vectors(c, q, kv, d) + 2 * d,
    "qwen3_moe": lambda c, q, kv, d: _llama_vectors(c, q, kv, d) + 2 * d,
    "gemma": _llama_vectors,
    "gemma3_text": lambda c, q, kv, d: _llama_vectors(c, q, kv, d) + 2 * c.hidden_size + 2 * d,
    "gemma2": lambda c, q, kv, d: _llama_vectors(c, q, kv, d) + 2 * c.hidden_size,
    "gpt_oss": lambda c, q, kv, d: _llama_vectors(c, q, kv, d) + c.num_attention_heads + c.num_local_experts,
    "qwen3_next": lambda c, q, kv, d: 2 * c.hidden_size + 2 * d,
    **dict.fromkeys(("bamba", "falcon_h1"), lambda c, q, kv, d: 2 * c.hidden_size),
    "nemotron_h": lambda c, q, kv, d: c.hidden_size,
    **dict.fromkeys(_LATENT, _latent_vectors),
}
#: Model types that tie embedding and output unless their config says otherwise.
_TIED = ("gemma", "gemma2", "gemma3_text")


def from_hugging_face(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The model of a Hugging Face config.json. Raises InvalidInput for keys that are missing or not modelled."""
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and config.get("hidden_size") is None:  # a multimodal model: its text part
        kind = inner.get("model_type") or f"{config.get('model_type')}_text"
        quantized = config.get("quantization_config")
        config = {"quantization_config": quantized, **inner, "model_type": kind}
    kind = None if config.get("model_type") is None else str(config["model_type"])
    if kind is not None and kind not in _VECTORS:
        raise InvalidInput(
            f"model {name}: model_type={kind!r} is not modelled; {did_you_mean(kind, _VECTORS)}expected one of "
            f"{', '.join(_VECTORS)}, or make a ringattn.lab.models.config.ModelConfig"
        )
    given = {**_DEFAULTS.get(kind or "", {}), **{key: value for key, value in config.items() if value is not None}}
    if kind == "nemotron_h":
        given = {key: value for key, value in given.items() if "expert" not in key}  # its layers say whether it has any
        given.setdefault("num_hidden_layers", len(given.get("layers_block_type", ())))
    read = as_kind(given, HuggingFaceConfig, f"model {name}")
    for key, plain in _PLAIN.items():
        if given.get(key) not in plain:
            raise InvalidInput(f"model {name}: {key}={given[key]!r} is not modelled; leave it out of the config")
    heads, columns = read.num_attention_heads, read.intermediate_size
    if read.model_type in ("qwen3_moe", "qwen3_next"):
        columns = as_kind(read.moe_intermediate_size, Count, f"model {name}: moe_intermediate_size")
    head_dim = read.head_dim or read.hidden_size // heads
    kv_heads = read.num_key_value_heads or heads
    latent, routed = None, read.num_local_experts or read.num_experts
    if kind in _LATENT:
        latent, head_dim, kv_heads, routed = *_latent(read, name), heads, read.n_routed_experts or read.num_experts
        columns = as_kind(read.moe_intermediate_size, Count, f"model {name}: moe_intermediate_size")
    stored = None if read.quantization_config is None else read.quantization_config.quant_method
    if stored not in _STORED:
        raise InvalidInput(
            f"model {name}: quantization_config with quant_method={stored!r} is not modelled; expected one of "
            f"{', '.join(filter(None, _STORED))}, or leave quantization_config out for weights in the dtype of the "
            "activations"
        )
    # A shared expert is one more, which all tokens choose, and its gate one more column of the router.
    shared = int(read.shared_expert_intermediate_size > 0)
    if shared and read.shared_expert_intermediate_size != columns:
        raise InvalidInput(f"model {name}: a shared expert is not modelled unless it is as wide as the others")
    shared += read.n_shared_experts + read.num_shared_experts
    recurrence, kinds = _recurrence(read, head_dim, name)
    return ModelConfig(
        name=name,
        layers=read.num_hidden_layers,
        hidden=read.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=columns,
        vocab=read.vocab_size,
        experts=(routed or 1) + shared,
        experts_per_token=(read.num_experts_per_tok or read.num_experts_per_token or 1) + shared,
        gated=kind != "nemotron_h",
        windows=_windows(read, name),
        sinks=kind == "gpt_oss",
        softcap=read.attn_logit_softcapping,
        tied=kind in _TIED if read.tie_word_embeddings is None else read.tie_word_embeddings,
        vectors=_VECTORS[read.model_type](read, heads * head_dim, kv_heads * head_dim, head_dim),
        expert_vectors=2 * read.intermediate_size + read.hidden_size if kind == "gpt_oss" else 0,
        mlp_item=_STORED[stored][0],
        attention_item=_STORED[stored][1],
        shared=shared,
        gates_output=kind == "qwen3_next",
        recurrence=recurrence,
        kinds=kinds,
        latent=latent,
        dense=min(read.first_k_dense_replace, read.num_hidden_layers),
        dense_mlp=read.intermediate_size,
    )


def _latent(c: HuggingFaceConfig, name: str) -> tuple[Latent, int]:
    """(latent, head dim) of a model that keeps latents. Raises InvalidInput where a size is missing."""

    def size(key: str) -> int:
        return as_kind(getattr(c, key), Count, f"model {name}: {key}")

    rank, rope, nope, value = map(size, ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    index = (size("index_n_heads"), size("index_head_dim"), size("index_topk")) if c.model_type in _INDEXED else None
    return Latent(rank, rope, value, c.q_lora_rank, index), nope + rope


def _recurrence(c: HuggingFaceConfig, head_dim: int, name: str) -> tuple[Recurrence | None, tuple[str, ...]]:
    """The recurrence of a hybrid model, and what each layer has. Raises InvalidInput where a size is missing."""

    def size(key: str) -> int:
        return as_kind(getattr(c, key), Count, f"model {name}: {key}")

    layers, kernel = c.num_hidden_layers, c.mamba_d_conv
    if c.model_type == "qwen3_next":
        every, kernel = c.full_attention_interval, c.linear_conv_kernel_dim
        types = c.layer_types or ["linear_attention" if i % every else "full_attention" for i in range(1, layers + 1)]
        heads, key_heads = size("linear_num_value_heads"), size("linear_num_key_heads")
        keys, values = size("linear_key_head_dim"), size("linear_value_head_dim")
        convolved = 2 * key_heads * keys + heads * values
        # The convolution, its gate's norm, dt_bias and A_log; a layer that attends has norms of q and k.
        own = convolved * kernel + values + 2 * heads - 2 * head_dim
        projected = convolved + heads * values + 2 * heads
        kinds = tuple("rm" if one == "linear_attention" else "am" for one in types)
        return Recurrence(heads, key_heads, keys, values, kernel, convolved, projected, own), kinds
    if c.model_type == "kimi_linear":
        one = as_kind(c.linear_attn_config, LinearAttention, f"model {name}: linear_attn_config")
        heads, dim, kernel = one.num_heads, one.head_dim, one.short_conv_kernel_size
        # The convolution, dt_bias, A_log, a norm, and the second matrices of two gates; an attending layer has a norm.
        own = heads * dim * (3 * kernel + 1 + 2 * dim) + heads + dim - size("kv_lora_rank")
        kinds = tuple("rm" if i in one.kda_layers else "am" for i in range(1, layers + 1))
        projected = 3 * heads * dim + 2 * dim + heads
        return Recurrence(heads, heads, dim, dim, kernel, 3 * heads * dim, projected, own), kinds
    if c.model_type == "nemotron_h":
        heads, keys, groups, kernel = size("mamba_num_heads"), size("ssm_state_size"), c.n_groups, c.conv_kernel
        inner, normed = heads * size("mamba_head_dim"), True
        letters = {"M": "r", "*": "a", "-": "m", "mamba": "r", "linear_attention": "r", "mlp": "m"}
        kinds = tuple(letters.get(one, "a") for one in c.layers_block_type or c.hybrid_override_pattern or "")
    elif c.model_type in ("bamba", "falcon_h1"):
        heads, keys, groups = size("mamba_n_heads"), size("mamba_d_state"), c.mamba_n_groups
        inner, normed = c.mamba_d_ssm or c.mamba_expand * c.hidden_size, c.mamba_rms_norm or c.model_type == "bamba"
        attending = range(layers) if c.model_type == "falcon_h1" else c.attn_layer_indices or ()
        beside = "arm" if c.model_type == "falcon_h1" else "am"
        kinds = tuple(beside if i in attending else "rm" for i in range(layers))
    else:
        return None, ()
    convolved = inner + 2 * groups * keys
    own = convolved * (kernel + 1) + 3 * heads + inner * normed
    sizes = keys, inner // heads, kernel, convolved, convolved + inner + heads, own
    return Recurrence(heads, groups, *sizes, mamba=True), kinds


def _windows(config: HuggingFaceConfig, name: str) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, else by the rule of the model type."""
    layers, window, types = config.num_hidden_layers, config.sliding_window, config.layer_types
    if config.model_type in ("qwen3_next", "bamba", "falcon_h1", "nemotron_h", *_LATENT):
        return ()
    if types is not None:
        if len(types) != layers or (window is None and "sliding_attention" in types):
            raise InvalidInput(
                f"model {name}: layer_types must give full_attention or sliding_attention for each of {layers} layers, "
                f"the latter with a sliding_window; got {len(types)} layers, sliding_window={window}"
            )
        return tuple(window if one == "sliding_attention" else None for one in types)
    qwen = config.model_type.startswith("qwen")
    if window is None or (qwen and not config.use_sliding_window):
        return (None,) * layers
    if config.model_type in ("gpt_oss", "gemma2"):  # layers alternate, starting with a window
        return tuple(None if layer % 2 else window for layer in range(layers))
    if config.model_type == "gemma3_text":  # every sixth layer sees all tokens
        every = config.sliding_window_pattern
        return tuple(None if (layer + 1) % every == 0 else window for layer in range(layers))
    first = config.max_window_layers if qwen else 0
    return tuple(None if layer < first else window for layer in range(layers))


def load_model(name_or_path: str) -> ModelConfig:
    """The model named in `MODELS`, or described by a JSON file with a Hugging Face config. Raises InvalidInput."""
    if name_or_path in MODELS:
        return from_hugging_face(MODELS[name_or_path], name_or_path)
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise InvalidInput(
            f"unknown model {name_or_path!r}; {did_you_mean(name_or_path, MODELS)}expected {', '.join(MODELS)}, or a "
            "file that ends in .json, such as a config.json of Hugging Face"
        )
    config = load(path, dict[str, Any], "model")
    return from_hugging_face(config, path.stem if path.stem != "config" else path.resolve().parent.name)
