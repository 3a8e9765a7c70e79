"""Transports: how messages travel. One fabric per file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..registry import Registry

if TYPE_CHECKING:
    from .base import Transport


class OpenTransport(Protocol):
    """Opens a transport for this process's rank. Every wait of the transport is bounded by `timeout` seconds."""

    def __call__(self, *, timeout: float) -> Transport: ...


#: Transports by the name that `transport=NAME` takes on the command line. An installed package adds a transport by an
#: entry point of the group "ringattn.transports": a subclass or a function that fits `OpenTransport`.
TRANSPORTS: Registry[OpenTransport] = Registry(
    "transports",
    {"gloo": "transport.torchdist:TorchDist", "nccl": "transport.torchdist:TorchDist", "mpi": "transport.mpi:Mpi"},
)
