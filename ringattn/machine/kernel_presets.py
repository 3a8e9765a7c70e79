"""Rates of attention kernels by GPU and library, each number with its source.

Peaks are rates of matrix products and exponentials on a full GPU, and so lie above the useful rates that tables give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .facts import Fact, Facts, assumed, cited, fitted
from .kernel_rates import KernelRates

#: The part of a data sheet's rate that memory and links of every kind reach; one rule for all machines.
REACHED = 0.8


@dataclass(frozen=True)
class PresetKernel:
    """The kernel of one library on one GPU, as facts by the fields of KernelRates."""

    library: str
    facts: Facts

    @property
    def rates(self) -> KernelRates:
        """The rates that these facts state."""
        values = {name: fact.value for name, fact in self.facts.items()}
        return KernelRates(self.library, **values)  # type: ignore[arg-type]


_SOFTMAX = fitted(112.0, "usp-a100-nvlink: Ulysses of 8 on 131,072 tokens, head dims 32 against 128")
_SOFTMAX_AS_FA2 = assumed(112.0, "the value fitted for flash-attn 2 on A100")
_LAUNCH = assumed(1e-5, "two CUDA kernels that start one after another are about 10 us apart")

_VISIT = fitted(8e-5, "zhuzilin and zhuzilin-old: zigzag rings, forward; rounded by hand")


def _memory(bytes_per_second: float, sheet: str) -> Fact:
    return assumed(REACHED * bytes_per_second, f"80 % of the {bytes_per_second:.4g} bytes/s in the {sheet}")


def _kernel(library: str, memory: Fact, forward: Fact, backward: Fact, slots: Fact, softmax: Fact) -> PresetKernel:
    facts = {"forward": forward, "backward": backward, "softmax": softmax, "slots": slots, "memory": memory}
    return PresetKernel(library, {**facts, "launch": _LAUNCH, "visit": _VISIT})


def _slots(multiprocessors: int, each: int, sheet: str) -> Fact:
    return cited(each * multiprocessors, f"{sheet}: {multiprocessors} multiprocessors, {each} thread block(s) on each")


def _like(kernel: PresetKernel, other: Mapping[str, Fact], why: str, scale: float = 1.0) -> PresetKernel:
    """The kernel with peaks `scale` times as high, which are then assumed, and `other` facts in place of its own."""
    peaks = {name: assumed(scale * kernel.facts[name].value, why) for name in ("forward", "backward")}
    return PresetKernel(kernel.library, {**kernel.facts, **peaks, **other})


_HOPPER_1 = _slots(132, 1, "NVIDIA H100 SXM data sheet")
_HOPPER_2 = _slots(132, 2, "NVIDIA H100 SXM data sheet")
_H100_MEMORY = _memory(3.35e12, "NVIDIA H100 SXM data sheet")
_H200_MEMORY = _memory(4.8e12, "NVIDIA H200 SXM data sheet")
_FA2_HOPPER = _kernel(
    "fa2",
    _H100_MEMORY,
    fitted(464e12, "zhuzilin: one H800, 8,192 tokens causal, 32 heads of 128, 591.5 forwards per second"),
    fitted(417e12, "zhuzilin: the same, 154.7 forwards and backwards per second, less the forward"),
    _HOPPER_2,
    _SOFTMAX_AS_FA2,
)
_FA3_HOPPER = _kernel(
    "fa3",
    _H100_MEMORY,
    fitted(792e12, "kernel-h100: flash_v3, rows with id 1 or 2 modulo 4; the others test it"),
    fitted(740e12, "magi-h100: Ulysses of 8, backward"),
    _HOPPER_1,
    _SOFTMAX_AS_FA2,
)
_TRITON_HOPPER = _kernel(
    "triton",
    _H100_MEMORY,
    fitted(592e12, "kernel-h100: triton_tutorial_flash_v2, rows with id 1 or 2 modulo 4; the others test it"),
    assumed(0.8 * 592e12, "80 % of the forward, as no backward is published"),
    _HOPPER_1,
    _SOFTMAX_AS_FA2,
)
_AS_FA3 = "as fast as flash-attn 3: both reach about three quarters of the data sheet in a forward"
H100_KERNELS = (_FA3_HOPPER, _FA2_HOPPER, PresetKernel("cudnn", _like(_FA3_HOPPER, {}, _AS_FA3).facts), _TRITON_HOPPER)
_SAME_CHIP = "the same chip as H100"
H200_KERNELS = tuple(_like(kernel, {"memory": _H200_MEMORY}, _SAME_CHIP) for kernel in H100_KERNELS)
H800_KERNELS = (_FA2_HOPPER, *(_like(kernel, {}, _SAME_CHIP) for kernel in (_FA3_HOPPER, H100_KERNELS[2])))
_A100_SLOTS = _slots(108, 2, "NVIDIA A100 data sheet")
_FA2_A100 = _kernel(
    "fa2",
    _memory(2.039e12, "NVIDIA A100 80GB SXM data sheet"),
    fitted(276e12, "zhuzilin: one A100, 8,192 tokens causal, 32 heads of 128, 373.4 forwards per second"),
    fitted(247e12, "zhuzilin: the same, 94.7 forwards and backwards per second, less the forward"),
    _A100_SLOTS,
    _SOFTMAX,
)
A100_KERNELS = (_FA2_A100,)
A100_PCIE_KERNELS = (
    _like(
        _FA2_A100,
        {"memory": _memory(1.935e12, "NVIDIA A100 80GB PCIe data sheet")},
        "fitted with the links of usp-a100-pcie: 60 % of A100 SXM, at 300 W instead of 400 W",
        0.6,
    ),
)
B200_KERNELS = (
    _kernel(
        "cudnn",
        _memory(8e12, "NVIDIA B200 data sheet"),
        assumed(1.7e15, "75 % of the 2.25e15 dense bf16 flop/s in the NVIDIA B200 data sheet, as flash-attn 3 on H100"),
        assumed(1.5e15, "two thirds of the same, as backwards on Hopper are slower than forwards"),
        _slots(148, 1, "NVIDIA B200 data sheet"),
        _SOFTMAX_AS_FA2,
    ),
)
L20_KERNELS = (
    _kernel(
        "fa2",
        _memory(8.64e11, "NVIDIA L20 data sheet"),
        assumed(1.1e14, "92 % of the 119.5e12 dense bf16 flop/s in the NVIDIA L20 data sheet, as flash-attn 2 on A100"),
        assumed(9.5e13, "80 % of the same, as on A100"),
        _slots(92, 1, "NVIDIA L20 data sheet"),
        _SOFTMAX_AS_FA2,
    ),
)
MI300X_KERNELS = (
    _kernel(
        "ck",
        _memory(5.3e12, "AMD Instinct MI300X data sheet"),
        assumed(6.5e14, "half of the 1307e12 dense bf16 flop/s in the AMD Instinct MI300X data sheet"),
        assumed(4.5e14, "a third of the same: backwards on this GPU are far from forwards"),
        _slots(304, 2, "AMD Instinct MI300X data sheet"),
        _SOFTMAX_AS_FA2,
    ),
)
