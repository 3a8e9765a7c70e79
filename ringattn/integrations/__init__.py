"""Doors for models of other libraries. `borders` and `comparison` need no other library."""
