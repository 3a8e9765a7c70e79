"""Machines for the timing model: their numbers, measured kernel times, presets, and machine files."""
