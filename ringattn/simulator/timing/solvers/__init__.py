"""Solvers of timing problems. They differ in their requirements, never in the resulting times."""
