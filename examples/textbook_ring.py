"""Ring attention on one page: exact, dense or causal, of a sequence sharded over ranks.

    torchrun --nproc-per-node 4 examples/textbook_ring.py

Every rank holds n rows of the sequence in order. Blocks of keys and values travel around the ring.
Each rank attends to the block that it has, and merges the result with its result so far.
ringattn itself does not use this file.
"""

import torch
import torch.distributed as dist


def rotate(*tensors):
    """Start sending tensors to the next rank; returns a function that waits for those of the previous rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    arriving = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % ranks) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in arriving]
    messages = dist.batch_isend_irecv(sends + receives) if ranks > 1 else []

    def wait():
        for message in messages:
            message.wait()
        return arriving if ranks > 1 else tensors

    return wait


def logits(q, k, owner, causal):
    """Scaled logits of this rank's rows and the keys of `owner`; with `causal`, -inf for later keys."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    n = torch.arange(q.shape[-2], device=q.device)
    rows, keys = dist.get_rank() * len(n) + n, owner * len(n) + n
    return scores.masked_fill(keys > rows[:, None], -torch.inf) if causal else scores


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        rank, ranks, own = dist.get_rank(), dist.get_world_size(), (k, v)
        for step in range(ranks):
            owner, wait = (rank - step) % ranks, rotate(k, v)  # the next block travels
            if not (causal and owner > rank):  # a block of later tokens is only passed on
                scores = logits(q, k, owner, causal)
                part_lse = scores.logsumexp(-1, keepdim=True)
                part = (scores - part_lse).exp() @ v
                if step == 0:
                    out, lse = part, part_lse
                else:  # weigh both partial results by their sums: the online softmax
                    total = torch.logaddexp(lse, part_lse)
                    out = out * (lse - total).exp() + part * (part_lse - total).exp()
                    lse = total
            k, v = wait()
        ctx.causal = causal
        ctx.save_for_backward(q, *own, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, scale = dist.get_rank(), dist.get_world_size(), q.shape[-1] ** -0.5
        dq, dk, dv = map(torch.zeros_like, (q, k, v))
        delta = (grad * out).sum(-1, keepdim=True)
        for step in range(ranks):  # gradients travel with their block, back to its owner
            owner = (rank - step) % ranks
            if not (ctx.causal and owner > rank):
                weights = (logits(q, k, owner, ctx.causal) - lse).exp()  # final weights: lse is of the whole row
                slope = weights * (grad @ v.mT - delta) * scale
                dq, dk, dv = dq + slope @ k, dk + slope.mT @ q, dv + weights.mT @ grad
            k, v, dk, dv = rotate(k, v, dk, dv)()
        return dq, dk, dv, None


if __name__ == "__main__":
    dist.init_process_group("gloo")
    q, k, v = (torch.randn(1, 4, 256, 64, requires_grad=True) for _ in "qkv")
    RingAttention.apply(q, k, v, True).sum().backward()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: |dk| = {k.grad.norm():.3f}")
    dist.destroy_process_group()
