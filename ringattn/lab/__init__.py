"""The laboratory: benchmarks, studies, calibration and advice. Nothing else in the package imports it."""
