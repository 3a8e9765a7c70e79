"""Progress of a command: a bar on a terminal, else, where that is wanted, a line now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..progress import Tell

#: Without a terminal, progress is a line at every so much of the work.
LINES = 10


@contextmanager
def progress(on: Console, *, wanted: bool = True, lines: bool = False) -> Iterator[Tell]:
    """What is told in the block appears on a terminal, and is gone after it; with `lines` also where `on` is none."""
    if not wanted or not (on.is_terminal or lines):
        yield lambda done, count, what: None
        return
    if on.is_terminal:
        shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*shown, console=on, transient=True) as bar:
            task = bar.add_task("", visible=False)  # until there is something to say
            yield lambda done, count, what: bar.update(
                task, completed=done, total=count, description=what, visible=True
            )
        return
    last: list[Any] = [None]

    def tell(done: int, count: int, what: str) -> None:
        part = (what, done * LINES // count)
        if part != last[0]:
            last[0] = part
            on.print(f"ringattn: {what}: {done:,} of {count:,}", highlight=False, markup=False, soft_wrap=True)

    yield tell
