"""A context-parallel attention that gathers all keys, and the same with one fault each: targets of the audit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class _Change(torch.autograd.Function):
    """The identity of k and v, whose gradients `change` makes wrong."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, change: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        ctx.change = change
        return k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.change(*grads), None)


class _Gather(torch.autograd.Function):
    """The shards of all ranks, [B, K, N, D]. torch.distributed.nn's all_gather has wrong gradients for strided ones."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, shard.shape[2]
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, shard, group=group)
        return torch.cat(shards, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.rows, 2)[dist.get_rank(ctx.group)], None


_kept: dict[torch.Size, list[Tensor]] = {}
_documents: dict[int, tuple[int, ...]] = {}
_leaked: list[Tensor] = []
_calls = count()


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int | None = None,
    documents: tuple[int, ...] = (), padding_mask: Tensor | None = None, dropout: float = 0.0,
    cache: dict[str, Any] | None = None, fault: str = "",
) -> Tensor:  # fmt: skip
    """Attention of contiguous shards of any equal length."""
    if fault == "group ignored":
        group = dist.group.WORLD
    if fault == "in-place change":
        q.data.mul_(1.0001)
    rank, ranks, rows, heads = dist.get_rank(group), dist.get_world_size(group), q.shape[2], q.shape[1]
    sizes: list[Any] = [None] * ranks
    dist.all_gather_object(sizes, (rows, q.dtype), group=group)
    if len({*sizes}) > 1 or k.shape[2] != rows:
        raise ValueError("shards must have equal lengths and dtypes; pad the sequence")
    if fault == "dense strides" and q.stride(3) == 1:
        q = q.as_strided(q.shape, torch.empty_like(q, memory_format=torch.contiguous_format).stride())
    if fault == "mask of an earlier call" and documents:
        documents = _documents.setdefault(rows, documents)
    if fault == "gradients in one buffer":
        k, v = _Change.apply(k, v, _keep)
    if fault == "gradients exchanged":
        k, v = _Change.apply(k, v, lambda dk, dv: (dv, dk))
    if fault == "half a gradient" and rank == 1:
        k, v = _Change.apply(k, v, lambda dk, dv: (dk / 2, dv))
    if cache:  # the next token, after those of all ranks
        keys, values = (torch.cat([old, x], 2) for old, x in zip(cache["kept"], (k, v), strict=True))
    else:
        keys, values = (_Gather.apply(x.contiguous(), group) for x in (k, v))
    mine = torch.arange(rank * rows, (rank + 1) * rows) if not cache else torch.tensor([keys.shape[2] - 1])
    if cache == {} or (cache and fault != "token not kept"):
        cache["kept"] = keys, values
    if fault == "stale buffer":
        keys = _kept.setdefault(keys.shape, [keys.detach()])[0] if not keys.requires_grad else keys
        kept = _kept.setdefault(values.shape, [values.detach()])[0]
        values = values + (kept - values).detach()
    many = keys.shape[2]
    place = torch.arange(many)
    distance = mine[:, None] - place
    seen = torch.ones(rows, many, dtype=torch.bool)
    if fault == "last tile skipped":
        seen &= place < many - many % 128
    if fault == "kept tensors":
        _leaked.append(keys)
    if causal and fault != "dropped mask":
        seen &= distance >= (1 if fault == "shift by one" and rank else 0)
    if window is not None:
        seen &= distance <= window
    if documents and not (fault == "lost border" and rank == ranks - 1):
        number = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        seen &= number[mine][:, None] == number
    if padding_mask is not None and fault != "padding attended":
        gathered = [torch.empty_like(padding_mask) for _ in range(ranks)]
        dist.all_gather(gathered, padding_mask.contiguous(), group=group)
        seen = seen & ~torch.cat(gathered, 1)[: 1 if fault == "padding of one row" else None, None, None]
    if fault == "hop skipped":
        seen &= place // rows != (rank - 2) % ranks
    share = heads // k.shape[1]
    spread = (lambda x: x.repeat(1, share, 1, 1)) if fault == "wrong head group" else (
        lambda x: x.repeat_interleave(share, 1)
    )  # fmt: skip
    keys, values = spread(keys), spread(values)
    scores = (q @ keys.mT * q.shape[3] ** -0.5).masked_fill(~seen, -torch.inf)
    if fault in ("lse in bf16", "sum of softmaxes"):
        return _by_blocks(scores, values, rows, fault)
    weights = scores.softmax(-1).nan_to_num(0.0)
    if fault == "softmax without maximum":
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    if fault == "race" and rank and torch.rand(()) < 0.02:
        weights = weights * 1.001
    if dropout:
        call = 0 if fault == "dropout repeated" else next(_calls)
        source = torch.Generator().manual_seed(99 * call + (0 if fault == "dropout differs" else rank))
        keep = torch.rand(weights.shape, generator=source) >= dropout
        weights = weights * keep / (1 - dropout)
    return weights @ values


def _keep(dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients, in buffers of their shape that the next call overwrites."""
    into = _kept.setdefault(dk.shape, [torch.empty_like(dk), torch.empty_like(dv)])
    return into[0].copy_(dk).view_as(dk), into[1].copy_(dv).view_as(dv)


