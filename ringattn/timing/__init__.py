"""Timing of plans on machines, by models; every number from here is modelled or counted. No torch."""

from __future__ import annotations

from .machine import Machine, get_machine, machine_fields
from .predict import BACKWARD, Prediction, predict, sampled
from .presets import FACTS, MACHINES
from .ring import Stall
from .simulation import simulate
from .speed import Grid, KernelTimes
from .timeline import Timeline

__all__ = [
    "BACKWARD",
    "FACTS",
    "MACHINES",
    "Grid",
    "KernelTimes",
    "Machine",
    "Prediction",
    "Stall",
    "Timeline",
    "get_machine",
    "machine_fields",
    "predict",
    "sampled",
    "simulate",
]
