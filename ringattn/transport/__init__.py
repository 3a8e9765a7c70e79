"""Transports: how messages travel. One fabric per file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..registry import Registry

if TYPE_CHECKING:
    from .base import Transport


#: Transports by the name that `transport=NAME` takes on the command line. An installed package adds a transport by an
#: entry point of the group "ringattn.transports": a callable that returns the transport of this process's rank; its
#: argument `timeout=` bounds every wait, in seconds.
TRANSPORTS: Registry[Callable[..., Transport]] = Registry(
    "transports",
    {"gloo": "transport.torchdist:TorchDist", "nccl": "transport.torchdist:TorchDist", "mpi": "transport.mpi:Mpi"},
)
