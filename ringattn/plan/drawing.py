"""Draw a plan as text: rank x step, from the true steps."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable

from ..errors import InvalidInput, plural
from .steps import Step

#: Ranks that are drawn at most, and of how many places in the sequence of ranks they are.
MAX_ROWS, PLACES = 16, 4
#: Columns of a cell, and of a picture where neither a terminal nor a caller says a width.
CELL, WIDTH = 5, 80
#: The narrowest picture: a label, two steps and the mark of those between them.
LEAST = 32


def draw_steps(
    ranks: int,
    steps: Callable[[int], tuple[Step, ...]],
    level: Callable[[int, Step], int],
    *,
    ascii: bool,
    width: int | None = None,
) -> str:
    """One line per rank, one cell per step, in at most `width` columns (default: those of the terminal).

    `steps(rank)` gives the steps of one of the `ranks`, and `level(rank, step)` the share of computed pairs: 0 for none, 1
    for less than half, 2 for less than all, 3 for all.

    A cell shows the share of the step's pairs that are computed, of all pairs of the visited blocks; a second
    mark says whether the rank sends meanwhile. Of many ranks those are drawn that send to, or receive from, each other
    at a few places; of many steps the first and the last. A line says what is left out.
    """
    width = max(LEAST, shutil.get_terminal_size((WIDTH, 24)).columns) if width is None else width
    if width < LEAST:
        raise InvalidInput(f"width={width}: a picture needs at least {LEAST} columns")
    marks = ".-+#" if ascii else "·░▓█"
    arrow = ">" if ascii else "→"
    drawn = drawn_ranks(ranks, steps)
    label = max([len(f"rank {rank} ") for rank in drawn] + [10])
    count = max((len(steps(rank)) for rank in drawn), default=0)
    shown = _shown(count, (width - label) // CELL)
    lines = [" " * label + "".join(" ...".ljust(CELL) if at is None else f" s{at}".ljust(CELL) for at in shown)]
    for rank in drawn:
        cells = ""
        found = steps(rank)
        for at in shown:
            if at is None or at >= len(found):
                cells += " " * CELL
                continue
            cells += f" {marks[level(rank, found[at])] * 2}{arrow if found[at].sends else ' '} "
        lines.append(f"rank {rank}".ljust(label) + cells)
    words = [f"{marks[3]} all pairs of the visit", f"{marks[2]} half or more", f"{marks[1]} less", f"{marks[0]} none"]
    lines += _filled([*words, f"{arrow} sends meanwhile"], width)
    left = []
    if len(drawn) < ranks:
        left.append(f"{ranks - len(drawn):,} of {plural(ranks, 'rank')}")
    if None in shown:
        gap = shown.index(None)
        left.append(f"steps {shown[gap - 1] + 1} to {shown[gap + 1] - 1} of {count:,}")  # type: ignore[operator]
    if left:
        lines += _filled([f"left out: {left[0]}", *left[1:]], width)
    return "\n".join(line.rstrip() for line in lines)


def drawn_ranks(ranks: int, steps: Callable[[int], tuple[Step, ...]]) -> list[int]:
    """All ranks, or of many those that exchange messages around a few places: receivers beside their senders."""
    if ranks <= MAX_ROWS:
        return list(range(ranks))
    found: set[int] = set()
    for number in range(PLACES):
        start = number * (ranks - 1) // (PLACES - 1)
        room = MAX_ROWS * (number + 1) // PLACES
        near = deque([start])
        while near and len(found) < room:
            rank = near.popleft()
            if rank in found:
                continue
            found.add(rank)
            for peers in (
                [h.peer for s in steps(rank) for h in s.sends],
                [h.peer for s in steps(rank) for h in s.recvs],
            ):
                near += list(dict.fromkeys(peers))[:MAX_ROWS]
    return sorted(found)


def _shown(count: int, room: int) -> list[int | None]:
    """The steps that are drawn; None stands for those between the first and the last of them."""
    if count <= room:
        return list(range(count))
    last = max(1, (room - 1) // 3)
    return [*range(room - 1 - last), None, *range(count - last, count)]


def _filled(words: list[str], width: int) -> list[str]:
    """Words two spaces apart, in lines of at most `width` columns where each of them fits one."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += "  " + word
        else:
            lines.append(word)
    return lines
