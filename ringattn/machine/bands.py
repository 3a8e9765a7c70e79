"""Error bands: how far published measurements are from the model: passes of presets, steps of training, and memory.

`ringattn score` computes the bands; tests compare them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .presets import PRESETS

#: The smallest number of tokens per rank, over all sequences, in each size class.
SIZES = (0, 4096, 16384)


@dataclass(frozen=True)
class ErrorBand:
    """How far published times were from the model's: 90 % were `low` to `high` times the predicted time.

    The band is based on `rows` published passes or training steps, and made for the model as it is. `seen` of the
    passes are of publications that set a number of the preset, so that their errors are in sample.
    """

    rows: int
    low: float
    high: float
    seen: int = 0


#: The error bands of each preset and its kernels' library by size class; None: no published measurement.
BANDS: dict[tuple[str, str], tuple[ErrorBand | None, ...]] = {
    ("a100_nvlink_ib", "fa2"): (
        ErrorBand(24, 0.79, 2.35, 24),
        ErrorBand(16, 0.88, 1.11, 16),
        ErrorBand(113, 0.93, 1.19, 113),
    ),
    ("a100_pcie", "fa2"): (ErrorBand(18, 0.53, 1.17, 18), ErrorBand(12, 0.92, 2.22, 12), ErrorBand(18, 0.79, 1.43, 18)),
    ("h100_nvlink_ib", "fa3"): (None, ErrorBand(128, 0.96, 1.11), ErrorBand(6, 0.97, 1.05)),
    ("h100_nvlink_ib", "triton"): (None, None, ErrorBand(6, 0.84, 0.92)),
    ("h800_nvlink_ib", "fa2"): (None, ErrorBand(16, 0.81, 1.14, 16), None),
}


#: The error bands of whole training steps, and of the bytes that an allocator reserves in one: 1 / high to high holds
#: 90 % of the rows of a source, each source counted alike, so that no source with many rows sets the band.
STEPS, MEMORY = ErrorBand(81, 0.81, 1.24), ErrorBand(22, 0.73, 1.37)
#: The longest sequences of those steps (tokens), the libraries whose attention they use, and their machines.
STEPS_TOKENS, STEPS_LIBRARIES = 1 << 18, ("fa2", "cudnn", "triton_2022")
STEPS_MACHINES = ("h100_nvlink_ib", "h100_500w_ib", "h200_nvlink_ib")


def describe_steps(outside: Sequence[str]) -> str:
    """A sentence that says how far a modelled training step may be from a measured one.

    `outside` lists what the published steps do not cover.
    """
    low, high = step_band(outside)
    if outside:
        return (
            f"No published step has {' or '.join(outside)}: the band {low:.2g} to {high:.2g} is twice as wide as that "
            f"of {STEPS.rows} published steps [assumed]"
        )
    return (
        f"{STEPS.rows} published steps of training took {low:g} to {high:g} times as long as this model, in which no "
        "number is fitted to them, in 90 % of the steps of a source"
    )


def step_band(outside: Sequence[str]) -> tuple[float, float]:
    """(low, high): factors between which a measured training step lies, relative to the modelled one.

    They come from published steps (`STEPS`). Both are squared if `outside`, the list of what no published step had, is
    not empty.
    """
    power = 2 if outside else 1
    return STEPS.low**power, STEPS.high**power


def size_class(tokens: int) -> int:
    """The index in SIZES of the size class of a rank with `tokens` tokens."""
    return bisect_right(SIZES, tokens) - 1


def describe_sizes(index: int) -> str:
    """The range of tokens per rank of size class number `index`, in words."""
    if index + 1 == len(SIZES):
        return f"{SIZES[index]:,} tokens per rank or more"
    return f"{SIZES[index]:,} to {SIZES[index + 1] - 1:,} tokens per rank"


def describe_band(preset: str, library: str, tokens: int) -> str:
    """A sentence for reports: the error band of a preset with the kernels of `library` ("": none of a library).

    The rank has `tokens` tokens. "" if `preset` is "".
    """
    if not preset:
        return ""
    spec, index = f"{preset}/{library}" if library else preset, size_class(tokens)
    band = BANDS.get((preset, library), (None,) * len(SIZES))[index]
    what = f"{spec} with {describe_sizes(index)}"
    if band is None:
        made = PRESETS[preset]
        tuned, families = ", ".join(made.tuned(library)), ", ".join(made.families(library))
        others = f"; published calls set {tuned} ({families})" if tuned else ""
        return f"{what}: no published measurement{others}"
    seen = f"{band.seen} of these are in sample: their publications set" if band.seen else "none of these set"
    return (
        f"{what}: 90 % of {band.rows} published passes took {band.low:g} to {band.high:g} times as long as this model "
        f"says; {seen} numbers of the preset"
    )
