"""Machines by name: what is published about them, and what is assumed. Nothing here was measured but "cpu".

Each number has a source and the reason: cited, with the document that says so, or assumed, with the reasoning. Speeds are
peaks of data sheets times a fraction that attention kernels were published to reach, so they are assumed, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput, did_you_mean
from .machine import Machine


@dataclass(frozen=True)
class Fact:
    """A number of a machine, its source (cited, assumed, measured), and the document or the reasoning."""

    value: Any
    source: str
    why: str


Facts = dict[str, Fact]


def cited(value: Any, why: str) -> Fact:
    return Fact(value, "cited", why)


def assumed(value: Any, why: str) -> Fact:
    return Fact(value, "assumed", why)


#: The currency of all prices here.
CURRENCY = "USD"

# Shared by several machines.
_NODE_OF_8 = cited(8, "NVIDIA HGX and DGX systems: 8 GPUs per node, all joined by NVSwitch")
_NCCL_NEAR = assumed(1e-5, "a NCCL message between GPUs of a node takes about 10 us with its launch")
_NCCL_FAR = assumed(2e-5, "a NCCL message over InfiniBand takes about twice as long to start as one over NVLink")
_GAMMA = assumed(0.05, "a few of the 132 or 108 multiprocessors copy for NCCL while messages travel")
_WRITES = cited(
    2e12 / 16384,
    "The Llama 3 Herd of Models (2024): storage sustains 2 TB/s, here for its 16,384 GPUs at the same time",
)
_RESTART = assumed(300.0, "minutes to start a job again and to read its state")
_LLAMA = cited(
    54 * 86400 * 16384 / 419,
    "Llama Team, The Llama 3 Herd of Models (2024), table 5: 419 unexpected interruptions in 54 days on 16,384 H100; here per "
    "GPU and its share of everything else",
)
_LIKE_WRITES = assumed(_WRITES.value, "as of the storage of the Llama 3 report")
_LIKE_LLAMA = assumed(_LLAMA.value, "as of the H100 of the Llama 3 report: no such count of this machine is known")


def _hopper(name: str, memory: float, bandwidth: float, price: float) -> Facts:
    return {
        "flops": assumed(
            5e14,
            f"half of the 989e12 dense bf16 flop/s in the NVIDIA {name} data sheet; FlashAttention-3 (Shah et al., 2024) "
            "reports up to 740e12 in its forward, torch's kernels less",
        ),
        "latency": _NCCL_FAR,
        "bandwidth": cited(5e10, "NVIDIA DGX H100/H200 data sheet: one 400 Gb/s ConnectX-7 per GPU"),
        "ranks_per_node": _NODE_OF_8,
        "node_latency": _NCCL_NEAR,
        "node_bandwidth": assumed(
            3.6e11,
            f"80 % of the 450e9 bytes/s each way that the NVIDIA {name} data sheet gives for NVLink (900 GB/s both ways)",
        ),
        "merge": assumed(
            bandwidth / 2, f"half of the memory bandwidth in the NVIDIA {name} data sheet, {bandwidth:.3g} bytes/s"
        ),
        "gamma": _GAMMA,
        "memory": cited(memory, f"NVIDIA {name} data sheet"),
        "watts": cited(700.0, f"NVIDIA {name} data sheet: up to 700 W per SXM module; without hosts and switches"),
        "price": assumed(price, "USD per GPU-hour as rented on demand, which changes from month to month"),
        "mtbf": _LLAMA if name == "H100" else _LIKE_LLAMA,
        "checkpoint": _WRITES if name == "H100" else _LIKE_WRITES,
        "restart": _RESTART,
    }


_H100, _H200 = _hopper("H100", 80e9, 3.35e12, 2.5), _hopper("H200", 141e9, 4.8e12, 3.5)
_A100: Facts = {
    "flops": assumed(
        1.8e14,
        "58 % of the 312e12 dense bf16 flop/s in the NVIDIA A100 data sheet; FlashAttention-2 (Dao, 2023) reports 50 to 73 % "
        "in its forward",
    ),
    "latency": _NCCL_FAR,
    "bandwidth": cited(2.5e10, "NVIDIA DGX A100 data sheet: one 200 Gb/s ConnectX-6 per GPU"),
    "ranks_per_node": _NODE_OF_8,
    "node_latency": _NCCL_NEAR,
    "node_bandwidth": assumed(
        2.4e11,
        "80 % of the 300e9 bytes/s each way that the NVIDIA A100 data sheet gives for NVLink (600 GB/s both ways)",
    ),
    "merge": assumed(1.02e12, "half of the memory bandwidth in the NVIDIA A100 80GB SXM data sheet, 2.039e12 bytes/s"),
    "gamma": _GAMMA,
    "memory": cited(80e9, "NVIDIA A100 80GB data sheet"),
    "watts": cited(400.0, "NVIDIA A100 data sheet: up to 400 W per SXM module; without hosts and switches"),
    "price": assumed(1.5, "USD per GPU-hour as rented on demand, which changes from month to month"),
    "mtbf": _LIKE_LLAMA,
    "checkpoint": _LIKE_WRITES,
    "restart": _RESTART,
}
_ETHERNET: Facts = {
    **_H100,
    "latency": assumed(5e-5, "TCP between nodes takes some 50 us per message with its copies"),
    "bandwidth": assumed(1e10, "80 % of one 100 Gb/s Ethernet card per node, which its 8 GPUs share"),
    "shared_nic": assumed(True, "one card per node"),
}
_A100_PCIE: Facts = {
    "flops": assumed(
        1.4e14, "45 % of the 312e12 dense bf16 flop/s in the NVIDIA A100 data sheet: 300 W instead of 400 W"
    ),
    "latency": assumed(5e-5, "TCP between nodes takes some 50 us per message with its copies"),
    "bandwidth": assumed(1e10, "80 % of one 100 Gb/s Ethernet card per node, which its GPUs share"),
    "ranks_per_node": assumed(4, "a server with four cards and no NVLink bridges"),
    "shared_nic": assumed(True, "one card per node"),
    "node_latency": assumed(1.5e-5, "a NCCL message through the host's PCIe switch"),
    "node_bandwidth": assumed(
        2e10, "two thirds of the 32e9 bytes/s each way of PCIe 4.0 x16 (PCI-SIG); less where it crosses sockets"
    ),
    "merge": assumed(9.7e11, "half of the memory bandwidth in the NVIDIA A100 80GB PCIe data sheet, 1.935e12 bytes/s"),
    "gamma": _GAMMA,
    "memory": cited(80e9, "NVIDIA A100 80GB PCIe data sheet"),
    "watts": cited(300.0, "NVIDIA A100 80GB PCIe data sheet: 300 W"),
    "price": assumed(1.2, "USD per GPU-hour as rented on demand, which changes from month to month"),
    "mtbf": _LIKE_LLAMA,
    "checkpoint": _LIKE_WRITES,
    "restart": _RESTART,
}
_GTX1080: Facts = {
    "flops": assumed(
        3e12,
        "35 % of 8.87e12 fp32 flop/s: 2,560 cores x 2 x 1.733 GHz, NVIDIA GeForce GTX 1080 whitepaper (2016); it has no tensor "
        "cores, and flash kernels do not run on it",
    ),
    "latency": assumed(5e-5, "a NCCL message between two cards through host memory"),
    "bandwidth": assumed(
        6e9,
        "40 % of the 15.75e9 bytes/s each way of PCIe 3.0 x16 (PCI-SIG): cards without peer access copy "
        "through host memory",
    ),
    "merge": assumed(1.6e11, "half of the 320e9 bytes/s of memory in the NVIDIA GeForce GTX 1080 whitepaper"),
    "gamma": _GAMMA,
    "memory": cited(8e9, "NVIDIA GeForce GTX 1080 whitepaper: 8 GB of GDDR5X"),
    "watts": cited(180.0, "NVIDIA GeForce GTX 1080 whitepaper: 180 W"),
    "price": assumed(0.1, "USD per hour of power and wear; such cards are hardly rented"),
    "mtbf": _LIKE_LLAMA,
    "checkpoint": assumed(1e8, "one disk"),
    "restart": assumed(60.0, "one workstation"),
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
_CUDA["latency"] = _NCCL_NEAR

#: What is known of machines, by name. `cpu` and `cuda` are the defaults of device types.
FACTS: dict[str, Facts] = {
    "cpu": _CPU,
    "cuda": _CUDA,
    "h100_nvlink_ib": _H100,
    "h200_nvlink_ib": _H200,
    "a100_nvlink_ib": _A100,
    "h100_ethernet": _ETHERNET,
    "a100_pcie": _A100_PCIE,
    "gtx1080_pcie": _GTX1080,
}


#: The dtype of the `flops` of machines; all others are of 16 bits.
_DTYPES = {"cpu": "float32", "gtx1080_pcie": "float32"}


def _machine(name: str, facts: Facts) -> Machine:
    known = tuple((field, fact.source) for field, fact in facts.items() if fact.source != "assumed")
    values = {field: fact.value for field, fact in facts.items()}
    return Machine(**values, sources=known, flops_dtype=_DTYPES.get(name, "bfloat16"))


MACHINES: dict[str, Machine] = {name: _machine(name, facts) for name, facts in FACTS.items()}


def get_machine(machine: Machine | str | None, device: str = "cpu") -> Machine:
    """A machine, that of a name (`MACHINES`), or the default of a device type."""
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
