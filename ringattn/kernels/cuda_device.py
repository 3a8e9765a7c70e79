"""Which of PyTorch's CUDA attention ops a device, its libraries and torch's switches allow, and which bands they read.

The rules come from aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (PyTorch 2.13), by which torch's own
scaled_dot_product_attention chooses an op, and from the bug reports named beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..dtypes import dtype_name
from ..plan.work import Work

OPS = ("flash", "cudnn", "efficient")
HALF_DTYPES = (torch.float16, torch.bfloat16)
#: torch's switches, by op: torch.backends.cuda.enable_..._sdp.
SWITCHES = {"flash": "flash", "cudnn": "cudnn", "efficient": "mem_efficient"}
#: From cuDNN 9.15.1 on, torch itself prefers cuDNN on compute capability 9.0 and 10.x.
KNOWN_CUDNN = 91_501
#: Before cuDNN 9.26, the gradients of a last tile of fewer than 128 keys could be NaN (pytorch issue 196678).
WHOLE_TILES_CUDNN = 92_600
#: Minimum rows and keys of a cuDNN call. Calls of one row have been wrong (pytorch 193893, cudnn-frontend 1072).
CUDNN_ROWS = 128
CUDNN_HEAD_DIM = 128
#: On compute capability 10.x, cuDNN is silently wrong with fewer key/value heads (pytorch issue 193893).
CUDNN_KV_HEADS = 8
#: The (major compute capabilities, largest head dim) of implementations with which `activate_flash_attention_impl`
#: replaces FlashAttention 2 (torch/nn/attention/_fa3.py and _fa4.py).
FLASH = {"FA3": ((9,), 256), "FA4": ((9, 10), 128)}


@dataclass(frozen=True)
class CudaDevice:
    """The facts about a CUDA device that decide which op computes a call.

    `cudnn` is torch.backends.cudnn.version(), such as 91501, or None without cuDNN and on ROCm, where MIOpen reports
    its own version. `disabled` are the ops that the user has switched off with
    torch.backends.cuda.enable_..._sdp(False). `flash` is the implementation behind the flash op: "FA2", or the one that
    torch.nn.attention.activate_flash_attention_impl has activated.
    """

    capability: tuple[int, int]
    cudnn: int | None = KNOWN_CUDNN
    disabled: frozenset[str] = frozenset()
    flash: str = "FA2"

    @classmethod
    def read(cls, device: torch.device | None = None) -> CudaDevice:
        """Read the properties of `device`, or of the current device, and torch's present switches."""
        flags: Any = torch.backends.cuda
        disabled = frozenset(op for op, name in SWITCHES.items() if not getattr(flags, f"{name}_sdp_enabled")())
        attention: Any = torch.nn.attention
        flash = attention.current_flash_attention_impl() or "FA2"
        cudnn = None if torch.version.hip else torch.backends.cudnn.version()
        return cls(torch.cuda.get_device_capability(device), cudnn, disabled, flash)

    @property
    def flash_head_dim(self) -> int:
        """The largest head dim of the flash op."""
        return FLASH[self.flash][1] if self.flash in FLASH else 256

    def padded(self, width: int) -> int:
        """The number of columns to which tensors with head dim `width` are padded.

        It is the next multiple of 8 for which the ops have a backward.
        """
        width = -(-width // 8) * 8
        # Flash has no backward for 193 to 224 columns on these devices, but has one for more.
        lacks_some = (8, 6) <= self.capability <= (8, 9) or self.capability[0] == 12
        return 232 if lacks_some and 192 < width <= 224 else width

    def refuses(self, op: str, dtype: torch.dtype, width: int) -> str | None:
        """Why `op` cannot compute any call of this dtype and head dim (`width`) here; None if it can compute some."""
        if op in self.disabled:
            return f"torch.backends.cuda.enable_{SWITCHES[op]}_sdp(False) has switched it off"
        if op != "efficient" and dtype not in HALF_DTYPES:
            return f"it computes float16 and bfloat16, not {dtype_name(dtype)}"
        if self.capability < (8, 0) and (op != "efficient" or dtype == torch.bfloat16):
            return (
                f"it needs compute capability 8.0 for {dtype_name(dtype)}, this device has {_version(self.capability)}"
            )
        if op == "cudnn" and (self.cudnn is None or self.cudnn < KNOWN_CUDNN):
            return f"it needs cuDNN {KNOWN_CUDNN}, torch.backends.cudnn.version() is {self.cudnn}"
        if op == "flash" and self.flash in FLASH:
            if self.capability[0] not in FLASH[self.flash][0]:
                return f"{self.flash} is activated, and does not run on {_version(self.capability)}"
            if width > self.flash_head_dim:
                return f"{self.flash} is activated, and takes head dims up to {self.flash_head_dim}, not {width}"
        return None

    def cudnn_refuses(self, work: Work, width: int) -> str | None:
        """The reason why cuDNN does not compute this call with head dim `width`; None if it does."""
        rows, keys, kv_heads = len(work.q), work.keys, len(work.kv)
        if not (work.dense or work.causal):
            return "it has no windows, and counts causal calls from the first row and key"
        if width > CUDNN_HEAD_DIM:
            return f"it takes head dims up to {CUDNN_HEAD_DIM}, not {width}"
        if min(rows, keys) < CUDNN_ROWS:
            return f"it gets calls of {CUDNN_ROWS} rows and keys or more"
        if keys % 128 and (self.cudnn or 0) < WHOLE_TILES_CUDNN:
            return f"before cuDNN {WHOLE_TILES_CUDNN} it gets whole tiles of 128 keys only"
        if self.capability[0] == 10 and kv_heads < CUDNN_KV_HEADS:
            return f"on {_version(self.capability)} it gets calls of {CUDNN_KV_HEADS} key/value heads or more"
        return None

    def cudnn_is_slower(self) -> str | None:
        """The reason why flash is used for calls that cuDNN can compute as well; None if cuDNN is faster."""
        if self.flash in FLASH:
            return f"{self.flash} is activated"
        if self.capability[0] not in (9, 10):
            return f"it is faster than flash on 9.0 and 10.x, this device has {_version(self.capability)}"
        return None


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def flash_window(work: Work) -> tuple[int, int]:
    """The mask of a work as arguments of the flash op: (window_size_left, window_size_right); -1 is unbounded."""
    left, right = (-1 if bound is None else bound for bound in window_bounds(work))
    return left, right


def flash_reads(work: Work) -> bool:
    """Whether the flash op, given the window of `flash_window`, hides the pairs that the work hides, and no others.

    FlashAttention 2 treats a bound as unbounded if it is below 0 or at least the number of keys. If only one side is
    bounded, it bounds the other side by the number of keys (flash_api.cpp; flash-attention issue 895).
    """
    rows, keys = len(work.q), work.keys
    left, right = window_bounds(work)
    read_left = left if left is not None and 0 <= left < keys else None
    read_right = right if right is not None and 0 <= right < keys else None
    if read_left is None and read_right is not None:
        read_left = keys
    elif read_right is None and read_left is not None:
        read_right = keys
    return _same_bound(read_left, left, keys - 1) and _same_bound(read_right, right, rows - 1)


def efficient_mask(work: Work) -> tuple[bool, int, int | None]:
    """The mask of a work as arguments of the memory-efficient op: (flip, mask type, window).

    Only for masks that the op can express, see `efficient_reads`. Type 0 hides nothing. Type 2 hides the keys after a
    diagonal that ends at the last row and the last key; `window` is how many keys up to this diagonal a row sees, or
    None for all. If `flip` is True, pass rows and keys in reverse order. This turns a bound on the left into one on the
    right, because the op cannot take a left bound alone.
    """
    if work.dense:
        return False, 0, None
    return work.lo is None, 2, None if work.lo is None or work.hi is None else work.hi - work.lo + 1


def efficient_reads(work: Work) -> bool:
    """Whether the memory-efficient op can express the mask of a work."""
    return work.dense or (work.hi == 0 if work.lo is None else work.lo == len(work.q) - work.keys)


def _same_bound(read: int | None, needed: int | None, nothing_hidden: int) -> bool:
    """Whether two bounds of a window hide the same keys; bounds of at least `nothing_hidden` hide no key."""
    hides_nothing = [bound is None or bound >= nothing_hidden for bound in (read, needed)]
    return all(hides_nothing) or (not any(hides_nothing) and read == needed)


def window_bounds(work: Work) -> tuple[int | None, int | None]:
    """The mask of a work as bounds (left, right) of a window, counted from the last row and the last key.

    Row i sees key j if and only if i + keys - rows - left <= j <= i + keys - rows + right; None is unbounded.
    """
    shift = 0 if work.sequences else work.keys - len(work.q)
    return None if work.hi is None else work.hi + shift, None if work.lo is None else -work.lo - shift
