"""The arguments of a call of attention: options, and `Call`, which one rank checks and resolves once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf, isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from ..dtypes import ITEM_BYTES, dtype_name, take_numbers
from ..errors import InvalidInput, Unsupported
from ..kernels import get_kernel
from ..kernels.base import Kernel, is_dense, kind_of, positive
from ..kernels.pad import EXTRA, check_padding, hidden_column, hide_keys
from ..layout.regular import Layout, layout_name
from ..pattern import Pattern, as_pattern
from ..plan.plan import Plan
from ..plan.schedules import resolve
from ..plan.steps import check_rotate
from ..text import did_you_mean, plural
from ..transport.base import CHECKS
from .planner import make_plan

if TYPE_CHECKING:
    from ..kernels.dropout import Dropout
    from ..machine.machine import Machine

#: No model has more heads. A tensor with more heads and few tokens has probably not been transposed.
MANY_HEADS = 256
SWAPPED = (
    "; if the tensors are [batch, tokens, heads, head_dim], pass x.transpose(1, 2) (the modules of ringattn.nn take "
    "order='BNHD')"
)


class AttentionKeywords(TypedDict, total=False):
    """The fields of `AttentionOptions` as keyword arguments, for type checkers and editors."""

    schedule: str
    kernel: str
    machine: Machine | str | None
    scale: float | None
    deterministic: bool
    comm_dtype: torch.dtype | str | None
    rotate: str
    softcap: float | None
    dropout: float | Dropout
    check: str | None


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How attention is computed. Only `scale`, `softcap` and `dropout` change the result by more than rounding.

    schedule: what travels between ranks and when: "ring", "direct", "allgather", "double_ring(n)", "ulysses(n)",
        "ulysses(n, schedule)", or "auto", the schedule with the shortest time by the timing model on `machine`.
    kernel: "reference", "aten_cpu", "aten_cuda", "aten_cuda:flash", "aten_cuda:cudnn", "aten_cuda:efficient",
        "flash_attn", "flash_attn_3" and "flash_attn_4" of these packages, the kernel of an installed package, or "auto"
        by the device of the tensors. A named kernel is used or refused.
    machine: a Machine or its name, read by schedule="auto"; None: "cpu" or "cuda" by the device of the tensors.
    scale: factor of the logits; None: 1 / sqrt(head_dim).
    deterministic: repeated runs give equal bits.
    comm_dtype: dtype that messages are rounded to; None: no rounding, see `make_plan`.
    rotate: what travels in the backward: "keys", "queries", or "auto" by bytes; with a q_layout also what travels in
        the forward, where "auto" is by time, see `make_plan`.
    softcap: a number c > 0 by which the scaled logits s become c * tanh(s / c), as in Gemma 2 (arXiv:2408.00118); None:
        the logits stay as they are. Only kernel "reference" computes a softcap, and "auto" then chooses this kernel.
    dropout: the probability p of dropping an attention weight, or `ringattn.Dropout(p, seed)`; the other weights are
        divided by 1 - p, and lse is that of all keys. The weights that fall depend on seed, batch element, head,
        query and key only. Without a seed each call takes one from torch's default CPU generator, on several ranks
        from that of rank 0. Computed by kernel "reference" only, as softcap is. Modules drop in training mode only.
    check: when ranks compare their calls: "now", before the first message, or "deferred", beside the messages, see
        `ringattn.synchronize`; None: RINGATTN_CHECK, or else "deferred" where the group has NCCL, and "now".
    """

    schedule: str = "auto"
    kernel: str = "auto"
    machine: Machine | str | None = None
    scale: float | None = None
    deterministic: bool = False
    comm_dtype: torch.dtype | str | None = None
    rotate: str = "auto"
    softcap: float | None = None
    dropout: float | Dropout = 0.0
    check: str | None = None

    def __post_init__(self) -> None:
        take_numbers(self)
        for entry in fields(self):
            check_type(entry.name, getattr(self, entry.name), cast(str, entry.type))
        if self.dropout:
            read_dropout(self.dropout)

    def keywords(self) -> AttentionKeywords:
        """All options as keyword arguments."""
        return cast(AttentionKeywords, dict(vars(self)))


#: Names of the options, in the order of the fields.
OPTION_NAMES = tuple(AttentionKeywords.__annotations__)


