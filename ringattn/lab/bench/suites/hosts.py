"""Suite "hosts": schedules on two hosts of two ranks, the bytes on their links, and what the simulator predicts."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ....machine.file import read_machine, write_machine
from ....machine.machine import Machine
from ....machine.presets import MACHINES
from ....simulator.timing.simulation import simulate
from ....transport.torchdist import TorchDist
from ...calibrate.measure import calibrate
from ...calibrate.measuring_ranks import MeasuringRanks, Settings
from ..calls import check_shards, make_ring, plan_ring
from ..case import BenchCase, BenchColumn, BenchSuite, CaseRecord, Context, Ratio, make_settings
from ..hosts import Cluster
from .ring import TEMPLATES, make_template
from .schedules import DOCUMENTS

NODES, PER_NODE, TOKENS = 2, 2, sum(DOCUMENTS)
#: Mbit/s of the links.
RATES = (100, 400, 1600)
SCHEDULES = ("ring", "direct", "allgather", "double_ring(2)", "ulysses(2, ring)", "ulysses(4, ring)")
#: (name, pattern, layout).
MASKS = (
    ("causal", "Causal()", "zigzag"),
    ("window", "Causal() & Window(255)", "contiguous"),
    ("documents", f"Causal() & Documents({DOCUMENTS})", "balanced"),
)
#: Promises: bytes on a link over the plan's; error of predicted times in the median, and of nine in ten; a pick counts
#: as right if the fastest schedule takes at least this share of its time.
MOST_BYTES, MEDIAN, MOST, NEAR = 1.06, 0.12, 0.25, 0.9
#: Calls whose bytes are counted.
CALLS = 3
MESSAGES = 256, 4096, 1 << 20, 1 << 22, 1 << 24
CALIBRATION = Settings(8, 64, "float32", "auto", 5, 0.0, (64, 512, 2048), (64, 256), MESSAGES)
NOTE = (
    "two hosts of two ranks, each host on half of this machine's cores; links of 100, 400 and 1,600 Mbit/s in each "
    "direction. bytes: what the kernel counts on the link of the first host, over what the plan sends between hosts; "
    "the rest is TCP, IP and Ethernet. prediction: the simulator with a machine that calibrate measured at the two "
    "other rates, its latency and the share of the link's rate that it reaches (at most 1) averaged over them"
)


def list_cases() -> list[BenchCase]:
    """The cases of this suite, at each link rate: a calibration, and for each mask a forward, also with backward."""
    cases = []
    for rate in RATES:
        cluster = Cluster(NODES, PER_NODE, rate * 1e6 / 8)
        settings = {"rate": rate, "tokens": 0}
        cases.append(
            BenchCase(f"calibrate_{rate}", cluster.ranks, settings, (), cluster=cluster, measure=_calibrate, weight=6.0)
        )
        cases += [_case(*mask, rate, cluster, backward) for mask in MASKS for backward in (False, True)]
    return cases


def _case(name: str, pattern: str, layout: str, rate: int, cluster: Cluster, backward: bool) -> BenchCase:
    causal = name == "causal"
    settings = make_settings(TOKENS, pattern=pattern, layout=layout, backward=backward, rate=rate, causal=causal)
    columns = [BenchColumn(x, 1, partial(make_ring, schedule=x), weighed=False) for x in SCHEDULES]
    if causal:
        columns += [
            BenchColumn(x, 1, partial(make_template, rotate=way), weighed=False) for x, way in TEMPLATES.items()
        ]
    return BenchCase(
        f"{name}{'_step' if backward else ''}_{rate}",
        cluster.ranks,
        settings,
        tuple(columns),
        tuple(Ratio(over, under) for over, under in (("allgather", "ring"), ("ring", "double_ring(2)"))),
        check_shards,
        cluster=cluster,
        notes=(NOTE,),
        count=_count,
    )


def _count(context: Context) -> dict[str, Any]:
    """The bytes on a link by schedule: [counted, planned]."""
    return {"bytes": {name: count_bytes(context, name) for name in SCHEDULES}}


def count_bytes(context: Context, schedule: str) -> tuple[int, int]:
    """Bytes that host 0 sends over its link in CALLS calls: (counted by the operating system, planned). Collective."""
    assert context.hosts is not None
    run, inside = make_ring(context, schedule), range(context.hosts.cluster.ranks_per_node)
    run()  # in the first call the ranks compare their plans
    dist.barrier()
    before = context.hosts.sent_bytes(0)
    for _ in range(CALLS):
        run()
    dist.barrier()
    plan = plan_ring(context.settings, context.ranks, schedule)
    passes = ("forward", "backward") if context.settings["backward"] else ("forward",)
    steps = [step for rank in inside for name in passes for step in getattr(plan.for_rank(rank), name)]
    hops = [hop for step in steps for hop in step.sends if hop.peer not in inside]
    planned = CALLS * sum(plan.part_bytes(part) for hop in hops for part in hop.parts)
    sent = context.hosts.sent_bytes(0) - before
    dist.barrier()
    return sent, planned


def _calibrate(context: Context, repeat: int) -> dict[str, Any]:
    """The machine file of a calibration on these hosts."""
    ranks = MeasuringRanks(TorchDist(), torch.device("cpu"), PER_NODE)
    torch.set_num_threads(1)
    *_, fit = calibrate(ranks, CALIBRATION, MACHINES["cpu"], lambda text: None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.yaml")
        write_machine(path, fit().machine)
        return {"times": {}, "errors": {}, "details": {"machine": path.read_text()}}


@cache
def _read(text: str) -> Machine:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.yaml")
        path.write_text(text)
        return read_machine(path)


def predict(records: list[CaseRecord]) -> tuple[list[float], list[float]]:
    """For all cases, how well times at a link rate are predicted from measurements at the other rates.

    Returns (predicted / measured times of all schedules, times of the schedule that `auto` picks / times of the
    fastest). The links are predicted by the mean latency at the other rates, and the mean share of the nominal rate
    that was reached.
    """
    machines = {x["settings"]["rate"]: _read(x["details"]["machine"]) for x in records if "machine" in x["details"]}
    ratios, picks = [], []
    for record in (x for x in records if x["columns"]):
        settings, rate = record["settings"], record["settings"]["rate"]
        others = {other: machine for other, machine in machines.items() if other != rate}
        share = min(mean(8e-6 * machine.bandwidth / other for other, machine in others.items()), 1.0)
        machine = [*others.values()][-1].changed(
            bandwidth=share * rate * 1e6 / 8, latency=mean(machine.latency for machine in others.values())
        )
        medians = {name: column["median"] for name, column in record["columns"].items()}
        for name in SCHEDULES:
            plan = plan_ring(settings, record["ranks"], name)
            ways = (False, True) if settings["backward"] else (False,)
            ratios.append(sum(simulate(plan, machine, backward=way).seconds for way in ways) / medians[name])
        picked = plan_ring(settings, record["ranks"], "auto", machine).schedule
        picks += [medians[picked] / min(medians.values())] if picked in medians else []
    return ratios, picks


def _conclude(records: list[CaseRecord]) -> tuple[str, bool | None]:
    """Bytes on links, errors of predictions at a rate left out, and how often auto was near the best."""
    done = [x for x in records if "failed" not in x]
    shares = [sent / planned for x in done for sent, planned in x["details"].get("bytes", {}).values() if planned]
    if not shares:
        return "nothing was measured", None
    text, met = f"links carried at most {max(shares):.3f} times the bytes planned", max(shares) <= MOST_BYTES
    if sum("machine" in x["details"] for x in done) == len(RATES):
        ratios, picks = predict(done)
        errors = [abs(ratio - 1) for ratio in ratios]
        middle, most = median(errors), float(np.quantile(errors, 0.9))
        right = sum(pick <= 1 / NEAR for pick in picks)
        text += (
            f"; times at a rate left out of the calibration were predicted within {middle:.1%} in the median and "
            f"{most:.1%} in nine of ten; auto was within 10 % of the best in {right} of {len(picks)} cases, and at "
            f"worst took {max(picks):.2f} times as long"
        )
        met = met and middle <= MEDIAN and most <= MOST
    return text, met


SUITE = BenchSuite(
    list_cases,
    _conclude,
    title="Schedules between two hosts",
    about=(
        "Two hosts of two ranks, joined by links of 100, 400 and 1,600 Mbit/s: network namespaces of one machine, with "
        "addresses and TCP of their own. 4,096 tokens, 8 heads of 64, fp32; template: torch's own ring.",
    ),
)
