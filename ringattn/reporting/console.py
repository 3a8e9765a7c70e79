"""Tables for people: every number says whether it was measured or counted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import plural
from ..machine.machine import MACHINE_NUMBERS
from ..plan.choice import Choice
from ..plan.plan import Plan
from ..text import duration, rate, size


@dataclass(frozen=True)
class Number:
    """A figure and where it comes from: measured, counted, modelled or extrapolated."""

    name: str
    value: str
    kind: str = ""


def shape(plan: Plan) -> str:
    """The sizes of a plan that its pattern, tokens and ranks do not say: B batch, H query heads, K key/value heads, D head dim."""
    return f"B={plan.batch} H={plan.heads} K={plan.kv_heads} D={plan.head_dim} {plan.dtype}"


def head(plan: Plan, ranks: str = "rank") -> str:
    """A plan in one line; `ranks` is what its ranks are called."""
    return (
        f"{plan.pattern!r} over {plural(plan.tokens, 'token')}, {plan.layout.name} on {plural(plan.ranks, ranks)}, {plan.schedule}, "
        f"{shape(plan)}"
    )


def quantity(name: str, value: Any) -> str:
    """A number of a machine with its unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    unit = MACHINE_NUMBERS[name].unit
    if unit == "s":
        return duration(value)
    if unit == "bytes":
        return size(value)
    if unit in ("bytes/s", "flop/s"):
        return rate(value, {"bytes/s": "B/s", "flop/s": "FLOP/s"}[unit])
    if isinstance(value, int):
        return f"{value:,} {unit.replace('ranks', 'rank').replace('slots', 'slot') if value == 1 else unit}"
    return f"{value:g} {unit}"


def show(title: str, numbers: Iterable[Number]) -> None:
    """Print names and values, each with its kind."""
    table = Table(title=escape(title) or None, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    for number in numbers:
        kind = f"[{number.kind}]" if number.kind else ""
        table.add_row(*(escape(text) for text in (number.name, number.value, kind)))
    _print(table)


def grid(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a header."""
    table = Table(title=escape(title) or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(escape(name), justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    _print(table)


def say(text: str) -> None:
    """Print a paragraph in lines that fit, without spaces at their ends."""
    found = console()
    lines = textwrap.wrap(text, found.width, break_long_words=False, break_on_hyphens=False)
    found.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _print(table: Table) -> None:
    """Print a table; where there is no terminal, without the spaces that fill its lines."""
    found = console()
    if found.is_terminal:
        found.print(table)
        return
    with found.capture() as captured:
        found.print(table)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    found.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def show_choice(choice: Choice, most: int = 8) -> None:
    """Print what `auto` compared, the fastest first, what each prediction was made from, what was left out, and the reason."""
    timed = sorted((p.seconds, i, c, p) for i, c in enumerate(choice.candidates) if (p := c.prediction))
    rows = [
        (
            str(c),
            duration(p.seconds),
            duration(p.compute),
            duration(p.exposed),
            size(p.bytes),
            f"{p.messages:,}",
            c.basis,
        )
        for _, _, c, p in timed
    ]
    lines = console()
    lines.print()
    if rows:
        header = ("auto [modelled]", "forward", "compute", "exposed", "sends at most", "messages", "estimated from")
        grid("", header, rows[:most])
    if len(rows) > most:
        lines.print(f"and {len(rows) - most} slower", highlight=False)
    for why in dict.fromkeys(c.left_out for c in choice.candidates if c.left_out):
        names = ", ".join(str(c) for c in choice.candidates if c.left_out == why)
        say(f"left out ({why}): {names}")
    say(f"auto: {choice.reason}")


def choice_data(choice: Choice | None) -> dict[str, Any] | None:
    """What `auto` compared, what it took and why, as plain data; None where nothing was chosen."""
    if choice is None:
        return None
    return {
        "picked": str(choice.picked),
        "reason": choice.reason,
        "candidates": [asdict(candidate) for candidate in choice.candidates],
    }


def console() -> Console:
    """Standard output; wide enough for a table where it is not a terminal."""
    found = _Console()
    return found if found.is_terminal else _Console(width=120)


class _Console(Console):
    """Where the reader of standard output is gone, that is an error, which the command line knows how to end with."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
