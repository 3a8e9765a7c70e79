"""Benchmarks, calibration and studies."""
