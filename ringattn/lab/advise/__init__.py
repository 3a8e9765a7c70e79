"""Advice on a cluster: which numbers of GPUs, which parallelism and which choices train a model fastest or cheapest."""
