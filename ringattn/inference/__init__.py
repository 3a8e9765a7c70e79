"""Generation: a K/V cache that is sharded over ranks, and attention of new tokens to it."""

#: How a step merges the partial results of the ranks, and where the keys of layers with a window lie, see `KVCache`.
MERGES, WINDOWS = ("auto", "gather", "scatter"), ("shard", "copy")
