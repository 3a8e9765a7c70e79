"""The sentence that a study's report begins with: what the values of one axis change, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from ...cli.config.groups import StudyGroup
from ...text import digits, duration, plural, size
from .plots import choose_axes
from .tables import Row, Table, efficiency, is_number, list_passes, name_value, show_number, total

#: Times whose ratio is closer to 1 are called equal.
EQUAL = 0.02
#: What a time is for, beside the passes: times are compared where these are equal.
WORK = ("tokens", "heads", "head_dim", "batch")
#: Axes whose numbers stand before a noun.
NOUNS = {"tokens": "tokens", "ranks": "ranks", "shard": "tokens per rank"}


def write_headline(table: Table, options: StudyGroup) -> str:
    """What the values of the study's main axis change, and how many points do not fit into memory.

    The main axis is study.x if it has an effect. Of a crossover map, it is all axes that the map does not have,
    together; and else the axis with the most effect, first of those that are no numbers, such as layouts, then of those
    with equal work.
    """
    rows = [row for row in table.rows if total(row, "time")]
    if not rows:
        return "No point takes any time."
    varied = [name for name in table.axes if len({str(row.get(name)) for row in rows}) > 1]
    if varied:
        words = _Neighbours(table, rows, varied, _main_axes(table, rows, varied, options)).sentence(options)
    else:
        words = f"Ranks compute {efficiency(rows[0]):.0%} of the time"
    tight = sum(any(row.get(f"{direction} fits") is False for direction in list_passes(row)) for row in rows)
    do = "does" if tight == 1 else "do"
    return f"{words} [modelled]" + (f"; {plural(tight, 'point')} {do} not fit into memory." if tight else ".")


def _main_axes(table: Table, rows: list[Row], varied: list[str], options: StudyGroup) -> tuple[str, ...]:
    if "crossover" in options.plots:
        mapped = choose_axes(table, options.x, options.y)
        if rest := tuple(name for name in varied if name not in mapped):
            return rest
    ranks = {name: _Neighbours(table, rows, varied, (name,)).rank for name in varied}
    if options.x in ranks and (options.plots == ["memory"] or ranks[options.x][-1] > EQUAL):
        return (options.x,)
    return (max(varied, key=lambda name: ranks[name]),)


def _name(name: str, row: Row) -> str:
    """The value of an axis in words: "64 ranks", "zigzag", "heads=8"; of a long pattern only its name."""
    value = row.get(name)
    if value is not None and name in NOUNS:
        return f"{show_number(name, value)} {NOUNS[name].replace('s', '', value == 1)}"
    text = name_value(name, value)
    if name == "pattern" and text.startswith("("):
        text = text[1:-1]
    return re.sub(r"\(.*", "(...)", text) if name == "pattern" and len(text) > 50 else text


@dataclass
class _Neighbours:
    """Rows that differ in the axes `main` alone, group by group: `groups` has rows by the value, by the other axes.

    `words` has a text for people of each value and each group.
    """

    table: Table
    rows: list[Row]
    varied: list[str]
    main: tuple[str, ...]

    def __post_init__(self) -> None:
        tied = self.table.together if set(self.main) & set(self.table.together) else ()
        self.others = [name for name in self.varied if name not in (*self.main, *tied)]
        self.words: dict[str, str] = {}
        rows = self.rows
        self.numeric = len(self.main) == 1 and all(is_number(row.get(self.main[0])) for row in rows)
        if self.numeric:
            rows = sorted(rows, key=lambda row: row[self.main[0]])
        self.values = list(dict.fromkeys(self._join(self.main, row) for row in rows))
        groups: dict[str, dict[str, Row]] = {}
        for row in rows:
            groups.setdefault(self._join(self.others, row), {})[self._join(self.main, row)] = row
        # A group of one value, as where all others were refused, compares nothing.
        self.groups = {name: group for name, group in groups.items() if len(group) > 1}

    def _join(self, names: Sequence[str], row: Row) -> str:
        key = ", ".join(f"{name}={row.get(name)}" for name in names)
        if key not in self.words:
            self.words[key] = ", ".join(_name(name, row) for name in names)
        return key

    @property
    def times(self) -> dict[str, dict[str, float]]:
        """The time of all passes by value, by group."""
        return {name: {x: total(row, "time") for x, row in rows.items()} for name, rows in self.groups.items()}

    @property
    def same_work(self) -> bool:
        """Whether times can be compared in every group."""
        work = ([[*map(row.get, WORK), list_passes(row)] for row in rows.values()] for rows in self.groups.values())
        return all(each == rows[0] for rows in work for each in rows)

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """How fit the axis is as the main axis."""
        if not self.groups:
            effect = 0.0
        elif self.same_work:
            effect = max(max(times.values()) / min(times.values()) for times in self.times.values()) - 1
        else:
            low, high, _ = self._extremes(efficiency)
            effect = high[1] - low[1]
        return bool(self.groups), not self.numeric, self.same_work, effect

    def sentence(self, options: StudyGroup) -> str:
        """What the main axis changes: the memory where only it is plotted, else the time or, of other work, its use."""
        if not self.groups:
            return f"No two points differ in {' and '.join(self.main)} alone"
        if options.plots == ["memory"]:
            low, high, where = self._extremes(lambda row: max(row[f"{one} memory"] for one in list_passes(row)))
            return f"A rank needs {size(low[1])} with {low[0]}, and {size(high[1])} with {high[0]}{where}"
        if not self.same_work and "model" in self.rows[0]:
            low, high, where = self._extremes(lambda row: total(row, "time"))
            return f"It takes {duration(low[1])} with {low[0]}, and {duration(high[1])} with {high[0]}{where}"
        if not self.same_work:
            low, high, where = self._extremes(efficiency)
            return f"Ranks compute {high[1]:.0%} of the time with {high[0]}, and {low[1]:.0%} with {low[0]}{where}"
        if all(max(times.values()) / min(times.values()) < 1 + EQUAL for times in self.times.values()):
            return f"The time changes by less than {EQUAL:.0%} with {' and '.join(self.main)}"
        return (self.numeric and self._end_of_gain()) or self._fastest()

    def _extremes(self, measure: Any) -> tuple[tuple[str, float], tuple[str, float], str]:
        """The least and the most of a number with their values, and the group where they differ most."""
        found = []
        for name, rows in self.groups.items():
            numbers = sorted(((x, measure(row)) for x, row in rows.items()), key=lambda pair: pair[1])
            low, high = ((self.words[x], number) for x, number in (numbers[0], numbers[-1]))
            found.append((low, high, f" ({self.words[name]}, where they differ most)" if name else ""))
        return max(found, key=lambda each: each[1][1] - each[0][1])

    def _end_of_gain(self) -> str:
        """From which value on the time stays equal, where it does in any group; "" elsewhere."""
        for values, begin, more in (
            (self.values, "From {} on", "larger values gain"),
            (self.values[::-1], "Up to {}", "smaller values gain"),
        ):
            ends = {name: _end(times, values) for name, times in self.times.items()}
            found = {name: end for name, end in ends.items() if end < len(values) - 1}
            if not found:
                continue
            first, last = min(found, key=lambda x: found[x]), max(found, key=lambda x: found[x])
            words = begin.format(self.words[values[found[last]]]) + f", {more} less than {EQUAL:.0%}"
            if found[first] < found[last]:
                words += f", and {begin[0].lower()}{begin[1:].format(self.words[values[found[first]]])}"
                words += f" with {self.words[first]}"
            left = len(ends) - len(found)
            return words + (f"; in {left:,} of {len(ends):,} cases all of them gain more" if left else "")
        return ""

    def _fastest(self) -> str:
        """The value that is fastest in most groups, with how much faster than the next it is at most."""
        all_times = self.times
        near = Counter(
            x for times in all_times.values() for x, time in times.items() if time < min(times.values()) * (1 + EQUAL)
        )
        best = max(self.values, key=lambda x: near[x])
        fastest = {name: min(times, key=lambda x: times[x]) for name, times in all_times.items()}
        won = [name for name, x in fastest.items() if all_times[name].get(best, inf) < all_times[name][x] * (1 + EQUAL)]
        losses = Counter(x for name, x in fastest.items() if name not in won)
        be = "are" if self.main[0] in NOUNS and not best.endswith("=1") else "is"
        words = f"{self.words[best]} {be} fastest"
        if any(fastest[name] != best for name in won):
            words += f", or less than {EQUAL:.0%} slower,"
        if losses:
            words += f" in {len(won):,} of {len(self.groups):,} cases"
        elif self.others:
            every = (f"number of {NOUNS[name]}" if name in NOUNS else name for name in self.others)
            words += f" at every {' and '.join(every)}"
        slower = {  # how many times as long as the best the others take, from fast to slow
            name: sorted((time / all_times[name][best], x) for x, time in all_times[name].items() if x != best)
            for name in won
        }
        where = max(slower, key=lambda name: slower[name][0][0])
        compared = (slower[where][0], *slower[where][1:][-1:])
        words += f", {' and '.join(_ratio(ratio) + self.words[x] for ratio, x in compared)}"
        words += f" ({self.words[where]}, where the next is slowest)" if where else ""
        return words + "".join(f"; {self.words[x]} in {count:,}" for x, count in losses.most_common(2))


def _ratio(ratio: float) -> str:
    return ("" if ratio < 1 + EQUAL else f"{digits(ratio)} times ") + "as fast as "


def _end(times: dict[str, float], values: list[str]) -> int:
    """The place of the first value from which on all times are equal."""
    end = len(values) - 1
    while end and max(rest := [times[x] for x in values[end - 1 :] if x in times]) < min(rest) * (1 + EQUAL):
        end -= 1
    return end
