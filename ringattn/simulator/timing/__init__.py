"""The time of a plan on a machine. Every number is modelled, extrapolated or counted. Needs no torch."""
