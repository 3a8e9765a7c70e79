"""An attention call as one value: its arguments, checked and resolved. Repeated calls find their value in a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache import Cache, cached
from ..dtypes import ITEM_BYTES, check_type, dtype_name
from ..errors import InvalidInput, Unsupported
from ..kernels import get_kernel
from ..kernels.base import Kernel, positive
from ..kernels.contract import VisitKernel
from ..kernels.memory import differentiable
from ..kernels.pad import EXTRA, check_padding, hidden_column, hide_keys
from ..layout.regular import Layout, check_layout, layout_name
from ..pattern import Pattern, as_pattern
from ..plan.plan import Plan
from ..plan.steps import PlanSizes, parse_rotate
from ..transport.base import CHECKS
from .arguments import (
    OPTION_NAMES,
    AttentionOptions,
    check_chosen,
    check_option_names,
    check_sinks,
    check_tensors,
    computing,
    looks_swapped,
    read_dropout,
)
from .planner import PLANS, find_faster_form, find_plan, resolve_auto
from .rows import Rows

if TYPE_CHECKING:
    from ..machine.machine import Machine

#: The options that are sizes of a plan.
PLANNED = "comm_dtype", "rotate", "reproducible"
#: The bytes of cached answers of a compiled call, plans aside.
ANSWERS = 1 << 22


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledCall:
    """The checked arguments of an attention call, without the values of its tensors.

    `sizes` are keyword arguments of `PlanSizes`, for the tensors that kernels get: a `key_padding_mask` makes q and k
    EXTRA columns wider. `q_layout` is None if queries and keys are the same tokens. `rows` and `q_rows` are the numbers
    of keys and of queries of this rank.
    """

    pattern: Pattern
    layout: str | Layout
    q_layout: str | Layout | None
    options: AttentionOptions
    return_lse: bool
    sinks: bool
    key_padding_mask: bool
    rows: int
    q_rows: int
    sizes: dict[str, Any]
    device: torch.device
    requires_grad: bool
    kernel: VisitKernel
    #: The factor of the logits, `sign` times `factor`: kernels take only a factor above 0, see `positive`.
    scale: float
    sign: float
    factor: float
    #: (groups, k, positions of a block) of the chosen keys; None if queries attend to all keys that they see.
    chosen: tuple[int, int, int] | None
    #: `Rows.travel`; "rows" without Rows.
    travel: str
    #: The number that hides padded keys, see `hide_keys`; None without a mask.
    column: float | None
    #: Rows with lse below this number have seen padded keys only; None without a mask.
    floor: float | None

    @cached_property
    def cache(self) -> Cache:
        """Results that this call computes once: its plans, and the records by which ranks compare calls."""
        return Cache(ANSWERS, _count_bytes, grows=True)

    @property
    def kept_bytes(self) -> int:
        """Estimate the bytes of memory of this call, including the plans in its cache."""
        return (1 << 12) + sum(map(_count_bytes, self.cache.values()))

    def hide(self, q: Tensor, k: Any, v: Tensor | None, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Return q, k and v, changed so that no query attends to keys where `mask` is True.

        For Rows k, their tensors and weights follow q; after the tensors a flag for each row, see `Expanding`.
        """
        column = self.column if self.column is None or self.scale > 0 else -self.column
        if isinstance(k, Rows):
            if column is None or mask is None:
                return q, *k.tensors, *k.weights
            flags = mask[:, None, :, None]
            hidden = (x.masked_fill(flags, 0) if differentiable((x,)) else x for x in k.tensors)
            return pad(q, (EXTRA, 0), value=column), *hidden, flags, *k.weights
        assert v is not None
        return (q, k, v) if column is None or mask is None else hide_keys(q, k, v, mask, column)

    def prepare(self, q: Tensor, k: Any, v: Tensor | None, mask: Tensor | None) -> tuple[Tensor, ...]:
        """As `hide`, and a negative scale is replaced by a positive one: q changes its sign."""
        q, *others = self.hide(q, k, v, mask)
        return (q if self.sign == 1 else q * self.sign), *others

    def expanding(
        self, plan: Plan, kernel: VisitKernel, rows: Any, tensors: list[Tensor]
    ) -> tuple[VisitKernel, list[Tensor]]:
        """The kernel that expands `rows` at each visit and then computes as `kernel`, and its tensors, from `prepare`.

        For k, or if keys and values travel by this plan, `kernel` itself, and k and v.
        """
        if not isinstance(rows, Rows):
            return kernel, tensors
        from ..kernels.expand import CHUNK_BYTES, Expanding, expand_rows  # few calls expand rows

        assert rows.expand is not None
        if plan.block is None:
            count = len(self.sizes["block"])
            with computing(self.device):
                pair = expand_rows(rows.expand, tuple(tensors[:count]), tuple(tensors[count:]), self.column)
            return kernel, [*pair]
        sizes = self.sizes
        per_row = (
            sizes["batch"] * sizes["kv_heads"] * (sizes["head_dim"] + sizes["value_dim"]) * ITEM_BYTES[sizes["dtype"]]
        )
        chunk = rows.chunk or max(CHUNK_BYTES // max(per_row, 1), 1)
        group = sizes["heads"] // sizes["kv_heads"]
        return Expanding(kernel, rows.expand, group, chunk, self.column, rows.takes_heads), tensors

    @property
    def chooses(self) -> bool:
        """Whether predicted times choose the schedule, or which tensors travel."""
        by_time = self.q_layout is not None and parse_rotate(self.options.rotate, both=True)[0] == "auto"
        return by_time or self.options.schedule == "auto" or self.travel == "auto"

    def machine(self) -> Machine:
        """The machine on which the times of schedules and layouts are predicted, to choose among them."""
        from ..machine.presets import get_machine  # few calls choose

        return get_machine(self.options.machine, self.device.type)

    @cached
    def plan(self, tokens: int, q_tokens: int, ranks: int, layout: str | Layout, q_layout: str | Layout | None) -> Plan:
        """The plan of the call for `tokens` keys and `q_tokens` queries in all, on these layouts."""
        options = self.options
        machine = self.machine() if layout == "auto" or self.chooses else None
        sizes = PlanSizes(**{**self.sizes, **{name: getattr(options, name) for name in PLANNED}})
        named: Any = {"tokens": tokens, "ranks": ranks, "q_layout": q_layout, "q_tokens": q_tokens}
        named |= {"schedule": options.schedule, "machine": machine}
        find: Callable[..., Plan] = find_plan if self.travel == "rows" else find_faster_form
        return find(self.pattern, sizes, layout=layout, **named)


def _count_bytes(answer: object) -> int:
    """About how many bytes a cached answer of a compiled call takes."""
    return int(answer.kept_bytes) if isinstance(answer, Plan) else 1 << 10


#: The latest calls, keyed by everything that `_compile` reads.
_calls = Cache(PLANS, lambda call: int(call.kept_bytes), grows=True)


def compile_call(
    q: Tensor,
    k: Tensor | Rows,
    v: Tensor | None,
    pattern: Pattern | str,
    layout: str | Layout,
    options: Mapping[str, Any],
    **named: Any,
) -> CompiledCall:
    """Check the arguments of an attention call and return them as a `CompiledCall`.

    Returns a cached value if the arguments, torch's global switches, and the shapes, strides, dtypes and devices of the
    tensors are equal, unless the pattern depends on the values of tensors. `named` are keyword arguments of `_compile`.
    Raises InvalidInput or Unsupported if the arguments cannot be used.
    """
    rows = k if isinstance(k, Rows) else None
    block: tuple[Any, ...] = (k, v)
    if rows is not None:
        rows.check()
        k, v = rows.sample()
        block = (*rows.tensors, rows.requires_grad, rows.travel, k, v)
    make = partial(_compile, q, k, v, pattern, layout, options, rows=rows, **named)
    if getattr(pattern, "transient", True) and not isinstance(pattern, str):
        return make()
    switches = _read_switches()
    # The types keep 1 and True apart, which are equal; a tensor equals only itself.
    key = (
        *[
            (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
            if isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
            else x
            for x in (q, *block, *named.values())
        ],
        *(pattern, layout, torch.is_grad_enabled(), switches, *named, *map(type, named.values())),
        *(*options, *options.values(), *map(type, options.values())),
    )
    try:
        hash(key)
    except TypeError:  # an argument without a hash, such as a list: `_compile` reports it
        return make()
    # Not cached if a kernel has changed a switch (its flash implementation), or if every call must warn.
    return _calls.answer(key, make, keep=lambda call: switches == _read_switches() and not looks_swapped(q))


def _read_switches() -> tuple[object, ...]:
    """The torch switches that kernels read when they check tensors and choose ops."""
    cuda: Any = torch.backends.cuda
    attention: Any = torch.nn.attention
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        attention.current_flash_attention_impl(),
    )


def _compile(
    q: Tensor,
    k: Any,
    v: Any,
    pattern: Pattern | str,
    layout: str | Layout,
    options: Mapping[str, Any],
    *,
    rows: Rows | None = None,
    q_layout: str | Layout | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
    block: int = 1,
    return_lse: bool = False,
    device: torch.device | None = None,
) -> CompiledCall:
    """`compile_call` without its cache. `device` is the device to compute on; None: that of the tensors.

    With `rows`, k and v are a sample of what these give.
    """
    check_option_names(options, OPTION_NAMES)
    given = AttentionOptions(**options)
    check_type("return_lse", return_lse, "bool")
    pattern = as_pattern(pattern)
    if layout is None:
        raise InvalidInput(
            "layout=None: the rows of a shard do not show how the sequence was cut; give the Layout that cut the "
            "sequence, or its name, such as layout='zigzag'"
        )
    for name, value in (("layout", layout), ("q_layout", layout if q_layout is None else q_layout)):
        check_layout(value, name)
    layout = layout_name(layout) if isinstance(layout, str) else layout
    if isinstance(q_layout, str):
        q_layout = layout_name(q_layout.replace("auto", layout if isinstance(layout, str) else layout.name))
    if rows is not None:  # keys and values of the rows, which nobody makes as a whole
        (batch, _, tokens, _), grad = rows.tensors[0].shape, rows.requires_grad
        k, v = (_stand_in(x, x.device, (batch, x.shape[1], tokens, x.shape[3]), grad=grad) for x in (k, v))
    check_tensors(q, k, v, alike=q_layout is None)
    check_sinks(sinks, q)
    check_padding(key_padding_mask, k)
    device = q.device if device is None else device
    resolved = _resolve(given, q.shape[3])
    choice = check_chosen(chosen, block, q)
    if choice is not None:
        vars(resolved).update(_resolve_chosen(resolved))
    assert resolved.scale is not None
    requires_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    chooses = choice is not None
    kernel, column = _get_kernel(resolved, q, k, v, device, padded=key_padding_mask is not None, chosen=chooses)
    if pattern.varies:
        kernel = kernel.derive(varies=True)
    if resolved.reproducible is not None:
        kernel = _make_leafwise(resolved.reproducible, kernel, device, chosen=chooses)
    elif chooses:
        from ..kernels.chosen import ChosenKeys  # few calls choose keys

        assert isinstance(kernel, Kernel), "kernels with this feature compute one work a call"
        kernel = ChosenKeys(kernel)
    sizes: dict[str, Any] = {
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[3] + EXTRA * (column is not None),
        "value_dim": v.shape[3],
        "dtype": dtype_name(q.dtype),
        "batch": q.shape[0],
    }
    if rows is not None:
        sizes["block"] = (*rows.sizes, (1, 1, "bool")) if column is not None else rows.sizes
    if return_lse and requires_grad:
        _check_lse(kernel, max(sizes["head_dim"], sizes["value_dim"]))
    sign, factor = positive(resolved.scale)
    return CompiledCall(
        pattern=pattern,
        layout=layout,
        q_layout=q_layout,
        options=resolved,
        return_lse=bool(return_lse),
        sinks=sinks is not None,
        key_padding_mask=key_padding_mask is not None,
        rows=k.shape[2],
        q_rows=q.shape[2],
        sizes=sizes,
        device=device,
        requires_grad=requires_grad,
        kernel=kernel,
        scale=resolved.scale,
        sign=sign,
        factor=factor,
        chosen=choice,
        travel="rows" if rows is None else rows.travel,
        column=column,
        floor=None if column is None else -EXTRA * abs(resolved.scale) * column**2 / 2,
    )


def _resolve(options: AttentionOptions, head_dim: int) -> AttentionOptions:
    """The options, normalized. Raises InvalidInput."""
    scale = float(head_dim**-0.5 if options.scale is None else options.scale)
    if not isfinite(scale):
        raise InvalidInput(f"scale must be a finite number, got {scale}; leave it out for 1 / sqrt(head_dim)")
    if options.softcap is not None and not 0 < options.softcap < inf:
        raise InvalidInput(f"softcap must be a finite number > 0, such as 50.0, got {options.softcap}; None: no cap")
    parse_rotate(options.rotate)
    if options.check not in (None, *CHECKS):
        raise InvalidInput(f"check={options.check!r}: expected one of {', '.join(CHECKS)}")
    if options.machine is not None:
        from ..machine.presets import get_machine  # few calls name a machine

        get_machine(options.machine)
    resolved = copy(options)
    vars(resolved).update(
        schedule=resolve_auto(options.schedule, options.reproducible),
        scale=scale,
        comm_dtype=None if options.comm_dtype is None else dtype_name(options.comm_dtype),
        dropout=read_dropout(options.dropout) or 0.0,
    )
    return resolved


def _resolve_chosen(options: AttentionOptions) -> dict[str, Any]:
    """The options that chosen keys determine. Raises Unsupported for others."""
    if options.schedule.startswith("ulysses"):
        raise Unsupported(f"schedule={options.schedule!r} with chosen= would move the choices; try schedule='ring'")
    if "q" in parse_rotate(options.rotate, both=True):
        raise Unsupported(f"rotate={options.rotate!r} with chosen= would move the choices; try rotate='kv'")
    schedule = "ring" if options.schedule == "auto" else options.schedule
    return {"schedule": schedule, "rotate": "kv"}


def _get_kernel(
    options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor, device: torch.device, *, padded: bool, chosen: bool
) -> tuple[VisitKernel, float | None]:
    """The kernel for these tensors on `device`, and the number that hides their padded keys, see `hide_keys`."""
    column = None
    if padded:
        assert options.scale is not None
        column = hidden_column(options.scale, q.dtype)
    if padded or device != q.device:  # the kernel will get other tensors, which do not exist yet
        wider = (EXTRA, EXTRA, 0) if padded else (0, 0, 0)
        shapes = [(*x.shape[:3], x.shape[3] + more) for x, more in zip((q, k, v), wider, strict=True)]
        q, k, v = (_stand_in(x, device, shape) for x, shape in zip((q, k, v), shapes, strict=True))
    dropout = read_dropout(options.dropout)
    kernel = get_kernel(
        options.kernel, q, k, v, deterministic=options.deterministic,
        softcap=options.softcap, dropout=dropout, reproducible=options.reproducible, chosen=chosen,
    )  # fmt: skip
    return kernel.derive(padded=True) if padded else kernel, column


def _make_leafwise(length: int, kernel: VisitKernel, device: torch.device, *, chosen: bool) -> VisitKernel:
    """The kernel of leaves that calls the op of `kernel`. Raises Unsupported."""
    from ..kernels.leaves import Leafwise  # few calls have leaves
    from ..kernels.visit import VisitTriton
    from ..kernels.visit_calls import VisitCalls

    if chosen:
        raise Unsupported(f"reproducible={length}: bits with chosen= depend on the shards; leave out one of them")
    if isinstance(kernel, VisitTriton):
        return Leafwise(VisitCalls(kernel), device)
    if device.type != "cpu":
        raise Unsupported(f"reproducible={length} on {device} needs kernel='visit', got kernel={kernel.name!r}")
    assert isinstance(kernel, Kernel), "kernels with this feature compute one work a call"
    return Leafwise(kernel, device)


def _stand_in(x: Tensor, device: torch.device, shape: Sequence[int], *, grad: bool | None = None) -> Tensor:
    """A tensor that takes no memory, on `device`, with the dtype of x, and `requires_grad` as x or `grad`."""
    made = torch.empty((), dtype=x.dtype, device=device).expand(tuple(shape))
    return made.requires_grad_(x.requires_grad if grad is None else grad and made.is_floating_point())


def _check_lse(kernel: VisitKernel, width: int) -> None:
    """Raise Unsupported if the kernel cannot compute the gradient of lse for tensors of this width."""
    most = kernel.max_head_dim
    if most is not None and width + EXTRA > most:
        raise Unsupported(
            f"a head dim of {width} with return_lse and gradients is not supported: the gradient of lse takes {EXTRA} "
            f"columns, and kernel {kernel.name} computes {most} at most; leave return_lse out, or try kernel=reference"
        )
