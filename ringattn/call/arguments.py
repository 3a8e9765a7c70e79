"""The arguments of an attention call: its options, and the checks of its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from ..dtypes import ITEM_BYTES, check_type, dtype_name, take_numbers
from ..errors import InvalidInput
from ..kernels.memory import is_dense, kind_of, out_of_memory
from ..pattern.base import check_integer
from ..text import did_you_mean, plural
from .rows import Rows

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
    reproducible: int | None


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of an attention call. Only `scale`, `softcap` and `dropout` change the result by more than rounding.

    schedule: what travels between ranks and when: "ring", "direct", "allgather", "double_ring(n)", "ulysses(n)",
        "ulysses(n, schedule)", or "auto", the schedule that the timing model predicts to be fastest on `machine`.
        Without a number, "double_ring" and "ulysses" take the ranks per node of `machine`.
    kernel: "reference", "aten_cpu", "visit", "aten_cuda", "aten_cuda:flash", "aten_cuda:cudnn", "aten_cuda:efficient",
        "cuda" ("visit" or "aten_cuda", by the mask), "flash_attn", "flash_attn_3" and "flash_attn_4" (from the packages
        of these names), a kernel that an installed package adds, or "auto": "cuda" or "aten_cpu", by the device of the
        tensors. If a named kernel cannot compute the call, the call raises Unsupported; no other kernel replaces it.
    machine: a Machine or its name, for schedule="auto" or a schedule without its number; None: "cpu" or "cuda", by the
        device of the tensors.
    scale: factor of the logits; None: 1 / sqrt(head_dim).
    deterministic: repeated runs give equal bits.
    comm_dtype: the dtype in which keys, values and gradients are sent; None: they are not rounded, see `make_plan`.
    rotate: what ranks send in the backward: "kv" (keys and values), "q" (queries), or "auto" (what has fewer bytes).
        With a q_layout, it also selects what they send in the forward, see `make_plan`.
    softcap: a number c > 0 that turns the scaled logits s into c * tanh(s / c), as in Gemma 2 (arXiv:2408.00118); None:
        no cap. Kernels "visit" and "reference" compute a softcap; "auto" chooses one of them.
    dropout: the probability p of dropping an attention weight, or `ringattn.Dropout(p, seed)`; the other weights are
        divided by 1 - p, and lse still covers all keys. Which weights are dropped depends only on seed, batch element,
        head, query and key. Without a seed each call draws one from torch's default CPU generator, on several ranks
        from rank 0's. Kernels "visit" and "reference" compute dropout; "auto" chooses one of them. Modules drop in
        training mode only.
    check: when ranks compare their calls: "now", before the first message, or "deferred", while messages travel, see
        `ringattn.synchronize`; None: the environment variable RINGATTN_CHECK; if unset, "deferred" for a group with
        NCCL, else "now".
    reproducible: the length L of a leaf in tokens, such as 512. out, lse, dq, dk and dv then have the same bits for any
        number of ranks, layout, schedule and transport, and on one process, on one type of device and version of torch.
        Shards must have borders between leaves: make_layout("leaves(zigzag, 512)", ...) cuts them; calls on whole
        tensors round their layout. schedule="auto" is then "direct". None: results differ by rounding.
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
    reproducible: int | None = None

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


def check_option_names(given: Iterable[str], names: Iterable[str]) -> None:
    """Raise InvalidInput for the first given option that is not among `names`."""
    names = sorted(names)
    for name in given:
        if name not in names:
            raise InvalidInput(f"unknown option {name!r}; {did_you_mean(name, names)}expected {', '.join(names)}")


def read_dropout(dropout: float | Dropout) -> Dropout | None:
    """The dropout of a call; None if no weight is dropped. Raises InvalidInput."""
    if not dropout:
        return None
    from ..kernels.dropout import Dropout  # few calls drop weights

    return dropout if isinstance(dropout, Dropout) else Dropout(dropout)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, alike: bool) -> None:
    """Raise InvalidInput if the shapes, dtypes or devices of q, k and v do not fit together.

    Set `alike` if queries and keys are the same tokens: q and k must then have equally many rows. Warns if the dims of
    heads and tokens seem to be swapped.
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
            "; queries at other positions need q_layout= or first= of ring_attention"
            if k.shape[2] == v.shape[2]
            else ""
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
    if looks_swapped(q):
        warnings.warn(
            f"q {tuple(q.shape)} is read as [batch, heads, tokens, head_dim], {q.shape[1]:,} heads of "
            f"{plural(q.shape[2], 'token')}{SWAPPED}",
            stacklevel=4,
        )


