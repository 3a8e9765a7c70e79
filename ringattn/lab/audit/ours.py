"""This library: one pattern for causal, window, sinks and documents."""

from __future__ import annotations

from typing import Any

import torch

import ringattn as ra

NEEDED = ra.ring_attention, ra.KVCache, ra.predict  # imported once, before ranks are forked


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any, causal: bool = False, window: int | None = None,
    sinks: int = 0, documents: tuple[int, ...] = (), padding_mask: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None, softcap: float | None = None, scale: float | None = None,
    dropout: float = 0.0, return_lse: bool = False, cache: dict[str, ra.KVCache] | None = None,
    same_bits: bool = False,
) -> Any:  # fmt: skip
    """ringattn's `ring_attention` on contiguous shards."""
    pattern: Any = ra.Causal() if causal else ra.Full()
    if window is not None:
        near = ra.Window(window)
        pattern &= near | ra.Sinks(sinks) if sinks else near
    if documents:
        pattern &= ra.Documents(documents)
    if cache:
        return cache["kept"].step(0, q, k, v)
    if cache is not None:
        cache["kept"] = ra.KVCache(pattern, layers=1, group=group, layout="contiguous")
        cache["kept"].shard(q.shape[2] * torch.distributed.get_world_size(group))
        return cache["kept"].prefill(0, q, k, v)
    options: dict[str, Any] = {"softcap": softcap, "scale": scale, "dropout": dropout, "return_lse": return_lse}
    options["reproducible"] = 16 if same_bits else None
    if k.shape[2] != q.shape[2]:
        options["q_layout"] = "rows"
    return ra.ring_attention(
        q, k, v, pattern, layout="rows", group=group, key_padding_mask=padding_mask, sinks=sink_logits, **options
    )


def run_model(model: Any, batch: dict[str, torch.Tensor], *, group: Any) -> torch.Tensor:
    """Run a model parallelized by ringattn; returns the logits of this rank's rows of contiguous shards."""
    from ringattn.integrations.transformers import parallelize, shard_batch

    model = parallelize(model, group, layout="contiguous")
    return model(**shard_batch(batch, group, layout="contiguous", shift=False), use_cache=False).logits


run_model.layout = lambda tokens, rank, ranks: (  # type: ignore[attr-defined]
    ra.make_layout("contiguous", tokens=tokens, ranks=ranks).positions(rank)
)
