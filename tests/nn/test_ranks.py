"""Compiled programs, copies and FSDP on real ranks."""

from __future__ import annotations

import graph_cases
import pytest
from rank_pool import has_imported


@pytest.mark.multi
def test_ranks_of_tests_begin_with_all_imports(run_ranks) -> None:  # type: ignore[no-untyped-def]
    """Else each would import what tests use, for seconds; `frozen` is imported last, and by no test."""
    assert all(run_ranks(has_imported, 2, "frozen"))


@pytest.mark.multi
@graph_cases.in_graphs
def test_compiled_calls_keep_their_order_on_all_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for same, passes in run_ranks(graph_cases.order, 2, timeout=240):
        assert same
        assert passes == [
            ("forward", 3),
            ("forward", 2),
            ("backward", 2),
            ("backward", 3),
            ("forward", 3),
            ("forward", 2),
        ]


@pytest.mark.multi
@graph_cases.in_graphs
def test_errors_of_compiled_calls_reach_all_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    one, other = run_ranks(graph_cases.errors, 2, timeout=240)
    assert "Mismatch: rank 1 " in one[0] and other[0].startswith("InvalidInput: q, k and v must have the same")
    for found in (one, other):
        assert "in different orders: rank 0 runs call 1; rank 1 runs call 2" in found[1]


@pytest.mark.multi
def test_mixed_precision_of_fsdp(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for said, wrong in run_ranks(graph_cases.mixed_precision, 2, timeout=240):
        assert "a process group cannot be pickled" in said
        assert 0 < wrong < 2**-6
