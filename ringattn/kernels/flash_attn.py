"""FlashAttention from packages other than torch: flash_attn, called directly, and FlashAttention 3 and 4 via torch.

Written from the sources of flash_attn 2.8 and PyTorch 2.13, and not yet run on a GPU: tests use stand-ins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import Unsupported
from .aten_cuda import AtenCuda, Lengths
from .cuda_device import CudaDevice


class FlashAttn(AtenCuda):
    """Kernel that calls FlashAttention 2 from the package flash_attn (2.7 or later) instead of torch's flash op.

    It splits works into the same calls as "aten_cuda:flash". `auto` does not choose this kernel: torch contains the
    same code, so the package should not be faster.
    """

    choices = ()
    #: The name for `kernel=`, the module that the kernel needs, and the package that contains the module.
    title: ClassVar[str] = "flash_attn"
    module: ClassVar[str] = "flash_attn.flash_attn_interface"
    package: ClassVar[str] = "flash-attn"
    #: Which rules of `CudaDevice` hold: "FA2", or a name that torch.nn.attention.activate_flash_attention_impl takes.
    implementation: ClassVar[str] = "FA2"

    def __init__(self, choice: str | None, dtype: torch.dtype, *, deterministic: bool) -> None:
        super().__init__("flash", dtype, deterministic=deterministic)
        self.name = self.title

    @classmethod
    def missing(cls) -> str | None:
        try:
            import_module(cls.module)
        except ImportError as error:
            return f"{error}; install the package {cls.package}"
        return super().missing()

    def use(self, device: CudaDevice, width: int) -> None:
        try:
            import_module(self.module)
        except ImportError as error:
            raise Unsupported(
                f"kernel {self.name}: {error}; install {self.package}, or try kernel=aten_cuda"
            ) from error
        # The package ignores the switches of torch's own op, and any implementation activated in its place.
        super().use(replace(device, flash=self.implementation, disabled=frozenset()), width)

    def flash_forward(
        self, *inputs: Tensor, lengths: Lengths, scale: float, window: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._call("forward", inputs, lengths, scale, window, return_softmax=False)
        return out, lse

    def flash_backward(
        self, *tensors: Tensor, lengths: Lengths, scale: float, window: tuple[int, int]
    ) -> Sequence[Tensor]:
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[1:4]]
        self._call("backward", (*tensors, *grads), lengths, scale, window, deterministic=self.deterministic)
        return grads

    def _call(
        self, name: str, tensors: tuple[Tensor, ...], lengths: Lengths, scale: float, window: Any, **options: bool
    ) -> Any:
        """Call a function of the package and return its result; for a packed call, the varlen variant."""
        packed = lengths[0] is not None
        call = getattr(import_module(self.module), f"_wrapped_flash_attn_{'varlen_' if packed else ''}{name}")
        return call(
            *(*tensors, *(lengths if packed else ()), 0.0, scale),
            causal=False,
            window_size_left=window[0],
            window_size_right=window[1],
            softcap=0.0,
            alibi_slopes=None,
            **options,
        )


class FlashAttn3(FlashAttn):
    """Kernel that calls torch's flash op after switching it to FlashAttention 3.

    The first call of this kernel switches it with torch.nn.attention.activate_flash_attention_impl("FA3"), for all
    attention in the process; so a user must ask for this kernel by name. Afterwards, `auto` and "aten_cuda" use
    FlashAttention 3 as well, in place of FlashAttention 2 and cuDNN.
    """

    title, module, package, implementation = "flash_attn_3", "flash_attn_interface", "flash_attn_3", "FA3"
    flash_forward, flash_backward = AtenCuda.flash_forward, AtenCuda.flash_backward

    def use(self, device: CudaDevice, width: int) -> None:
        super().use(device, width)
        if torch.nn.attention.current_flash_attention_impl() != self.implementation:
            torch.nn.attention.activate_flash_attention_impl(self.implementation)


class FlashAttn4(FlashAttn3):
    """Kernel that calls torch's flash op after switching it to FlashAttention 4 ("FA4"); see `FlashAttn3`."""

    title, module, package, implementation = "flash_attn_4", "flash_attn.cute.interface", "flash-attn-4", "FA4"
