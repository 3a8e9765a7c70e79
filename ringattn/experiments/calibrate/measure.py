"""The order of a calibration on one rank, and the machine that comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ...errors import InvalidInput
from ...kernels import get_kernel
from ...machine.machine import Machine
from . import kernels, links, merge, noise, overlap
from .fits import Line, interference, jitter, kernel_times, line
from .passes import Pass, Settings
from .team import Team


@dataclass(frozen=True)
class CalibrationSizes:
    """What is measured: rows and keys of tiles, keys per row of bands, bytes of messages; each ascends."""

    rows: Sequence[int]
    widths: Sequence[int]
    messages: Sequence[int]

    def __post_init__(self) -> None:
        for name, sizes, least in (("rows", self.rows, 2), ("widths", self.widths, 1), ("messages", self.messages, 2)):
            if len(sizes) < least or any(a >= b for a, b in pairwise(sizes)) or sizes[0] < 1:
                raise InvalidInput(f"{name}={list(sizes)}: expected at least {least} ascending sizes >= 1")


@dataclass(frozen=True)
class Calibration:
    """A measured machine, the raw samples behind it, and what the fits leave."""

    machine: Machine
    samples: dict[str, Any]
    fits: dict[str, Any]
    passes: list[Pass]


def calibrate(
    team: Team, settings: Settings, sizes: CalibrationSizes, base: Machine, tell: Callable[[str], None]
) -> Calibration:
    """Measure kernels, merging, links, overlap and noise on all ranks of `team`; what is not measured is `base`'s.

    Collective; `tell` hears what is under way. A process alone measures kernels and merging. Raises InvalidInput, and
    Unsupported where the kernel cannot compute the dtype.
    """
    shape = (1, settings.heads, 1, settings.head_dim)
    probe = torch.zeros(shape, dtype=settings.torch_dtype, device=team.device)
    kernel = get_kernel(settings.kernel, probe, probe, probe)
    dtype = settings.torch_dtype
    tell("kernels")
    empty = kernels.overheads(team, kernel, settings.head_dim, dtype, settings.repeat)
    works = list(kernels.tiles(sizes.rows, sizes.widths, settings.heads))
    samples = kernels.samples(team, kernel, works, settings.head_dim, dtype, settings.repeat)
    overhead = median(empty[0]), median(empty[1])
    times = kernel_times(samples, overhead, settings.head_dim, settings.dtype, settings.heads)
    tell("merging")
    merges = merge.measure(team, sizes.rows, settings.heads, settings.head_dim, dtype, settings.repeat)
    dense = times.grid("dense", False)
    values: dict[str, Any] = {
        "flops": dense.rates[-1][-1], "merge": merge.rate(merges), "jitter": jitter([s.seconds for s in samples]),
    }  # fmt: skip
    raw: dict[str, Any] = {
        "unit": "s", "overhead": [list(x) for x in empty], "kernels": [asdict(s) for s in samples],
        "merge": [{"bytes": size, "seconds": seconds} for size, seconds in merges],
    }  # fmt: skip
    fits: dict[str, Any] = {}
    if team.size > 1:
        tell("links")
        _links(team, sizes, settings, values, raw, fits)
        tell("overlap")
        found = overlap.measure(team, kernel, sizes.rows, settings.heads, settings.head_dim, dtype, settings.repeat)
        raw["overlap"] = [asdict(one) for one in found]
        # Of the smallest blocks a message takes longer than a visit, which is not what a ring is for.
        values["gamma"] = interference([(one.visit, one.message, one.together) for one in found[1:]])
    machine = base.changed(
        **values,
        kernel=times,
        sources=(
            *_kept(base, values),
            *((name, "measured") for name in measured(values, team.size // team.inner)),
            ("kernel", "measured"),
        ),
    )
    passes: list[Pass] = []
    if team.size > 1:
        tell("calls")
        short = noise.calls(team, machine, sizes.rows, settings)
        raw["calls"] = [{**asdict(one.case), "seconds": list(one.seconds), "modelled": one.modelled} for one in short]
        machine = machine.changed(call=noise.beside(short), sources=(*machine.sources, ("call", "measured")))
        tell("noise")
        passes = noise.residuals(team, machine, sizes.rows, settings)
        ratios = tuple(ratio for one in passes for ratio in one.ratios)
        machine = machine.changed(residuals=ratios, sources=(*machine.sources, ("residuals", "measured")))
        raw["passes"] = [{**asdict(one.case), "seconds": list(one.seconds), "modelled": one.modelled} for one in passes]
    return Calibration(machine, _plain(raw), _plain(fits), passes)


def _links(
    team: Team,
    sizes: CalibrationSizes,
    settings: Settings,
    values: dict[str, Any],
    raw: dict[str, Any],
    fits: dict[str, Any],
) -> None:
    """Measure and fit links: those between nodes where there are several, and those within."""
    pairs = links.ping_pong(team, sizes.messages, settings.repeat)
    raw["ping_pong"] = [{"bytes": size, "seconds": seconds} for size, seconds in pairs]
    nodes = team.size // team.inner
    kinds = [("", False)] if team.inner == 1 else [("", True)] if nodes == 1 else [("", False), ("node_", True)]
    values["ranks_per_node"] = team.inner if nodes > 1 else 1
    for prefix, near in kinds:
        found = links.shift(team, sizes.messages, settings.repeat, near=near)
        raw[f"{prefix}shift"] = [{"bytes": size, "seconds": seconds} for size, seconds in found]
        fit: Line = line([size for size, _ in found], [median(seconds) for _, seconds in found])
        fits[f"{prefix}link"] = {
            **asdict(fit), "unit": "s, bytes/s, relative", "of": "shift to the neighbour, all ranks at once"
        }  # fmt: skip
        values[f"{prefix}latency"], values[f"{prefix}bandwidth"] = fit.latency, fit.bandwidth
    if nodes == 1 or team.inner == 1:
        values["node_latency"] = values["node_bandwidth"] = None
    values["shared_nic"] = False  # bandwidth was measured with all ranks of a node on their way out


def measured(values: dict[str, Any], nodes: int) -> list[str]:
    """The names of `values` that were measured. On one node nothing tells `ranks_per_node` and `shared_nic`: they are assumed."""
    return [
        name
        for name, value in values.items()
        if value is not None and (nodes > 1 or name not in ("ranks_per_node", "shared_nic"))
    ]


def _kept(base: Machine, values: dict[str, Any]) -> list[tuple[str, str]]:
    """The sources of what the base says and was not measured."""
    return [pair for pair in base.sources if pair[0] not in (*values, "kernel", "residuals")]


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