def _by_blocks(scores: Tensor, values: Tensor, rows: int, fault: str) -> Tensor:
    """The merge of the ranks' blocks, in bf16 or by adding them."""
    blocks, lses = [], []
    for part, value in zip(scores.split(rows, -1), values.split(rows, 2), strict=True):
        lses.append(part.logsumexp(-1, keepdim=True))
        blocks.append(part.softmax(-1).nan_to_num(0.0) @ value)
    if fault == "sum of softmaxes":
        return torch.stack(blocks).sum(0)
    shares = torch.stack(lses).bfloat16().softmax(0)
    return (shares.to(values) * torch.stack(blocks)).sum(0)


#: (the feature in which each fault must show, the fault).
FAULTS = {
    "dropped mask": "causal",
    "shift by one": "causal",
    "lse in bf16": "causal",
    "gradients exchanged": "causal",
    "lost border": "documents",
    "stale buffer": "causal",
    "group ignored": "two groups",
    "in-place change": "causal",
    "last tile skipped": "several tiles",
    "kept tensors": "many calls",
    "softmax without maximum": "a component that all keys share",
    "race": "many calls",
    "half a gradient": "causal",
    "hop skipped": "causal",
    "padding attended": "padding on the left",
    "dropout differs": "dropout",
    "wrong head group": "grouped heads",
    "sum of softmaxes": "causal",
    "token not kept": "a cache with decode steps",
    "dense strides": "strided inputs",
    "mask of an earlier call": "documents",
    "gradients in one buffer": "causal",
    "padding of one row": "padding on the right",
    "dropout repeated": "dropout",
}


def __getattr__(name: str) -> Any:
    """`fault_0`, `fault_1` ...: `attend` with the fault of this number."""
    if not name.startswith("fault_"):
        raise AttributeError(name)
    return partial(attend, fault=[*FAULTS][int(name[6:])])


def recur(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool, decay: float, lost: bool = False) -> Tensor:
    """A recurrent layer of contiguous shards, which may lose the state between ranks."""
    (rank, rows), share = (dist.get_rank(group), q.shape[2]), q.shape[1] // k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (_Gather.apply(x.to(wide).contiguous(), group).repeat_interleave(share, 1) for x in (k, v))
    place, mine = torch.arange(keys.shape[2]), torch.arange(rank * rows, (rank + 1) * rows)
    distance = mine[:, None] - place
    seen = (distance >= 0) & ((place >= rank * rows) | (not lost))
    scores = q.to(wide) @ keys.mT * q.shape[3] ** -0.5 * decay ** distance.clamp(min=0).to(wide)
    return (scores.masked_fill(~seen, 0.0) @ values).to(q.dtype)


def forget(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool, decay: float) -> Tensor:
    """The same, without the state of earlier ranks."""
    return recur(q, k, v, group=group, causal=causal, decay=decay, lost=True)


def hanging(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False) -> Tensor:
    """Rank 0 refuses causal masks after the others have begun to wait for it."""
    if causal and dist.get_rank(group) == 0:
        raise NotImplementedError("no causal mask here")
    return attend(q, k, v, group=group, causal=causal)


def leaving(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int = 0) -> Tensor:
    """With windows, crashes after it has sent what no rank receives; each call sends the number of its mask."""
    mark, got, (rank, ranks) = (
        torch.tensor([window, causal]),
        torch.zeros(2),
        (dist.get_rank(group), dist.get_world_size(group)),
    )
    sent = dist.isend(mark.float(), (rank + 1) % ranks, group)
    if window:
        raise RuntimeError("out of memory")
    dist.recv(got, (rank - 1) % ranks, group)
    sent.wait()
    return attend(q, k, v, group=group, causal=causal, window=int(got[0]) or None)


