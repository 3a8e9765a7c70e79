"""How far published measurements lie from the model of a preset: its error bands, by the size of a rank's shard.

`ringattn simulate experiment=published` computes the bands; a test compares them with BANDS.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

#: The least tokens of a rank, of all sequences, of each size class.
SIZES = (0, 4096, 16384)


@dataclass(frozen=True)
class ErrorBand:
    """90 % of `rows` published passes took between `low` and `high` times as long as the model says."""

    rows: int
    low: float
    high: float


#: The bands of presets by size class; None: no published measurement.
BANDS: dict[str, tuple[ErrorBand | None, ...]] = {
    "a100_nvlink_ib": (ErrorBand(24, 0.8, 2.34), ErrorBand(40, 0.96, 3.04), ErrorBand(113, 0.97, 1.24)),
    "a100_pcie": (ErrorBand(18, 0.61, 1.5), ErrorBand(18, 0.51, 2.76), ErrorBand(18, 0.7, 1.36)),
    "h100_nvlink_ib": (None, ErrorBand(128, 0.96, 1.13), ErrorBand(12, 0.95, 1.03)),
    "h800_nvlink_ib": (None, ErrorBand(16, 0.83, 1.14), None),
}


def size_class(tokens: int) -> int:
    """The number of the size class of a rank with `tokens` tokens."""
    return bisect_right(SIZES, tokens) - 1


def describe_sizes(index: int) -> str:
    """The sizes of a class in words."""
    if index + 1 == len(SIZES):
        return f"{SIZES[index]:,} tokens per rank or more"
    return f"{SIZES[index]:,} to {SIZES[index + 1] - 1:,} tokens per rank"


def describe_band(preset: str, tokens: int) -> str:
    """The band of a preset for ranks of `tokens` tokens, in words for reports; "" where the machine is no preset."""
    if not preset:
        return ""
    index = size_class(tokens)
    band = BANDS.get(preset, (None,) * len(SIZES))[index]
    if band is None:
        return f"{preset} with {describe_sizes(index)}: no published measurement"
    return (
        f"{preset} with {describe_sizes(index)}: 90 % of {band.rows} published passes took {band.low:g} to "
        f"{band.high:g} times as long as this model says"
    )
