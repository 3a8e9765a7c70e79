"""The numerics simulator: a plan's own messages, kernels and merges over virtual ranks, with inputs made on demand."""

from .faults import FAULT_KINDS, GRADIENT_FAULTS, Fault
from .numerics import MODES, numerics
from .result import NumericsReport
from .sampled import chosen_rows, sample
from .source import PERIOD, RowSource, TensorSource, make_source
from .whole import Outcome, execute, make_groups, whole

__all__ = [
    "FAULT_KINDS",
    "GRADIENT_FAULTS",
    "MODES",
    "PERIOD",
    "Fault",
    "NumericsReport",
    "Outcome",
    "RowSource",
    "TensorSource",
    "chosen_rows",
    "execute",
    "make_groups",
    "make_source",
    "numerics",
    "sample",
    "whole",
]
