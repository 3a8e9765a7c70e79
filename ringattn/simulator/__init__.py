"""The numerics simulator: a plan's own hops, kernels and merges over virtual ranks, with inputs made on demand."""

from .mutate import FAULTS, Mutation
from .result import NumericsReport
from .sampled import chosen_rows, sample
from .source import PERIOD, Source, make_source

__all__ = ["FAULTS", "PERIOD", "Mutation", "NumericsReport", "Source", "chosen_rows", "make_source", "sample"]
