"""One memory pool per device, for message buffers, accumulators and workspaces: a step needs no newly allocated memory.

On CPUs the first touch of new memory costs more than the copy that fills it. On CUDA PyTorch's allocator is a pool
already, so that the limit is 0 and every tensor given back is freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import RLock
from typing import TypeVar

import torch

from ..errors import InvalidInput, OutOfMemory, raised_below

#: The most idle bytes of a pool.
LIMIT = 1 << 28
#: Beyond FEW bytes a pool keeps no more idle bytes than were in use at once during about the last WINDOW calls of
#: `take`. Calls of the same shapes need no more, and leftovers of calls of other shapes do not add up.
FEW, WINDOW = 1 << 24, 1 << 10

T = TypeVar("T")


class Pool:
    """Idle uint8 tensors of one device, by size. `hits` and `misses` count the calls of `take`.

    A `limit` (bytes) of 0 turns the pool off. `idle_bytes` never exceeds `limit`, nor, beyond FEW, the bytes that were
    recently in use at once. Threads may share a pool.
    """

    def __init__(self, device: torch.device, limit: int = LIMIT) -> None:
        self.device, self.limit = device, limit
        self.hits = self.misses = self.idle_bytes = 0
        # Bytes in use, and the most bytes in use in this window and in the previous window.
        self._in_use = self._peak = self._previous_peak = 0
        #: Idle tensors by size, the least recently used size first.
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        # Reentrant: the garbage collector can end, in the middle of a call, a generator that gives a tensor back.
        self._lock = RLock()

    def take(self, size: int) -> torch.Tensor:
        """A tensor of `size` bytes with arbitrary contents. Raises OutOfMemory."""
        with self._lock:
            self._in_use += size
            self._peak = max(self._peak, self._in_use)
            if not (self.hits + self.misses) % WINDOW:
                self._previous_peak, self._peak = self._peak, self._in_use
            stores = self._idle.get(size)
            if stores:
                self.hits += 1
                self.idle_bytes -= size
                return stores.pop()
            self.misses += 1
        # A tensor made in inference mode cannot be written to outside of inference mode, where the next caller may be.
        with torch.inference_mode(False):
            return empty((size,), torch.uint8, self.device)

    def give(self, store: torch.Tensor) -> None:
        """Take back a tensor that nobody uses any more. Over the limit, free the least recently used sizes."""
        size = store.numel()
        with self._lock:
            self._idle.setdefault(size, []).append(store)
            self._idle.move_to_end(size)
            self.idle_bytes += size
            self._in_use = max(self._in_use - size, 0)
            limit = min(self.limit, max(self._peak, self._previous_peak, FEW))
            while self.idle_bytes > limit:
                oldest_size, stores = next(iter(self._idle.items()))
                if stores:
                    stores.pop()
                    self.idle_bytes -= oldest_size
                else:
                    del self._idle[oldest_size]

    def clear(self) -> None:
        """Return all idle memory to the system."""
        with self._lock:
            self._idle.clear()
            self.idle_bytes = 0


_pools: dict[torch.device, Pool] = {}


def memory_pool(device: torch.device | str = "cpu") -> Pool:
    """The pool of a device."""
    device = torch.device(device)
    pool = _pools.get(device)
    # `setdefault` is atomic: threads that come first together get one pool.
    return pool or _pools.setdefault(device, Pool(device, LIMIT if device.type == "cpu" else 0))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty`, tried once more after the pool was emptied. Raises OutOfMemory."""
    # On CPUs lack of memory is a plain RuntimeError, and with a valid shape `torch.empty` fails for nothing else. On
    # CUDA a plain RuntimeError is another failure, such as an error of a kernel that ran before.
    failure = RuntimeError if device.type == "cpu" else torch.OutOfMemoryError
    return _try_twice(lambda: torch.empty(tuple(shape), dtype=dtype, device=device), device, failure)


def retried(call: Callable[[], T], device: torch.device) -> T:
    """`call()`, which must be repeatable, tried once more after the pool was emptied. Raises OutOfMemory."""
    return _try_twice(call, device, torch.OutOfMemoryError)


def _try_twice(call: Callable[[], T], device: torch.device, failure: type[RuntimeError]) -> T:
    """`call()`, tried once more after a `failure` or MemoryError. `failure`: the type of torch's error."""
    try:
        return call()
    except (failure, MemoryError) as error:
        # `empty` takes any RuntimeError for lack of memory; a RuntimeError of a signal handler must pass unchanged.
        if failure is RuntimeError and not raised_below(error, (__name__,)):
            raise
    memory_pool(device).clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return call()
    except (failure, MemoryError) as error:
        raise OutOfMemory(
            f"{device} has not enough memory, also after ringattn's pool was emptied: {error}; "
            "try a smaller batch (auto_batch_size finds one), more ranks, or a narrower dtype"
        ) from error


def auto_batch_size(call: Callable[[int], T], start: int) -> tuple[int, T]:
    """(batch, call(batch)) for the first of start, start // 2, ... 1 that fits into the memory of this process.

    Raises OutOfMemory if a batch of 1 does not fit. Any other error passes: on CPUs a tensor that `call` itself makes
    and that does not fit is a plain RuntimeError of torch, which passes, too. For one process only: on a ring a rank
    that runs out of memory leaves the other ranks waiting, so find the size with `virtual_attention` or on one rank.
    """
    if isinstance(start, bool) or not isinstance(start, int) or start < 1:
        raise InvalidInput(f"start={start!r} must be an integer >= 1, the largest batch to try")
    batch = start
    while True:
        try:
            return batch, call(batch)
        except (OutOfMemory, torch.OutOfMemoryError, MemoryError) as error:
            for pool in list(_pools.values()):
                pool.clear()
            if batch <= 1:
                if isinstance(error, OutOfMemory):
                    raise
                raise OutOfMemory(
                    f"a batch of {batch} does not fit into memory: {error}; shard the sequence"
                ) from error
            batch //= 2
