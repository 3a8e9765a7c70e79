"""Documents of the rows of a batch, and the rows one after another as one sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from strategies import pairs

from ringattn import Causal, Documents, InvalidInput, Sinks, Window, parse_pattern
from ringattn.pattern.base import Side
from ringattn.pattern.views import RowByRow

ROWS = Documents([[3, 5], [8], [1, 7]])


def test_rows_are_given_by_lists_arrays_or_borders() -> None:
    borders = [[0, 3, 8], [0, 8, 8], [0, 1, 8]]
    assert Documents(cu_seqlens=borders).row(1) == Documents([8, 0])
    assert Documents(torch.tensor(borders)) == Documents(cu_seqlens=np.array(borders))
    assert Documents([[3, 5], [3, 5]]) == Documents([3, 5])  # which is for batches of any size
    with pytest.raises(InvalidInput, match=r"row 3 of Documents with 3 rows; try row\(2\)"):
        ROWS.row(3)
    assert Documents([3, 5]).rows is None and ROWS.rows == 3 and ROWS.row(2) == Documents([1, 7])
    with pytest.raises(InvalidInput, match="a length"):
        Documents([[3, 5], [-8]])
    with pytest.raises(InvalidInput, match="cu_seqlens begin with 0"):
        Documents(cu_seqlens=[[0, 8], [1, 8]])


def test_documents_are_split_from_the_begin_of_each() -> None:
    assert Documents([7, 0, 3]).split(3) == Documents(cu_seqlens=[0, 3, 6, 7, 10])
    assert ROWS.split(4) == Documents(cu_seqlens=[[0, 3, 7, 8], [0, 4, 8], [0, 1, 5, 8]])


@pytest.mark.parametrize("pattern", [ROWS, Causal() & ROWS, Causal() & (ROWS | Sinks(2)) & Window(5)], ids=repr)
def test_the_text_of_rows_reads_back(pattern: Documents) -> None:
    assert parse_pattern(repr(pattern)) == pattern
    assert parse_pattern("Causal() & Documents([[3, 5], [8], [1, 7]])") == Causal() & ROWS


@pytest.mark.parametrize(
    "pattern", [ROWS, Causal() & ROWS & Window(2), Causal() & ROWS & (Sinks(2) | Window(1))], ids=repr
)
def test_rows_one_after_another_see_what_each_sees(pattern: Documents) -> None:
    stacked, whole = RowByRow(pattern, 8), range(24)
    mask = stacked.mask(24)[0]
    assert mask.dtype == bool
    for row in range(3):
        part = slice(8 * row, 8 * row + 8)
        assert (mask[part, part] == pattern.row(row).mask(8)[0]).all()
        mask[part, part] = 0
    assert not mask.any()
    mask = stacked.mask(24)[0].astype(int)
    for q, k in ((whole, whole), (range(2, 21, 3), whole), (range(5, 19), range(1, 24, 2))):
        expected, found = np.zeros_like(mask), np.zeros_like(mask)
        expected[np.ix_(q, k)] = mask[np.ix_(q, k)]
        for tile in stacked.tiles(q, k):
            for _, x, y in pairs(tile):
                found[x, y] += 1
        assert (found == expected).all()
        assert stacked.count(q, k) == expected.sum()
        sides: tuple[tuple[Side, int], ...] = (("keys", 0), ("queries", 1))
        for side, axis in sides:
            paired = {x for _, rows in stacked.paired(side, q, k) for x in rows}
            assert paired == set(np.flatnonzero(expected.any(axis)).tolist())


def test_runs_of_rows_end_with_the_row() -> None:
    stacked = RowByRow(Causal() & ROWS, 8)
    mask = stacked.mask(24)[0].astype(bool)
    for first in range(24):
        for last in range(first, 24):
            keys, queries = mask[first : last + 1].any(0).nonzero()[0], mask[:, first : last + 1].any(1).nonzero()[0]
            assert stacked.run("keys", first, last) == (keys[0], keys[-1])
            assert stacked.run("queries", first, last) == (queries[0], queries[-1])
    assert RowByRow(ROWS & Sinks(2), 8).run("keys", 0, 9) is None
