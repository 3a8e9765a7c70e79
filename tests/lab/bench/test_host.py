"""Suite "host": what a warm call of one rank launches beside its kernels."""

from __future__ import annotations

import pytest

from ringattn.lab.bench.suites.host import count_passes


@pytest.mark.parametrize(
    ("schedule", "rotate", "most"),
    [("ring", "kv", (10.0, 11.5)), ("ring", "q", (10.0, 22.5)), ("double_ring(2)", "kv", (10.5, 12.0))],
)
def test_launches_per_kernel_call_have_a_ceiling(schedule: str, rotate: str, most: tuple[float, float]) -> None:
    """The kernel, the merge of 7 ops, and what packs and unpacks messages; a ceiling for each pass."""
    counts = dict(count_passes(schedule, rotate))
    for name, limit in zip(("forward", "backward"), most, strict=True):
        assert counts[name]["kernel_calls"] == 8 and counts[name]["launches_per_call"] <= limit, counts[name]