def deaf(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False) -> Tensor:
    """Rank 0 refuses everything, and the others wait for it."""
    return hanging(q, k, v, group=group, causal=True)


def resting(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False, window: int = 0) -> Tensor:
    """Rank 1 is stopped: for 1 s with causal masks, for good with windows; without either it imports for 2 s."""
    if dist.get_rank(group) == 1 and causal:
        if not window:
            subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif dist.get_rank(group) == 1:
        import_module("slow_to_import")
    return attend(q, k, v, group=group, causal=causal)


def clearing(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Removes the folder of the report."""
    shutil.rmtree("out", ignore_errors=True)
    return attend(q, k, v, group=group)


def clearing_and_hanging(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Removes the folder of the report, before rank 1 waits for nothing."""
    shutil.rmtree("out", ignore_errors=True)
    return hanging(q, k, v, group=group, causal=True)


def stopping(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Rank 0 ends with an error that the audit does not expect."""
    if dist.get_rank(group) == 0:
        raise StopAsyncIteration("no more")
    return attend(q, k, v, group=group)


def dying(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool = False) -> Tensor:
    """Rank 1 ends its process."""
    if causal and dist.get_rank(group) == 1:
        raise SystemExit(7)
    return attend(q, k, v, group=group, causal=causal)


def run_model(model: Any, batch: dict[str, Tensor], *, group: Any, drop: str = "", share: float = 1.0) -> Tensor:
    """The logits of this rank's contiguous rows, by a model that runs the whole batch on every rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    given = {name: x for name, x in batch.items() if name != drop}
    if "position_ids" in given:
        number = (given["position_ids"] == 0).cumsum(1)
        seen = (number[:, :, None] == number[:, None]).tril()[:, None]
        given["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(model.dtype)
    elif "attention_mask" in given:
        given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = model(**given, use_cache=False).logits.tensor_split(ranks, 1)[rank]
    return logits.detach() + (logits - logits.detach()) * (share if rank else 1.0)


def without_documents(model: Any, batch: dict[str, Tensor], *, group: Any) -> Tensor:
    """Packed documents see each other."""
    return run_model(model, batch, group=group, drop="position_ids")


def with_padding(model: Any, batch: dict[str, Tensor], *, group: Any) -> Tensor:
    """Padding is attended."""
    return run_model(model, batch, group=group, drop="attention_mask")


def with_half_a_gradient(model: Any, batch: dict[str, Tensor], *, group: Any) -> Tensor:
    """All ranks but the first halve their gradients."""
    return run_model(model, batch, group=group, share=0.5)


def nothing(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> None:
    """Returns no result."""


def three(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> tuple[Tensor, None, None]:
    """Returns more than out and lse."""
    return attend(q, k, v, group=group), None, None


def in_fp64(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Returns another dtype."""
    return attend(q, k, v, group=group).double()


def of_one_row(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Returns too few rows."""
    return attend(q, k, v, group=group)[:, :, :1]


def with_a_mistake(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Raises what nobody would raise to refuse a call."""
    return q[: len(3)]  # type: ignore[arg-type]


def promising(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool, same_bits: bool) -> Tensor:
    """Says that its bits are the same on any number of ranks, but adds gradients of keys by rank."""
    return attend(q, k, v, group=group, causal=causal)


def not_alone(q: Tensor, k: Tensor, v: Tensor, *, group: Any, causal: bool) -> Tensor:
    """Refuses a group of one rank."""
    if dist.get_world_size(group) == 1:
        raise ValueError("nothing to send")
    return attend(q, k, v, group=group, causal=causal)


def badly_named(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Has a layout that does not exist."""
    return q


def badly_cut(q: Tensor, k: Tensor, v: Tensor, *, group: Any) -> Tensor:
    """Gives position 0 to both ranks."""
    return q


badly_named.layout = "zigzga"  # type: ignore[attr-defined]
badly_cut.layout = lambda tokens, rank, ranks: [0]  # type: ignore[attr-defined]


def len_of_nothing() -> int:
    """Makes no model."""
    return 0
