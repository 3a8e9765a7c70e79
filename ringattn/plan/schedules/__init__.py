"""Schedules by name, one per file. A schedule makes the steps of one rank from a demand."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...errors import InvalidInput
from ...registry import Registry
from ...text import did_you_mean, shown
from ..demand import BlockDemand
from .base import Schedule

#: Schedules without Ulysses groups. Each takes a `BlockDemand`, plus a number if its class is `numbered`.
SCHEDULES: Registry[Callable[..., Schedule]] = Registry(
    "schedules",
    {
        "ring": "plan.schedules.ring:RingSchedule",
        "direct": "plan.schedules.direct:DirectSchedule",
        "allgather": "plan.schedules.allgather:AllGatherSchedule",
        "double_ring": "plan.schedules.double_ring:DoubleRingSchedule",
    },
)
ULYSSES = re.compile(r"\s*ulysses\s*\(\s*(?:size\s*=\s*)?(\d+)\s*(?:,\s*(.+?)\s*)?\)\s*")
#: The number of a schedule that stands for the ranks of a node, and the names that mean it if no number follows.
NODE = re.compile(r"\bnode\b")
ULYSSES_OF_NODE = re.compile(r"(\s*ulysses\s*\(\s*(?:size\s*=\s*)?)node\b")
BARE = re.compile(r"\b(double_ring|ulysses)\b(?!\s*\()")


def takes_node(name: str) -> bool:
    """Whether the schedule `name` depends on the ranks of a node, as "double_ring" and "ulysses(node)" do."""
    return bool(NODE.search(name) or BARE.search(name))


def resolve(
    name: str, ranks: int | None = None, heads: int = 0, kv_heads: int = 0, ranks_per_node: int | None = None
) -> str:
    """The canonical name of a schedule; "auto" is returned unchanged.

    "double_ring" and "ulysses" without a number take `ranks_per_node`; if that is None, they become "double_ring(node)"
    and "ulysses(node)". `ranks`, `heads` and `kv_heads` are checked if they are known (not None, not 0). Raises
    InvalidInput for an unknown name, or a schedule that does not fit these numbers.
    """
    if not isinstance(name, str):
        raise InvalidInput(f"schedule must be a name such as 'auto', got {shown(name)}")
    if name.strip() == "auto":
        return "auto"
    if takes_node(name):
        written = BARE.sub(r"\1(node)", name)
        if ranks_per_node is None:
            resolve(NODE.sub("2", written))  # for its errors
            return written.strip()
        if ranks_per_node == 1 and ranks != 1:
            raise InvalidInput(
                f"schedule {name!r}: each node of the machine has one rank; give a number, such as "
                f"{NODE.sub('2', written)}, or machine.ranks_per_node="
            )
        node = min(ranks_per_node, ranks or ranks_per_node)
        name = ULYSSES_OF_NODE.sub(rf"\g<1>{node}", written)
        name = NODE.sub(str(max(node // split_ulysses(name)[0], 1)), name)  # between groups, so many fill a node
    size, rest = split_ulysses(name)
    if ULYSSES.fullmatch(name):
        if size == 1:  # a group of one rank exchanges nothing
            return resolve(rest, ranks, heads, kv_heads)
        if (between := resolve(rest)).startswith(("auto", "ulysses")):
            raise InvalidInput(
                f"schedule {name!r}: the schedule between groups of {size} ranks can be ring, direct, allgather or "
                f"double_ring(n), not {between}; try ulysses({size}, ring), or auto, which considers ulysses, too"
            )
        _check_ulysses(name, size, ranks, heads, kv_heads)
        return f"ulysses({size}, {resolve(between, None if ranks is None else ranks // size)})"
    kind, number = _parse(name)
    if number is None:
        return kind
    if ranks == 1 and number > 1:
        raise InvalidInput(f"schedule {name!r}: one rank cannot form nodes of {number} ranks; try ring, or more ranks")
    if ranks is not None and (number < 1 or ranks % number):
        fits = " or ".join([str(n) for n in range(2, min(ranks, 1024) + 1) if ranks % n == 0][:6])
        raise InvalidInput(
            f"schedule {name!r}: {ranks} ranks cannot be split into nodes of this size; try {kind} with {fits}"
        )
    return f"{kind}({number})"


def split_ulysses(name: str) -> tuple[int, str]:
    """(ranks of a Ulysses group, the schedule between the groups); (1, name) for a schedule without groups."""
    match = ULYSSES.fullmatch(name)
    return (int(match[1]), match[2] or "ring") if match else (1, name)


def make_schedule(name: str, demand: BlockDemand) -> Schedule:
    """Create the `Schedule` with a resolved name, without Ulysses groups, for the blocks in `demand`."""
    kind, number = _parse(name)
    make = SCHEDULES[kind]
    return make(demand) if number is None else make(demand, number)


def list_spellings() -> list[str]:
    """All spellings of schedules, for messages and help."""
    alone = [f"{kind}(n)" if _numbered(kind) else kind for kind in SCHEDULES]
    return ["auto", *alone, "ulysses(size)", "ulysses(size, another)"]


def _check_ulysses(name: str, size: int, ranks: int | None, heads: int, kv_heads: int) -> None:
    """Raise InvalidInput unless groups of `size` ranks divide the ranks and the heads.

    `size` may also be a multiple of the key/value heads: each rank then has a copy of one head.
    """
    numbers = {"ranks": ranks or 0, "query heads": heads, "key/value heads": kv_heads}
    for what, number in numbers.items():
        if size < 1 or not _serves(size, what, number):
            others = range(2, min(ranks or heads, heads or 1024, 1024) + 1)
            fits = [str(n) for n in others if all(_serves(n, *each) for each in numbers.items())][:6]
            hint = f"sizes {' or '.join(fits)}" if fits else "ring: no size fits all"
            raise InvalidInput(f"schedule {name!r}: groups of {size} ranks do not divide {number} {what}; try {hint}")


def _serves(size: int, what: str, number: int) -> bool:
    """Whether groups of `size` ranks fit `number` ranks or heads (0: not known)."""
    return number % size == 0 or ("/" in what and size % number == 0)


def _parse(name: str) -> tuple[str, int | None]:
    """The name of a schedule without groups, and the number after it. Raises InvalidInput."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(?:ranks_per_node\s*=\s*)?(\d+)\s*\))?\s*", name)
    kind = match[1] if match else name
    before = name.partition("(")[0].strip()
    if before in SCHEDULES and _numbered(before) and (match is None or not match[2]):
        raise InvalidInput(f"schedule {name!r}: expected the number of ranks per node, such as {before}(2)")
    if match is None or kind not in SCHEDULES or _numbered(kind) != bool(match[2]):
        hint = did_you_mean(kind, [*SCHEDULES, "ulysses", "auto"]) if kind not in (*SCHEDULES, "ulysses") else ""
        raise InvalidInput(f"unknown schedule {name!r}; {hint}expected {', '.join(list_spellings())}")
    return kind, int(match[2]) if match[2] else None


def _numbered(kind: str) -> bool:
    return bool(getattr(SCHEDULES[kind], "numbered", False))
