"""Simulates what a plan does on a cluster: its time (`timing`) and its numerics (`numerics`)."""