def check_type(name: str, value: object, annotation: str) -> None:
    """Raise InvalidInput unless the value has a type of the annotation."""
    if not _has_type(type(value), annotation):  # type: ignore[arg-type]  # mypy takes the hash of values for that of types
        hint = f"; try {name}={name}.item()" if isinstance(value, Tensor | np.ndarray) else ""
        raise InvalidInput(f"{name}={' '.join(repr(value).split())}: expected {annotation}{hint}")


@lru_cache(maxsize=256)
def _has_type(kind: type, annotation: str) -> bool:
    """Whether values of a type have a type of the annotation. By name: few calls load Machine and Dropout."""
    expected = {name.rpartition(".")[2] for name in annotation.split(" | ")}
    if kind is bool:  # also an int, and no number here
        return "bool" in expected
    found = {"None" if base is NoneType else base.__name__ for base in kind.__mro__}
    return bool(expected & found) or ("float" in expected and "int" in found)


def check_option_names(given: Iterable[str], names: Iterable[str]) -> None:
    """Raise InvalidInput for the first given option that is not among `names`."""
    names = sorted(names)
    for name in given:
        if name not in names:
            raise InvalidInput(f"unknown option {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")


def read_dropout(dropout: float | Dropout) -> Dropout | None:
    """The dropout of a call; None where no weight is dropped. Raises InvalidInput."""
    if not dropout:
        return None
    from ..kernels.dropout import Dropout  # few calls drop weights

    return Dropout.read(dropout)


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of a call but for its tensors, checked and each in one spelling; what runs asks for no other.

    `sizes` are the keyword arguments of `make_plan` that describe the tensors as they are computed: a
    `key_padding_mask` makes q and k wider by EXTRA columns. `q_layout` is None where the queries are the tokens of the
    keys; `rows` are the keys of this rank, `q_rows` its queries.
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
    kernel: Kernel
    #: Factor of the logits.
    scale: float
    #: What hides padded keys, see `hide_keys`; None without a mask.
    column: float | None

    @property
    def floor(self) -> float | None:
        """Rows with lse below this number have seen padded keys only; None without a mask."""
        return None if self.column is None else -EXTRA * abs(self.scale) * self.column**2 / 2

    def hide(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with the keys hidden that the mask flags."""
        if self.column is None or mask is None:
            return q, k, v
        return hide_keys(q, k, v, mask, self.column if self.scale > 0 else -self.column)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with the keys hidden that the mask flags, and with the sign of the scale in q."""
        q, k, v = self.hide(q, k, v, mask)
        sign, _ = positive(self.scale)
        return (q if sign == 1 else q * sign), k, v

    @property
    def chooses(self) -> bool:
        """Whether a schedule, or what travels in the forward, is chosen by the times of a machine."""
        by_time = self.q_layout is not None and self.options.rotate.startswith("auto")
        return by_time or self.options.schedule == "auto"

    def machine(self) -> Machine:
        """The machine by whose times a schedule or a layout is chosen."""
        from ..machine.presets import get_machine  # few calls choose

        return get_machine(self.options.machine, self.device.type)

    def plan(self, tokens: int, q_tokens: int, ranks: int, layout: str | Layout) -> Plan:
        """The plan of the call for `tokens` keys and `q_tokens` queries in all."""
        options = self.options
        return make_plan(
            self.pattern,
            tokens=tokens,
            ranks=ranks,
            layout=layout,
            q_layout=self.q_layout,
            q_tokens=q_tokens,
            schedule=options.schedule,
            machine=self.machine() if layout == "auto" or self.chooses else None,
            comm_dtype=options.comm_dtype,
            rotate=options.rotate,
            **self.sizes,
        )


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | str,
    layout: str | Layout,
    options: Mapping[str, Any],
    *,
    q_layout: str | Layout | None = None,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    device: torch.device | None = None,
) -> Call:
    """The call of these arguments. Raises InvalidInput or Unsupported where attention cannot be computed from them.

    `device` computes; None: the device of the tensors.
    """
    check_option_names(options, OPTION_NAMES)
    given = AttentionOptions(**options)
    check_type("return_lse", return_lse, "bool")
    pattern = as_pattern(pattern)
    if layout is None:
        raise InvalidInput(
            "layout=None: the rows of a shard do not tell how the sequence was cut; give the Layout that cut the "
            "sequence, or its name, such as layout='zigzag'"
        )
    layout = layout_name(layout) if isinstance(layout, str) else layout
    if not isinstance(q_layout, str | Layout | None):
        raise InvalidInput(f"q_layout={q_layout!r}: expected a Layout, or its name, such as 'shifted(zigzag, 1000)'")
    if isinstance(q_layout, str):
        q_layout = layout_name(q_layout.replace("auto", layout if isinstance(layout, str) else layout.name))
    _check_tensors(q, k, v, alike=q_layout is None)
    check_sinks(sinks, q)
    check_padding(key_padding_mask, k)
    device = q.device if device is None else device
    resolved = _resolve(given, q.shape[3])
    assert resolved.scale is not None
    requires_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    kernel, column = _get_kernel(resolved, q, k, v, device, padded=key_padding_mask is not None)
    if pattern.varies:
        kernel = kernel.derive(varies=True)
    sizes: dict[str, Any] = {
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[3] + EXTRA * (column is not None),
        "value_dim": v.shape[3],
        "dtype": dtype_name(q.dtype),
        "batch": q.shape[0],
    }
    if return_lse and requires_grad:
        _check_lse(kernel, max(sizes["head_dim"], sizes["value_dim"]))
    return Call(
        pattern=pattern,
        layout=layout,
        q_layout=q_layout,
        options=resolved,
        return_lse=return_lse,
        sinks=sinks is not None,
        key_padding_mask=key_padding_mask is not None,
        rows=k.shape[2],
        q_rows=q.shape[2],
        sizes=sizes,
        device=device,
        requires_grad=requires_grad,
        kernel=kernel,
        scale=resolved.scale,
        column=column,
    )


