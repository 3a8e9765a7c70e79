"""One pool of message buffers per device, so that a step does not pay for fresh memory.

On CPUs the first touch of fresh memory costs more than the copy that fills it. CUDA needs no pool: PyTorch's
allocator is one.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

#: Bytes that a pool holds at most while nobody uses them.
LIMIT = 1 << 28


class Pool:
    """Idle uint8 tensors of one device, by size. `hits` and `misses` count the calls of `take`."""

    def __init__(self, device: torch.device, limit: int = LIMIT) -> None:
        self.device, self.limit = device, limit
        self.hits = self.misses = self.idle_bytes = 0
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()  # least recently used size first

    def take(self, size: int) -> torch.Tensor:
        """A tensor of `size` bytes with arbitrary contents."""
        stores = self._idle.get(size)
        if stores:
            self.hits += 1
            self.idle_bytes -= size
            return stores.pop()
        self.misses += 1
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give(self, store: torch.Tensor) -> None:
        """Take back a tensor that nobody reads or writes any more; the least recently used go beyond the limit."""
        size = store.numel()
        self._idle.setdefault(size, []).append(store)
        self._idle.move_to_end(size)
        self.idle_bytes += size
        while self.idle_bytes > self.limit:
            oldest, stores = next(iter(self._idle.items()))
            if stores:
                stores.pop()
                self.idle_bytes -= oldest
            else:
                del self._idle[oldest]

    def clear(self) -> None:
        """Return all idle memory to the system."""
        self._idle.clear()
        self.idle_bytes = 0


_pools: dict[torch.device, Pool] = {}


def pool(device: torch.device) -> Pool:
    """The pool of a device."""
    if device not in _pools:
        _pools[device] = Pool(device, LIMIT if device.type == "cpu" else 0)
    return _pools[device]
