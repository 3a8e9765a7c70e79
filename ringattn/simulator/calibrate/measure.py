"""The rounds of a calibration on one rank, and the machine that results from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ...machine.kernel_times import KernelTimes
from ...machine.machine import Machine
from ..timing.rates import own_bytes
from . import kernels, merge, noise
from .fits import fit_calls, fit_interference, fit_jitter, fit_kernel_times, fit_link
from .measuring_ranks import MeasuringRanks, Settings
from .passes import Pass, PassCase, Runs, list_cases, model_passes
from .rounds import CalibrationSizes, Round


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
    between: Callable[[MeasuringRanks], object] = lambda ranks: None,
) -> Calibration:
    """Measure kernels, merging, links, overlap and passes on all ranks, in rounds.

    Numbers that are not measured are those of `base`. A process alone measures kernels and merging only. `tell`
    receives what is measured, round by round, and `between` is called with the ranks after each round. Collective.
    Raises InvalidInput, and Unsupported where the kernel cannot compute the dtype.
    """
    kernel = kernels.find_kernel(settings, ranks.device)
    if ranks.device.type == "cpu":
        ranks.keep_pace(kernels.make_reference(kernel, settings, ranks.device))
    cases = _list_passes(ranks, sizes)
    rounds = []
    for number in ranks.rounds(settings):
        tell(f"round {number + 1}")
        rounds.append(Round.measure(ranks, kernel, settings, sizes, cases, first=not number))
        between(ranks)
    return _Fitter(ranks, settings, sizes).fit(Round.join(rounds), cases, base)


def _list_passes(ranks: MeasuringRanks, sizes: CalibrationSizes) -> list[PassCase]:
    """The passes of a calibration: of two calibrated sizes, and of sizes between; none for a process alone."""
    rows = (*sizes.rows[:2], *noise.sizes_between(sizes.rows)) if ranks.size > 1 else ()
    return list_cases(noise.GRID, rows, ranks.size)


class _Fitter:
    """Fits a machine; its numbers are in `values`, and the machine file's raw data in `samples` and `fits`."""

    def __init__(self, ranks: MeasuringRanks, settings: Settings, sizes: CalibrationSizes) -> None:
        self.ranks, self.settings, self.sizes = ranks, settings, sizes
        self.values: dict[str, Any] = {}
        self.samples: dict[str, Any] = {"unit": "s"}
        self.fits: dict[str, Any] = {}

    def fit(self, measured: Round, cases: Sequence[PassCase], base: Machine) -> Calibration:
        ranks = self.ranks
        kernel_times = self.fit_kernels(measured)
        self.values["merge"] = merge.merge_rate(measured.merges)
        self.samples["merge"] = [asdict(one) for one in measured.merges]
        if ranks.size > 1:
            self.fit_links(measured)
        kept = [pair for pair in base.sources if pair[0] not in (*self.values, "kernel", "residuals")]
        names = [*list_measured(self.values, ranks.nodes), "kernel"]
        sources = (*kept, *((name, "measured") for name in names))
        machine = base.changed(**self.values, kernel=kernel_times, sources=sources)
        passes: list[Pass] = []
        if ranks.size > 1:
            machine, passes = self.fit_passes(machine, cases, measured.runs)
        return Calibration(machine, _plain(self.samples), _plain(self.fits), passes)

    def fit_kernels(self, measured: Round) -> KernelTimes:
        """Kernel times, and the machine's `flops` and `jitter`."""
        settings, samples = self.settings, measured.works
        overhead = median(measured.overheads[0]), median(measured.overheads[1])
        kernel_times = fit_kernel_times(samples, overhead, settings.head_dim, settings.dtype, settings.heads)
        self.values["flops"] = kernel_times.grid("dense", False).rates[-1][-1]
        self.values["jitter"] = fit_jitter([sample.seconds for sample in samples])
        self.samples["overhead"] = measured.overheads
        self.samples["kernels"] = [asdict(sample) for sample in samples]
        return kernel_times

    def fit_links(self, measured: Round) -> None:
        """Latency and bandwidth of the links, within a node apart where there are several nodes, and `gamma`."""
        ranks = self.ranks
        self.samples["ping_pong"] = [asdict(one) for one in measured.ping_pong]
        self.values["ranks_per_node"] = ranks.ranks_per_node if ranks.nodes > 1 else 1
        for prefix, times in measured.shifts.items():
            fit = fit_link([one.bytes for one in times], [median(one.seconds) for one in times])
            self.values[f"{prefix}latency"], self.values[f"{prefix}bandwidth"] = fit.latency, fit.bandwidth
            self.samples[f"{prefix}shift"] = [asdict(one) for one in times]
            self.fits[f"{prefix}link"] = {
                **asdict(fit),
                "unit": "s, bytes/s, relative",
                "of": "shift to the neighbour, all ranks at once, after a visit",
            }
        if len(measured.shifts) == 1:
            self.values["node_latency"] = self.values["node_bandwidth"] = None
            if ranks.device.type == "cpu":
                self.values["cores"] = max(ranks.cores, ranks.ranks_per_node)
        self.values["shared_nic"] = False  # the bandwidth was measured while all ranks of a node sent to another node
        self.samples["overlap"] = [asdict(overlap) for overlap in measured.overlaps]
        # Without the smallest block, whose message takes longer than its visit: a ring is not meant for such blocks.
        self.values["gamma"] = fit_interference(
            [(overlap.visit, overlap.message, overlap.both) for overlap in measured.overlaps[1:]]
        )

    def fit_passes(
        self, machine: Machine, cases: Sequence[PassCase], runs: Sequence[Runs]
    ) -> tuple[Machine, list[Pass]]:
        """The machine with what calls take beside visits and messages, `residuals`, and the passes behind them.

        Passes of three sizes tell what a call takes whatever its size, and what its tensors take by their bytes, in
        each direction: at least what merging takes for as many bytes. Passes without any work would take less, as
        threads for messages find a core then. The residuals are those of sizes between the calibrated ones.
        """
        ranks, settings = self.ranks, self.settings
        between = {n * ranks.size for n in noise.sizes_between(self.sizes.rows)}

        def model(machine: Machine) -> list[Pass]:
            on_node = machine.changed(ranks_per_node=ranks.ranks_per_node)
            return model_passes(cases, runs, ranks.size, on_node, settings)

        assert machine.merge is not None, "merging is measured before passes"
        fitted: dict[str, float] = {}
        plain = model(machine.changed(call=0.0, call_backward=None, sweep=None, sweep_backward=None))
        for backward, suffix in ((False, ""), (True, "_backward")):
            beside = [_beside(each, ranks.size, settings) for each in plain if each.case.backward == backward]
            call, per_byte = fit_calls(beside, 1 / machine.merge)
            fitted |= {f"call{suffix}": call, f"sweep{suffix}": 1 / per_byte}
        sources = (*machine.sources, *((name, "measured") for name in (*fitted, "residuals")))
        machine = machine.changed(**fitted)
        modelled = model(machine)
        passes = [each for each in modelled if each.case.tokens in between]
        self.samples["calls"] = [each.record for each in modelled if each.case.tokens not in between]
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


def _plain(value: Any) -> Any:
    """Tuples as lists, which YAML can hold."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
