"""Hugging Face diffusers: `parallelize` makes a transformer attend over tokens that are sharded over ranks.

    parallelize(pipe.transformer, ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    image = pipe("a cat in the rain").images[0]

Every rank holds the whole model and gets whole inputs. Tokens are cut and gathered where the model's `_cp_plan` says,
before and after its blocks. In between, every layer calls `_attend`, which diffusers finds under the name "ringattn"
once this module is imported. Unmasked attention does not depend on the order of keys, so the sequence is the shard of
rank 0, text before image, then that of rank 1, and so on: layout "rows".
"""

from __future__ import annotations

from copy import copy
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from diffusers.hooks import HookRegistry
from diffusers.hooks.context_parallel import ContextParallelSplitHook, _get_submodule_by_name
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention, MochiAttention
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from ..call.arguments import OPTION_NAMES, check_option_names
from ..call.functional import get_transport, ring_attention
from ..errors import InvalidInput, Unsupported
from ..layout.regular import ROWS
from ..pattern import Full
from ..train.loss import SumOverRanks
from ..transport.records import exchange_values
from . import check_release
from .ranks import compare_inputs

if TYPE_CHECKING:
    from diffusers import ModelMixin
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from ..call.arguments import AttentionKeywords

#: The name of the backend in diffusers.
NAME = "ringattn"


