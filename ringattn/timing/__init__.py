"""Timing of plans on machines, by models; every number from here is modelled or counted. No torch."""
