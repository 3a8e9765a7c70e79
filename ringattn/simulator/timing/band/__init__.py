"""Closed forms for masks of a single band: exact, also at 262,144 ranks."""
