"""Suites "schedules" and "latents": what columns run is right, what notes promise is counted; no time is asserted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_cases import skip_without_hosts

import ringattn as ra
from ringattn.cli.config.schema import RunConfig
from ringattn.cli.run_job import Run
from ringattn.lab.bench import get_cases, runner
from ringattn.lab.bench.calls import plan_ring
from ringattn.lab.bench.case import HEAD_DIM, HEADS, TOLERANCES, BenchCase, BenchColumn
from ringattn.lab.bench.hosts import Cluster, Hosts, make_hosts
from ringattn.lab.bench.suites import latents, schedules

CLUSTER = Cluster(2, 2, 1e9)


def small() -> list[BenchCase]:
    """The kinds of cases of the suite, at sizes for tests."""
    return [
        schedules._local_case("moving", CLUSTER, "Causal() & Window(9)", tokens=130, layout="zigzag", backward=True),
        schedules._double_ring_case("double", CLUSTER, 128, 1.5, backward=True),
        schedules._overlap_case("overlap", CLUSTER, 128),
    ]


#: What a rank measured, by case.
Measured = dict[str, dict[str, Any]]


def measure_small(rank: int) -> Measured:
    return {case.name: runner.measure_case(case, rank, None, 2) for case in small()}


@pytest.fixture(scope="module")
def measured() -> list[Measured]:
    """One start of ranks for all tests."""
    skip_without_hosts()
    with make_hosts(CLUSTER) as hosts:
        return hosts.run(measure_small, timeout=90, threads=1)


def test_calls_are_warm_and_checked_before_the_timing() -> None:
    """A first call compares plans and opens links; then two columns run in two rounds, and again for their memory."""
    events: list[str] = []
    columns = tuple(BenchColumn(name, 1, lambda context, name=name: lambda: events.append(name)) for name in "ab")
    case = BenchCase("x", 1, {}, columns, check=lambda context, results: events.append("check") or {})
    runner.measure_case(case, 0, None, 2)
    assert events == ["a", "b", "check", "a", "b", "a", "b", "a", "b"]


class Counted(Run):
    """A run whose attention only notes that it was called."""

    ranks, plan, inputs = 1, ra.make_plan("Full()", tokens=4, ranks=1), ()

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.events: list[str] = []

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append("attend")
        return torch.zeros(1), torch.zeros(1)

    def count_bytes(self, *, backward: bool) -> int:
        return 0


def test_a_run_is_not_timed_before_it_is_warm() -> None:
    """The first call, in which the ranks compare plans and open their connections, is not among the times."""
    run = Counted(RunConfig(repeat=3))
    *_, seen = run.measure()
    assert run.events == ["attend"] * 4 and len(seen.seconds["forward"]) == 3


@pytest.mark.multi
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("moving", ["allgather_messages", "ring_messages", "direct_messages", "allgather", "ring", "direct"]),
        ("double", ["ring", "double_ring(2)"]),
        ("overlap", ["compute", "ring", "ring_messages"]),
    ],
)
def test_what_is_timed_is_right(name: str, columns: list[str], measured: list[Measured]) -> None:
    for cases in measured:
        found = cases[name]
        assert list(found["times"]) == columns and all(len(times) == 2 for times in found["times"].values())
        whole = [column for column in columns if column != "compute" and not column.endswith("_messages")]
        assert list(found["errors"]) == whole and max(found["errors"].values()) < TOLERANCES["float32"]
    (case,) = [case for case in small() if case.name == name]
    record = runner.summarise_case(case, [cases[name] for cases in measured])
    assert len(record["ratios"]) == len(case.ratios)
    assert record["cluster"]["bandwidth"] == 1e9 and any(note.startswith("network: ") for note in record["notes"])


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (2, 4), (3, 2), (4, 4)])
def test_outer_bytes_are_those_of_the_formula(nodes: int, ranks_per_node: int) -> None:
    """Bytes that leave the first node."""
    cluster = Cluster(nodes, ranks_per_node, 1e9)

    def count(schedule: str, way: str = "forward") -> int:
        case = schedules._double_ring_case("x", cluster, 16 * cluster.ranks, None)
        plan = plan_ring(case.settings, cluster.ranks, schedule)
        steps = [step for rank in range(ranks_per_node) for step in getattr(plan.for_rank(rank), way)]
        hops = [hop for step in steps for hop in step.sends if hop.peer >= ranks_per_node]
        return sum(plan.part_bytes(part) for hop in hops for part in hop.parts)

    block = 16 * 2 * HEADS * HEAD_DIM * 4
    assert count("ring") == (cluster.ranks - 1) * block
    assert count(f"double_ring({ranks_per_node})") == (nodes - 1) * ranks_per_node * block
    if nodes == ranks_per_node == 2:
        row = 16 * 2 * HEADS * 4  # lse and delta
        assert count("ring", "backward") == 3 * (block + row) + 3 * block // 2  # q and dout, and dq
        assert count("double_ring(2)", "backward") == 2 * block


def measure_latents(rank: int, hosts: Hosts) -> dict[str, Any]:
    return runner.measure_case(latents.list_cases(48)[0], rank, hosts, 2)


@pytest.mark.multi
def test_heads_and_latents_alternate_over_both_links() -> None:
    skip_without_hosts()
    case = latents.list_cases(48)[0]
    assert case.cluster is not None
    with make_hosts(case.cluster) as hosts:
        raw = hosts.run(measure_latents, hosts, timeout=90, threads=1)
    columns = ["heads_400", "latents_400", "heads_free", "latents_free"]
    assert all([*x["times"]] == columns == [*x["errors"]] for x in raw)
    record = runner.summarise_case(case, raw)
    assert [x["target"] for x in record["ratios"]] == [None, 1 / 1.2, None]
    text, met = latents.SUITE.conclude([record])  # type: ignore[misc]
    assert "at 400 Mbit/s latents take" in text and met is not None


def test_every_promise_is_a_target() -> None:
    targets = {case.name: [ratio.target for ratio in case.ratios] for case in get_cases("schedules")}
    assert targets["window"][:2] == targets["documents"][:2] == [5.0, 5.0]
    assert targets["double_ring_4_step"] == targets["double_ring_8"] == [1.5] and targets["overlap"] == [0.9, 2.0]
    assert targets["packed"][0] == targets["packed_step"][0] == 1.4
    linked = [case for case in get_cases("schedules") if not case.name.startswith("packed")]
    assert all(case.cluster and case.cluster.ranks == case.ranks for case in linked)
