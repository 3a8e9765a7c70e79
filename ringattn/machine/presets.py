"""Machines by name: published numbers, and assumptions where nothing is published. Only the preset `cpu` was measured.

Each number has a source: cited, with the document, or assumed, with the reason. A rate of a kernel or of merging is the
peak of a data sheet times a fraction that was published for such kernels, and is therefore assumed, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput
from ..text import did_you_mean
from .kernel_times import KernelRates
from .machine import Machine

#: The currency of all prices of presets.
CURRENCY = "USD"


@dataclass(frozen=True)
class Fact:
    """A number of a machine, its source (cited, fitted, assumed or measured), and the document, rows or reason."""

    value: float | int | bool
    source: str
    reason: str


#: Facts by the name of the number.
Facts = dict[str, Fact]


def cited(value: float | int | bool, document: str) -> Fact:
    """A number that a document states."""
    return Fact(value, "cited", document)


def fitted(value: float | int | bool, rows: str) -> Fact:
    """A number that was fitted to published measurements: `rows` of simulator/published/measurements.csv."""
    return Fact(value, "fitted", rows)


def assumed(value: float | int | bool, reason: str) -> Fact:
    """A number that is assumed for a reason."""
    return Fact(value, "assumed", reason)


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


@dataclass(frozen=True)
class Preset:
    """A machine by name: one line that describes it, its numbers, and the dtype that `flops` belong to.

    A plan in another dtype of the same size takes the same `flops`.
    """

    title: str
    facts: Facts
    flops_dtype: str = "bfloat16"
    #: Rates of the kernels of several libraries, the default first; none: every call has the rate `flops`.
    kernels: tuple[PresetKernel, ...] = ()

    def machine(self, name: str, library: str = "") -> Machine:
        """The machine that has these numbers, called `name`, with the kernels of a library."""
        libraries = {kernel.library: kernel.rates for kernel in self.kernels}
        if library and library not in libraries:
            raise InvalidInput(
                f"machine {name}/{library}: {did_you_mean(library, libraries)}expected one of the kernels "
                f"{', '.join(libraries) or '(this machine has none)'}, such as {name}/{next(iter(libraries), '')}"
            )
        sources = tuple((name, fact.source) for name, fact in self.facts.items() if fact.source != "assumed")
        values: dict[str, Any] = {name: fact.value for name, fact in self.facts.items()}
        rates = libraries[library] if library else next(iter(libraries.values()), None)
        if rates is not None:
            kernel = next(kernel for kernel in self.kernels if kernel.library == rates.library)
            sources += (("kernel_rates", kernel.facts["forward"].source),)
        return Machine(**values, sources=sources, flops_dtype=self.flops_dtype, kernel_rates=rates, preset=name)


# Facts that several machines share.
_NODE_OF_8 = cited(8, "NVIDIA HGX and DGX systems: 8 GPUs per node, all joined by NVSwitch")
_NCCL_WITHIN_NODE = assumed(1e-5, "an NCCL message between GPUs of a node takes about 10 us, launch included")
_NCCL_BETWEEN_NODES = assumed(2e-5, "an NCCL message over InfiniBand takes about twice as long to start as over NVLink")
_INTERFERENCE = assumed(0.05, "NCCL copies with a few of the 132 or 108 multiprocessors while messages travel")
_LLAMA_STORAGE = cited(
    2e12 / 16384,
    "The Llama 3 Herd of Models (2024): storage sustains 2 TB/s, here shared by 16,384 GPUs that write at once",
)
_RESTART = assumed(300.0, "starting a job again and reading its state takes minutes")
_LLAMA_FAILURES = cited(
    54 * 86400 * 16384 / 419,
    "Llama Team, The Llama 3 Herd of Models (2024), table 5: 419 unexpected interruptions in 54 days on 16,384 H100, "
    "here per GPU with its share of host, network and storage",
)
_STORAGE_AS_LLAMA = assumed(_LLAMA_STORAGE.value, "the value for the storage in the Llama 3 report")
_FAILURES_AS_LLAMA = assumed(
    _LLAMA_FAILURES.value, "the value for H100 in the Llama 3 report, as no such count is published for this machine"
)
_RENT = "a GPU rented on demand; the price changes from month to month"


_HOST = fitted(
    4e-4, "usp-a100-nvlink: 8,192 tokens, ids 1 or 2 modulo 4, rounded by hand: Python, autograd, NCCL's calls"
)
_HOST_CALL = fitted(
    6e-4,
    "usp-a100-nvlink: 8,192 tokens, ids 1 or 2 modulo 4, rounded by hand: what these passes take beside their steps",
)


def _link(bytes_per_second: float, what: str) -> Fact:
    """What messages reach of a link's rate in one direction, by the one rule for NVLink, PCIe and network cards."""
    return assumed(REACHED * bytes_per_second, f"80 % of the {bytes_per_second:.4g} bytes/s each way of {what}")


