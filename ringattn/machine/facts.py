"""Numbers of presets with their sources: cited, fitted to published measurements, measured, or assumed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A number of a machine, its source (cited, fitted, assumed or measured), and the document, rows or reason."""

    value: float | int | bool
    source: str
    reason: str


#: Facts by the name of the number.
Facts = dict[str, Fact]


def cited(value: float | int | bool, document: str) -> Fact:
    """A number that a document states."""
    return Fact(value, "cited", document)


def fitted(value: float | int | bool, rows: str) -> Fact:
    """A number that was fitted to published measurements: `rows` of experiments/published/measurements.csv."""
    return Fact(value, "fitted", rows)


def assumed(value: float | int | bool, reason: str) -> Fact:
    """A number that is assumed for a reason."""
    return Fact(value, "assumed", reason)
