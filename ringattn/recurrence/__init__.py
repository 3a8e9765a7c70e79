"""Recurrent and convolutional layers over sharded sequences: runs, their exchange, and the layers."""
