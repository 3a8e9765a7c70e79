"""The modes of `ringattn simulate`, and the keys that have a meaning in each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from .errors import InvalidInput

#: What only timing gives a meaning to, and what each mode of `simulate` leaves without one.
_TIMED = ("slow", "slow_links", "stalls", "passes", "tier")
MODES: dict[str, tuple[str, ...]] = {
    "timing": ("validate", "numerics"),
    "validate": ("numerics", "study", "shard", "pattern", "layout", "schedule", "ranks", "tokens", "kv_heads", "batch", "wire_dtype",
                 "rotate", "backward", "seed", *_TIMED),
    "numerics": ("validate", "study", "batch", *_TIMED),
}  # fmt: skip


def of_experiment(name: str, key: str, folder: Path) -> str | None:
    """What an experiment in a conf folder sets a plain key to, if it does."""
    path = folder / "experiment" / f"{name}.yaml"
    found = re.search(rf"^{key}: *(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    return found[1] if found else None


def check_mode(given: Mapping[str, str], folder: Path) -> None:
    """Refuse keys that the chosen mode of `simulate` would not look at."""
    names = given.get("experiment", "null").split(",")
    set_there = [found for name in names if (found := of_experiment(name, "mode", folder))]
    for mode in given["mode"].split(",") if "mode" in given else set_there or ["timing"]:
        for key in given:
            name = re.split(r"[./@]", key)[0]
            if name in MODES.get(mode, ()):
                takers = [other for other, without in MODES.items() if name not in without]
                raise InvalidInput(
                    f"{key}={given[key]} has no meaning with mode={mode}; leave it out, or try mode={' or '.join(takers)}"
                )
