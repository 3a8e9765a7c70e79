"""The rounds of a calibration on one rank, and the machine that results from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from statistics import median
from typing import Any, TypeVar

from ...errors import InvalidInput
from ...kernels.base import Kernel
from ...machine.kernel_times import KernelTimes
from ...machine.machine import Machine
from ...timing.rates import own_bytes
from . import kernels, merge, noise
from .fits import Sample, fit_calls, fit_interference, fit_jitter, fit_kernel_times, fit_link
from .links import Overlap, measure_overlap, time_ping_pong, time_shift
from .measuring_ranks import MeasuringRanks, Settings, TimedBytes
from .passes import Pass, PassCase, Runs, list_cases, model_passes, time_passes

T = TypeVar("T")
#: A measurement of one round.
D = TypeVar("D", Sample, TimedBytes, Overlap)

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
    between: Callable[[], None] = lambda: None,
) -> Calibration:
    """Measure kernels, merging, links, overlap and passes on all ranks, in rounds.

    Numbers that are not measured are those of `base`. A process alone measures kernels and merging only. `tell`
    receives what is measured, round by round, and `between` is called after each round. Collective. Raises
    InvalidInput, and Unsupported where the kernel cannot compute the dtype.
    """
    kernel = kernels.find_kernel(settings, ranks.device)
    if ranks.device.type == "cpu":
        ranks.keep_pace(kernels.make_reference(kernel, settings, ranks.device))
    cases = _list_passes(ranks, sizes)
    rounds = []
    for number in ranks.rounds(settings):
        tell(f"round {number + 1}")
        rounds.append(_Round.measure(ranks, kernel, settings, sizes, cases, first=not number))
        between()
    return _Fitter(ranks, settings, sizes).fit(_Round.join(rounds), cases, base)


def _list_passes(ranks: MeasuringRanks, sizes: CalibrationSizes) -> list[PassCase]:
    """The passes of a calibration: of two calibrated sizes, and of sizes between; none for a process alone."""
    rows = (*sizes.rows[:2], *noise.sizes_between(sizes.rows)) if ranks.size > 1 else ()
    return list_cases(noise.GRID, rows, ranks.size)


@dataclass(frozen=True)
class _Round:
    """What one round has measured, or all rounds together. A process alone has no messages, overlaps and passes."""

    overheads: kernels.Overheads
    works: list[Sample]
    merges: list[TimedBytes]
    ping_pong: list[TimedBytes]
    #: Messages to the next rank by the prefix of the numbers that they give: "", or "node_" within a node.
    shifts: dict[str, list[TimedBytes]]
    overlaps: list[Overlap]
    #: The runs of each pass.
    runs: list[Runs]

    @classmethod
    def measure(
        cls,
        ranks: MeasuringRanks,
        kernel: Kernel,
        settings: Settings,
        sizes: CalibrationSizes,
        cases: Sequence[PassCase],
        *,
        first: bool,
    ) -> _Round:
        """Measure everything once. Collective."""
        overheads = kernels.time_overheads(ranks, kernel, settings)
        works = list(kernels.list_works(sizes.rows, sizes.widths, settings.heads))
        samples = kernels.time_works(ranks, kernel, works, settings)
        merges = merge.time_merges(ranks, sizes.rows, settings)
        if ranks.size == 1:
            return cls(overheads, samples, merges, [], {}, [], [])
        shifts = {
            prefix: time_shift(ranks, kernel, sizes.messages, settings, within_node=within_node)
            for prefix, within_node in _list_links(ranks).items()
        }
        overlaps = [measure_overlap(ranks, kernel, rows, settings) for rows in sizes.rows]
        runs: list[Runs] = [(run,) for run in time_passes(ranks, cases, settings, warm_up=first)]
        return cls(overheads, samples, merges, time_ping_pong(ranks, sizes.messages), shifts, overlaps, runs)

    @classmethod
    def join(cls, rounds: Sequence[_Round]) -> _Round:
        """The rounds as one, in which every measurement has the seconds of all rounds."""
        return cls(
            overheads=(_chain(one.overheads[0] for one in rounds), _chain(one.overheads[1] for one in rounds)),
            works=_join([one.works for one in rounds], "seconds"),
            merges=_join([one.merges for one in rounds], "seconds"),
            ping_pong=_join([one.ping_pong for one in rounds], "seconds"),
            shifts={prefix: _join([one.shifts[prefix] for one in rounds], "seconds") for prefix in rounds[0].shifts},
            overlaps=_join([one.overlaps for one in rounds], "visit", "message", "both"),
            runs=[_chain(runs) for runs in zip(*(one.runs for one in rounds), strict=True)],
        )


def _list_links(ranks: MeasuringRanks) -> dict[str, bool]:
    """The kinds of links by the prefix of their numbers, and whether the links lie within a node.

    The only kind of links has no prefix; where there are nodes of several ranks, that between nodes has none.
    """
    if ranks.nodes == 1 or ranks.ranks_per_node == 1:
        return {"": ranks.ranks_per_node > 1}
    return {"": False, "node_": True}


def _join(rounds: Sequence[Sequence[D]], *names: str) -> list[D]:
    """What was measured in each round, with the values of all rounds under `names`."""
    return [
        replace(same[0], **{name: _chain(getattr(one, name) for one in same) for name in names})
        for same in zip(*rounds, strict=True)
    ]


def _chain(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))


class _Fitter:
    """Fits a machine; its numbers are in `values`, and the machine file's raw data in `samples` and `fits`."""

    def __init__(self, ranks: MeasuringRanks, settings: Settings, sizes: CalibrationSizes) -> None:
        self.ranks, self.settings, self.sizes = ranks, settings, sizes
        self.values: dict[str, Any] = {}
        self.samples: dict[str, Any] = {"unit": "s"}
        self.fits: dict[str, Any] = {}

    def fit(self, measured: _Round, cases: Sequence[PassCase], base: Machine) -> Calibration:
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

    def fit_kernels(self, measured: _Round) -> KernelTimes:
        """Kernel times, and the machine's `flops` and `jitter`."""
        settings, samples = self.settings, measured.works
        overhead = median(measured.overheads[0]), median(measured.overheads[1])
        kernel_times = fit_kernel_times(samples, overhead, settings.head_dim, settings.dtype, settings.heads)
        self.values["flops"] = kernel_times.grid("dense", False).rates[-1][-1]
        self.values["jitter"] = fit_jitter([sample.seconds for sample in samples])
        self.samples["overhead"] = measured.overheads
        self.samples["kernels"] = [asdict(sample) for sample in samples]
        return kernel_times

    def fit_links(self, measured: _Round) -> None:
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
        plain = model(machine.changed(**dict.fromkeys(CALLS)))
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
