"""A refusal ends no group: after each refused request the next good call of the same group is right."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import told_by

import ringattn as ra
from ringattn.inference.cache import KVCache

SIZE, TOKENS, ROUNDS = 3, 24, 100
Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi


def _made(rank: int, seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(1, heads, TOKENS // SIZE, 8, generator=source) for heads in (4, 2, 2)]


def _right(rank: int, seed: int) -> torch.Tensor:
    """A rank's rows of the attention of all shards, by torch."""
    whole = [torch.cat(parts, 2) for parts in zip(*(_made(other, seed) for other in range(SIZE)), strict=True)]
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    wanted = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=mask, enable_gqa=True)
    return wanted.chunk(SIZE, 2)[rank]


def _attend(x: list[torch.Tensor], **given: Any) -> torch.Tensor:
    q, k, v = (given.pop(name, y) for name, y in zip("qkv", x, strict=True))
    options = {"pattern": ra.Causal(), "layout": "contiguous", "kernel": "reference", **given}
    return ra.ring_attention(q, k, v, **options)  # type: ignore[no-any-return]


def _prefill(x: list[torch.Tensor], layers: int = 2, bad: int = 0, rows: int | None = None, **given: Any) -> None:
    """A chunk whose layer `bad` is given what is refused."""
    cache = KVCache(ra.Causal(), layers=layers, layout="contiguous")
    cache.shard(TOKENS)
    with torch.no_grad():
        for layer in range(layers):
            q, k, v = x if layer != bad or rows is None else [y[:, :, :rows] for y in x]
            cache.prefill(layer, q, k, v, **(given if layer == bad else {}))


def _step(x: list[torch.Tensor], **given: Any) -> None:
    cache = KVCache(ra.Causal(), layers=1, layout="contiguous")
    with torch.no_grad():
        cache.step(0, *(y[:, :, :1] for y in x), **given)


#: What is refused, by its name, on all ranks or on one of them.
REFUSED: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "unknown option": lambda x: _attend(x, sclae=1.0),
    "bad schedule": lambda x: _attend(x, schedule="rnig"),
    "bad scale": lambda x: _attend(x, scale=float("inf")),
    "bad layout": lambda x: _attend(x, layout="zagzig"),
    "layout of another length": lambda x: _attend(x, layout=ra.make_layout("contiguous", tokens=99, ranks=SIZE)),
    "dtype": lambda x: _attend(x, q=x[0].double()),
    "integers": lambda x: _attend(x, **{name: y.long() for name, y in zip("qkv", x, strict=True)}),
    "shape": lambda x: _attend(x, k=x[1][:, :, :3]),
    "heads": lambda x: _attend(x, q=x[0][:, :3]),
    "mask": lambda x: _attend(x, key_padding_mask=torch.zeros(1, 5, dtype=torch.bool)),
    "sinks": lambda x: _attend(x, sinks=torch.zeros(7)),
    "documents": lambda x: _attend(x, pattern=ra.Documents([5, 5])),
    "kernel without a softcap": lambda x: _attend(x, kernel="aten_cpu", softcap=5.0),
    "kernel of another device": lambda x: _attend(x, kernel="aten_cuda"),
    "prefill": lambda x: _prefill(x, softcap=-1.0),
    "prefill, second layer": lambda x: _prefill(x, bad=1, kernel="aten_cpu", softcap=5.0),
    "prefill, rows of the second layer": lambda x: _prefill(x, bad=1, rows=2),
    "step": lambda x: _step(x, schedule="ring"),
    "step, kernel": lambda x: _step(x, kernel="aten_cuda"),
}


def refusals(rank: int, seed: int) -> tuple[int, int, list[str]]:
    """Refused requests that this rank was told of, good calls after them that were right, and what went wrong."""
    same, told, right, wrong = random.Random(seed), 0, 0, list[str]()
    shards, mine = [_made(other, seed) for other in range(SIZE)], _right(rank, seed)
    names = [*REFUSED]
    for number in range(ROUNDS):
        name, odd = names[number % len(names)], same.choice((None, *range(SIZE)))
        refused = odd is None or odd == rank
        good = (lambda x: _prefill(x)) if "prefill" in name else (lambda x: _step(x)) if "step" in name else _attend
        text = told_by(lambda call=REFUSED[name] if refused else good: call(shards[rank]))  # type: ignore[misc]
        told += text != "fine"
        try:
            close = torch.allclose(_attend(shards[rank]), mine, atol=1e-5)
        except ra.RingAttentionError as error:
            wrong.append(f"{number}: {name} on {odd}: {text}; then {error}"[:500])
            break
        right += close
    dist.barrier()
    return told, right, wrong


def test_the_call_after_a_refusal_is_right(run_ranks: Run) -> None:
    assert run_ranks(refusals, SIZE, 0, timeout=100) == [(ROUNDS, ROUNDS, [])] * SIZE


def _threads(rank: int) -> tuple[list[str], float]:
    """What two threads of a rank are told whose calls overlap on rank 0, and the error of a call after them."""
    group, told = dist.new_group(), ["", ""]

    def call(index: int) -> None:
        told[index] = told_by(lambda: _attend(_made(rank, index), group=group))

    threads = [threading.Thread(target=call, args=(index,), name=f"caller {index}") for index in range(2)]
    if rank:
        time.sleep(1.0)  # meanwhile the first thread of rank 0 waits in its call
    for thread in threads:
        thread.start()
        if rank:
            thread.join()
        else:
            time.sleep(0.2)
    for thread in threads:
        thread.join()
    x = _made(rank, 7)
    out = _attend(x, group=group)
    return told, float((out - _right(rank, 7)).abs().max())


def test_a_second_thread_is_refused_by_name_and_the_group_goes_on(run_ranks: Run) -> None:
    (first, *others) = run_ranks(_threads, SIZE, timeout=60)
    words = "thread 'caller 1' calls while another thread is in a call of the same group"
    assert first[0][0] == "fine" and first[0][1].startswith(f"InvalidInput: {words}")
    for told, _ in others:
        assert told[0] == "fine" and words in told[1] and told[1].startswith("Mismatch: rank 0 cannot take part")
    assert max(error for _, error in (first, *others)) <= 1e-5
