"""A small decoder: rotary embeddings, RMSNorm, grouped heads, and a sliding window in every second layer."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import ringattn as ra


class Attention(nn.Module):
    """Causal attention within documents, over the ranks of a group."""

    def __init__(self, width: int, heads: int, kv_heads: int, window: int | None, place: dict) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.window, self.place = heads, kv_heads, width // heads, window, place
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, documents: ra.Documents) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for part in self.qkv(x).split([n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        )
        pattern = ra.Causal() & documents
        if self.window is not None:
            pattern = pattern & ra.Window(self.window)
        out = ra.ring_attention(rotate(q, angles), rotate(k, angles), v, pattern, **self.place)
        return self.out(out.transpose(1, 2).flatten(2))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [B, H, n, D] with pairs (i, i + D / 2) rotated by angles [n, D / 2] (RoPE, arXiv:2104.09864)."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, documents: ra.Documents) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), angles, documents)
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Decoder(nn.Module):
    """Maps byte ids [1, n] at positions [n] to hidden states [1, n, width]. `embedding` is the output weight, too."""

    def __init__(self, width: int, layers: int, heads: int, kv_heads: int, window: int | None, place: dict) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.layers = nn.ModuleList(
            Layer(width, Attention(width, heads, kv_heads, window if i % 2 == 0 else None, place))
            for i in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        dim = width // heads
        self.register_buffer("speeds", 10_000.0 ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, documents: ra.Documents) -> torch.Tensor:
        angles = positions[:, None] * self.speeds
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, angles, documents)
        return self.norm(x)
