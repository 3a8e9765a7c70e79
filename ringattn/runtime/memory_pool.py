"""One pool of memory per device: message buffers, accumulators and workspaces, so that a step needs no fresh memory.

On CPUs the first touch of fresh memory costs more than the copy that fills it. CUDA needs no pool: PyTorch's
allocator is one, so there the limit is 0 and nothing is held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import RLock
from typing import TypeVar

import torch

from ..errors import InvalidInput, OutOfMemory, raised_below

#: Bytes that a pool holds at most while nobody uses them.
LIMIT = 1 << 28
#: Of these, more than FEW only up to as many as were in use at once during the last WINDOW calls of `take` or so: calls
#: of the same shapes need no more, and what calls of other shapes have left does not add up.
FEW, WINDOW = 1 << 24, 1 << 10

T = TypeVar("T")


class Pool:
    """Idle uint8 tensors of one device, by size. `hits` and `misses` count the calls of `take`.

    Setting `limit` (bytes) to 0 turns it off. `idle_bytes` never exceeds `limit`, nor what was in use at once lately.
    Threads may share a pool.
    """

    def __init__(self, device: torch.device, limit: int = LIMIT) -> None:
        self.device, self.limit = device, limit
        self.hits = self.misses = self.idle_bytes = 0
        self._out = self._peak = self._earlier = 0  # bytes in use, and the most of them in this window and the last
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()  # least recently used size first
        # The same thread may enter twice: the garbage collector can end a generator that gives a tensor back.
        self._lock = RLock()

    def take(self, size: int) -> torch.Tensor:
        """A tensor of `size` bytes with arbitrary contents. Raises OutOfMemory."""
        with self._lock:
            self._out += size
            self._peak = max(self._peak, self._out)
            if not (self.hits + self.misses) % WINDOW:
                self._earlier, self._peak = self._peak, self._out
            stores = self._idle.get(size)
            if stores:
                self.hits += 1
                self.idle_bytes -= size
                return stores.pop()
            self.misses += 1
        # A tensor made in inference mode could not be written to outside of it, where the next caller may be.
        with torch.inference_mode(False):
            return empty((size,), torch.uint8, self.device)

    def give(self, store: torch.Tensor) -> None:
        """Take back a tensor that nobody reads or writes any more; the least recently used go beyond the limit."""
        size = store.numel()
        with self._lock:
            self._idle.setdefault(size, []).append(store)
            self._idle.move_to_end(size)
            self.idle_bytes += size
            self._out = max(self._out - size, 0)
            most = min(self.limit, max(self._peak, self._earlier, FEW))
            while self.idle_bytes > most:
                oldest, stores = next(iter(self._idle.items()))
                if stores:
                    stores.pop()
                    self.idle_bytes -= oldest
                else:
                    del self._idle[oldest]

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
    """`torch.empty`, with one more try after the pool was emptied. Raises OutOfMemory."""
    # With a valid shape there is but one way for it to fail; on CPUs that has no type of its own.
    return _twice(lambda: torch.empty(tuple(shape), dtype=dtype, device=device), device, RuntimeError)


def retried(call: Callable[[], T], device: torch.device) -> T:
    """`call()`, which must be repeatable, with one more try after the pool was emptied. Raises OutOfMemory."""
    return _twice(call, device, torch.OutOfMemoryError)


def _twice(call: Callable[[], T], device: torch.device, failure: type[RuntimeError]) -> T:
    try:
        return call()
    except (failure, MemoryError) as error:
        # `empty` takes any RuntimeError for a lack of memory, so that one of a signal handler must be told apart.
        if failure is RuntimeError and not raised_below(error, (__name__,)):
            raise
    memory_pool(device).clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return call()
    except (failure, MemoryError) as error:
        raise OutOfMemory(
            f"{device} has not enough memory, nor had it after ringattn's pool was emptied: {error}; "
            "try a smaller batch (auto_batch_size finds one), more ranks, or a narrower dtype"
        ) from error


def auto_batch_size(call: Callable[[int], T], start: int) -> tuple[int, T]:
    """(batch, call(batch)) for the first of start, start // 2, ... 1 that fits into the memory of this process.

    Any other error passes (on CPUs a tensor that `call` makes itself and that does not fit is a plain RuntimeError of
    torch, which cannot be told from others); OutOfMemory is raised where a batch of 1 does not fit. For one process:
    on a ring, one rank that runs out of memory leaves the others waiting, so find the size with `virtual_attention`
    or on one rank.
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
