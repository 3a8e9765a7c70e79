"""Machines by name: published numbers, and assumptions where nothing is published. Only the preset `cpu` was measured.

Each number has a source: cited, with the document, or assumed, with the reason. A rate of a kernel or of merging is the
peak of a data sheet times a fraction that was published for such kernels, and is therefore assumed, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput
from ..text import did_you_mean
from .facts import Fact, Facts, assumed, cited, fitted
from .kernel_presets import (
    A100_KERNELS,
    A100_PCIE_KERNELS,
    B200_KERNELS,
    H100_KERNELS,
    H200_KERNELS,
    H800_KERNELS,
    L20_KERNELS,
    MI300X_KERNELS,
    REACHED,
    PresetKernel,
)
from .machine import Machine

#: The currency of all prices of presets.
CURRENCY = "USD"


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
    flops: Fact,
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
        "flops": flops,
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


def _useful(kernel: PresetKernel) -> Fact:
    """The rate of large dense calls with heads of 128, for numbers of machines that have no rates by size."""
    facts = kernel.facts
    useful = round(facts["forward"].value / (1 + facts["softmax"].value / 512) / 1e13) * 1e13
    return assumed(
        useful, f"what {kernel.library} reaches in large calls with heads of 128, by the rates of the kernel"
    )


_NDR, _HDR = _link(5e10, "a 400 Gb/s card per GPU"), _link(2.5e10, "a 200 Gb/s card per GPU")
_TCP = assumed(5e-5, "TCP between nodes takes about 50 us per message, copies included")
_ONE_CARD = assumed(True, "one network card per node")
_ETHERNET_CARD = _link(1.25e10, "one 100 Gb/s Ethernet card per node, which its GPUs share")
_H100_SHEET, _PCIE_4 = "NVIDIA H100 data sheet", "PCIe 4.0 x16 (PCI-SIG)"
_NVLINK_4 = _link(4.5e11, "NVLink in the NVIDIA H100 data sheet (900 GB/s both ways)")
_H100 = _node(
    _H100_SHEET,
    _useful(H100_KERNELS[0]),
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
    _useful(H200_KERNELS[0]),
    nic=_NDR,
    node_bandwidth=_NVLINK_4,
    memory=141e9,
    memory_bandwidth=4.8e12,
    watts=700.0,
    price=3.5,
)
_H800: Facts = {
    **_H100,
    "flops": _useful(H800_KERNELS[0]),
    "node_bandwidth": _link(2e11, "NVLink of H800 (400 GB/s both ways instead of H100's 900)"),
    "mtbf": _FAILURES_AS_LLAMA,
    "checkpoint": _STORAGE_AS_LLAMA,
}
_B200 = _node(
    "NVIDIA B200 data sheet",
    _useful(B200_KERNELS[0]),
    nic=_NDR,
    node_bandwidth=_link(9e11, "NVLink 5 in the NVIDIA B200 data sheet (1.8 TB/s both ways)"),
    memory=180e9,
    memory_bandwidth=8e12,
    watts=1000.0,
    price=5.0,
)
_A100 = _node(
    "NVIDIA A100 80GB data sheet",
    _useful(A100_KERNELS[0]),
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
    _useful(A100_PCIE_KERNELS[0]),
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
    node_latency=assumed(1.5e-5, "an NCCL message through the host's PCIe switch"),
)
_L20 = _node(
    "NVIDIA L20 data sheet",
    _useful(L20_KERNELS[0]),
    nic=_ETHERNET_CARD,
    node_bandwidth=assumed(6e9, f"a fifth of the 32e9 bytes/s each way of {_PCIE_4}, which 8 cards share in pairs"),
    memory=48e9,
    memory_bandwidth=8.64e11,
    watts=275.0,
    price=0.8,
    latency=_TCP,
    ranks_per_node=assumed(8, "a server with eight cards and no NVLink"),
    shared_nic=_ONE_CARD,
    node_latency=assumed(1.5e-5, "an NCCL message through the host's PCIe switch"),
)
_MI300X = _node(
    "AMD Instinct MI300X data sheet",
    _useful(MI300X_KERNELS[0]),
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
