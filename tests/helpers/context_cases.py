"""What the ranks of test_context_parallel.py run: a Llama as torch's tutorials write it, in `context_parallel`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import ringattn as ra

CLASSES, HEADS, WIDTH, LONGEST = 53, 4, 32, 96
#: As models hold it that compile attention alone.
compiled_flex = torch.compile(flex_attention, backend="aot_eager")


class Layer(nn.Module):
    """Grouped-query attention with rotary positions, and a feed-forward part.

    `turns` are longer than the sequence, as the tables of such models are.
    """

    turns: torch.Tensor

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attend = attend
        angles = torch.outer(torch.arange(LONGEST), 0.1 ** torch.arange(WIDTH // HEADS // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        width, turns = WIDTH // HEADS, self.turns[: x.shape[1]]
        q, k, v = (
            y.unflatten(-1, (-1, width)).transpose(1, 2)
            for y in self.qkv(F.layer_norm(x, x.shape[-1:])).split((WIDTH, WIDTH // 2, WIDTH // 2), -1)
        )
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for y in (q, k)
        )
        if isinstance(mask, BlockMask):
            out = self.attend(q, k, v, block_mask=mask, enable_gqa=True)
        else:  # torch's flex_attention has no backward on the CPU
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(F.layer_norm(x, x.shape[-1:]))))


class Model(nn.Module):
    def __init__(self, attend: Any = flex_attention, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList([Layer(attend), Layer(attend)])
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor, mask: Any = None) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask) if self.reentrant is None else checkpoint(layer, x, mask, use_reentrant=self.reentrant)
        return self.head(x)


def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Two documents, in the second element of a batch others, and a window."""
    return ((q >= 17 + 9 * b) == (k >= 17 + 9 * b)) & (q >= k) & (q - k <= 30)


def train(run: Any, model: Model, tokens: int, documents: bool, enter: Any, after: bool = False) -> list[float]:
    """Losses and gradient norms of three steps, whose batches `enter` cuts; `after`: the backward comes after it."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        ids = torch.randint(CLASSES, (2, tokens + 1), generator=torch.Generator().manual_seed(step))
        make = create_mask if enter is whole else partial(create_block_mask, BLOCK_SIZE=16)
        mask = make(rule, 2, None, tokens, tokens, device="cpu") if documents else None
        inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
        with enter(inputs, labels, mask):
            loss = F.cross_entropy(run(inputs, mask).flatten(0, 1), labels.view(-1), reduction="sum") / (2 * tokens)
            if not after:
                loss.backward()
        if after:
            loss.backward()
        total = loss.detach()
        if enter is not whole:
            for x in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
            assert after or inputs.shape == labels.shape == (2, tokens)
        found += [total.item(), nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def whole(*buffers: Any) -> Any:
    return nullcontext()


def losses(rank: int, tokens: int, kind: str) -> tuple[list[float], list[float]]:
    """What `train` finds on the ranks, and in one process that computes whole sequences."""
    reentrant = False if "recomputed" in kind else None
    documents = "documents" in kind
    model = Model(compiled_flex if kind == "documents, compiled attention" else flex_attention, reentrant)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))["cp"]

    def enter(inputs: torch.Tensor, labels: torch.Tensor, mask: Any) -> Any:
        tables = [layer.turns for layer in model.layers]
        return ra.context_parallel(
            mesh,
            buffers=[inputs, labels, *tables, *([] if mask is None else [mask])],
            buffer_seq_dims=[1, 1, 0, 0, *([] if mask is None else [None])],
            no_restore_buffers=set() if reentrant is None else {inputs, labels},
        )

    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if kind.endswith("compiled") else model
    found = train(run, model, tokens, documents, enter, after=reentrant is not None)
    return found, train(alone := Model(), alone, tokens, documents, whole)
