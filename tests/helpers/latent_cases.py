"""Blocks that are expanded at the visit, with a dense oracle in fp64.

MLA, absorbed, GQA, K = V, a projection, int8 rows of 13 bytes, and rows of two heads that make each key together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

import ringattn as ra

KINDS = ("mla", "absorbed", "gqa", "k=v", "projection", "int8", "mixed")
HEADS, RANK, NOPE, ROPE, VALUE = 6, 16, 8, 4, 6


@dataclass
class LatentCase:
    """q, rows, weights, and `expand` of an attention in fp64, with cotangents of its results."""

    q: Tensor
    rows: list[Tensor]
    weights: list[Tensor]
    expand: Callable[..., Any]
    pattern: ra.Pattern
    options: dict[str, Any] = field(default_factory=dict)
    mask: Tensor | None = None
    sinks: Tensor | None = None
    chosen: Tensor | None = None
    block: int = 1
    chunk: int | None = None
    travel: str = "rows"
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.q.shape[2]

    def leaves(self) -> tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]:
        """(those with a gradient, q, rows, weights), all new."""
        q, *others = (
            x.detach().clone().requires_grad_(x.is_floating_point()) for x in (self.q, *self.rows, *self.weights)
        )
        rows, weights = others[: len(self.rows)], others[len(self.rows) :]
        return [x for x in (q, *others) if x.requires_grad], q, rows, weights

    def cotangents(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(self.seed + 1)
        seen = lse.detach().isfinite()
        grad_lse = torch.randn(lse.shape, generator=source, dtype=torch.float64) * seen
        return torch.randn(out.shape, generator=source, dtype=torch.float64), grad_lse

    def dense(self) -> list[Tensor]:
        """out, lse, and all gradients of the sum of both times their cotangents; the last one is that of sinks."""
        leaves, q, rows, weights = self.leaves()
        k, v = self.expand(*rows, *weights)
        group, scale = q.shape[1] // k.shape[1], self.options.get("scale", q.shape[-1] ** -0.5)
        scores = q @ k.repeat_interleave(group, 1).mT * scale
        if (cap := self.options.get("softcap")) is not None:
            scores = cap * (scores / cap).tanh()
        seen = torch.from_numpy(self.pattern.mask(self.tokens, q.shape[1])) > 0
        seen = seen.expand(len(q), *seen.shape[-3:])
        if self.mask is not None:
            seen = seen & ~self.mask[:, None, None, :]
        if self.chosen is not None:
            blocks = -(-self.tokens // self.block)
            table = torch.zeros(*self.chosen.shape[:3], blocks + 1, dtype=torch.bool)
            table.scatter_(-1, torch.where(self.chosen < 0, blocks, self.chosen), True)
            marked = table[..., torch.arange(self.tokens) // self.block]
            seen = seen & marked.repeat_interleave(q.shape[1] // marked.shape[1], 1)
        scores = scores.masked_fill(~seen, -torch.inf)
        columns = scores.shape[-1]
        if self.sinks is not None:
            sinks = self.sinks.clone().requires_grad_()
            leaves.append(sinks)
            scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
        lse = scores.logsumexp(-1)
        weight = (scores - lse.clamp(min=-1e300)[..., None]).exp()[..., :columns]
        out = weight @ v.repeat_interleave(group, 1)
        grad, grad_lse = self.cotangents(out, lse)
        loss = (out * grad).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]

    def solve(self, call: Callable[..., Any] = ra.virtual_attention, **more: Any) -> list[Tensor]:
        """The same by `call` with Rows."""
        leaves, q, rows, weights = self.leaves()
        sinks = None if self.sinks is None else self.sinks.clone().requires_grad_()
        leaves += [] if sinks is None else [sinks]
        given = ra.Rows(*rows, expand=self.expand, weights=weights, chunk=self.chunk, travel=self.travel)
        options = {**self.options, **more}
        out, lse = call(
            q, given, self.pattern, key_padding_mask=self.mask, sinks=sinks, chosen=self.chosen, block=self.block,
            return_lse=True, **options,
        )  # fmt: skip
        grad, grad_lse = self.cotangents(out, lse)
        loss = (out * grad).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * grad_lse).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]

    def error(self, found: list[Tensor]) -> float:
        """The largest error of a result or gradient, relative to its largest number."""
        return max(map(distance, found, self.dense()))


def distance(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    apart = torch.where(found == truth, 0.0, found - truth).abs()
    largest = truth.abs().masked_fill(truth.abs() == torch.inf, 0.0)
    if found.isnan().any():
        return float("inf")  # max() of Python may pass over a NaN
    return float((apart.max() / largest.max().clamp(min=1.0)).detach()) if truth.numel() else 0.0


def make_latents(
    kind: str, tokens: int, pattern: ra.Pattern, *, batch: int = 2, seed: int = 0, **named: Any
) -> LatentCase:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    def heads(x: Tensor, of: range | None, dim: int = 0) -> Tensor:
        return x if of is None else x.narrow(dim, of.start, len(of))

    q, c, rope = (
        normal(batch, HEADS, tokens, NOPE + ROPE),
        normal(batch, 1, tokens, RANK),
        normal(batch, 1, tokens, ROPE),
    )
    of_keys, of_values = normal(HEADS, RANK, NOPE) / RANK**0.5, normal(HEADS, RANK, VALUE) / RANK**0.5
    weights = [of_keys, of_values]

    def mla(c: Tensor, rope: Tensor, of_keys: Tensor, of_values: Tensor, heads: range | None = None) -> Any:
        if heads is not None:
            of_keys, of_values = (x[heads.start : heads.stop] for x in (of_keys, of_values))
        k = c @ of_keys
        return torch.cat([k, rope.expand(-1, k.shape[1], -1, -1)], -1), c @ of_values

    def projected(x: Tensor, inner: Tensor, of_keys: Tensor, of_values: Tensor) -> Any:
        x = silu(rms_norm(x, (RANK,)) @ inner)
        return x @ of_keys, x @ of_values

    def quantised(c: Tensor, size: Tensor, rope: Tensor, of_keys: Tensor, of_values: Tensor) -> Any:
        return mla(c.to(size.dtype) * size, rope, of_keys, of_values)

    def mixed(c: Tensor, rope: Tensor, of_keys: Tensor, of_values: Tensor, heads: range | None = None) -> Any:
        return mla(c[:, :1] + 2 * c[:, 1:], rope, of_keys, of_values, heads)

    def pair(k: Tensor, v: Tensor | None = None) -> Any:
        return k, k if v is None else v

    expand: Callable[..., Any] = mla
    rows = [c, rope]
    if kind == "absorbed":
        q, weights, expand = normal(batch, HEADS, tokens, RANK + ROPE), [], lambda c, r: (torch.cat([c, r], -1), c)
    elif kind == "gqa":
        rows, weights = [normal(batch, 2, tokens, NOPE + ROPE), normal(batch, 2, tokens, VALUE)], []
        expand = pair
    elif kind == "k=v":
        rows, weights, expand = [normal(batch, 3, tokens, NOPE + ROPE)], [], pair
    elif kind == "projection":
        shared = [normal(2, RANK, width) / RANK**0.5 for width in (NOPE + ROPE, VALUE)]
        rows, weights, expand = [c], [normal(RANK, RANK) / RANK**0.5, *shared], projected
    elif kind == "mixed":
        rows, expand = [normal(batch, 2, tokens, RANK), rope], mixed
    elif kind == "int8":
        c, weights = c[..., :13], [x[:, :13] for x in weights]
        size = normal(batch, 1, tokens, 1).abs() / 40
        rows, expand = [(c * 40).round().clamp(-127, 127).to(torch.int8), size, rope], quantised
    return LatentCase(q, rows, weights, expand, pattern, seed=seed, **named)


def draw_latents(seed: int) -> LatentCase:
    """A random case: block, pattern, layout, schedule, ranks, chunk and options."""
    pick = random.Random(seed)
    tokens, ranks, batch = pick.choice((1, 5, 16, 23, 37, 48)), pick.randint(1, 5), pick.randint(1, 2)
    ends = sorted({*(pick.randint(1, tokens) for _ in range(3)), tokens})
    lengths = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    pattern = pick.choice(
        (
            *(ra.Causal(), ra.Causal(), ra.Full(), ra.Causal() & ra.Window(pick.randint(0, 9))),
            *(ra.Causal() & ra.Documents(lengths), ra.Causal() & (ra.Sinks(2) | ra.Window(3))),
            *(ra.Causal() & ra.Window(4) & ra.Documents(lengths), ra.Causal() & ra.Strided(3)),
        )
    )
    sizes = [n for n in (2, 3, 4) if ranks % n == 0]
    schedules = ["ring", "ring", "direct", "allgather", "auto"]
    schedules += [f"double_ring({n})" for n in sizes]
    options: dict[str, Any] = {
        "ranks": ranks,
        "layout": pick.choice(("contiguous", "zigzag", "striped")),
        "rotate": pick.choice(("auto", "kv", "q")),
        "kernel": pick.choice(("auto", "reference")),
    }
    kind = pick.choice(KINDS)
    heads = {"gqa": 2, "k=v": 3, "projection": 2, "absorbed": 1}.get(kind, HEADS)
    fitting = [n for n in sizes if HEADS % n == 0 and (heads % n == 0 or n % heads == 0)]
    schedules += [f"ulysses({n}{pick.choice(('', ', allgather'))})" for n in fitting] * 2
    options["schedule"] = pick.choice(schedules)
    if pick.random() < 0.2:
        options["scale"] = pick.choice((0.3, -0.2, 1.0))
    if pick.random() < 0.15:
        options |= {"softcap": 3.0, "kernel": "reference"}
    case = make_latents(kind, tokens, pattern, batch=batch, seed=seed, options=options)
    case.chunk = pick.choice((None, 1, 3, 5, 16))
    if pick.random() < 0.3:
        case.mask = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < 0.3
    if pick.random() < 0.2:
        case.sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return case
