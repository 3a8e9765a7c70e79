"""Recurrent and convolutional layers of transformers models over ranks.

Each model's file has these functions at module level under the same names. `take_layers` replaces them, once for each
file, by functions that run over ranks inside the layers of a parallelized model, and are the original ones elsewhere.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..call.functional import get_transport
from ..errors import Unsupported
from ..kernels.base import wide
from ..pattern import Documents
from ..recurrence.layers import causal_conv1d, gated_delta_rule, selective_scan, ssd
from ..transport.records import ErrorReport
from .batches import LayerMasks, read_borders
from .generation import STATE


class _Frame(NamedTuple):
    """The running call of a parallelized model; without a ring, every row is a sequence of its own."""

    ring: Any
    borders: Tensor | None = None
    #: 0 for padding, [B, rows] of this rank.
    mask: Tensor | None = None

    def where(self, name: str, rows: int) -> dict[str, Any]:
        """Keyword arguments that tell the function `name` how the sequence is sharded; this rank has `rows` rows."""
        if self.ring is None:
            return {"layout": "contiguous", "ranks": 1, "documents": Documents([1] * rows)}
        group, generation = self.ring.place.group, self.ring.call.generation
        if generation is not None:
            return {"layout": generation.past.cache.layout, "group": group, "padding": generation.padding}
        layout, documents = self.ring.layout, None if self.borders is None else read_borders(self.borders)
        if isinstance(layout, LayerMasks):
            with ErrorReport(get_transport(group), name):
                layout = "zigzag" if documents is None else layout.cut(documents, dist.get_world_size(group))
        padding = None if self.mask is None else self.mask == 0
        return {"layout": layout, "group": group, "documents": documents, "padding": padding}


#: The call that runs; None outside of calls.
_frame: ContextVar[_Frame | None] = ContextVar("ringattn_frame", default=None)


def _delta(
    frame: _Frame, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gated delta rule of Qwen3-Next and its kin, and KDA."""
    if use_qk_l2norm_in_kernel:
        q, k = (x.to(wide(x.dtype)) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out, state = gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        **frame.where("gated_delta_rule", q.shape[1]),
    )  # fmt: skip
    return out, state


def _ssd(
    frame: _Frame, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    **others: Any,
) -> Any:  # fmt: skip
    """The chunk scan of Mamba-2."""
    assert z is None
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    out, state = ssd(
        x, dt, A, B, C, initial_state=initial_states, output_final_state=return_final_states,
        **frame.where("ssd", x.shape[1]),
    )  # fmt: skip
    out = (out if D is None else out + D[:, None] * x).to(x.dtype)
    return (out, state) if return_final_states else out