def looks_swapped(q: Tensor) -> bool:
    """Whether heads and tokens of q [B, H, n, D] seem swapped."""
    return q.shape[1] > MANY_HEADS and q.shape[1] >= 8 * q.shape[2] > 0


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise InvalidInput unless `sinks` is None, or floats [H] on the device of q [B, H, n, D]."""
    if sinks is None:
        return
    if not is_dense(sinks) or not sinks.is_floating_point() or sinks.shape != q.shape[1:2]:
        kind = f"{sinks.dtype} {tuple(sinks.shape)}" if is_dense(sinks) else kind_of(sinks)
        raise InvalidInput(
            f"sinks must be a float tensor [heads] = ({q.shape[1]},), one logit per query head, got {kind}; to let all "
            "rows see the first tokens, use the pattern Sinks instead"
        )
    if sinks.device != q.device:
        raise InvalidInput(f"sinks are on {sinks.device}, the queries are on {q.device}; move the sinks there")


def check_chosen(chosen: Any, block: object, q: Tensor) -> tuple[int, int, int] | None:
    """(groups, k, block) of chosen keys; None without. Raises InvalidInput unless they fit q [B, H, n, D]."""
    block = check_integer(block, "block", 1, "block=64")
    if chosen is None:
        return None
    if not is_dense(chosen) or chosen.dtype not in (torch.int32, torch.int64) or chosen.ndim != 4:
        kind = f"{chosen.dtype} {tuple(chosen.shape)}" if is_dense(chosen) else kind_of(chosen)
        raise InvalidInput(f"chosen must be int32 or int64 [batch, groups, tokens, k], as of top_keys, got {kind}")
    fits = chosen.shape[::2] == q.shape[::2] and chosen.shape[1] and q.shape[1] % chosen.shape[1] == 0
    if not fits or not chosen.shape[3] or chosen.device != q.device:
        raise InvalidInput(
            f"chosen {tuple(chosen.shape)} on {chosen.device} does not fit the queries {tuple(q.shape)} on {q.device}; "
            "expected [batch, groups, tokens, k], where groups divide the query heads"
        )
    return chosen.shape[1], chosen.shape[3], block


def _hint(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Advice to transpose if the shapes would fit with heads and tokens swapped; else an empty text."""
    tokens, heads = q.shape[1], q.shape[2]
    would_fit = tokens == k.shape[1] == v.shape[1] and k.shape[2] == v.shape[2] > 0 and heads % k.shape[2] == 0
    return SWAPPED if would_fit and tokens > heads else ""


def cast_inputs(*tensors: Any) -> tuple[Any, ...]:
    """The tensors, cast to the dtype of autocast where autocast is on for their device. fp64 tensors stay, as in torch.

    Arguments that are not floating-point tensors are returned unchanged; later checks report them.
    """
    kind = ""
    for x in tensors:
        if isinstance(x, Tensor) and x.device.type != kind and _enabled(kind := x.device.type):
            return tuple(map(_cast, tensors))
    return tensors


def _cast(x: Any) -> Any:
    if isinstance(x, Rows):
        return x.replaced(tuple(map(_cast, x.tensors)), tuple(map(_cast, x.weights)))
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if _enabled(x.device.type) else x


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Context manager for computing attention on `device`: disables autocast, and converts out-of-memory errors.

    Autocast is disabled for `device`, and also for the CPU and CUDA, because offloading computes on both. torch's
    OutOfMemoryError is raised again as OutOfMemory. Trying again would not help: torch's CUDA allocator has already
    released its idle memory and tried again before it raises.
    """
    with ExitStack() as stack:
        for kind in {"cpu", "cuda", device.type}:
            if _enabled(kind) if kind not in ("cpu", "cuda") else torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise out_of_memory(device, error) from error


def _enabled(kind: str) -> bool:
    """Whether autocast is on for devices of type `kind`."""
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # a device without autocast, such as meta
        return False
