"""Progress of a command: a bar on a terminal, elsewhere lines on standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...text import duration
from ..progress import Listener

#: Seconds between two lines where there is no terminal.
INTERVAL = 30.0
#: Lines for the whole work that `tenths` adds.
LINES = 10


@contextmanager
def show_progress(console: Console, *, shown: bool = True, tenths: bool = False) -> Iterator[Listener]:
    """A function that shows progress while the block runs: call it with the units done, their count and their noun.

    A terminal shows a bar, which is gone after the block. Elsewhere a line with the time left goes to standard error
    every `INTERVAL` seconds, and with `tenths` also at every tenth of the work. shown=False shows nothing.
    """
    if not shown:
        yield lambda done, count, noun: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", visible=False)  # until the first call
            yield lambda done, count, noun: bar.update(
                task, completed=done, total=count, description=noun, visible=True
            )
    else:
        yield ProgressLines(console if console.stderr else Console(stderr=True), tenths)


class ProgressLines:
    """Progress as lines of text, a line every `INTERVAL` seconds, and with `tenths` at every tenth of the work."""

    def __init__(self, console: Console, tenths: bool) -> None:
        self.console, self.tenths = console, tenths
        self.noun: str | None = None
        self.tenth = -1
        self.first = 0
        self.start = self.last_line = 0.0

    def __call__(self, done: int, count: int, noun: str) -> None:
        """Take note that `done` of `count` units of work are done."""
        now, tenth = time.monotonic(), done * LINES // count
        if noun != self.noun or done < self.first:  # another loop has begun
            self.noun, self.tenth, self.first, self.start, self.last_line = noun, -1, done, now, now
        if not (self.tenths and tenth != self.tenth) and now - self.last_line < INTERVAL:
            return
        self.tenth, self.last_line = tenth, now
        text = f"ringattn: {noun}: {done:,} of {count:,}"
        if done > self.first and now - self.start >= 1:
            text += f", about {duration((count - done) * (now - self.start) / (done - self.first))} left"
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
