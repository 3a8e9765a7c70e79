"""Rings of this job's ranks against a dense oracle, then ranks that disagree, then a rank that dies.

torchrun --nproc-per-node 4 tests/helpers/ring_ranks.py [gloo]. NCCL with one CUDA device a rank is the default; on
Gloo the same runs on CPUs. Prints a line for each part; fails with the first that is wrong.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import ringattn as ra

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "nccl"
#: Gloo's CPUs show that this program runs, which smaller sizes do, too.
TOKENS, HEADS, KV_HEADS, DIM = (1000, 8, 2, 64) if BACKEND == "nccl" else (400, 4, 2, 8)
PATTERNS = (
    ra.Full(),
    ra.Causal() & (ra.Sinks(4) | ra.Window(200)),
    ra.Dilated((256, 512), (1, 2)),
    ra.Causal() & ra.Documents([300, 17, TOKENS - 317]),
)


def oracle(pattern: ra.Pattern, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention in fp64 by the pattern's dense mask, which counts each pair."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    seen = torch.as_tensor(pattern.mask(TOKENS, heads=HEADS), dtype=torch.float64, device=q.device)
    weights = ((q @ k.mT) / DIM**0.5).exp() * seen
    total: torch.Tensor = (weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)) @ v
    return total


def rings(device: torch.device, dtype: torch.dtype) -> float:
    """The largest error of out, dq, dk and dv over patterns and schedules, relative to the largest number."""
    rank, size, worst = dist.get_rank(), dist.get_world_size(), 0.0
    schedules = ["ring", "direct", "allgather", *(f"double_ring({n})" for n in (2, 4) if size % n == 0)]
    schedules += [f"ulysses({n})" for n in (2,) if size % n == 0]
    for number, pattern in enumerate(PATTERNS):
        source = torch.Generator().manual_seed(number)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        *whole, grad = (torch.randn(1, h, TOKENS, DIM, generator=source).to(device, dtype) for h in heads)
        wide = [x.double().requires_grad_() for x in whole]
        out = oracle(pattern, *wide)
        wanted = (out, *torch.autograd.grad(out, wide, grad.double()))
        for index, schedule in enumerate(schedules):
            layout = ra.make_layout(("contiguous", "zigzag")[(number + index) % 2], tokens=TOKENS, ranks=size)
            mine = [layout.shard_tensor(x, rank).contiguous().requires_grad_() for x in whole]
            found = ra.ring_attention(*mine, pattern, layout=layout, schedule=schedule)
            grads = torch.autograd.grad(found, mine, layout.shard_tensor(grad, rank))
            for got, truth in zip((found.detach(), *grads), (out.detach(), *wanted[1:]), strict=True):
                part = layout.shard_tensor(truth, rank)
                worst = max(worst, float((got.double() - part).abs().max() / truth.abs().max()))
    ra.synchronize()
    return worst


def told(device: torch.device, group: dist.ProcessGroup, odd: bool) -> tuple[str, float]:
    """What this rank is told, and after how many seconds, where an odd rank gives another scale."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = ra.make_layout("contiguous", tokens=TOKENS, ranks=size)
    q = [torch.randn(1, 2, layout.rows(rank), DIM, device=device) for _ in range(3)]
    begun = time.monotonic()
    try:
        ra.ring_attention(*q, ra.Causal(), layout=layout, group=group, scale=0.5 if odd else 0.25)
        ra.synchronize(group)
    except ra.RingAttentionError as error:
        return str(error), time.monotonic() - begun
    return "nothing", time.monotonic() - begun


def main() -> None:
    device = torch.device("cpu")
    if BACKEND == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    within = timedelta(seconds=60)
    dist.init_process_group(BACKEND, timeout=within, device_id=device if BACKEND == "nccl" else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(timeout=within) for _ in range(2)]  # an error ends the calls of its group
    for dtype, bound in ((torch.float32, 3e-5), (torch.bfloat16, 3e-2)):
        worst = rings(device, dtype)
        assert worst < bound, f"rank {rank}: {dtype} differs from the oracle by {worst:.1e}"
        if rank == 0:
            print(f"{size} ranks on {BACKEND}: {dtype} differs from fp64 by {worst:.1e} at most", flush=True)
    text, seconds = told(device, groups[0], rank == size - 1)
    assert "the ranks disagree about scale" in text, f"rank {rank}: {text}"
    if rank == 0:
        print(f"{size} ranks on {BACKEND}: another scale is told after {seconds:.2f} s: {text}", flush=True)
    told(device, groups[1], False)
    begun = time.monotonic()
    if rank == size - 1:
        os._exit(0)  # as a killed process leaves its connections; torchrun would end all ranks after SIGKILL
    text, _ = told(device, groups[1], False)
    assert f"rank {size - 1}" in text, text
    if rank == 0:
        print(f"{size} ranks on {BACKEND}: a rank that died is told after {time.monotonic() - begun:.2f} s", flush=True)


if __name__ == "__main__":
    main()
