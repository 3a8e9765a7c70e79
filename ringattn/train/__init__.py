"""Train a language model whose tokens are sharded over ranks: ranks, loss, packed documents, log and checkpoints."""

from .log import Log
from .loss import NO_LABEL, count_labels, linear_cross_entropy, mean_over_ranks
from .packing import pack
from .sharding import Checkpoints, shard, start

__all__ = [
    "NO_LABEL", "Checkpoints", "Log", "count_labels", "linear_cross_entropy", "mean_over_ranks", "pack", "shard",
    "start",
]  # fmt: skip
