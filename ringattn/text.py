"""Numbers as people read them: durations, bytes and rates, of three digits and with a fitting unit."""

from __future__ import annotations

import math

#: Seconds of the units of a duration, and from how many of the unit before on each is used.
_LONG = (("min", 60.0, 2), ("h", 3600.0, 2), ("days", 86400.0, 2), ("years", 31557600.0, 1))
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def digits(value: float) -> str:
    """Three significant digits without an exponent, or a whole number with commas: 0.0123, 12.3, 1,234."""
    if not math.isfinite(value) or 0 < abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds for people: 0.00123 -> 1.23 ms, 1530 -> 25.5 min, 3e7 -> 347 days."""
    size = abs(seconds)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    for name, unit, least in reversed(_LONG):
        if size >= least * unit:
            count = seconds / unit
            return f"{digits(count / 1e6)} million {name}" if abs(count) >= 1e6 else f"{digits(count)} {name}"
    for name, factor in (("s", 1.0), ("ms", 1e3)):
        if size * factor >= 0.9995:
            return f"{digits(seconds * factor)} {name}"
    return f"{digits(seconds * 1e6)} us"


def size(count: float) -> str:
    """Bytes for people: 1,536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(count) < (1024 if unit == "B" else 1023.95) or unit == "EiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def rate(value: float, unit: str) -> str:
    """How much in a second: 1.234e9, "B/s" -> 1.23 GB/s; 5.6e6, "tokens/s" -> 5.6 M tokens/s."""
    number, power = value, 0
    while math.isfinite(number) and abs(number) >= 999.5 and power < len(_PREFIXES) - 1:
        number, power = number / 1000, power + 1
    prefix = _PREFIXES[power]
    space = " " if prefix and unit[0].islower() else ""  # a unit that is a word
    return f"{digits(number)} {prefix}{space}{unit}"
