"""A calibration on one rank: rounds that measure everything once, and the machine fitted to them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, cycle
from statistics import median
from typing import Any

import torch

from ...kernels import get_kernel
from ...kernels.base import Kernel
from ...machine.machine import Machine
from ...simulator.timing.rates import MERGE_PASSES, own_bytes
from ...simulator.timing.simulation import simulate
from ...text import duration
from . import kernels
from .fits import Sample, fit_calls, fit_interference, fit_kernel_times, fit_link
from .measuring_ranks import MeasuringRanks, Settings, TimedBytes, count_turns
from .passes import Pass, PassCase, Runs, list_cases, sizes_between, time_pass

#: The most time that a pass may wait for links to tell the time of a call, and a bandwidth without waiting (bytes/s).
WAITING, INSTANT = 0.25, 1e18
#: Ranks of a node share a card if their messages take this many times as long together as one of them alone.
SHARED = 1.4


@dataclass(frozen=True)
class Overlap:
    """Times of a message and a computation, each alone and both at once.

    The computation (`visit`) is attention of `rows` queries to `rows` keys; the message has `bytes` bytes. `message`
    has the seconds of each repetition. `visit` and `both` have those of each rank and repetition; `both` lasts from
    posting the message until both have ended.
    """

    rows: int
    bytes: int
    visit: tuple[float, ...]
    message: tuple[float, ...]
    both: tuple[float, ...]


@dataclass(frozen=True)
class Round:
    """The measurements of one round, or of all rounds together.

    A single process measures no messages, overlaps and passes.
    """

    #: Of forward calls, and of backward calls.
    overheads: list[tuple[float, ...]]
    works: list[Sample]
    merges: list[TimedBytes]
    #: Messages to the next rank, by the prefix of the machine numbers they yield: "", or "node_" within a node. Between
    #: nodes of several ranks, one rank of each node sends, and "crowd_" has a message that all ranks send at once.
    shifts: dict[str, list[TimedBytes]]
    overlaps: list[Overlap]
    #: The runs of each pass.
    runs: list[Runs]

    @classmethod
    def measure(
        cls, ranks: MeasuringRanks, kernel: Kernel, settings: Settings, cases: Sequence[PassCase], *, first: bool
    ) -> Round:
        """Make all measurements once. Set `first` in the first of several rounds. Collective."""
        overheads = kernels.time_overheads(ranks, kernel, settings)
        works = list(kernels.list_works(settings.rows, settings.widths, settings.heads))
        samples = kernels.time_works(ranks, kernel, works, settings)
        merges = kernels.time_merges(ranks, settings.rows, settings)
        if ranks.size == 1:
            return cls(overheads, samples, merges, {}, [], [])
        sizes = settings.messages
        if 1 < ranks.ranks_per_node < ranks.size:
            shifts = {
                "": time_shift(ranks, kernel, sizes, settings, within_node=False, alone=True),
                "crowd_": time_shift(ranks, kernel, sizes[-1:], settings, within_node=False),
                "node_": time_shift(ranks, kernel, sizes, settings, within_node=True),
            }
        else:
            shifts = {"": time_shift(ranks, kernel, sizes, settings, within_node=ranks.nodes == 1)}
        overlaps = [measure_overlap(ranks, kernel, rows, settings) for rows in settings.rows]
        runs: list[Runs] = [(time_pass(ranks, case, settings, warm_up=first),) for case in cases]
        return cls(overheads, samples, merges, shifts, overlaps, runs)


def join(parts: Sequence[Any]) -> Any:
    """Combine measurements of several rounds: a Round, or a part of it, with the seconds of all `parts`.

    Tuples are concatenated; everything else must be equal in all parts.
    """
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(chain.from_iterable(parts))
    if isinstance(first, list):
        return [join(same) for same in zip(*parts, strict=True)]
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    return replace(first, **join([vars(part) for part in parts])) if hasattr(first, "__dict__") else first


@dataclass(frozen=True)
class Calibration:
    """A measured machine, the measurements from which its numbers come, and how well the numbers fit them."""

    machine: Machine
    samples: dict[str, Any]
    fits: dict[str, Any]
    passes: list[Pass]


def calibrate(
    ranks: MeasuringRanks, settings: Settings, base: Machine, tell: Callable[[str], None]
) -> Iterator[Callable[[], Calibration]]:
    """Measure the kernels, merges, links, overlap and whole forwards and backwards of this machine, in rounds.

    Yields after each round a function that fits all rounds so far, which raises InvalidInput if they are too few.
    Numbers that are not measured come from `base`. A single process measures only kernels and merges. `tell` receives a
    text before each round. Collective. Raises Unsupported if the kernel cannot compute the dtype.
    """
    probe = torch.zeros((1, settings.heads, 1, settings.head_dim), dtype=settings.torch_dtype, device=ranks.device)
    kernel = get_kernel(settings.kernel, probe, probe, probe).single()
    if ranks.device.type == "cpu" and ranks.nodes == 1:  # a link between nodes does not slow down with the cores
        ranks.keep_pace(kernels.make_reference(kernel, settings, ranks.device))
    cases = list_cases(settings.rows, ranks.size) if ranks.size > 1 else []
    rounds: list[Round] = []
    begun = time.perf_counter()
    for number in ranks.rounds(settings):
        passed = time.perf_counter() - begun
        left = max((settings.repeat - number) * passed / number, settings.seconds - passed) if number else 0.0
        after = f"about {duration(left)} left" if number else "a round can take minutes"
        tell(f"round {number + 1} of {'at least ' * (settings.seconds > 0)}{settings.repeat}; {after}")
        rounds.append(Round.measure(ranks, kernel, settings, cases, first=not number))
        yield partial(_fit, ranks, settings, join(rounds), cases, base)


def _fit(
    ranks: MeasuringRanks, settings: Settings, measured: Round, cases: Sequence[PassCase], base: Machine
) -> Calibration:
    """The machine, with the raw data that its file stores."""
    overhead = median(measured.overheads[0]), median(measured.overheads[1])
    kernel_times = fit_kernel_times(measured.works, overhead, settings.head_dim, settings.dtype, settings.heads)
    values: dict[str, Any] = {
        "flops": kernel_times.grid("dense", False).rates[-1][-1],
        "merge": median(MERGE_PASSES * one.bytes / median(one.seconds) for one in measured.merges),
        "kernel": kernel_times,
    }
    assumed: dict[str, Any] = {"residuals": ()}
    samples, fits = {"unit": "s", **asdict(measured)}, dict[str, Any]()
    del samples["runs"]  # `passes` has them
    samples |= {f"{prefix}shifts": times for prefix, times in samples.pop("shifts").items()}
    samples = json.loads(json.dumps(samples))  # tuples as lists, which YAML can hold
    if ranks.size > 1:
        _fit_links(ranks, measured, values, assumed, fits)
    machine = _change(base, values, **assumed)
    if ranks.size == 1:
        return Calibration(machine, samples, fits, [])
    between = {n * ranks.size for n in sizes_between(settings.rows)}
    machine, modelled = _fit_passes(ranks, settings, machine, cases, measured.runs)
    passes = [each for each in modelled if each.case.tokens in between]
    samples["calls"] = [each.record for each in modelled if each.case.tokens not in between]
    samples["passes"] = [each.record for each in passes]
    residuals = tuple((each.modelled, ratio) for each in passes for ratio in each.ratios)
    return Calibration(_change(machine, {"residuals": residuals}), samples, fits, passes)


def _change(machine: Machine, measured: dict[str, Any], **assumed: Any) -> Machine:
    """The machine with measured values, and with assumed ones."""
    machine = machine.changed(**measured, **assumed)
    return replace(machine, sources=(*machine.sources, *((name, "measured") for name in measured)))


def _fit_links(
    ranks: MeasuringRanks, measured: Round, values: dict[str, Any], assumed: dict[str, Any], fits: dict[str, Any]
) -> None:
    """Fit latency and bandwidth of the links, separately within a node if there are several nodes, and `gamma`.

    How many ranks a node has, and whether they share a card, is measured between nodes only. `cores` are counted.
    """
    of_nodes = values if ranks.nodes > 1 else assumed
    of_nodes |= {"ranks_per_node": ranks.ranks_per_node if ranks.nodes > 1 else 1, "shared_nic": False}
    shifts = dict(measured.shifts)
    crowd = shifts.pop("crowd_", None)
    for prefix, times in shifts.items():
        fit = fit_link([one.bytes for one in times], [median(one.seconds) for one in times])
        values[f"{prefix}latency"], values[f"{prefix}bandwidth"] = fit.latency, fit.bandwidth
        who = "one rank of each node" if crowd and not prefix else "all ranks at once"
        of = f"shift to the neighbour, {who}, after a visit"
        fits[f"{prefix}link"] = {**asdict(fit), "unit": "s, bytes/s, relative", "of": of}
    if len(shifts) == 1:
        assumed |= {"node_latency": None, "node_bandwidth": None}
        if ranks.device.type == "cpu":
            assumed["cores"] = max(ranks.cores, ranks.ranks_per_node)
    if crowd:  # ranks that share a card need as many times as long together
        longer = median(crowd[0].seconds) / median(shifts[""][-1].seconds)
        of_nodes["shared_nic"] = longer > SHARED
        values["bandwidth"] /= 1 if longer > SHARED else max(longer, 1.0)
    # Skip the smallest block: its message takes longer than its visit, and a ring is not meant for such blocks.
    values["gamma"] = fit_interference([(one.visit, one.message, one.both) for one in measured.overlaps[1:]])


def _fit_passes(
    ranks: MeasuringRanks, settings: Settings, machine: Machine, cases: Sequence[PassCase], runs: Sequence[Runs]
) -> tuple[Machine, list[Pass]]:
    """The machine with what calls take besides visits and messages, and all passes as this machine models them.

    Passes of three sizes give, for each direction, the fixed time of a call and its time per byte of tensors, at least
    that of merging a byte; where links are slow, the passes that hardly wait for them. Passes without any work would
    take less, as the threads of messages would find a free core.
    """

    def model(machine: Machine) -> list[Pass]:
        node = machine.changed(ranks_per_node=ranks.ranks_per_node)
        return [
            Pass(case, seconds, simulate(case.plan(ranks.size, settings), node, backward=case.backward).seconds)
            for case, seconds in zip(cases, runs, strict=True)
        ]

    assert machine.merge is not None, "merging is measured before passes"
    fitted: dict[str, float] = {}
    bare = machine.changed(call=0.0, call_backward=None, sweep=None, sweep_backward=None)
    plain, free = model(bare), model(bare.changed(latency=0.0, bandwidth=INSTANT))
    few = [each for each, one in zip(plain, free, strict=True) if one.modelled >= (1 - WAITING) * each.modelled]
    plain = few if min(sum(each.case.backward is way for each in few) for way in (False, True)) > 2 else plain
    for backward, suffix in ((False, ""), (True, "_backward")):
        of_way = [(each, median(each.seconds)) for each in plain if each.case.backward == backward]
        nbytes = [own_bytes(each.case.plan(ranks.size, settings)) for each, _ in of_way]
        beside = [(t, size, t - each.modelled) for (each, t), size in zip(of_way, nbytes, strict=True)]
        call, per_byte = fit_calls(beside, 1 / machine.merge)
        fitted |= {f"call{suffix}": call, f"sweep{suffix}": 1 / per_byte}
    machine = _change(machine, fitted)
    return machine, model(machine)


def time_shift(
    ranks: MeasuringRanks,
    kernel: Kernel,
    sizes: Sequence[int],
    settings: Settings,
    *,
    within_node: bool,
    alone: bool = False,
) -> list[TimedBytes]:
    """Seconds of messages from every rank to the next rank of its node, or to its counterpart on the next node.

    With `alone`, only the first rank of each node sends. Each message follows a computation and uses other buffers than
    the message before. As in a pass, the threads that copy it were asleep, and its bytes are not in the caches;
    repeated alone, messages of some MiB take half as long.
    """
    visit = kernels.make_reference(kernel, settings, ranks.device)
    node, place = divmod(ranks.rank, ranks.ranks_per_node)

    def peer(step: int) -> int:
        if within_node:
            return node * ranks.ranks_per_node + (place + step) % ranks.ranks_per_node
        return (node + step) % ranks.nodes * ranks.ranks_per_node + place

    times = []
    for size in sizes:
        pairs = cycle([(ranks.make_buffer(size), ranks.make_buffer(size)) for _ in range(count_turns(2 * size))])

        def shift(pairs: Iterator[tuple[torch.Tensor, torch.Tensor]] = pairs) -> None:
            sent, received = next(pairs)
            if place == 0 or not alone:
                ranks.exchange({peer(1): sent}, {peer(-1): received})

        _, seconds = ranks.time_alternating((visit, shift))
        times.append(TimedBytes(size, _of_last(ranks, seconds, ranks.ranks_per_node if alone else 1)))
    return times


def _of_last(ranks: MeasuringRanks, seconds: Sequence[float], every: int = 1) -> tuple[float, ...]:
    """The seconds on whichever rank (of each `every`) started each message last: the others also waited for it."""
    return tuple(min(of_ranks) for of_ranks in zip(*ranks.gather(seconds)[::every], strict=True))


def measure_overlap(ranks: MeasuringRanks, kernel: Kernel, rows: int, settings: Settings) -> Overlap:
    """Time a dense computation of `rows` queries and `rows` keys while as many keys and values travel.

    They go to the next node or, on a single node, to the next rank.
    """
    visit = kernels.make_call(kernel, kernels.square(rows, settings.heads), settings, ranks.device, backward=False)
    size = 2 * rows * settings.heads * settings.head_dim * settings.torch_dtype.itemsize
    step = ranks.ranks_per_node if ranks.nodes > 1 else 1
    sends = {(ranks.rank + step) % ranks.size: ranks.make_buffer(size)}
    recvs = {(ranks.rank - step) % ranks.size: ranks.make_buffer(size)}

    def overlap() -> None:
        ticket = ranks.start_messages(sends, recvs)
        visit()
        ranks.finish_messages(ticket)

    visits, messages, both = ranks.time_alternating((visit, partial(ranks.exchange, sends, recvs), overlap))
    return Overlap(rows, size, ranks.gather_times(visits), _of_last(ranks, messages), ranks.gather_times(both))
