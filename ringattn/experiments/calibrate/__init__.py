"""Calibration: what a machine does, measured on all ranks at once, as a Machine that the timing model takes."""
