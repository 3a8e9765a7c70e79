"""Calibration: the speed of a machine, measured on all its ranks at once, as a Machine for the timing model."""