def _node(
    sheet: str,
    speed: Facts,
    *,
    nic: Fact,
    node_bandwidth: Fact,
    memory: float,
    memory_bandwidth: float,
    watts: float,
    price: float,
    **others: Fact,
) -> Facts:
    """The facts of nodes of GPUs, by default 8 of them joined by NVSwitch; `others` replace or add facts."""
    return {
        **speed,
        "latency": _NCCL_BETWEEN_NODES,
        "bandwidth": nic,
        "ranks_per_node": _NODE_OF_8,
        "node_latency": _NCCL_WITHIN_NODE,
        "node_bandwidth": node_bandwidth,
        "merge": assumed(
            memory_bandwidth / 2, f"half of the memory bandwidth in the {sheet}, {memory_bandwidth:.4g} bytes/s"
        ),
        "gamma": _INTERFERENCE,
        "host": _HOST,
        "host_call": _HOST_CALL,
        "memory": cited(memory, sheet),
        "watts": cited(watts, f"{sheet}: up to {watts:g} W per GPU; without hosts and switches"),
        "price": assumed(price, _RENT),
        "mtbf": _FAILURES_AS_LLAMA,
        "checkpoint": _STORAGE_AS_LLAMA,
        "restart": _RESTART,
        **others,
    }


def _speed(kernel: PresetKernel, peak: float, reached: float) -> Facts:
    """The rates of large calls of attention with heads of 128, of the data sheet, and of matrix products."""
    facts = kernel.facts
    useful = round(facts["forward"].value / (1 + facts["softmax"].value / 512) / 1e13) * 1e13
    calls = f"what {kernel.library} reaches in large calls with heads of 128, by the rates of the kernel"
    matmuls = f"{reached:.0%} of the peak, as power and tiles limit large matrix products"
    of_sheet = cited(peak, "dense bf16 flop/s in the data sheet of the GPU")
    return {"flops": assumed(useful, calls), "peak": of_sheet, "matmul": assumed(reached * peak, matmuls)}


