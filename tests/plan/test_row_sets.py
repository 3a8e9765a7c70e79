"""Sets of rows as cuts, against sets."""

from __future__ import annotations

import random

from ringattn.plan.row_sets import RowSet, count_union, subtract, union


def test_rows_of_step_one_are_counted_and_taken_away_like_sets() -> None:
    """The interval path of `count_union` and `subtract`, which long blocks need, against sets; short runs included."""
    chance = random.Random(1)
    for _ in range(300):
        rows = chance.randrange(1, 40)

        def some(rows: int = rows) -> list[range]:
            ends = [sorted(chance.sample(range(rows + 1), 2)) for _ in range(chance.randrange(1, 5))]
            return [range(*pair) for pair in ends]

        held, gone = some(), some()
        members_of_both = {row for part in held for row in part}
        assert count_union(((range(1), part) for part in held), 1, rows) == len(members_of_both)
        cuts = [union(((range(1), part) for part in parts), 1, rows) for parts in (held, gone)]
        left = subtract(cuts[0], [cuts[1]], 1, rows)
        members = [
            row
            for cut in left
            for part in (cut.rows_of(0) if isinstance(cut, RowSet) else [range(rows)])
            for row in part
        ]
        assert members == sorted(members_of_both - {row for part in gone for row in part})
    assert count_union([(range(1), range(0, 1 << 40)), (range(1), range(1 << 39, 1 << 41))], 1, 1 << 42) == 1 << 41
