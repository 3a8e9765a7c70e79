"""Draw the steps of a plan as text: rank x step."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from ..errors import InvalidInput
from ..text import plural
from .steps import Step

#: A picture has at most MAX_ROWS ranks. If there are more, it shows GROUPS groups of neighbours.
MAX_ROWS, GROUPS = 16, 4
#: Columns of a cell, and of a picture if neither the terminal nor the caller gives a width.
CELL, WIDTH = 5, 80
#: Columns of the narrowest picture: a label, two steps, and "..." for the steps between them.
LEAST = 32


def draw_steps(
    ranks: int,
    steps: Callable[[int], tuple[Step, ...]],
    level: Callable[[int, Step], int],
    *,
    ascii: bool,
    width: int | None = None,
) -> str:
    """A picture of a plan as text: one line per rank and one cell per step, at most `width` columns wide.

    `width` defaults to the width of the terminal. `steps(rank)` gives the steps of a rank. `level(rank, step)` says how
    many of the pairs in the step's blocks are computed: 0 for none, 1 for less than half, 2 for less than all, 3 for
    all.

    A cell shows the level, and an arrow with the number of messages if the rank also sends. With many ranks, the
    picture shows a few groups of neighbours; with many steps, the first and the last ones. A last line lists what is
    left out. Raises InvalidInput if `width` is below LEAST.
    """
    width = max(LEAST, shutil.get_terminal_size((WIDTH, 24)).columns) if width is None else width
    if width < LEAST:
        raise InvalidInput(f"width={width}: a picture needs at least {LEAST} columns; try width={LEAST}")
    marks = ".-+#" if ascii else "·░▓█"
    arrow = ">" if ascii else "→"
    drawn = choose_ranks(ranks)
    label = max([len(f"rank {rank} ") for rank in drawn] + [10])
    count = max((len(steps(rank)) for rank in drawn), default=0)
    shown = _choose_steps(count, (width - label) // CELL)
    lines = [" " * label + "".join(" ...".ljust(CELL) if at is None else f" s{at}".ljust(CELL) for at in shown)]
    for rank in drawn:
        cells = ""
        rank_steps = steps(rank)
        for at in shown:
            if at is None or at >= len(rank_steps):
                cells += " " * CELL
                continue
            cells += f" {marks[level(rank, rank_steps[at])] * 2}{_count(len(rank_steps[at].sends), arrow)}".ljust(CELL)
        lines.append(f"rank {rank}".ljust(label) + cells)
    words = [f"{marks[3]} all pairs of the visit", f"{marks[2]} half or more", f"{marks[1]} less", f"{marks[0]} none"]
    lines += _wrap([*words, f"{arrow} sends, {arrow}2 twice"], width)
    left = []
    if len(drawn) < ranks:
        left.append(f"{ranks - len(drawn):,} of {plural(ranks, 'rank')}")
    if None in shown:
        gap = shown.index(None)
        left.append(f"steps {shown[gap - 1] + 1} to {shown[gap + 1] - 1} of {count:,}")  # type: ignore[operator]
    if left:
        lines += _wrap([f"left out: {left[0]}", *left[1:]], width)
    return "\n".join(line.rstrip() for line in lines)


def _count(sends: int, arrow: str) -> str:
    """An arrow with the number of messages if there are several, in two columns: "+" stands for 10 or more."""
    return "" if not sends else arrow if sends == 1 else f"{arrow}{sends if sends < 10 else '+'}"


def choose_ranks(ranks: int) -> list[int]:
    """The ranks to draw: all, or if they are many, evenly spaced groups of neighbours."""
    if ranks <= MAX_ROWS:
        return list(range(ranks))
    size = MAX_ROWS // GROUPS
    return [number * (ranks - size) // (GROUPS - 1) + i for number in range(GROUPS) for i in range(size)]


def _choose_steps(count: int, room: int) -> list[int | None]:
    """Which of `count` steps to draw; None stands for the steps left out in the middle."""
    if count <= room:
        return list(range(count))
    last = max(1, (room - 1) // 3)
    return [*range(room - 1 - last), None, *range(count - last, count)]


def _wrap(words: list[str], width: int) -> list[str]:
    """Lines of at most `width` columns with the words two spaces apart; a longer word gets a line of its own."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += "  " + word
        else:
            lines.append(word)
    return lines
