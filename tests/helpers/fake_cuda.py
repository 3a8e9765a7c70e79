"""Tensors without memory that say that they are on a CUDA device, and a record of every aten op that they meet.

PyTorch's FakeTensorMode gives the shapes, dtypes and devices. On a build without CUDA some bindings of Python ask for
the device itself; `_Bindings` calls the aten ops in their place. Tensors that require gradients end the process there,
so that tests call a rank's forward and backward directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringattn.kernels.aten_cuda import AtenCuda
from ringattn.transport.base import Counters, Post
from ringattn.transport.records import Agreed

Tensor = torch.Tensor
aten = torch.ops.aten
CUDA = torch.device("cuda:0")
#: One mode for all tests: tensors that caches keep belong to it. Caches also hand real CPU tensors to the device.
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
#: Ops that make tensors without a launch.
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
RANDOM = {"uniform_", "normal_"}
#: Ops for which the host waits for the device.
WAITING = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}


@dataclass
class Record:
    """What happened while a `Recorder` was on. Bytes are those of the tensors that an op reads and writes."""

    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    #: Ops that copy between host and device, and ops for which the host waits.
    crossings: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    #: The numbers of the largest tensor of each dtype that was made.
    largest: dict[torch.dtype, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.launches.total()


class Recorder(TorchDispatchMode):
    """Counts aten ops. Sees an op before FAKE does."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func: Any, types, args=(), kwargs=None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if name in WAITING:
            self.record.waits.append(name)
        if name == "_efficient_attention_backward":
            result = _efficient_backward(*args)
        else:  # what fills tensors with random numbers asks for the device
            result = args[0] if name in RANDOM else func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if name in ("_to_copy", "copy_", "_copy_from"):
            devices = {x.device.type for x in (*given, *made)}
            if len(devices) > 1:
                self.record.crossings.append(name)
        if name not in NO_LAUNCH and not _is_view(func) and any(x.numel() for x in made):
            self.record.launches[name] += 1
            tensors = {id(x): x for x in (*given, *made)}.values()
            self.record.bytes[name] += sum(x.numel() * x.element_size() for x in tensors)
        for x in made:
            self.record.devices.add(str(x.device))
            self.record.largest[x.dtype] = max(x.numel(), self.record.largest.get(x.dtype, 0))
        return result


def _is_view(func: Any) -> bool:
    """Whether the outputs of an op are views of its inputs, which the op does not write to."""
    return any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.arguments)


def _efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """The shapes of the op's results; PyTorch's own function for that lacks the argument `out`."""
    return (*(torch.empty_like(x) for x in (q, k, v)), torch.empty_like(q))


class _Bindings(TorchFunctionMode):
    """aten ops in place of the bindings that ask for a CUDA device."""

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func: Callable[..., Any], types, args=(), kwargs=None
    ) -> Any:
        return _BY_BINDING.get(func, func)(*args, **(kwargs or {}))


def _get(x: Tensor, index: Any) -> Tensor:
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [i for i in index if not isinstance(i, Tensor)]:
        at = next(n for n, i in enumerate(index) if i is Ellipsis)
        used = sum(i is not None and i is not Ellipsis for i in index)
        index = (*index[:at], *[slice(None)] * (x.dim() - used), *index[at + 1 :])
    if any(isinstance(i, Tensor) for i in index):
        return aten.index.Tensor(x, [i if isinstance(i, Tensor) else None for i in index])
    dim = 0
    for i in index:
        if i is None:
            x = aten.unsqueeze.default(x, dim)
        elif isinstance(i, slice):
            if i != slice(None):
                x = aten.slice.Tensor(x, dim, i.start, i.stop, 1 if i.step is None else i.step)
        else:
            x, dim = aten.select.int(x, dim, i), dim - 1
        dim += 1
    return x


def _set(x: Tensor, index: Any, value: Any) -> None:
    target = _get(x, index)
    if isinstance(value, Tensor):
        aten.copy_.default(target, value)
    else:
        aten.fill_.Scalar(target, value)


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, str | torch.device):
            device = arg
    dtype = dtype or x.dtype
    device = torch.device(device or x.device)
    device = CUDA if device.type == "cuda" else device
    return x if (dtype, device) == (x.dtype, x.device) else aten._to_copy.default(x, dtype=dtype, device=device)


def _contiguous(x: Tensor, **_: Any) -> Tensor:
    return x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)


def _as_tensor(x: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    if isinstance(x, Tensor):
        return _to(x, dtype=dtype, device=device)
    return _to(torch._C._VariableFunctions.as_tensor(x, dtype=dtype, device="cpu"), device=device)


_BY_BINDING: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _get,
    Tensor.__setitem__: _set,
    Tensor.__invert__: aten.bitwise_not.default,
    Tensor.copy_: lambda x, y, non_blocking=False: aten.copy_.default(x, y, non_blocking),
    Tensor.to: _to,
    Tensor.float: lambda x: _to(x, torch.float32),
    Tensor.double: lambda x: _to(x, torch.float64),
    Tensor.long: lambda x: _to(x, torch.int64),
    Tensor.contiguous: _contiguous,
    Tensor.data_ptr: lambda x: x.storage_offset() * x.element_size(),  # memory begins at an aligned address
    torch.as_tensor: _as_tensor,
}


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on CUDA are fake, and the CUDA kernel takes them for those of a device of capability 9.0."""
    with monkeypatch.context() as patch, FAKE, torch.no_grad():
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(AtenCuda, "missing", classmethod(lambda cls: None))
        yield


@contextmanager
def recorded() -> Iterator[Record]:
    """The ops of this context, on fake tensors."""
    with Recorder() as recorder, _Bindings():
        yield recorder.record


class NoMessages:
    """A transport of equal ranks that carries nothing, and checks what it is handed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.counters, self.calls, self.agreed = Counters(), count(), Agreed()

    def check(self, device: torch.device) -> None:
        assert device == CUDA

    def gather(self, record: bytes) -> list[bytes]:
        return [record] * self.size

    def post(self, post: Post) -> None:
        for message in (*post.sends, *post.recvs):
            assert (message.data.device, message.data.dtype) == (CUDA, torch.uint8)

    def wait(self, ticket: None) -> None:
        pass
