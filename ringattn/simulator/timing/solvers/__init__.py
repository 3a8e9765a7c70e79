"""Solvers of timing problems. They differ in what they need, never in the times."""
