"""The rounds of a calibration on one rank, and the machine that results from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ...machine.machine import Machine
from ..timing.rates import own_bytes
from . import kernels
from .fits import fit_calls, fit_interference, fit_jitter, fit_kernel_times, fit_link
from .measuring_ranks import MeasuringRanks, Settings
from .passes import GRID, Pass, PassCase, Runs, list_cases, model_passes, sizes_between
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
    return _fit(ranks, settings, sizes, Round.join(rounds), cases, base)


def _list_passes(ranks: MeasuringRanks, sizes: CalibrationSizes) -> list[PassCase]:
    """The passes of a calibration: of two calibrated sizes, and of sizes between; none for a process alone."""
    rows = (*sizes.rows[:2], *sizes_between(sizes.rows)) if ranks.size > 1 else ()
    return list_cases(GRID, rows, ranks.size)


def _fit(
    ranks: MeasuringRanks,
    settings: Settings,
    sizes: CalibrationSizes,
    measured: Round,
    cases: Sequence[PassCase],
    base: Machine,
) -> Calibration:
    """The machine, with the machine file's raw data of it."""
    overhead = median(measured.overheads[0]), median(measured.overheads[1])
    kernel_times = fit_kernel_times(measured.works, overhead, settings.head_dim, settings.dtype, settings.heads)
    values: dict[str, Any] = {
        "flops": kernel_times.grid("dense", False).rates[-1][-1],
        "jitter": fit_jitter([sample.seconds for sample in measured.works]),
        "merge": kernels.merge_rate(measured.merges),
    }
    samples, fits = {"unit": "s", **asdict(measured)}, dict[str, Any]()
    del samples["runs"]  # which `passes` has
    samples |= {f"{prefix}shifts": times for prefix, times in samples.pop("shifts").items()}
    if ranks.size > 1:
        _fit_links(ranks, measured, values, fits)
    kept = [pair for pair in base.sources if pair[0] not in (*values, "kernel", "residuals")]
    names = [*list_measured(values, ranks.nodes), "kernel"]
    machine = base.changed(**values, kernel=kernel_times, sources=(*kept, *((name, "measured") for name in names)))
    if ranks.size == 1:
        return Calibration(machine, _plain(samples), fits, [])
    between = {n * ranks.size for n in sizes_between(sizes.rows)}
    machine, modelled = _fit_passes(ranks, settings, machine, cases, measured.runs)
    passes = [each for each in modelled if each.case.tokens in between]
    samples["calls"] = [each.record for each in modelled if each.case.tokens not in between]
    samples["passes"] = [each.record for each in passes]
    residuals = tuple((each.modelled, ratio) for each in passes for ratio in each.ratios)
    sources = (*machine.sources, ("residuals", "measured"))
    return Calibration(machine.changed(residuals=residuals, sources=sources), _plain(samples), fits, passes)


def _fit_links(ranks: MeasuringRanks, measured: Round, values: dict[str, Any], fits: dict[str, Any]) -> None:
    """Latency and bandwidth of the links, within a node apart where there are several nodes, and `gamma`."""
    values["ranks_per_node"] = ranks.ranks_per_node if ranks.nodes > 1 else 1
    for prefix, times in measured.shifts.items():
        fit = fit_link([one.bytes for one in times], [median(one.seconds) for one in times])
        values[f"{prefix}latency"], values[f"{prefix}bandwidth"] = fit.latency, fit.bandwidth
        of = "shift to the neighbour, all ranks at once, after a visit"
        fits[f"{prefix}link"] = {**asdict(fit), "unit": "s, bytes/s, relative", "of": of}
    if len(measured.shifts) == 1:
        values["node_latency"] = values["node_bandwidth"] = None
        if ranks.device.type == "cpu":
            values["cores"] = max(ranks.cores, ranks.ranks_per_node)
    values["shared_nic"] = False  # the bandwidth was measured while all ranks of a node sent to another node
    # Without the smallest block, whose message takes longer than its visit: a ring is not meant for such blocks.
    values["gamma"] = fit_interference([(one.visit, one.message, one.both) for one in measured.overlaps[1:]])


def _fit_passes(
    ranks: MeasuringRanks, settings: Settings, machine: Machine, cases: Sequence[PassCase], runs: Sequence[Runs]
) -> tuple[Machine, list[Pass]]:
    """The machine with what calls take beside visits and messages, and all passes as it models them.

    Passes of three sizes tell what a call takes whatever its size, and what its tensors take by their bytes, in each
    direction: at least what merging takes for as many bytes. Passes without any work would take less, as threads for
    messages find a core then.
    """

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
    sources = (*machine.sources, *((name, "measured") for name in fitted))
    machine = machine.changed(**fitted, sources=sources)
    return machine, model(machine)


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
