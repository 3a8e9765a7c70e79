"""Layouts: which positions of the sequence each rank owns."""
