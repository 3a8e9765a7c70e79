"""Generation: a K/V cache that is sharded over ranks, and attention of new tokens to it."""
