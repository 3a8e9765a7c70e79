"""Console output: tables in which each number has its kind (measured, counted, ...), and progress."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ...machine.machine import MACHINE_NUMBERS
from ...plan.choice import Choice
from ...plan.plan import Plan
from ...text import duration, durations, plural, size
from ..progress import Listener

#: Width of standard output in columns if it is not a terminal: enough for every table.
WIDTH = 120
#: Without a terminal: seconds between two progress lines, and the number of lines for all the work with `tenths`.
INTERVAL, LINES = 25.0, 10


@dataclass(frozen=True)
class Number:
    """A value to report: its name, its text, and where it comes from.

    `kind` is measured, counted, modelled, extrapolated, or "" for none of these.
    """

    name: str
    value: str
    kind: str = ""


def describe_sizes(plan: Plan) -> str:
    """The batch B, query heads H, key/value heads K, head dim D and dtype of a plan."""
    return f"B={plan.batch} H={plan.heads} K={plan.kv_heads} D={plan.head_dim} {plan.dtype}"


def describe_plan(plan: Plan, rank_noun: str = "rank") -> str:
    """A one-line description of a plan; `rank_noun` is the word for its ranks."""
    return f"{describe_sides(plan, rank_noun)}, {plan.schedule}, {describe_sizes(plan)}"


def describe_sides(plan: Plan, rank_noun: str = "rank") -> str:
    """A plan's pattern, tokens, layout and ranks as text; for queries and keys separately if they differ.

    `rank_noun` is the word for a rank.
    """
    queries = "" if plan.q_layout is None else f"{plural(plan.q_tokens, 'query token')}, {plan.q_layout.name}, and "
    what = "token" if plan.q_layout is None else "key"
    return (
        f"{plan.pattern!r} over {queries}{plural(plan.tokens, what)}, {plan.layout.name} on "
        f"{plural(plan.ranks, rank_noun)}"
    )


def format_quantity(name: str, value: float | bool) -> str:
    """A machine parameter's value with its unit, as text; `name` is the parameter."""
    return MACHINE_NUMBERS[name].show(value)


