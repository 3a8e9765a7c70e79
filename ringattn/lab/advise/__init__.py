"""Advice on a cluster: which number of GPUs, parallelism and options train a model fastest or cheapest."""
