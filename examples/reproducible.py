"""Trains a tiny language model to the same bits of loss and weights on any number of ranks.

    python examples/reproducible.py 1 2 4    # starts one process, then 2 and 4 ranks, and compares them

Attention does it by `reproducible=LEAF`. Everything else that sums over tokens needs the same tree: the gradients of
weights in linear layers and norms, and the loss. Here each of them is computed for whole leaves, and ranks exchange
the nodes of the leaves that they hold. Row-wise ops, such as a product x @ W of whole leaves, need nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringattn as ra
from ringattn.plan.leaves import Tree
from ringattn.transport.launcher import run_local

LEAF, TOKENS, WIDTH, HEADS, VOCABULARY = 16, 96, 32, 2, 64
Tensor = torch.Tensor
#: The leaves of this rank, by number, and how many there are: set by `train`.
held: list[int] = []
COUNT = TOKENS // LEAF


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum over all leaves of all ranks in one tree, on each rank; `parts` are those of this rank's leaves.

    A rank sends its largest complete subtrees.
    """
    tree: Tree[Tensor] = Tree((range(COUNT),), torch.add)
    for leaf, part in zip(held, parts, strict=True):
        tree.put(0, leaf, part)
    if dist.is_initialized() and dist.get_world_size() > 1:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, tree.nodes)
        tree = Tree((range(COUNT),), torch.add)
        for (level, index), node in (item for nodes in found for item in nodes.items()):
            tree.put(level, index, node)
    assert tree.root is not None
    return tree.root


class LeafWise(torch.autograd.Function):
    """function(x, weight) of rows x [n, ...], leaf by leaf; the gradient of the weight is summed in the tree."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x, weight)
        return torch.cat([function(leaf.contiguous(), weight) for leaf in x.split(LEAF)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = [], []
        for leaf, part in zip(x.split(LEAF), grad.split(LEAF), strict=True):
            with torch.enable_grad():
                inputs = leaf.contiguous().requires_grad_(x.is_floating_point()), weight.detach().requires_grad_()
                out = ctx.function(*inputs)
            needed = inputs if x.is_floating_point() else inputs[1:]
            *first, last = torch.autograd.grad(out, needed, part.contiguous())
            of_x += first
            of_weight.append(last)
        return None, torch.cat(of_x) if of_x else None, tree_sum(of_weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, with the gradient of the weight in the tree."""
    return LeafWise.apply(F.linear, x, weight)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm, with the gradient of the weight in the tree."""
    return LeafWise.apply(lambda x, w: F.rms_norm(x, (x.shape[-1],), w), x, weight)


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight`, whose gradient is summed in the tree."""
    return LeafWise.apply(F.embedding, ids, weight)


class TreeLoss(torch.autograd.Function):
    """The sum of the losses of all tokens of all ranks, in the tree."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.shape = losses.shape
        return tree_sum([leaf.contiguous().sum() for leaf in losses.split(LEAF)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)


def make_weights(layers: int) -> dict[str, Tensor]:
    """The weights of the model, equal on all ranks."""
    source, shapes = torch.Generator().manual_seed(0), {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    for layer in range(layers):
        shapes |= {f"{layer}.norm": (WIDTH,), f"{layer}.qkv": (3 * WIDTH, WIDTH), f"{layer}.out": (WIDTH, WIDTH)}
        shapes |= {f"{layer}.norm2": (WIDTH,), f"{layer}.up": (2 * WIDTH, WIDTH), f"{layer}.down": (WIDTH, 2 * WIDTH)}
    return {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape, generator=source) * 0.2).requires_grad_()
        for name, shape in shapes.items()
    }


def model(ids: Tensor, weights: dict[str, Tensor], attend: Callable[..., Tensor], layers: int) -> Tensor:
    """The logits [n, VOCABULARY] of the tokens `ids` of this rank; `attend` attends to all tokens before."""
    x = embed(ids, weights["embed"])
    for layer in range(layers):
        part = {name.partition(".")[2]: w for name, w in weights.items() if name.startswith(f"{layer}.")}
        qkv = linear(norm(x, part["norm"]), part["qkv"]).view(len(ids), 3, HEADS, -1).permute(1, 2, 0, 3)
        out = attend(*(y.unsqueeze(0) for y in qkv))
        x = x + linear(out[0].transpose(0, 1).flatten(1), part["out"])
        x = x + linear(F.silu(linear(norm(x, part["norm2"]), part["up"])), part["down"])
    return linear(norm(x, weights["norm"]), weights["embed"])


def train(rank: int, ranks: int, steps: int, layers: int = 1) -> list[str]:
    """The digests of the loss and of all weights after each step."""
    layout = ra.make_layout(f"leaves(zigzag, {LEAF})", tokens=TOKENS, ranks=ranks)
    held[:] = [place // LEAF for place in layout.positions(rank)[::LEAF].tolist()]
    options: dict[str, Any] = {"reproducible": LEAF}
    if ranks > 1:
        options["layout"] = layout

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = (ra.ring_attention if ranks > 1 else ra.attention)(q, k, v, ra.Causal(), **options)
        return out

    weights, source, digests = make_weights(layers), torch.Generator().manual_seed(1), []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=source).cumsum(0) % VOCABULARY
        ids, labels = layout.shard_tensor(tokens, rank, -1), layout.shift(tokens, rank)
        losses = F.cross_entropy(model(ids, weights, attend, layers), labels, ignore_index=-100, reduction="none")
        loss = TreeLoss.apply(losses) / (TOKENS - 1)
        grads = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for weight, grad in zip(weights.values(), grads, strict=True):
                weight -= 0.1 * grad
        found = b"".join(x.detach().numpy().tobytes() for x in (loss, *weights.values()))
        digests.append(hashlib.sha256(found).hexdigest()[:16])
    return digests


def start(rank: int, steps: int) -> list[str]:
    """`train` on a rank of a started group."""
    torch.set_num_threads(1)
    return train(rank, dist.get_world_size(), steps)


def main(counts: Sequence[int], steps: int = 20) -> bool:
    """Train on each number of ranks, and print the digest of the last step; whether all digests are equal."""
    found = []
    for count in counts:
        found += [train(0, 1, steps)] if count == 1 else run_local(start, count, steps, timeout=900.0)
        print(f"{count} rank{'s' * (count > 1)}: loss and weights after step {steps} have the digest {found[-1][-1]}")
    return all(digests == found[0] for digests in found)


if __name__ == "__main__":
    sys.exit(0 if main([int(x) for x in sys.argv[1:]] or [1, 2, 4]) else "the bits differ")
