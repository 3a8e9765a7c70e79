"""Hugging Face diffusers: `parallelize` makes a transformer attend over tokens that are sharded over ranks.

    parallelize(pipe.transformer, ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    image = pipe("a cat in the rain").images[0]

Every rank holds the whole model and is given whole inputs. Tokens are cut and gathered where the model's `_cp_plan`
says: before its blocks, and after them. In between every layer calls `_attend`, which diffusers finds under the name
"ringattn" once this module is imported. Attention without a mask does not depend on the order of its keys, so that the
sequence is the shard of rank 0, text before image, then that of rank 1, and so on: layout "rows".
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import _get_submodule_by_name, apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention, MochiAttention
from torch.distributed.device_mesh import init_device_mesh

from ..errors import InvalidInput, Unsupported
from ..functional import get_transport, ring_attention
from ..layout.regular import ROWS
from ..pattern import Full
from ..runtime.call import AttentionOptions, check_option_names
from ..transport.records import Exchange
from .borders import gather_shards

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from ..runtime.call import AttentionKeywords

#: The name of the backend in diffusers.
NAME = "ringattn"
#: What the model, its attention processors or the config of diffusers say, and no option may say again.
GIVEN = {"schedule", "scale", "softcap", "dropout"}


@dataclass
class _Parallel(ParallelConfig):  # type: ignore[misc]
    """What diffusers hands to `_attend`, with the options of `ring_attention`."""

    options: AttentionKeywords = field(default_factory=lambda: cast("AttentionKeywords", {}))


def parallelize(
    model: ModelMixin,
    config: ContextParallelConfig,
    *,
    cp_plan: dict[str, Any] | None = None,
    **options: Unpack[AttentionKeywords],
) -> ModelMixin:
    """The model itself, which now cuts its tokens over ring_degree * ulysses_degree ranks; calls are collective.

    config: `ring_degree` groups of `ulysses_degree` consecutive ranks; `mesh` has the axes "ring" and "ulysses" where
        the ranks have other work, too. The number of heads is a multiple of `ulysses_degree`.
    cp_plan: where tokens are cut and gathered; None: the plan of the model's class.
    options: `kernel`, `machine`, `deterministic`, `comm_dtype`, `rotate` and `check`, see
        `runtime.call.AttentionOptions`.

    Stands for the model's `enable_parallelism(config=config)`, and takes any number of image or text tokens from the
    number of ranks on: shards may differ by a token. Keys that are whole on every rank, as in the cross-attention of
    Wan, are attended without messages. Every rank is given the same inputs and computes the loss from the gathered
    output; the mean over the ranks of their gradients, as DDP and FSDP take it, is the gradient of the loss.

    Raises Unsupported for a model with a processor that does not let diffusers choose its attention, and InvalidInput
    without a plan. Calls raise Unsupported, by name, for masks other than boolean padding of keys, for causal attention
    and for dropout.
    """
    check_option_names(options, sorted(set(AttentionOptions.__annotations__) - GIVEN))
    cp_plan = model._cp_plan if cp_plan is None else cp_plan
    if cp_plan is None:
        raise InvalidInput(f"{type(model).__name__} does not say where its tokens can be cut; give cp_plan=")
    attention = Attention, MochiAttention, AttentionModuleMixin
    processors = [module.processor for module in model.modules() if isinstance(module, attention)]
    for processor in processors:
        if not (hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config")):
            raise Unsupported(
                f"{type(processor).__name__} of {type(model).__name__} computes attention by itself, over the tokens "
                "of one rank; set a processor that calls diffusers' dispatch_attention_fn"
            )
    config = copy(config)
    config.ring_anything = True  # so that hooks cut any number of tokens; the constructor refuses it beside Ulysses
    mesh = config.mesh or init_device_mesh(model.device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel = _Parallel(context_parallel_config=config, options=options)
    parallel.setup(dist.get_rank(), dist.get_world_size(), model.device, mesh=mesh)
    model._parallel_config = parallel
    for processor in processors:
        processor._attention_backend, processor._parallel_config = BACKEND, parallel
    apply_context_parallel(model, config, {name: place for name, place in cp_plan.items() if isinstance(place, dict)})
    for name, place in cp_plan.items():
        if not isinstance(place, dict):
            places = place if isinstance(place, list | tuple) else [place]
            dims = [where and where.gather_dim for where in places]
            modules = _get_submodule_by_name(model, name)
            for module in modules if isinstance(modules, list) else [modules]:
                module.register_forward_hook(partial(_gather, dims, config._flattened_mesh.get_group()))
    return model


def _gather(dims: list[int | None], group: ProcessGroup, module: Any, inputs: Any, output: Any) -> Any:
    """The output of a module with the rows of all ranks along the dim of each tensor.

    Its gradient is the sum over the ranks. diffusers' own hook takes the gradient of one rank, which is wrong where
    tokens are cut again later, and cannot gather shards that differ in length with Gloo.
    """
    ring, outputs = get_transport(group), [output] if isinstance(output, torch.Tensor) else [*output]
    for place, dim in enumerate(dims):
        if dim is not None:
            mine = outputs[place]
            with Exchange(ring, "rows of an output") as ranks:
                ranks.mine = str(mine.shape[dim]).encode()
            shards = gather_shards(mine.detach(), [int(raw) for raw in ranks.records], dim, group)
            shards[ring.rank] = mine
            outputs[place] = whole = torch.cat(shards, dim)
            if whole.requires_grad:
                whole.register_hook(partial(_add_up, group))
    return outputs[0] if isinstance(output, torch.Tensor) else tuple(outputs)


def _add_up(group: ProcessGroup, grad: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' gradients."""
    total = grad.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _name_backend() -> AttentionBackendName:
    """A new member of diffusers' enumeration of backends, which has no way to add one."""
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_map_[member._name_] = AttentionBackendName._value2member_map_[NAME] = member
    return member


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: ParallelConfig | None = None,
) -> torch.Tensor:
    """The output [B, n, H, D] of queries [B, n, H, D] over the keys and values [B, m, K, D] of all ranks.

    Without a config the keys are whole on this rank, and diffusers' native backend attends them. diffusers drops
    arguments that no parameter here names.
    """
    if _parallel_config is None:
        native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        return cast(torch.Tensor, native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    padding, (batch, keys) = None, key.shape[:2]
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.shape not in ((batch, keys), (batch, 1, 1, keys)):
            raise Unsupported(
                f"a mask {attn_mask.dtype} {tuple(attn_mask.shape)} in attention over tokens that are cut over ranks; "
                f"only boolean masks of padded keys, {(batch, keys)} or {(batch, 1, 1, keys)} here, are taken"
            )
        padding = ~attn_mask.reshape(batch, keys)
    for name, given in (("is_causal", is_causal), ("dropout_p", dropout_p)):
        if given:
            raise Unsupported(f"{name}={given} in attention over tokens that are cut over ranks")
    config = _parallel_config.context_parallel_config
    out = ring_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), Full(),
        layout=ROWS,
        q_layout=ROWS,
        group=config._flattened_mesh.get_group(),
        key_padding_mask=padding,
        schedule=f"ulysses({config.ulysses_degree}, ring)",
        scale=scale,
        **getattr(_parallel_config, "options", {}),
    )  # fmt: skip
    return cast(torch.Tensor, out.transpose(1, 2))


BACKEND = _name_backend()
_AttentionBackendRegistry.register(BACKEND, supports_context_parallel=True)(_attend)