def _resolve(options: AttentionOptions, head_dim: int) -> AttentionOptions:
    """The options in one spelling for all forms of equal options. Raises InvalidInput."""
    scale = float(head_dim**-0.5 if options.scale is None else options.scale)
    if not isfinite(scale):
        raise InvalidInput(f"scale must be a finite number, got {scale}; leave it out for 1 / sqrt(head_dim)")
    if options.softcap is not None and not 0 < options.softcap < inf:
        raise InvalidInput(f"softcap must be a finite number > 0, such as 50.0, got {options.softcap}; None: no cap")
    check_rotate(options.rotate)
    if options.check not in (None, *CHECKS):
        raise InvalidInput(f"check={options.check!r}: expected one of {', '.join(CHECKS)}")
    if options.machine is not None:
        from ..machine.presets import get_machine  # few calls name a machine

        get_machine(options.machine)
    return replace(
        options,
        schedule=resolve(options.schedule),
        scale=scale,
        comm_dtype=None if options.comm_dtype is None else dtype_name(options.comm_dtype),
        dropout=read_dropout(options.dropout) or 0.0,
    )


def _get_kernel(
    options: AttentionOptions, q: Tensor, k: Tensor, v: Tensor, device: torch.device, *, padded: bool
) -> tuple[Kernel, float | None]:
    """The kernel for these tensors on `device`, and what hides their padded keys."""
    column = None
    if padded:
        assert options.scale is not None
        column = hidden_column(options.scale, q.dtype)
    if padded or device != q.device:  # what the kernel gets is another tensor, which is not made yet
        wider = (EXTRA, EXTRA, 0) if padded else (0, 0, 0)
        q, k, v = (_stand_in(x, device, more) for x, more in zip((q, k, v), wider, strict=True))
    dropout = read_dropout(options.dropout)
    kernel = get_kernel(
        options.kernel, q, k, v, deterministic=options.deterministic, softcap=options.softcap, dropout=dropout
    )
    return kernel.derive(padded=True) if padded else kernel, column


def _stand_in(x: Tensor, device: torch.device, more: int) -> Tensor:
    """A tensor on `device` with the shape and dtype of x and `more` columns, which takes no memory."""
    shape = (*x.shape[:3], x.shape[3] + more)
    return torch.empty((), dtype=x.dtype, device=device).expand(shape).requires_grad_(x.requires_grad)


