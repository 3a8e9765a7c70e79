"""Solvers of timing problems by name, the cheapest first. Solvers differ in what they need, never in the times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....registry import Registry

if TYPE_CHECKING:
    from .base import Solver

#: `simulate` asks its own solvers in this order. A solver that an installed package adds runs where `solver=` names it.
SOLVERS: Registry[Callable[[], Solver]] = Registry(
    "solvers",
    {
        "periodic": "simulator.timing.solvers.periodic:PeriodicSolver",
        "stencil": "simulator.timing.solvers.stencil:StencilSolver",
        "events": "simulator.timing.solvers.events:EventSolver",
    },
)
