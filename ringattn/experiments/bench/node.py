"""One rank of `network.run_nodes`, started by torchrun: python -m ringattn.experiments.bench.node <folder>."""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ...transport.torchdist import TorchDist


@record
def main(folder: Path) -> None:
    """Run the pickled function of the file `work`, and write its result to the file named after the rank."""
    timeout, threads, work = pickle.loads((folder / "work").read_bytes())
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout))
    function, args = pickle.loads(work)
    rank = dist.get_rank()
    result = function(rank, TorchDist(timeout=timeout), *args)
    temporary = folder / f"{rank}.part"
    temporary.write_bytes(pickle.dumps(result))
    temporary.rename(folder / str(rank))
    dist.barrier()  # rank 0 hosts the store, and must not end while others use it
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the interpreter's shutdown, in which torch's Gloo threads sometimes abort the process.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
