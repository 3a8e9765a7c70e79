"""Models of other libraries over sharded sequences. `borders` and `comparison` need none of these libraries."""
