"""The suites of the earlier reports: every system by its name, right on one device and on ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ringattn.lab.bench import get_cases, runner
from ringattn.lab.bench.calls import DRAWN, make_inputs
from ringattn.lab.bench.case import BenchCase, make_settings
from ringattn.lab.bench.report import compare
from ringattn.lab.bench.suites import peers, seeds
from ringattn.lab.bench.systems import SYSTEMS, conclude_systems, find_cases, list_system_cases, make_system_case
from ringattn.transport.launcher import run_local

TOKENS = 512
#: A system of each kind; the others of a kind make the same module.
ON_RANKS = (
    "DilatedAttention",
    "RingDilatedAttentionProduction",
    "RingMultiheadDilatedAttention",
    *(name for name in SYSTEMS if name.startswith("BlockSparse")),
)


def small(ranks: int) -> list[BenchCase]:
    """Every system with branches for few tokens and one thread."""
    branches = {"segment_lengths": (64, 128, 256)}
    cases = list_system_cases([*SYSTEMS, "RingDilatedAttentionV2_r4"], [TOKENS], ranks=[ranks], settings=branches)
    return [replace(case, columns=tuple(replace(x, threads=1) for x in case.columns)) for case in cases]


def measure_small(rank: int) -> dict[str, dict[str, Any]]:
    """What one rank measures of every system, for the oracle; and a call that needs more memory than it may have."""
    found = {
        case.name: runner.measure_case(case, rank, None, 1) for case in small(2) if case.settings["system"] in ON_RANKS
    }
    found |= measure_peers(rank)
    runner.limit_memory(1 << 30)
    try:
        torch.zeros(1 << 31, dtype=torch.uint8)
    except runner.FAILURES as error:
        return {**found, "capped": {"class": runner.classify(error)}}
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, dict[str, Any]]]:
    return run_local(measure_small, 2, timeout=170, threads=1)


@pytest.mark.multi
def test_every_system_is_right_on_ranks_and_the_cap_holds(on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    for rank in on_ranks:
        assert rank["capped"] == {"class": "OutOfMemory"}
        systems = {name: found for name, found in rank.items() if name.endswith("_2_ranks")}
        assert len(systems) == len(ON_RANKS)
        for name, found in systems.items():
            assert 0 < found["errors"]["forward"] < 1e-5, name
            assert found["peaks"]["forward"]["tensors"] >= 2 * TOKENS * 512, name


def test_every_system_is_right_on_one_device() -> None:
    rows = [
        {"key": case.name, **runner.summarise_case(case, [runner.measure_case(case, 0, None, 1)])} for case in small(1)
    ]
    assert len(find_cases(rows, "")) == len(SYSTEMS) + 1
    for row in rows:
        bytes_of_inputs = TOKENS * 512 * 4 * (1 if "Multihead" in row["case"] else 3)
        assert row["errors"]["forward"] < 1e-5 and row["columns"]["forward"]["peaks"]["tensors"] >= bytes_of_inputs
    assert conclude_systems(rows)[0].startswith(
        f"{len(rows)} of {len(rows)} rows agree with fp64 softmaxes, the largest"
    )
    assert conclude_systems([{**rows[0], "columns": {}}]) == ("none of 1 row was computed", None)
    assert not seeds.conclude_memory(rows)[1]


def test_a_wrong_result_is_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(1)[0]
    real = SYSTEMS["DilatedAttention"].make

    def make_wrong(settings: dict[str, Any], place: dict[str, Any]) -> Any:
        module = real(settings, place)
        module.register_forward_hook(lambda _, inputs, out: out * 1.001)
        return module

    monkeypatch.setitem(SYSTEMS, "DilatedAttention", replace(SYSTEMS["DilatedAttention"], make=make_wrong))
    with pytest.raises(AssertionError, match="DilatedAttention is wrong by 1"):
        runner.measure_case(case, 0, None, 1)


def test_suites_have_the_rows_of_the_reports() -> None:
    names = {suite: {case.name for case in get_cases(suite)} for suite in ("comprehensive", "extreme", "memory")}
    every = {f"{name}_4096{ranks}" for name in SYSTEMS for ranks in ("", "_2_ranks", "_4_ranks")}
    assert every == names["comprehensive"]
    assert {"RingDilatedAttentionProduction_r16_1048576", "BlockSparse_LocalWindow_0.95_4194304"} < names["extreme"]
    assert "BlockSparseRingMultiheadDilatedAttention_131072" not in names["memory"]
    (case,) = get_cases("extreme", ["DilatedAttention_16384"])
    assert case.after == "DilatedAttention_4096" and case.may_fail
    assert make_system_case("RingDilatedAttentionV2_r8", 64).settings["ring_size"] == 8


def test_a_case_that_would_take_too_long_is_not_tried() -> None:
    """From 16 s at 16K tokens follow 64 s at 64K. Nothing is started."""
    names = [f"BlockSparseAdaptive_{tokens}" for tokens in (16384, 65536)]
    short, long_case = get_cases("blocksparse", names)
    for seconds, tried in ((16.0, False), (1.0, True)):
        done = runner.summarise_case(short, [{"times": {"forward": [seconds] * 5}, "errors": {}}])
        why = runner._why_not(long_case, 5, {short.name: done})
        assert why == "" if tried else "a call would take 64 s" in why


def test_long_inputs_have_no_equal_rows() -> None:
    settings = make_settings(3 * DRAWN // 2, "bfloat16", heads=2, head_dim=16)
    x, y = make_inputs(settings, 2)
    assert torch.equal(x, make_inputs(settings, 1)[0]) and not torch.equal(x, y)
    blocks = [x[0, h, first : first + DRAWN // 2].double() for h in (0, 1) for first in (0, DRAWN // 2, DRAWN)]
    assert all(not (a == b).all(1).any() for i, a in enumerate(blocks) for b in blocks[:i])


def test_comparison_marks_what_leaves_the_noise_band() -> None:
    def record(**seconds: float) -> dict[str, Any]:
        columns = {name: {"seconds": [value] * 3, "median": value} for name, value in seconds.items()}
        return {"cases": [{"case": "x", "columns": columns}]}

    old, new = record(a=1.0, b=1.0, c=1.0, d=1.0), record(a=1.09, b=1.11, c=0.9, e=1.0)
    rows = {row[1]: row[2:] for row in compare(old, new, 0.1).rows}
    assert [rows[name][3] for name in "abcde"] == ["", "SLOWER", "faster", "", ""]
    assert rows["b"][2] == "1.110" and rows["d"][1] == "missing"
    failed = {"cases": [{"case": "x", "columns": {}, "failed": {"class": "OutOfMemory"}}]}
    assert compare(record(forward=1.0), failed, 0.1).rows[0][3:] == ["OutOfMemory", "", "FAILS"]


def test_tensors_count_once_and_until_they_are_gone() -> None:
    with runner.TensorBytes() as tensors:
        x = torch.zeros(1000, device="cpu")
        view, more = x.view(10, 100), x + 1
        assert tensors.live == tensors.peak == 8000
        del x, more
        assert tensors.live == 4000  # the view keeps its storage
        tensors.restart()
        view.add_(1)
        assert tensors.peak == 4000


def measure_peers(rank: int) -> dict[str, dict[str, Any]]:
    del peers.PEERS["FlexAttention"]  # compiling takes longer than all tests of this file
    cases = {case.name: case for case in peers.list_cases(256)}
    chosen = [cases[name] for name in ("causal_backward", "window_forward", "causal_bfloat16_backward")]
    return {case.name: runner.measure_case(case, rank, None, 1) for case in chosen}


@pytest.mark.multi
def test_peers_are_timed_where_they_are_right(on_ranks: list[dict[str, dict[str, Any]]]) -> None:
    found, other = ({name: rank[name] for name in ("causal_backward", "window_forward")} for rank in on_ranks)
    assert found["causal_backward"]["times"].keys() == other["causal_backward"]["times"].keys()
    for name, raw in found.items():
        assert {"ringattn", "sdpa"} <= raw["times"].keys() and raw["errors"]["ringattn"] < 1e-5
        assert raw["times"].keys() | raw["details"]["missing"].keys() == peers.PEERS.keys() - {"FlexAttention"}
        for reason in raw["details"]["missing"].values():
            assert reason.startswith(("cannot run: ", "wrong: "))
        case = next(case for case in peers.list_cases(256) if case.name == name)
        record = runner.summarise_case(case, [found[name], other[name]])
        assert record["summary"]["fastest right peer"] in raw["times"]
    assert {"template", "template_a2a"} <= found["causal_backward"]["times"].keys()
    assert "no such mask" in found["window_forward"]["details"]["missing"]["template"]
    half = on_ranks[0]["causal_bfloat16_backward"]
    assert {"ringattn", "sdpa"} <= half["times"].keys() and 1e-4 < half["errors"]["ringattn"] < 2e-2
