"""Closed forms for masks of one band, which stay exact at 262,144 ranks."""