_NDR, _HDR = _link(5e10, "a 400 Gb/s card per GPU"), _link(2.5e10, "a 200 Gb/s card per GPU")
_TCP = assumed(5e-5, "TCP between nodes takes about 50 us per message, copies included")
_ONE_CARD = assumed(True, "one network card per node")
_PCIE_SWITCH = assumed(1.5e-5, "an NCCL message through the host's PCIe switch")
_ETHERNET_CARD = _link(1.25e10, "one 100 Gb/s Ethernet card per node, which its GPUs share")
_H100_SHEET, _PCIE_4 = "NVIDIA H100 data sheet", "PCIe 4.0 x16 (PCI-SIG)"
_NVLINK_4 = _link(4.5e11, "NVLink in the NVIDIA H100 data sheet (900 GB/s both ways)")
_H100 = _node(
    _H100_SHEET,
    _speed(H100_KERNELS[0], 9.89e14, 0.65),
    nic=_NDR,
    node_bandwidth=_NVLINK_4,
    memory=80e9,
    memory_bandwidth=3.35e12,
    watts=700.0,
    price=2.5,
    mtbf=_LLAMA_FAILURES,
    checkpoint=_LLAMA_STORAGE,
)
_H200 = _node(
    "NVIDIA H200 data sheet",
    _speed(H200_KERNELS[0], 9.89e14, 0.65),
    nic=_NDR,
    node_bandwidth=_NVLINK_4,
    memory=141e9,
    memory_bandwidth=4.8e12,
    watts=700.0,
    price=3.5,
)
_H800: Facts = {
    **_H100,
    **_speed(H800_KERNELS[0], 9.89e14, 0.65),
    "node_bandwidth": _link(2e11, "NVLink of H800 (400 GB/s both ways instead of H100's 900)"),
    "mtbf": _FAILURES_AS_LLAMA,
    "checkpoint": _STORAGE_AS_LLAMA,
}
_B200 = _node(
    "NVIDIA B200 data sheet",
    _speed(B200_KERNELS[0], 2.25e15, 0.65),
    nic=_NDR,
    node_bandwidth=_link(9e11, "NVLink 5 in the NVIDIA B200 data sheet (1.8 TB/s both ways)"),
    memory=180e9,
    memory_bandwidth=8e12,
    watts=1000.0,
    price=5.0,
)
_A100 = _node(
    "NVIDIA A100 80GB data sheet",
    _speed(A100_KERNELS[0], 3.12e14, 0.7),
    nic=_HDR,
    node_bandwidth=_link(3e11, "NVLink in the NVIDIA A100 data sheet (600 GB/s both ways)"),
    memory=80e9,
    memory_bandwidth=2.039e12,
    watts=400.0,
    price=1.5,
)
_ETHERNET: Facts = {**_H100, "latency": _TCP, "bandwidth": _ETHERNET_CARD, "shared_nic": _ONE_CARD}
_A100_PCIE = _node(
    "NVIDIA A100 80GB PCIe data sheet",
    _speed(A100_PCIE_KERNELS[0], 3.12e14, 0.5),
    nic=_ETHERNET_CARD,
    node_bandwidth=fitted(
        3e9,
        "usp-a100-pcie: ids 1 or 2 modulo 4: four cards that copy through host memory at the same time, across "
        f"sockets; a tenth of {_PCIE_4}",
    ),
    memory=80e9,
    memory_bandwidth=1.935e12,
    watts=300.0,
    price=1.2,
    latency=_TCP,
    ranks_per_node=assumed(4, "a server with four cards and no NVLink bridges"),
    shared_nic=_ONE_CARD,
    node_latency=_PCIE_SWITCH,
)
_L20 = _node(
    "NVIDIA L20 data sheet",
    _speed(L20_KERNELS[0], 1.195e14, 0.7),
    nic=_ETHERNET_CARD,
    node_bandwidth=assumed(6e9, f"a fifth of the 32e9 bytes/s each way of {_PCIE_4}, which 8 cards share in pairs"),
    memory=48e9,
    memory_bandwidth=8.64e11,
    watts=275.0,
    price=0.8,
    latency=_TCP,
    ranks_per_node=assumed(8, "a server with eight cards and no NVLink"),
    shared_nic=_ONE_CARD,
    node_latency=_PCIE_SWITCH,
)
_MI300X = _node(
    "AMD Instinct MI300X data sheet",
    _speed(MI300X_KERNELS[0], 1.307e15, 0.5),
    nic=_NDR,
    node_bandwidth=_link(6.4e10, "one Infinity Fabric link (128 GB/s both ways): a ring uses one of seven"),
    memory=192e9,
    memory_bandwidth=5.3e12,
    watts=750.0,
    price=3.0,
    ranks_per_node=cited(8, "AMD Instinct MI300X data sheet: platforms of 8, each joined to all others"),
)
_GTX1080: Facts = {
    "flops": assumed(
        3e12,
        "35 % of 8.87e12 fp32 flop/s: 2,560 cores x 2 x 1.733 GHz, NVIDIA GeForce GTX 1080 whitepaper (2016); the "
        "card has no tensor cores, and flash kernels do not run on it",
    ),
    "latency": assumed(5e-5, "an NCCL message between two cards through host memory"),
    "bandwidth": assumed(
        6e9,
        "40 % of the 15.75e9 bytes/s each way of PCIe 3.0 x16 (PCI-SIG): cards without peer access copy "
        "through host memory",
    ),
    "merge": assumed(1.6e11, "half of the 320e9 bytes/s of memory in the NVIDIA GeForce GTX 1080 whitepaper"),
    "gamma": _INTERFERENCE,
    "memory": cited(8e9, "NVIDIA GeForce GTX 1080 whitepaper: 8 GB of GDDR5X"),
    "watts": cited(180.0, "NVIDIA GeForce GTX 1080 whitepaper: 180 W"),
    "price": assumed(0.1, "power and wear; hardly anyone rents such cards out"),
    "mtbf": _FAILURES_AS_LLAMA,
    "checkpoint": assumed(1e8, "the rate of one disk"),
    "restart": assumed(60.0, "one workstation starts again within a minute"),
}
_CPU: Facts = {
    "flops": Fact(
        5e10, "measured", "a flash call of 2,048 tokens in fp32 with one thread, on a virtual x86 server of 2 cores"
    ),
    "latency": Fact(1e-4, "measured", "Gloo between processes of that server: a message of 256 bytes took 90 us"),
    "bandwidth": Fact(1.5e9, "measured", "Gloo between processes of that server: 16 MiB both ways took 11 ms"),
}
_CUDA: Facts = {
    "flops": assumed(5e14, "half of the 989e12 dense bf16 flop/s in the NVIDIA H100 data sheet"),
    "latency": _NCCL_WITHIN_NODE,
    "bandwidth": cited(5e10, "NVIDIA DGX H100/H200 data sheet: one 400 Gb/s ConnectX-7 per GPU"),
    **{name: _H100[name] for name in ("ranks_per_node", "node_latency", "node_bandwidth")},
}

