"""The time of a plan on a machine. Every number is modelled or counted. Needs no torch."""