def _selective(
    frame: _Frame, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """The selective scan of Mamba: x, dt [B, D, n], B and C [B, N, n]."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = F.softplus(dt) if delta_softplus else dt
    generation = None if frame.ring is None else frame.ring.call.generation
    if generation is not None and generation.before:
        raise Unsupported("generate: Mamba's scan takes no earlier state; give the whole prompt at once")
    out, state = selective_scan(
        x.mT, dt.mT, A, B.mT, C.mT, output_final_state=return_last_state, **frame.where("selective_scan", x.shape[2])
    )
    out = out.mT if D is None else out.mT + D[:, None] * x
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_last_state else out


def _conv(
    frame: _Frame, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """The causal convolution; in a prompt it also stores the last inputs in the cache."""
    generation = None if frame.ring is None else frame.ring.call.generation
    before = None if generation is None else generation.past.conv_before(weight.shape[1] - 1)
    out, last = causal_conv1d(
        x, weight, bias, activation=activation, initial_state=before, output_final_state=generation is not None,
        **frame.where("causal_conv1d", x.shape[2]),
    )  # fmt: skip
    if generation is not None:
        generation.past.store_conv(last)
    return out


def _leave_out(frame: _Frame, *args: Any, **others: Any) -> None:
    """None: the layer then calls the functions that a fused kernel would join."""


#: The functions that run over ranks by their names in the files of models.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), _delta),
    **dict.fromkeys(("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), _delta),
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective,
    "causal_conv1d_fn": _conv,
    **dict.fromkeys(("mamba2_split_conv1d_scan_combined", "mamba_inner_fn"), _leave_out),
}
#: Functions of single tokens, which every rank computes by itself.
OF_TOKENS = ("causal_conv1d_update", "mamba2_selective_state_update", "mamba_selective_state_update")


def mixing_functions(module: nn.Module) -> set[str]:
    """The names in `FUNCTIONS` that a module's forward calls; these functions combine rows of different tokens."""
    return set(FUNCTIONS) & set(inspect.unwrap(type(module).forward).__code__.co_names)


def unknown_functions(model: nn.Module) -> set[str]:
    """Names of functions in a model's source files that transformers may replace by a kernel, unknown to ringattn."""
    found = set()
    for file in {type(module).__module__ for module in model.modules() if mixing_functions(module)}:
        for name, function in vars(sys.modules[file]).items():
            code = getattr(function, "__code__", None) if hasattr(function, "__wrapped__") else None
            if code is not None and "hub_kernels" in code.co_filename:  # that of the decorator, which names a kernel
                found.add(name)
    return found - set(FUNCTIONS) - set(OF_TOKENS)


def take_layers(model: PreTrainedModel, reproducible: int | None) -> bool:
    """Replace the functions in a model's source files that combine rows, such as recurrences, by ones over ranks.

    Hooks tell these functions which call of the model is running. Returns whether the model has such functions.
    Raises Unsupported if it has, and calls are to be `reproducible`.
    """
    mixers = [module for module in model.modules() if mixing_functions(module)]
    if mixers and reproducible is not None:
        raise Unsupported(
            f"reproducible={reproducible}: bits of recurrent layers follow the number of ranks; leave it out"
        )
    for file in {type(module).__module__ for module in mixers}:
        space = vars(sys.modules[file])
        for name in FUNCTIONS.keys() & space.keys():
            if not hasattr(space[name], "_ringattn_original"):
                space[name] = _dispatch(space[name], FUNCTIONS[name])
    for module in mixers if not hasattr(model, STATE) else ():
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.register_forward_hook(_leave, always_call=True)
    return bool(mixers)


def _dispatch(original: Callable[..., Any], over_ranks: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs over ranks in calls of a parallelized model."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = _frame.get()
        generation = None if frame is None or frame.ring is None else frame.ring.call.generation
        if frame is None or (generation is not None and generation.note is not None):
            return original(*args, **kwargs)  # all ranks have the tokens of a step
        return over_ranks(frame, *args, **kwargs)

    call._ringattn_original = original  # type: ignore[attr-defined]
    return call


@torch.compiler.disable  # type: ignore[untyped-decorator]
def enter_call(model: nn.Module, ring: Any, mask: Tensor | None = None) -> None:
    """Tell the replaced functions that a model call begins.

    If gradient checkpointing runs a layer again in the backward, the layer still belongs to this call.
    """
    _frame.set(_Frame(ring, ring.call.borders, mask))
    for module in model.modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None and not hasattr(function, "_ringattn_again"):
            module.__dict__["_gradient_checkpointing_func"] = _checkpoint(function)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def leave_call() -> None:
    """Tell the replaced functions that the model call has ended."""
    _frame.set(None)


def _checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """The checkpointing `function`, whose recomputation is part of the call that it began in."""

    def call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = _frame.get()

        def again(*args: Any, **kwargs: Any) -> Any:
            token = _frame.set(frame)
            try:
                return run(*args, **kwargs)
            finally:
                _frame.reset(token)

        return function(again, *args, **kwargs)

    call._ringattn_again = True  # type: ignore[attr-defined]
    return call


def _enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Let a layer that runs outside of a call, in the recomputation of other checkpoints, run over ranks, too."""
    ring = getattr(module, STATE, None)
    if ring is None or _frame.get() is not None:
        return
    borders = kwargs.get("cu_seq_lens_q")
    if borders is None and ring.call.packs:
        raise Unsupported(
            f"{type(module).__name__} is recomputed by activation checkpointing without its document borders; switch "
            "it on with model.gradient_checkpointing_enable()"
        )
    mask = kwargs.get("attention_mask")
    frame = _Frame(ring, borders, mask if mask is not None and mask.ndim == 2 else None)
    module.__dict__["_ringattn_entered"] = _frame.set(frame)


def _leave(module: nn.Module, args: Any, result: Any) -> None:
    if (token := module.__dict__.pop("_ringattn_entered", None)) is not None:
        _frame.reset(token)


@contextmanager
def each_row_alone() -> Iterator[None]:
    """Context manager in which the replaced functions treat every row as a sequence of its own."""
    token = _frame.set(_Frame(None))
    try:
        yield
    finally:
        _frame.reset(token)
