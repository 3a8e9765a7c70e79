"""Numbers for people: units that fit, three digits, no exponents where a unit will do."""

from __future__ import annotations

import pytest

from ringattn.simulator.reporting.console import format_quantity
from ringattn.text import did_you_mean, duration, durations, rate, size, split_commas


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (1.234e-6, "1.23 us"),
        (9.9996e-4, "1 ms"),
        (0.0105, "10.5 ms"),
        (1, "1 s"),
        (99.96, "100 s"),
        (119.4, "119 s"),
        (1530, "25.5 min"),
        (7300, "2.03 h"),
        (3 * 86400, "3 days"),
        (8 * 3600, "8 h"),
        (3.2e7, "1.01 years"),
        (3.66e14, "11.6 million years"),
        (31557600 * 2500, "2,500 years"),
        (float("inf"), "inf s"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_times_that_are_compared() -> None:
    """A fourth digit where it tells times apart that are alike in three."""
    assert durations((0.03756, 0.03764, 2.0)) == ["37.56 ms", "37.64 ms", "2 s"]
    assert durations((0.0375601, 0.0375602, 2.0)) == ["37.6 ms", "37.6 ms", "2 s"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (524286 * 2**40, "512.0 PiB"),
        (2**60, "1.0 EiB"),
        (3 * 2**72, "12,288.0 EiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (123456789.4, "tokens/s", "123 M tokens/s"),
        (999.6, "tokens/s", "1 k tokens/s"),
        (12, "tokens/s", "12 tokens/s"),
        (4.5e11, "B/s", "450 GB/s"),
        (5e14, "FLOP/s", "500 TFLOP/s"),
        (0.5, "B/s", "0.5 B/s"),
    ],
)
def test_rates(value: float, unit: str, text: str) -> None:
    assert rate(value, unit) == text


def test_numbers_of_a_machine() -> None:
    found = {"mtbf": 1.8e8, "bandwidth": 4e10, "flops": 5e14, "memory": 80 * 2**30, "ranks_per_node": 1, "gamma": 0.05}
    assert [format_quantity(name, value) for name, value in found.items()] == [
        "5.7 years",
        "40 GB/s",
        "500 TFLOP/s",
        "80.0 GiB",
        "1 rank per node",
        "0.05 part of a message's time",
    ]


@pytest.mark.parametrize(
    ("name", "options", "hint"),
    [
        ("com_dtype", ["dtype", "comm_dtype"], "did you mean 'comm_dtype'? "),
        ("com_dtype", ["heads"], ""),
        ("flash", ["aten_cpu", "aten_cuda:flash"], "did you mean 'aten_cuda:flash'? "),
        ("recent", ["Recent()", "Causal()"], "did you mean 'Recent()'? "),
        ("ring", ["ring"], ""),
        ("h100", ["cpu", "h100_nvlink_ib"], "did you mean 'h100_nvlink_ib'? "),
    ],
)
def test_hints(name: str, options: list[str], hint: str) -> None:
    assert did_you_mean(name, options) == hint


def test_commas_within_brackets_and_quotes_do_not_split() -> None:
    assert split_commas("a,(b,c),'d,e',{f: 1, g: 2}") == ["a", "(b,c)", "'d,e'", "{f: 1, g: 2}"]