def print_numbers(title: str, numbers: Iterable[Number]) -> None:
    """Print a table of names, values and kinds."""
    table = Table(title=escape(title) or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    for number in numbers:
        kind = f"[{number.kind}]" if number.kind else ""
        table.add_row(*(escape(text) for text in (number.name, number.value, kind)))
    _print_table(table)


def print_grid(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a header; the first column is left-aligned, the others right-aligned.

    A table that is wider than the terminal is stacked: each row becomes its first cell, followed by a line for each
    other cell.
    """
    rows = [*rows]
    widths = [max(map(cell_len, column)) for column in zip(header, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > get_console().width:
        names = max(map(cell_len, header[1:]), default=0)
        lines = [line for row in rows for line in (row[0], *(
            f"  {name:<{names}}  {text}" for name, text in zip(header[1:], row[1:], strict=True) if text
        ))]  # fmt: skip
        print_plain("\n".join([*([title] if title else []), *lines]))
        return
    table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(escape(name), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    _print_table(table)


def print_paragraph(text: str) -> None:
    """Print a text wrapped to the width of the terminal."""
    lines = textwrap.wrap(text, get_console().width, break_long_words=False, break_on_hyphens=False)
    print_plain("\n".join(lines))


def print_plain(text: str) -> None:
    """Print a text unchanged: without colours, markup or wrapping."""
    get_console().print(text, highlight=False, markup=False, soft_wrap=True)


def announce(text: str) -> None:
    """Print a line that says what will be measured next."""
    get_console().print(f"measuring {text}", highlight=False, soft_wrap=True)


def _print_table(table: Table) -> None:
    """Print a table; without trailing blanks if the output is not a terminal."""
    console = get_console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    print_plain("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_choice(choice: Choice, max_rows: int = 8) -> None:
    """Print what `auto` compared: candidates from fastest to slowest, those left out, and the reason for the choice."""
    timed = sorted((p.seconds, i, c, p) for i, c in enumerate(choice.candidates) if (p := c.prediction))
    rows = [
        (
            str(candidate),
            seconds,
            duration(prediction.compute),
            duration(prediction.exposed),
            size(prediction.bytes),
            f"{prediction.messages:,}",
            candidate.basis,
        )
        for (_, _, candidate, prediction), seconds in zip(timed, durations([row[0] for row in timed]), strict=True)
    ]
    console = get_console()
    console.print()
    if rows:
        header = ("auto [modelled]", "forward", "compute", "exposed", "sends at most", "messages", "estimated from")
        print_grid("", header, rows[:max_rows])
    if len(rows) > max_rows:
        console.print(f"and {len(rows) - max_rows} slower candidates", highlight=False)
    for why in dict.fromkeys(candidate.left_out for candidate in choice.candidates if candidate.left_out):
        names = ", ".join(str(candidate) for candidate in choice.candidates if candidate.left_out == why)
        print_paragraph(f"left out ({why}): {names}")
    print_paragraph(f"auto: {choice.reason}")


def get_console() -> Console:
    """A console on the current standard output; if that is not a terminal, COLUMNS or `WIDTH` columns wide."""
    console = _Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else _Console(width=WIDTH)


class _Console(Console):
    """A console that raises BrokenPipeError if the reader of standard output is gone; `main` then ends the command."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


@contextmanager
def show_progress(console: Console, *, shown: bool = True, tenths: bool = False) -> Iterator[Listener]:
    """Show progress in the `with` block; yields a function to call with (units done, units in total, noun).

    On a terminal it draws a bar, removed after the block. Elsewhere it prints a line with the time left to standard
    error every `INTERVAL` seconds, even within a unit, and with `tenths` at every tenth of the work. shown=False shows
    nothing.
    """
    if not shown:
        yield lambda done, count, noun: None
    elif console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("preparing", total=None)
            yield lambda done, count, noun: bar.update(task, completed=done, total=count, description=noun)
    else:
        with ProgressLines(Console(stderr=True) if console.file is sys.stdout else console, tenths) as lines:
            yield lines


class ProgressLines:
    """A context that prints progress lines: one every `INTERVAL` seconds, and with `tenths` at every tenth of the work.

    If a unit of work takes longer than that, a thread says how long it has taken. The thread ends with the context.
    """

    def __init__(self, console: Console, tenths: bool) -> None:
        self.console, self.tenths = console, tenths
        self.noun: str | None = None
        self.tenth = -1
        self.first = self.done = self.count = 0
        self.start = self.begun = self.last_line = time.monotonic()
        self.over, self.spoken = False, threading.Event()
        threading.Thread(target=self._repeat, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Print nothing more."""
        self.over = True
        self.spoken.set()

    def __call__(self, done: int, count: int, noun: str) -> None:
        """Record that `done` of `count` units of work are done."""
        now, tenth = time.monotonic(), done * LINES // count
        if noun != self.noun or done < self.first:  # a new loop
            self.noun, self.tenth, self.first, self.start = noun, -1, done, now
        self.done, self.count, self.begun = done, count, now
        if (self.tenths and tenth != self.tenth) or now - self.last_line >= INTERVAL:
            self.tenth = tenth
            self._print()

    def _repeat(self) -> None:
        while not self.over:
            if not self.spoken.wait(INTERVAL):
                self._print()
            self.spoken.clear()

    def _print(self) -> None:
        text = "preparing" if self.noun is None else f"{self.noun}: {self.done:,} of {self.count:,}"
        self.last_line = now = time.monotonic()
        units = self.done - self.first
        if (inside := now - self.begun) >= INTERVAL:
            text += f", {duration(inside)} in this one"
        if units >= self.count / LINES and self.begun - self.start >= 1:  # too early to estimate before
            # A unit that takes longer than those before it makes the rest longer, too.
            each = max((self.begun - self.start) / units, (now - self.start) / (units + 1))
            left = (self.count - self.done - 1) * each + max(each - inside, 0.0)
            text += f", about {duration(left)} left" if left else ""
        self.console.print(f"ringattn: {text}", highlight=False, markup=False, soft_wrap=True)
        self.spoken.set()
