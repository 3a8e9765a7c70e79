"""Timing of plans on machines, by models; every number from here is modelled or counted. No torch."""

from __future__ import annotations

from .machine import MACHINES, Machine, get_machine, machine_fields
from .predict import BACKWARD, Prediction, predict, sampled
from .ring import Stall
from .simulation import simulate
from .timeline import Timeline

__all__ = [
    "BACKWARD",
    "MACHINES",
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
