"""Training on tokens that are sharded over ranks."""

from .loss import NO_LABEL, count_labels, linear_cross_entropy, mean_over_ranks

__all__ = ["NO_LABEL", "count_labels", "linear_cross_entropy", "mean_over_ranks"]
