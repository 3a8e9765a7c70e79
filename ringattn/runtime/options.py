"""The options that all forms of attention share: functions, modules, and what the ranks compare in their handshake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Required, TypedDict, cast, get_args, get_type_hints

import torch

from ..errors import InvalidInput
from ..machine.machine import Machine
from ..text import did_you_mean

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ..kernels.dropout import Dropout
    from ..layout.regular import Layout
    from ..transport.base import Transport


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


class RankKeywords(TypedDict, total=False):
    """Who the ranks of a call are: at most one of the three. None of the three means the default process group."""

    group: ProcessGroup | DeviceMesh | None
    mesh: DeviceMesh | None
    transport: Transport | None


class RingKeywords(AttentionKeywords, RankKeywords, total=False):
    """Keyword arguments of `ring_attention` but for `return_lse`."""

    layout: Required[str | Layout]
    key_padding_mask: torch.Tensor | None
    sinks: torch.Tensor | None


class VirtualKeywords(AttentionKeywords, total=False):
    """Keyword arguments of `virtual_attention` but for `return_lse`."""

    ranks: Required[int]
    layout: str | Layout
    key_padding_mask: torch.Tensor | None
    sinks: torch.Tensor | None


class StreamKeywords(TypedDict, total=False):
    """Keyword arguments of `attention` but for `return_lse`."""

    kernel: str
    scale: float | None
    deterministic: bool
    softcap: float | None
    dropout: float | Dropout
    key_padding_mask: torch.Tensor | None
    sinks: torch.Tensor | None
    stream: str | None
    chunk: int | None
    device: torch.device | str | None


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How attention is computed. Only `scale`, `softcap` and `dropout` change the result by more than rounding.

    schedule: what travels between ranks and when: "ring", "direct", "allgather", "double_ring(n)", "ulysses(n)",
        "ulysses(n, schedule)", or "auto", the schedule with the shortest time by the timing model on `machine`.
    kernel: "reference", "aten_cpu", "aten_cuda", "aten_cuda:flash", "aten_cuda:cudnn", "aten_cuda:efficient",
        the kernel of an installed package, or "auto" by the device of the tensors. A named kernel is used or refused.
    machine: a Machine or its name, read by schedule="auto"; None: "cpu" or "cuda" by the device of the tensors.
    scale: factor of the logits; None: 1 / sqrt(head_dim).
    deterministic: repeated runs give equal bits.
    comm_dtype: dtype that messages are rounded to; None: no rounding, see `make_plan`.
    rotate: what travels in the backward: "keys", "queries", or "auto" by bytes, see `make_plan`.
    softcap: a number c > 0 by which the scaled logits s become c * tanh(s / c), as in Gemma 2 (arXiv:2408.00118); None:
        the logits stay as they are. Only kernel "reference" computes a softcap, and "auto" then chooses this kernel.
    dropout: the probability p of dropping an attention weight, or `ringattn.Dropout(p, seed)`; the other weights are
        divided by 1 - p, and lse is that of all keys. The weights that fall depend on seed, batch element, head,
        query and key only. Without a seed each call takes one from torch's default CPU generator, on several ranks
        from that of rank 0. Computed by kernel "reference" only, as softcap is. Modules drop in training mode only.
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

    def __post_init__(self) -> None:
        types = _field_types(type(self))  # type: ignore[arg-type]  # mypy takes the hash of instances for the class's
        for entry in fields(self):
            value, kinds = getattr(self, entry.name), types[entry.name]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidInput(f"{entry.name}={value!r}: expected {entry.type}")
        read_dropout(self.dropout)

    def keywords(self) -> AttentionKeywords:
        """All options as keyword arguments."""
        return cast(AttentionKeywords, dict(vars(self)))


#: Names of the options, in the order of the fields.
OPTION_NAMES = tuple(AttentionKeywords.__annotations__)


@cache
def _field_types(options: type) -> dict[str, tuple[type, ...]]:
    """The types that each field of a class of options may have. A number may be an int."""
    from ..kernels.dropout import Dropout  # few calls drop weights

    kinds = {name: get_args(x) or (x,) for name, x in get_type_hints(options, localns={"Dropout": Dropout}).items()}
    return {name: (*found, int) if float in found else found for name, found in kinds.items()}


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
