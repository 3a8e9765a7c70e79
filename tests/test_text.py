"""Numbers for people: units that fit, three digits, no exponents where a unit will do."""

from __future__ import annotations

import pytest

from ringattn.simulator.reporting.console import format_quantity
from ringattn.text import did_you_mean, duration, durations, first_line, rate, size, split_commas


def test_durations() -> None:
    short = (0, 1.234e-6, 9.9996e-4, 0.0105, 1, 99.96, 119.4, 1530, 7300, 8 * 3600, 3 * 86400, -0.5)
    texts = "0 us|1.23 us|1 ms|10.5 ms|1 s|100 s|119 s|25.5 min|2.03 h|8 h|3 days|-500 ms"
    assert list(map(duration, short)) == texts.split("|")
    long = (3.2e7, 31557600 * 2500, 3.66e14, float("inf"))
    assert list(map(duration, long)) == ["1.01 years", "2,500 years", "11.6 million years", "inf s"]


def test_times_that_are_compared() -> None:
    """A fourth digit where it tells times apart that are alike in three."""
    assert durations((0.03756, 0.03764, 2.0)) == ["37.56 ms", "37.64 ms", "2 s"]
    assert durations((0.0375601, 0.0375602, 2.0)) == ["37.6 ms", "37.6 ms", "2 s"]


def test_bytes() -> None:
    counts = (0, 1023, 1536, 2**20 - 1, 524286 * 2**40, 2**60, 3 * 2**72)
    texts = "0 B|1,023 B|1.5 KiB|1.0 MiB|512.0 PiB|1.0 EiB|12,288.0 EiB"
    assert list(map(size, counts)) == texts.split("|")


def test_rates() -> None:
    counts = [rate(value, "tokens/s") for value in (123456789.4, 999.6, 12)]
    assert counts == ["123 M tokens/s", "1 k tokens/s", "12 tokens/s"]
    assert [rate(4.5e11, "B/s"), rate(5e14, "FLOP/s"), rate(0.5, "B/s")] == ["450 GB/s", "500 TFLOP/s", "0.5 B/s"]


def test_numbers_of_a_machine() -> None:
    found = {"mtbf": 1.8e8, "bandwidth": 4e10, "flops": 5e14, "memory": 80 * 2**30, "ranks_per_node": 1, "gamma": 0.05}
    texts = "5.7 years|40 GB/s|500 TFLOP/s|80.0 GiB|1 rank per node|0.05 part of a message's time"
    assert [format_quantity(name, value) for name, value in found.items()] == texts.split("|")


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


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one" and first_line(ValueError()) == "no message"
    assert first_line(ValueError("x" * 201)) == "x" * 200 + "..."
