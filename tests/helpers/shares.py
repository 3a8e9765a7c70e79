"""How many random cases a sweep of the tests takes."""

from __future__ import annotations

import os

#: The part of each sweep that is run; RINGATTN_TEST_SHARE=1 runs all of it.
SHARE = float(os.environ.get("RINGATTN_TEST_SHARE", "0.35"))


def share_of(count: int) -> int:
    """The cases to take of a sweep of `count`: at least one."""
    return max(1, round(count * SHARE))
