"""Train a language model whose tokens are sharded over ranks: its loss, packed documents, and a log of its steps."""

from .log import Log
from .loss import NO_LABEL, count_labels, linear_cross_entropy, mean_over_ranks
from .packing import pack

__all__ = ["NO_LABEL", "Log", "count_labels", "linear_cross_entropy", "mean_over_ranks", "pack"]
