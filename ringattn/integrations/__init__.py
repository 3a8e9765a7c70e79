"""Models of other libraries over sharded sequences. `borders` needs none of these libraries."""
