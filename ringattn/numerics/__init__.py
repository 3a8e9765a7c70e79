"""The numerics simulator: a plan's own hops, kernels and merges over virtual ranks, with inputs made on demand."""

from .mutate import FAULTS, GRADIENTS, Mutation
from .numerics import MODES, numerics
from .result import NumericsReport
from .sampled import chosen_rows, sample
from .source import PERIOD, RowSource, TensorSource, make_source
from .whole import Outcome, execute, make_groups, whole

__all__ = [
    "FAULTS",
    "GRADIENTS",
    "MODES",
    "PERIOD",
    "Mutation",
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
