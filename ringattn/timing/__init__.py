"""Timing of plans on machines, by models; every number from here is modelled or counted. No torch."""

from __future__ import annotations

from .machine import MACHINES, Machine, get_machine
from .predict import BACKWARD, Prediction, predict, sampled
from .ring import Stall
from .simulation import simulate
from .speed import Grid, KernelTimes
from .timeline import Timeline

__all__ = [
    "BACKWARD",
    "MACHINES",
    "Grid",
    "KernelTimes",
    "Machine",
    "Prediction",
    "Stall",
    "Timeline",
    "get_machine",
    "predict",
    "sampled",
    "simulate",
]
