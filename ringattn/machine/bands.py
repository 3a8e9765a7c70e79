"""Error bands of presets: how far published measurements are from the model, by tokens per rank, and for whole steps.

`ringattn simulate experiment=published` computes the bands; tests compare them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

#: The smallest number of tokens per rank, over all sequences, in each size class.
SIZES = (0, 4096, 16384)


@dataclass(frozen=True)
class ErrorBand:
    """90 % of `rows` published passes took `low` to `high` times as long as a model made without them predicts."""

    rows: int
    low: float
    high: float


#: The error bands of each preset by size class; None: no published measurement.
BANDS: dict[str, tuple[ErrorBand | None, ...]] = {
    "a100_nvlink_ib": (ErrorBand(24, 1.15, 3.51), ErrorBand(40, 1.02, 3.22), ErrorBand(113, 1.06, 1.34)),
    "a100_pcie": (ErrorBand(18, 0.53, 1.17), ErrorBand(18, 0.58, 2.22), ErrorBand(18, 0.8, 1.43)),
    "h100_nvlink_ib": (None, ErrorBand(128, 0.96, 1.1), ErrorBand(12, 0.84, 1.04)),
    "h800_nvlink_ib": (None, ErrorBand(16, 0.84, 1.16), None),
}


#: The error band of whole training steps.
STEPS = ErrorBand(81, 0.91, 1.12)


def size_class(tokens: int) -> int:
    """The index in SIZES of the size class of a rank with `tokens` tokens."""
    return bisect_right(SIZES, tokens) - 1


def describe_sizes(index: int) -> str:
    """The token range of a size class in words."""
    if index + 1 == len(SIZES):
        return f"{SIZES[index]:,} tokens per rank or more"
    return f"{SIZES[index]:,} to {SIZES[index + 1] - 1:,} tokens per rank"


def describe_band(preset: str, tokens: int) -> str:
    """The error band of a preset for ranks of `tokens` tokens, in words for reports; "" if `preset` is ""."""
    if not preset:
        return ""
    index = size_class(tokens)
    band = BANDS.get(preset, (None,) * len(SIZES))[index]
    if band is None:
        return f"{preset} with {describe_sizes(index)}: no published measurement"
    return (
        f"{preset} with {describe_sizes(index)}: 90 % of {band.rows} published passes took {band.low:g} to "
        f"{band.high:g} times as long as this model predicts without them"
    )
