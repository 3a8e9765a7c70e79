"""Progress of a command: a bar on a terminal, else a line on standard error now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..progress import Listener
from ..text import duration

#: Without a terminal, seconds between two lines.
EVERY = 30.0
#: With `lines`, there is a line at every so much of the work as well.
LINES = 10


@contextmanager
def progress(on: Console, *, wanted: bool = True, lines: bool = False) -> Iterator[Listener]:
    """What is told in the block appears on a terminal, and is gone after it. Where `on` is none, a line with the time left
    goes to standard error every `EVERY` seconds; with `lines` also at every tenth of the work."""
    if not wanted:
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
    yield Lines(on if on.stderr else Console(stderr=True), lines)


class Lines:
    """Progress as lines of text; `tenths`: at every tenth of the work, beside those of the step."""

    def __init__(self, on: Console, tenths: bool) -> None:
        self.on, self.tenths = on, tenths
        self.what: str | None = None
        self.part = -1
        self.begun = self.first = self.said = 0.0

    def __call__(self, done: int, count: int, what: str) -> None:
        """Hear of `done` of `count` units of work."""
        now, part = time.monotonic(), done * LINES // count
        if what != self.what or done < self.first:  # another loop
            self.what, self.part, self.first, self.begun, self.said = what, -1, done, now, now
        if not (self.tenths and part != self.part) and now - self.said < EVERY:
            return
        self.part, self.said = part, now
        text = f"ringattn: {what}: {done:,} of {count:,}"
        if done > self.first and now - self.begun >= 1:
            text += f", about {duration((count - done) * (now - self.begun) / (done - self.first))} left"
        self.on.print(text, highlight=False, markup=False, soft_wrap=True)
