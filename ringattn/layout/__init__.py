"""Which positions each rank holds."""
