"""Text for people: counts, durations, byte sizes and rates in suitable units, and hints for misspelled names."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from textwrap import wrap

#: Units of long durations: name, seconds per unit, and the number of units from which the unit is used.
_LONG_UNITS = (("min", 60.0, 2), ("h", 3600.0, 2), ("days", 86400.0, 2), ("years", 31557600.0, 1))
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def digits(value: float, count: int = 3) -> str:
    """`value` with `count` significant digits, or from 1,000 on as an integer with commas: 0.0123, 12.3, 1,234.

    Values closer to zero than 0.0001 keep an exponent.
    """
    if not math.isfinite(value) or 0 < abs(value) < 1e-4:
        return f"{value:.{count}g}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.{count}g}"


def duration(seconds: float, count: int = 3) -> str:
    """Seconds as text of `count` digits: 0.00123 -> "1.23 ms", 1530 -> "25.5 min", 3e7 -> "347 days"."""
    magnitude = abs(seconds)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    for name, unit, least in reversed(_LONG_UNITS):
        if magnitude >= least * unit:
            units = seconds / unit
            million = " million" if abs(units) >= 1e6 else ""
            return f"{digits(units / 1e6 if million else units, count)}{million} {name}"
    for name, factor in (("s", 1.0), ("ms", 1e3)):
        if magnitude * factor >= 0.9995:
            return f"{digits(seconds * factor, count)} {name}"
    return f"{digits(seconds * 1e6, count)} us"


def durations(seconds: Sequence[float]) -> list[str]:
    """Times as text for comparison: three digits, or four where times differ only in the fourth."""
    texts, finer = ([duration(each, count) for each in seconds] for count in (3, 4))
    apart = {text: {other for t, other in zip(texts, finer, strict=True) if t == text} for text in texts}
    return [fine if len(apart[text]) > 1 else text for text, fine in zip(texts, finer, strict=True)]


def size(count: float) -> str:
    """Bytes as text, in powers of 1,024: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(count) < (1024 if unit == "B" else 1023.95) or unit == "EiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def rate(value: float, unit: str) -> str:
    """A rate as text, in powers of 1,000: (1.234e9, "B/s") -> "1.23 GB/s", (5.6e6, "tokens/s") -> "5.6 M tokens/s"."""
    scaled, power = value, 0
    while math.isfinite(scaled) and abs(scaled) >= 999.5 and power < len(_PREFIXES) - 1:
        scaled, power = scaled / 1000, power + 1
    prefix = _PREFIXES[power]
    space = " " if prefix and unit[0].islower() else ""  # a space before a unit that is a word, such as "tokens/s"
    return f"{digits(scaled)} {prefix}{space}{unit}"


def shorten(text: str, limit: int) -> str:
    """The first `limit` characters of `text`, with "..." if there are more: user input in error messages."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def first_line(error: BaseException) -> str:
    """The first line of the message of an error from elsewhere, at most 200 characters of it."""
    return shorten(next(iter(str(error).strip().splitlines()), "no message"), 200)


def command_lines(command: str) -> str:
    """A command in lines that a terminal of 80 columns shows, to be copied, with each option beside its value."""
    paired = re.sub(r"(?<= )(--\S+) (?!--)", "\\1\0", command)
    lines = wrap(paired, 70, break_long_words=False, break_on_hyphens=False)
    return " \\\n  ".join(lines).replace("\0", " ")


def split_commas(text: str) -> list[str]:
    """Split a text at commas outside brackets and quotes."""
    parts, depth = [""], 0
    for word in re.findall(r"'[^']*'?|\"[^\"]*\"?|.", text, re.DOTALL):  # a quoted text, or a character
        depth += (word in "([{") - (word in ")]}")
        if word == "," and not depth:
            parts.append("")
        else:
            parts[-1] += word
    return [part.strip() for part in parts]


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 rank", "8,192 ranks", "2 passes"."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def shown(value: object) -> str:
    """`repr(value)` for a message: in one line, cut where it is long or nested deep."""
    if isinstance(value, int) and value.bit_length() > 400:  # Python refuses to print the longest
        return f"a number of {value.bit_length()} bits"
    return " ".join(_SHORT.repr(value).split())


def did_you_mean(name: object, options: Iterable[str]) -> str:
    """The hint "did you mean 'x'? " for the option most similar to a wrong name; empty if there is none."""
    options, name = list(options), name if isinstance(name, str) else ""
    of_kind = [option for option in options if option.endswith(f":{name}")]  # "aten_cuda:flash" of "flash"
    begun = [option for option in options if len(str(name)) > 2 and option.startswith(str(name))]  # "h100"
    matches = of_kind or difflib.get_close_matches(str(name), options, n=1) or begun
    return f"did you mean {matches[0]!r}? " if matches and matches[0] != name else ""
