"""The order of a calibration on one rank, and the machine that results from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ...errors import InvalidInput
from ...kernels.base import Kernel
from ...machine.kernel_times import KernelTimes
from ...machine.machine import Machine
from ...timing.rates import own_bytes
from . import kernels, merge, noise
from .fits import fit_calls, fit_interference, fit_jitter, fit_kernel_times, fit_link
from .links import MessageTimes, measure_overlap, time_ping_pong, time_shift
from .measuring_ranks import MeasuringRanks, Settings
from .passes import Pass, list_cases, model_passes, time_passes

#: The numbers of a machine that are fitted to whole passes.
CALLS = ("call", "sweep", "call_backward", "sweep_backward")


@dataclass(frozen=True)
class CalibrationSizes:
    """Ascending sizes to measure: rows and keys of tiles, keys per row of bands, bytes of messages."""

    rows: Sequence[int]
    widths: Sequence[int]
    messages: Sequence[int]

    def __post_init__(self) -> None:
        for name, sizes, least in (("rows", self.rows, 2), ("widths", self.widths, 1), ("messages", self.messages, 2)):
            if len(sizes) < least or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 1:
                raise InvalidInput(f"{name}={list(sizes)}: expected at least {least} ascending sizes >= 1")


@dataclass(frozen=True)
class Calibration:
    """A measured machine, the raw samples behind its numbers, and the errors of the fits."""

    machine: Machine
    samples: dict[str, Any]
    fits: dict[str, Any]
    passes: list[Pass]


def calibrate(
    ranks: MeasuringRanks,
    settings: Settings,
    sizes: CalibrationSizes,
    base: Machine,
    tell: Callable[[str], None],
) -> Calibration:
    """Measure kernels, merging, links, overlap and noise on all ranks.

    Numbers that are not measured are those of `base`. A process alone measures kernels and merging only. `tell`
    receives the name of each part before it is measured. Collective. Raises InvalidInput, and Unsupported where the
    kernel cannot compute the dtype.
    """
    return _Calibrator(ranks, settings, sizes, tell).run(base)


class _Calibrator:
    """Collects the machine's numbers in `values`, and the machine file's raw data in `samples` and `fits`."""

    def __init__(
        self, ranks: MeasuringRanks, settings: Settings, sizes: CalibrationSizes, tell: Callable[[str], None]
    ) -> None:
        self.ranks, self.settings, self.sizes, self.tell = ranks, settings, sizes, tell
        self.values: dict[str, Any] = {}
        self.samples: dict[str, Any] = {"unit": "s"}
        self.fits: dict[str, Any] = {}

    def run(self, base: Machine) -> Calibration:
        settings, ranks = self.settings, self.ranks
        kernel = kernels.find_kernel(settings, ranks.device)
        if ranks.device.type == "cpu":
            ranks.keep_pace(kernels.make_reference(kernel, settings, ranks.device))
        kernel_times = self.measure_kernels(kernel)
        self.measure_merging()
        if ranks.size > 1:
            self.measure_links(kernel)
            self.measure_overlap(kernel)
        kept = [pair for pair in base.sources if pair[0] not in (*self.values, "kernel", "residuals")]
        names = [*list_measured(self.values, ranks.nodes), "kernel"]
        sources = (*kept, *((name, "measured") for name in names))
        machine = base.changed(**self.values, kernel=kernel_times, sources=sources)
        passes: list[Pass] = []
        if ranks.size > 1:
            machine, passes = self.measure_passes(machine)
        return Calibration(machine, _plain(self.samples), _plain(self.fits), passes)

    def measure_kernels(self, kernel: Kernel) -> KernelTimes:
        """Kernel times, and the machine's `flops` and `jitter`."""
        settings = self.settings
        self.tell("kernels")
        overheads = kernels.time_overheads(self.ranks, kernel, settings)
        works = list(kernels.list_works(self.sizes.rows, self.sizes.widths, settings.heads))
        samples = kernels.time_works(self.ranks, kernel, works, settings)
        overhead = median(overheads[0]), median(overheads[1])
        kernel_times = fit_kernel_times(samples, overhead, settings.head_dim, settings.dtype, settings.heads)
        self.values["flops"] = kernel_times.grid("dense", False).rates[-1][-1]
        self.values["jitter"] = fit_jitter([sample.seconds for sample in samples])
        self.samples["overhead"] = overheads
        self.samples["kernels"] = [asdict(sample) for sample in samples]
        return kernel_times

    def measure_merging(self) -> None:
        """The machine's `merge`."""
        self.tell("merging")
        times = merge.time_merges(self.ranks, self.sizes.rows, self.settings)
        self.values["merge"] = merge.merge_rate(times)
        self.samples["merge"] = _by_bytes(times)

    def measure_links(self, kernel: Kernel) -> None:
        """Latency and bandwidth of the links between nodes where there are several, and of those within a node."""
        self.tell("links")
        ranks, messages, repeat = self.ranks, self.sizes.messages, self.settings.repeat
        self.samples["ping_pong"] = _by_bytes(time_ping_pong(ranks, messages, repeat))
        self.values["ranks_per_node"] = ranks.ranks_per_node if ranks.nodes > 1 else 1
        if ranks.nodes == 1 or ranks.ranks_per_node == 1:  # one kind of links
            self._measure_shift("", kernel, within_node=ranks.ranks_per_node > 1)
            self.values["node_latency"] = self.values["node_bandwidth"] = None
            if ranks.device.type == "cpu":
                self.values["cores"] = max(ranks.cores, ranks.ranks_per_node)
        else:
            self._measure_shift("", kernel, within_node=False)
            self._measure_shift("node_", kernel, within_node=True)
        self.values["shared_nic"] = False  # the bandwidth was measured while all ranks of a node sent to another node

    def _measure_shift(self, prefix: str, kernel: Kernel, *, within_node: bool) -> None:
        times = time_shift(self.ranks, kernel, self.sizes.messages, self.settings, within_node=within_node)
        fit = fit_link([size for size, _ in times], [median(seconds) for _, seconds in times])
        self.values[f"{prefix}latency"], self.values[f"{prefix}bandwidth"] = fit.latency, fit.bandwidth
        self.samples[f"{prefix}shift"] = _by_bytes(times)
        self.fits[f"{prefix}link"] = {
            **asdict(fit),
            "unit": "s, bytes/s, relative",
            "of": "shift to the neighbour, all ranks at once, after a visit",
        }

    def measure_overlap(self, kernel: Kernel) -> None:
        """The machine's `gamma`."""
        self.tell("overlap")
        overlaps = [measure_overlap(self.ranks, kernel, rows, self.settings) for rows in self.sizes.rows]
        self.samples["overlap"] = [asdict(overlap) for overlap in overlaps]
        # Without the smallest block, whose message takes longer than its visit: a ring is not meant for such blocks.
        self.values["gamma"] = fit_interference(
            [(overlap.visit, overlap.message, overlap.both) for overlap in overlaps[1:]]
        )

    def measure_passes(self, machine: Machine) -> tuple[Machine, list[Pass]]:
        """The machine with what calls take beside visits and messages, `residuals`, and the passes behind them.

        Passes of three sizes tell what a call takes whatever its size, and what its tensors take by their bytes, in
        each direction: at least what merging takes for as many bytes. Passes without any work would take less, as
        threads for messages find a core then.
        """
        self.tell("passes")
        ranks, rows, settings = self.ranks, self.sizes.rows, self.settings
        short = list_cases(noise.GRID, rows[:2], ranks.size)
        cases = short + list_cases(noise.GRID, noise.sizes_between(rows), ranks.size)
        runs = time_passes(ranks, cases, settings)

        def model(machine: Machine) -> list[Pass]:
            on_node = machine.changed(ranks_per_node=ranks.ranks_per_node)
            return model_passes(cases, runs, ranks.size, on_node, settings)

        assert machine.merge is not None, "merging is measured before passes"
        fitted: dict[str, float] = {}
        plain = model(machine.changed(**dict.fromkeys(CALLS)))
        for backward, suffix in ((False, ""), (True, "_backward")):
            beside = [_beside(each, ranks.size, settings) for each in plain if each.case.backward == backward]
            call, per_byte = fit_calls(beside, 1 / machine.merge)
            fitted |= {f"call{suffix}": call, f"sweep{suffix}": 1 / per_byte}
        sources = (*machine.sources, *((name, "measured") for name in (*fitted, "residuals")))
        machine = machine.changed(**fitted)
        modelled = model(machine)
        passes = modelled[len(short) :]
        self.samples["calls"] = [each.record for each in modelled[: len(short)]]
        self.samples["passes"] = [each.record for each in passes]
        residuals = tuple((each.modelled, ratio) for each in passes for ratio in each.ratios)
        return machine.changed(residuals=residuals, sources=sources), passes


def _beside(one: Pass, ranks: int, settings: Settings) -> tuple[float, float, float]:
    """(measured seconds, bytes of a rank's q, k, v and output, measured - modelled seconds) of a pass."""
    seconds = median(one.seconds)
    nbytes = own_bytes(one.case.plan(ranks, settings))
    return seconds, nbytes, seconds - one.modelled


def list_measured(values: dict[str, Any], nodes: int) -> list[str]:
    """The names of `values` that were measured.

    On one node, nothing measures `ranks_per_node` and `shared_nic`: they are assumed. `cores` are counted.
    """
    return [
        name
        for name, value in values.items()
        if value is not None and name != "cores" and (nodes > 1 or name not in ("ranks_per_node", "shared_nic"))
    ]


def _by_bytes(times: MessageTimes) -> list[dict[str, Any]]:
    return [{"bytes": size, "seconds": seconds} for size, seconds in times]


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