def _check_lse(kernel: Kernel, width: int) -> None:
    """Raise Unsupported where the kernel is too narrow for the gradient of lse of tensors of this width."""
    most = kernel.max_head_dim
    if most is not None and width + EXTRA > most:
        raise Unsupported(
            f"a head dim of {width} with return_lse, and gradients: the gradient of lse takes {EXTRA} columns, "
            f"and kernel {kernel.name} computes {most} at most; leave return_lse out, or try kernel=reference"
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, alike: bool) -> None:
    """Raise InvalidInput where q, k and v do not fit each other. Warns if heads and tokens seem exchanged.

    `alike`: queries are the tokens of the keys.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dense(x) or x.ndim != 4:
            actual = f"shape {tuple(x.shape)}" if is_dense(x) else kind_of(x)
            raise InvalidInput(f"{name} must be a tensor [batch, heads, tokens, head_dim], got {actual}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        kinds = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in (("q", q), ("k", k), ("v", v)))
        raise InvalidInput(f"q, k and v must have one dtype and one device, got {kinds}")
    if dtype_name(q.dtype) not in ITEM_BYTES:
        raise InvalidInput(f"dtype {q.dtype} is not supported; expected one of {', '.join(ITEM_BYTES)}")
    tokens_fit = k.shape[2] == v.shape[2] and (not alike or q.shape[2] == k.shape[2])
    if not (q.shape[0] == k.shape[0] == v.shape[0]) or not tokens_fit:
        hint = _hint(q, k, v) or (
            "; other queries than the keys need q_layout=, or first=" if k.shape[2] == v.shape[2] else ""
        )
        raise InvalidInput(f"q, k and v must have the same batch and the same tokens, got {shapes}{hint}")
    sizes = q.shape[1], q.shape[3], v.shape[3], k.shape[1]
    if k.shape[1] != v.shape[1] or q.shape[-1] != k.shape[-1] or 0 in sizes:
        raise InvalidInput(
            f"k and v must have the same heads, q and k the same head dim, and none may be 0, got {shapes}"
        )
    if q.shape[1] % k.shape[1]:
        raise InvalidInput(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly ({shapes}); "
            f"the query heads must be a multiple of the key/value heads{_hint(q, k, v)}"
        )
    if q.shape[1] > MANY_HEADS and q.shape[1] >= 8 * q.shape[2] > 0:
        warnings.warn(
            f"q {tuple(q.shape)} is read as [batch, heads, tokens, head_dim], {q.shape[1]:,} heads of "
            f"{plural(q.shape[2], 'token')}{SWAPPED}",
            stacklevel=3,
        )


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise InvalidInput unless `sinks` is None, or floats [H] on the device of q [B, H, n, D]."""
    if sinks is None:
        return
    if not is_dense(sinks) or not sinks.is_floating_point() or sinks.shape != q.shape[1:2]:
        kind = f"{sinks.dtype} {tuple(sinks.shape)}" if is_dense(sinks) else kind_of(sinks)
        raise InvalidInput(
            f"sinks must be a float tensor [heads] = ({q.shape[1]},), one logit per query head, got {kind}; for first "
            "tokens that all rows see use the pattern Sinks"
        )
    if sinks.device != q.device:
        raise InvalidInput(f"sinks are on {sinks.device}, the queries are on {q.device}; move the sinks there")


def _hint(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Advice to transpose if the shapes would fit with heads and tokens exchanged; else no text."""
    tokens, heads = q.shape[1], q.shape[2]
    would_fit = tokens == k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2] > 0 and heads % k.shape[2] == 0
    return SWAPPED if would_fit and tokens > heads else ""


def cast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, cast to the dtype of autocast where autocast is on for their device. fp64 tensors stay, as in torch.

    Arguments that are not floating-point tensors are returned unchanged; later checks report them.
    """
    return tuple(map(_cast, tensors))


def _cast(x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if _enabled(x.device.type) else x


@contextmanager
def autocast_off(device: torch.device) -> Iterator[None]:
    """A context without autocast on `device`, the CPU and CUDA: attention may be streamed between the CPU and CUDA."""
    with ExitStack() as stack:
        for kind in {"cpu", "cuda", device.type}:
            if _enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _enabled(kind: str) -> bool:
    """Whether autocast is on for devices of type `kind`."""
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device that has no autocast, such as meta
        return False
