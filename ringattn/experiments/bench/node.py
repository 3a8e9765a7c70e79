"""A rank that torchrun starts on a node of `network.run_nodes`: python -m ringattn.experiments.bench.node <folder>."""

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
    """Run the pickled function and leave its result in the folder."""
    timeout, threads, work = pickle.loads((folder / "work").read_bytes())
    if threads:
        torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout))
    fn, args = pickle.loads(work)
    rank = dist.get_rank()
    result = fn(rank, TorchDist(timeout=timeout), *args)
    temporary = folder / f"{rank}.part"
    temporary.write_bytes(pickle.dumps(result))
    temporary.rename(folder / str(rank))
    dist.barrier()  # the store of rank 0 outlives everybody's use of it
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: there torch's Gloo threads abort the process now and then.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
