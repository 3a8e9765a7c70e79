"""Machines by name: published numbers, and assumptions where nothing is published. Only the preset `cpu` was measured.

Each number has a source: cited, with the document, or assumed, with the reason. A rate of a kernel or of merging is the
peak of a data sheet times a fraction that was published for such kernels, and is therefore assumed, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput
from ..text import did_you_mean
from .machine import Machine

#: The currency of all prices of presets.
CURRENCY = "USD"


@dataclass(frozen=True)
class Fact:
    """A number of a machine, its source (cited, assumed or measured), and the document or the reason."""

    value: float | int | bool
    source: str
    reason: str


#: Facts by the name of the number.
Facts = dict[str, Fact]


@dataclass(frozen=True)
class Preset:
    """A machine by name: one line that describes it, its numbers, and the dtype that `flops` belong to.

    A plan in another dtype of the same size takes the same `flops`.
    """

    title: str
    facts: Facts
    flops_dtype: str = "bfloat16"

    @property
    def machine(self) -> Machine:
        """The machine that has these numbers."""
        sources = tuple((name, fact.source) for name, fact in self.facts.items() if fact.source != "assumed")
        values: dict[str, Any] = {name: fact.value for name, fact in self.facts.items()}
        return Machine(**values, sources=sources, flops_dtype=self.flops_dtype)


def cited(value: float | int | bool, document: str) -> Fact:
    """A number that a document states."""
    return Fact(value, "cited", document)


def assumed(value: float | int | bool, reason: str) -> Fact:
    """A number that is assumed for a reason."""
    return Fact(value, "assumed", reason)


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


def _hopper(name: str, memory: float, memory_bandwidth: float, price: float) -> Facts:
    """The facts of nodes with 8 H100 or H200 GPUs, which differ in memory and price."""
    return {
        "flops": assumed(
            5e14,
            f"half of the 989e12 dense bf16 flop/s in the NVIDIA {name} data sheet; FlashAttention-3 (Shah et al., "
            "2024) reports up to 740e12 in its forward, and torch's kernels reach less",
        ),
        "latency": _NCCL_BETWEEN_NODES,
        "bandwidth": cited(5e10, "NVIDIA DGX H100/H200 data sheet: one 400 Gb/s ConnectX-7 per GPU"),
        "ranks_per_node": _NODE_OF_8,
        "node_latency": _NCCL_WITHIN_NODE,
        "node_bandwidth": assumed(
            3.6e11,
            f"80 % of the 450e9 bytes/s each way of NVLink in the NVIDIA {name} data sheet (900 GB/s both ways)",
        ),
        "merge": assumed(
            memory_bandwidth / 2,
            f"half of the memory bandwidth in the NVIDIA {name} data sheet, {memory_bandwidth:.3g} bytes/s",
        ),
        "gamma": _INTERFERENCE,
        "memory": cited(memory, f"NVIDIA {name} data sheet"),
        "watts": cited(700.0, f"NVIDIA {name} data sheet: up to 700 W per SXM module; without hosts and switches"),
        "price": assumed(price, _RENT),
        "mtbf": _LLAMA_FAILURES if name == "H100" else _FAILURES_AS_LLAMA,
        "checkpoint": _LLAMA_STORAGE if name == "H100" else _STORAGE_AS_LLAMA,
        "restart": _RESTART,
    }


_H100, _H200 = _hopper("H100", 80e9, 3.35e12, 2.5), _hopper("H200", 141e9, 4.8e12, 3.5)
_A100: Facts = {
    "flops": assumed(
        1.8e14,
        "58 % of the 312e12 dense bf16 flop/s in the NVIDIA A100 data sheet; FlashAttention-2 (Dao, 2023) reports 50 "
        "to 73 % in its forward",
    ),
    "latency": _NCCL_BETWEEN_NODES,
    "bandwidth": cited(2.5e10, "NVIDIA DGX A100 data sheet: one 200 Gb/s ConnectX-6 per GPU"),
    "ranks_per_node": _NODE_OF_8,
    "node_latency": _NCCL_WITHIN_NODE,
    "node_bandwidth": assumed(
        2.4e11,
        "80 % of the 300e9 bytes/s each way of NVLink in the NVIDIA A100 data sheet (600 GB/s both ways)",
    ),
    "merge": assumed(1.02e12, "half of the memory bandwidth in the NVIDIA A100 80GB SXM data sheet, 2.039e12 bytes/s"),
    "gamma": _INTERFERENCE,
    "memory": cited(80e9, "NVIDIA A100 80GB data sheet"),
    "watts": cited(400.0, "NVIDIA A100 data sheet: up to 400 W per SXM module; without hosts and switches"),
    "price": assumed(1.5, _RENT),
    "mtbf": _FAILURES_AS_LLAMA,
    "checkpoint": _STORAGE_AS_LLAMA,
    "restart": _RESTART,
}
_ETHERNET: Facts = {
    **_H100,
    "latency": assumed(5e-5, "TCP between nodes takes about 50 us per message, copies included"),
    "bandwidth": assumed(1e10, "80 % of one 100 Gb/s Ethernet card per node, which 8 GPUs share"),
    "shared_nic": assumed(True, "one network card per node"),
}
_A100_PCIE: Facts = {
    "flops": assumed(
        1.4e14, "45 % of the 312e12 dense bf16 flop/s in the NVIDIA A100 data sheet: 300 W instead of 400 W"
    ),
    "latency": assumed(5e-5, "TCP between nodes takes about 50 us per message, copies included"),
    "bandwidth": assumed(1e10, "80 % of one 100 Gb/s Ethernet card per node, which 4 GPUs share"),
    "ranks_per_node": assumed(4, "a server with four cards and no NVLink bridges"),
    "shared_nic": assumed(True, "one network card per node"),
    "node_latency": assumed(1.5e-5, "an NCCL message through the host's PCIe switch"),
    "node_bandwidth": assumed(
        2e10, "two thirds of the 32e9 bytes/s each way of PCIe 4.0 x16 (PCI-SIG); less across sockets"
    ),
    "merge": assumed(9.7e11, "half of the memory bandwidth in the NVIDIA A100 80GB PCIe data sheet, 1.935e12 bytes/s"),
    "gamma": _INTERFERENCE,
    "memory": cited(80e9, "NVIDIA A100 80GB PCIe data sheet"),
    "watts": cited(300.0, "NVIDIA A100 80GB PCIe data sheet: 300 W"),
    "price": assumed(1.2, _RENT),
    "mtbf": _FAILURES_AS_LLAMA,
    "checkpoint": _STORAGE_AS_LLAMA,
    "restart": _RESTART,
}
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
    name: _H100[name] for name in ("flops", "bandwidth", "ranks_per_node", "node_latency", "node_bandwidth")
}
_CUDA["latency"] = _NCCL_WITHIN_NODE

#: Presets by name. `cpu` and `cuda` are the defaults of these device types.
PRESETS: dict[str, Preset] = {
    "cpu": Preset(
        "Gloo between processes of one host, one thread each: measured roughly in fp32 on 2 cores of a virtual server",
        _CPU,
        "float32",
    ),
    "cuda": Preset("The rates of kernels and links of H100 nodes with 8 GPUs, assumed and not measured", _CUDA),
    "h100_nvlink_ib": Preset(
        "H100 SXM nodes of 8: NVLink inside, a 400 Gb/s InfiniBand card per GPU between nodes", _H100
    ),
    "h200_nvlink_ib": Preset(
        "H200 SXM nodes of 8: NVLink inside, a 400 Gb/s InfiniBand card per GPU between nodes", _H200
    ),
    "a100_nvlink_ib": Preset(
        "A100 80GB SXM nodes of 8: NVLink inside, a 200 Gb/s InfiniBand card per GPU between nodes", _A100
    ),
    "h100_ethernet": Preset(
        "H100 SXM nodes of 8: NVLink inside, one 100 Gb/s Ethernet card per node between nodes", _ETHERNET
    ),
    "a100_pcie": Preset("Servers with 4 A100 PCIe cards and one 100 Gb/s Ethernet card", _A100_PCIE),
    "gtx1080_pcie": Preset(
        "GTX 1080 cards in one box, joined by PCIe 3.0 through host memory; every card counts as a node",
        _GTX1080,
        "float32",
    ),
}
#: The machines of the presets, by name.
MACHINES: dict[str, Machine] = {name: preset.machine for name, preset in PRESETS.items()}


def get_machine(machine: Machine | str | None, device: str = "cpu") -> Machine:
    """The machine itself, the machine of a name in `MACHINES`, or for None the default of a device type.

    Raises InvalidInput where there is no such machine.
    """
    if machine is None:
        return MACHINES.get(device, MACHINES["cpu"])
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str) or machine not in MACHINES:
        raise InvalidInput(
            f"unknown machine {machine!r}; {did_you_mean(machine, MACHINES)}expected {', '.join(MACHINES)}, or a "
            "Machine such as ringattn.Machine(flops=5e10, latency=1e-4, bandwidth=1.5e9)"
        )
    return MACHINES[machine]