def parallelize(
    model: ModelMixin,
    config: ContextParallelConfig,
    *,
    cp_plan: dict[str, Any] | None = None,
    **options: Unpack[AttentionKeywords],
) -> ModelMixin:
    """Shard the tokens of a diffusers model over ring_degree * ulysses_degree ranks; returns `model`.

    config: `ring_degree` groups of `ulysses_degree` consecutive ranks. If ranks are also split along other axes, give
        it a `mesh` with axes named "ring" and "ulysses". The number of heads must be a multiple of `ulysses_degree`.
    cp_plan: where tokens are cut and gathered; None: the plan of the model's class.
    options: `kernel`, `machine`, `deterministic`, `comm_dtype`, `rotate`, `check` of `AttentionOptions`.

    Calls of the model are then collective. Call `parallelize` instead of the model's
    `enable_parallelism(config=config)`. Any number of image or text tokens works, at least one per rank: shards may
    differ by a token. Keys that are whole on every rank, as in Wan's cross-attention, need no messages. All ranks get
    the same inputs and compute the loss from the gathered output; the mean of their gradients, as DDP and FSDP take it,
    is the gradient of the loss.

    Raises Unsupported if a processor does not let diffusers choose its attention; InvalidInput without a plan, for
    degrees that do not match the ranks, and for a model that is parallel already. Calls raise Unsupported for causal
    attention, dropout and masks other than boolean ones of padded keys, InvalidInput for fewer tokens than ranks, and
    Mismatch on every rank if inputs, or unsharded weights, differ between ranks.
    """
    check_release("diffusers")
    if model._parallel_config is not None:
        raise InvalidInput(f"this {type(model).__name__} is parallelized already; load it again for another config")
    check_option_names(options, {*OPTION_NAMES} - {"schedule", "scale", "softcap", "dropout"})
    cp_plan = model._cp_plan if cp_plan is None else cp_plan
    if cp_plan is None:
        raise InvalidInput(f"{type(model).__name__} has no plan of where to cut its tokens; give cp_plan=")
    attention = Attention, MochiAttention, AttentionModuleMixin
    for processor in (processors := [x.processor for x in model.modules() if isinstance(x, attention)]):
        if not (hasattr(processor, "_attention_backend") and hasattr(processor, "_parallel_config")):
            raise Unsupported(
                f"{type(processor).__name__} of {type(model).__name__} computes attention by itself, over the tokens "
                "of one rank; set a processor that calls diffusers' dispatch_attention_fn"
            )
    config = copy(config)
    config.ring_anything = True  # lets hooks cut any number of tokens; the constructor refuses it with Ulysses
    have = config.mesh["ring", "ulysses"].size() if config.mesh else dist.get_world_size()
    if config.ring_degree * config.ulysses_degree != have:
        raise InvalidInput(
            f"ring_degree {config.ring_degree} x ulysses_degree {config.ulysses_degree} must equal the number of "
            f"ranks, which is {have}; change the degrees, or give mesh= if other axes take the remaining ranks"
        )
    mesh = config.mesh or init_device_mesh(model.device.type, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.ring_options = options  # for `_attend`
    parallel.setup(dist.get_rank(), dist.get_world_size(), model.device, mesh=mesh)
    model._parallel_config = parallel
    for processor in processors:
        processor._attention_backend, processor._parallel_config = BACKEND, parallel
    group = config._flattened_mesh.get_group()
    model.register_forward_pre_hook(partial(torch.compiler.disable(_compare_inputs), group), with_kwargs=True)
    for name, place in cp_plan.items():
        modules = _get_submodule_by_name(model, name)
        for module in modules if isinstance(modules, list) else [modules]:
            if isinstance(place, dict):
                registry = HookRegistry.check_if_exists_or_initialize(module)
                registry.register_hook(_Cut(place, config), f"{NAME} {name}")
            else:
                dims = [x and x.gather_dim for x in (place if isinstance(place, list | tuple) else [place])]
                module.register_forward_hook(partial(torch.compiler.disable(_gather), dims, group))
    return model


class _Cut(ContextParallelSplitHook):  # type: ignore[misc]
    """diffusers' hook that cuts tokens, but leaves a whole model's output alone, which may be a dataclass."""

    def _prepare_cp_input(self, x: Tensor, place: Any) -> Tensor:
        ranks = self.parallel_config._flattened_mesh.size()
        if place.expected_dims in (None, x.dim()) and x.shape[place.split_dim] < ranks:
            raise InvalidInput(
                f"an input {tuple(x.shape)} has fewer tokens, in dim {place.split_dim}, than the {ranks} ranks: each "
                "needs a token of the image, and one of the text if that is cut; use fewer ranks"
            )
        return cast(Tensor, super()._prepare_cp_input(x, place))

    def post_forward(self, module: Any, output: Any) -> Any:
        cuts = any(isinstance(name, int) for name in self.metadata)  # indices of outputs
        return super().post_forward(module, output) if cuts else output


def _compare_inputs(group: ProcessGroup, module: Any, arguments: Any, named: Any) -> None:
    """Raise Mismatch on every rank if the ranks' inputs differ in shape or by more than rounding.

    The first call, and each with gradients enabled, also compares weights, since training may let them drift apart.
    Sharded weights and those on the meta device are left out.
    """
    weights, config = [], module._parallel_config
    if torch.is_grad_enabled() or not hasattr(config, "ring_compared"):
        weights = [x for name, x in module.named_parameters() if type(x) is torch.nn.Parameter and "_fsdp" not in name]
        weights = [x for x in weights if not x.is_meta]
    compare_inputs([x for x in tree_leaves((arguments, named)) if isinstance(x, Tensor)], group, weights)
    config.ring_compared = True


def _gather(dims: list[int | None], group: ProcessGroup, module: Any, inputs: Any, output: Any) -> Any:
    """A module's output with the rows of all ranks, gathered along each tensor's dim in `dims`; gradients add up.

    diffusers' own hook takes the gradient of one rank, which is wrong if tokens are cut again later, and it cannot
    gather shards of different lengths with Gloo.
    """
    outputs = [output] if isinstance(output, Tensor) else [*output]
    for i, dim in enumerate(dims):
        if dim is not None:
            rows, shape = outputs[i].shape[dim], [*outputs[i].shape]
            lengths = exchange_values(get_transport(group), "rows of an output", rows, int)
            *_, shape[dim] = ends = [*accumulate(lengths)]
            end = ends[dist.get_rank(group)]
            whole = outputs[i].new_zeros(shape).slice_scatter(outputs[i], dim, end - rows, end)
            outputs[i] = SumOverRanks.apply(whole, group)
    return outputs[0] if isinstance(output, Tensor) else tuple(outputs)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: ParallelConfig | None = None,
) -> Tensor:
    """The output [B, n, H, D] of queries [B, n, H, D] over the keys and values [B, m, K, D] of all ranks.

    Without a config this rank holds all keys, and diffusers' native backend computes. diffusers drops arguments that
    are not among these parameters.
    """
    if _parallel_config is None:
        native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        return cast(Tensor, native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    padding, (batch, keys) = None, key.shape[:2]
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool or attn_mask.shape not in ((batch, keys), (batch, 1, 1, keys)):
            raise Unsupported(
                f"a mask {attn_mask.dtype} {tuple(attn_mask.shape)} is not supported in attention over sharded tokens; "
                f"give only boolean masks of padded keys, here {(batch, keys)} or {(batch, 1, 1, keys)}"
            )
        padding = ~attn_mask.reshape(batch, keys)
    if is_causal or dropout_p:
        raise Unsupported(
            f"{is_causal=}, {dropout_p=} are not supported in attention over sharded tokens; leave both out"
        )
    config = _parallel_config.context_parallel_config
    out = ring_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), Full(),
        layout=ROWS, q_layout=ROWS, group=config._flattened_mesh.get_group(), key_padding_mask=padding, scale=scale,
        schedule=f"ulysses({config.ulysses_degree}, ring)", **getattr(_parallel_config, "ring_options", {}),
    )  # fmt: skip
    return cast(Tensor, out.transpose(1, 2))


#: A new member of diffusers' enumeration of backends, made by hand as an enumeration cannot be extended.
BACKEND = str.__new__(AttentionBackendName, NAME)
BACKEND._name_, BACKEND._value_ = NAME.upper(), NAME
AttentionBackendName._member_map_[BACKEND._name_] = AttentionBackendName._value2member_map_[NAME] = BACKEND
_AttentionBackendRegistry.register(BACKEND, supports_context_parallel=True)(_attend)