#: Presets by name. `cpu` and `cuda` are the defaults of these device types.
PRESETS: dict[str, Preset] = {
    "cpu": Preset(
        "Gloo between processes of one host, one thread each: measured roughly in fp32 on 2 cores of a virtual server",
        _CPU,
        "float32",
    ),
    "cuda": Preset("The rates of kernels and links of H100 nodes with 8 GPUs, assumed and not measured", _CUDA),
    "h100_nvlink_ib": Preset(
        "H100 SXM nodes of 8: NVLink inside, a 400 Gb/s InfiniBand card per GPU between nodes",
        _H100,
        kernels=H100_KERNELS,
    ),
    "h200_nvlink_ib": Preset(
        "H200 SXM nodes of 8: NVLink inside, a 400 Gb/s InfiniBand card per GPU between nodes",
        _H200,
        kernels=H200_KERNELS,
    ),
    "a100_nvlink_ib": Preset(
        "A100 80GB SXM nodes of 8: NVLink inside, a 200 Gb/s InfiniBand card per GPU between nodes",
        _A100,
        kernels=A100_KERNELS,
    ),
    "h100_ethernet": Preset(
        "H100 SXM nodes of 8: NVLink inside, one 100 Gb/s Ethernet card per node between nodes",
        _ETHERNET,
        kernels=H100_KERNELS,
    ),
    "h800_nvlink_ib": Preset(
        "H800 SXM nodes of 8: NVLink of 400 GB/s inside, a 400 Gb/s InfiniBand card per GPU between nodes",
        _H800,
        kernels=H800_KERNELS,
    ),
    "b200_nvlink_ib": Preset(
        "B200 SXM nodes of 8: NVLink inside, a 400 Gb/s InfiniBand card per GPU between nodes",
        _B200,
        kernels=B200_KERNELS,
    ),
    "mi300x_ib": Preset(
        "MI300X nodes of 8: Infinity Fabric inside, a 400 Gb/s card per GPU between nodes",
        _MI300X,
        kernels=MI300X_KERNELS,
    ),
    "a100_pcie": Preset(
        "Servers with 4 A100 PCIe cards and one 100 Gb/s Ethernet card", _A100_PCIE, kernels=A100_PCIE_KERNELS
    ),
    "l20_pcie": Preset("Servers with 8 L20 cards on PCIe and one 100 Gb/s Ethernet card", _L20, kernels=L20_KERNELS),
    "gtx1080_pcie": Preset(
        "GTX 1080 cards in one box, joined by PCIe 3.0 through host memory; every card counts as a node",
        _GTX1080,
        "float32",
    ),
}
#: The machines of the presets, by name.
MACHINES: dict[str, Machine] = {name: preset.machine(name) for name, preset in PRESETS.items()}


def get_machine(machine: Machine | str | None, device: str = "cpu") -> Machine:
    """The machine itself, the machine of a name in `MACHINES`, or for None the default of a device type.

    A name such as "h100_nvlink_ib/fa2" is that machine with the kernels of another library. Raises InvalidInput where
    there is no such machine.
    """
    if machine is None:
        return MACHINES.get(device, MACHINES["cpu"])
    if isinstance(machine, Machine):
        return machine
    name, _, library = machine.partition("/") if isinstance(machine, str) else ("", "", "")
    if name not in MACHINES:
        raise InvalidInput(
            f"unknown machine {machine!r}; {did_you_mean(name, MACHINES)}expected {', '.join(MACHINES)}, or a "
            "Machine such as ringattn.Machine(flops=5e10, latency=1e-4, bandwidth=1.5e9)"
        )
    return PRESETS[name].machine(name, library) if library else MACHINES[name]
