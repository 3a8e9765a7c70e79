"""A K/V cache over ranks: attention of new tokens is that of one device, whatever was cropped, forked or let go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch
from generations import MOST, PATTERNS, Generation
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import share_of
from torch.distributed import ProcessGroup

import ringattn as ra
import ringattn.inference.cache
from ringattn.call.compile import compile_call
from ringattn.inference.holdings import Holdings
from ringattn.pattern.base import And
from ringattn.pattern.tile import Tile, append_run, shift_range
from ringattn.plan.work import find_tiles, join_dense, lower
from ringattn.transport.base import Counters


@pytest.mark.parametrize("seed", range(40))
def test_generations_equal_a_dense_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts, padded or not, steps, crops and forks in random order, by random patterns and heads."""
    if seed % 2:
        monkeypatch.setattr(ringattn.inference.cache, "SHARED_ROWS", 3)
    generation = Generation(1000 + seed, 1 + seed % 5)
    generation.run(12)
    assert generation.worst < 1e-12, generation.patterns


def fill(cache: ra.KVCache, tokens: int, heads: int = 2, dim: int = 8, batch: int = 1) -> None:
    """A prompt in every layer."""
    cache.shard(tokens)
    for layer in range(len(cache.patterns)):
        cache.prefill(layer, *torch.randn(3, batch, heads, tokens, dim))


def step(cache: ra.KVCache, tokens: int = 1, heads: int = 2, dim: int = 8) -> list[torch.Tensor]:
    """New tokens in every layer."""
    batch = len(cache.lengths) or 1
    return [cache.step(layer, *torch.randn(3, batch, heads, tokens, dim)) for layer in range(len(cache.patterns))]


def counters(cache: ra.KVCache) -> list[Counters]:
    found = cache.transport.counters
    assert isinstance(found, list)
    return found


@settings(max_examples=share_of(25))
@given(
    pattern=st.sampled_from(PATTERNS),
    ranks=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "contiguous", "striped(3)"]),
    windows=st.sampled_from(["shard", "copy"]),
    cuts=st.sets(st.integers(1, MOST - 1), max_size=6),
)
def test_chunks_equal_one_prefill(pattern: ra.Pattern, ranks: int, layout: str, windows: str, cuts: set[int]) -> None:
    source = torch.Generator().manual_seed(len(cuts))
    q, k, v = (torch.randn(2, h, MOST, 8, generator=source, dtype=torch.float64) for h in (4, 2, 2))
    wanted = ra.attention(q, k, v, pattern)
    cache = ra.KVCache(pattern, layers=1, ranks=ranks, layout=layout, windows=windows, page=4, max_tokens=MOST)
    outs = [
        cache.prefill(0, *(x[:, :, first:last] for x in (q, k, v)))
        for first, last in itertools.pairwise([0, *sorted(cuts), MOST])
    ]
    assert torch.allclose(torch.cat(outs, 2), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_holds_its_share(ranks: int) -> None:
    page, tokens = 4, 100
    cache = ra.KVCache("Causal()", layers=2, ranks=ranks, page=page)
    fill(cache, tokens)
    for new in range(1, 60):
        step(cache)
        rows = [sum(map(len, cache.rows(0, rank))) for rank in range(ranks)]
        assert sum(rows) == tokens + new and max(rows) - min(rows) <= page + 1
        row_bytes = 2 * 2 * 2 * 8 * 4  # layers, k and v, heads, dims, fp32
        assert cache.nbytes <= row_bytes * (tokens + new + ranks * page)


@pytest.mark.parametrize("windows", ["shard", "copy"])
def test_a_window_layer_holds_a_window(windows: str) -> None:
    """Over all ranks, or on each; the first tokens of Sinks stay, and other layers hold everything."""
    window, page, ranks, first = 32, 4, 3, 50
    patterns = [ra.Causal(), ra.Causal() & ra.Window(window - 1), ra.Causal() & (ra.Sinks(2) | ra.Window(window - 1))]
    cache = ra.KVCache(patterns, layers=3, ranks=ranks, page=page, windows=windows)
    fill(cache, first)
    for new in range(1, 150):
        step(cache)
        held = [
            [{slot for run in cache.rows(layer, rank) for slot in run} for rank in range(ranks)] for layer in range(3)
        ]
        total = first + new
        assert set.union(*held[0]) == set(range(total)) and sum(map(len, held[0])) == total
        for layer, extra in ((1, set()), (2, {0, 1})):
            union = set.union(*held[layer])
            assert union >= set(range(total - window, total)) | extra
            assert len(union) <= window + len(extra) + 3 * page
            assert sum(map(len, held[layer])) == len(union) * (ranks if windows == "copy" else 1)
    assert cache.nbytes < 2 * 2 * 8 * 4 * (total + 2 * (ranks if windows == "copy" else 1) * (window + 8 * page))


def test_a_step_of_copies_sends_no_message() -> None:
    cache = ra.KVCache("Causal() & Window(7)", layers=1, ranks=3, windows="copy")
    fill(cache, 40)
    for found in counters(cache):
        found.reset()
    step(cache, tokens=3)
    assert all(found == Counters() for found in counters(cache))


def test_beams_share_what_they_have_in_common() -> None:
    cache = ra.KVCache("Causal()", layers=1, ranks=2)
    fill(cache, 2000)
    before = cache.nbytes
    cache.fork([0, 0, 0, 0])
    step(cache)
    cache.fork(torch.tensor([1, 0, 3, 3]))
    step(cache)
    assert cache.nbytes <= before + 4 * 2 * 64 * 2 * 2 * 8 * 4
    cache.fork([2])
    assert cache.nbytes <= before + 2 * 64 * 2 * 2 * 8 * 4


def test_patterns_of_one_length_need_the_most_tokens() -> None:
    new = torch.randn(3, 1, 2, 1, 8)
    for pattern in (ra.Documents([5, 3]), ra.local_window(4, density=0.5)):
        with pytest.raises(ra.InvalidInput, match="one length only; give max_tokens="):
            ra.KVCache(pattern, layers=1, ranks=2).step(0, *new)
    with pytest.raises(ra.InvalidInput, match="lengths sum to 8"):
        ra.KVCache(ra.Documents([5, 3]), layers=1, ranks=2, max_tokens=9).step(0, *new)


def test_rows_that_were_let_go_do_not_come_back() -> None:
    cache = ra.KVCache("Causal() & Window(7)", layers=1, ranks=2, page=4)
    fill(cache, 40)
    cache.crop(-4)
    assert cache.length == 36
    with pytest.raises(ra.InvalidInput, match="has already dropped; keep at least 36"):
        cache.crop(35)
    with pytest.raises(ra.InvalidInput, match="the cache holds 36 tokens"):
        cache.crop(37)
    cache.fork([0, 0])
    with pytest.raises(ra.InvalidInput, match="has already dropped; keep at least 36"):
        cache.crop([36, 5])  # the shorter row would miss what its next token sees
    cache.fork([0])
    for everything in (-36, 0):
        cache.crop(everything)
        assert cache.length == 0 and not cache.rows(0)
        step(cache)


@pytest.mark.parametrize("windows", ["shard", "copy"])
def test_what_is_within_the_window_can_be_cropped(windows: str) -> None:
    cache = ra.KVCache("Causal() & Window(63)", layers=1, ranks=2, page=4, windows=windows)
    fill(cache, 40)
    step(cache)
    cache.crop(3)
    assert [sum(map(len, cache.rows(0, rank))) for rank in range(2)] == ([3, 0] if windows == "shard" else [3, 3])


def test_a_cache_of_another_dtype() -> None:
    q, k, v = torch.randn(3, 1, 2, 24, 8)
    cache = ra.KVCache("Causal()", layers=1, ranks=2, dtype=torch.bfloat16, page=1)
    out = cache.prefill(0, *(x[:, :, :20] for x in (q, k, v)))
    last = cache.step(0, *(x[:, :, 20:] for x in (q, k, v)))
    wanted = ra.attention(q, *(x.bfloat16().float() for x in (k, v)), ra.Causal())
    assert torch.allclose(torch.cat((out, last), 2), wanted, atol=1e-5)
    assert cache.nbytes == 24 * 2 * 2 * 8 * 2


def test_wrong_arguments_are_refused_in_a_line() -> None:
    cache = ra.KVCache("Causal()", layers=1, ranks=2)
    fill(cache, 6)
    empty, group = torch.zeros(3, 1, 2, 0, 8), cast("ProcessGroup", object())
    calls = {
        "no new token": lambda: cache.step(0, *empty),
        "max_tokens=2.5 must be an integer": lambda: ra.KVCache("Causal()", layers=1, ranks=2, max_tokens=2.5),  # type: ignore[arg-type]
        "ranks=2 asks for virtual ranks": lambda: ra.KVCache("Causal()", layers=1, ranks=2, group=group),
        r"fork\(\[True, False\]\)": lambda: cache.fork(torch.tensor([True, False])),
        r"torch.bfloat16.* the cache holds .*torch.float32": lambda: cache.step(
            0, *torch.ones(3, 1, 2, 1, 8).bfloat16()
        ),
        r"crop\(2.5\)": lambda: cache.crop(2.5),  # type: ignore[arg-type]
        r"crop\(\[2.5\]\)": lambda: cache.crop([2.5]),  # type: ignore[list-item]
        r"fork\(\[0.5\]\)": lambda: cache.fork([0.5]),  # type: ignore[list-item]
        r"padding must be a tensor, bool \[batch, 2\], got list": lambda: cache.shard(2, [[True, False]]),  # type: ignore[arg-type]
        "dtype=torch.int32: expected a floating-point": lambda: ra.KVCache(
            "Causal()", layers=1, ranks=2, dtype=torch.int32
        ),
        "cannot cut a chunk that begins after position 0": lambda: ra.KVCache(
            "Causal()", layers=1, ranks=2, layout="shifted(zigzag, 3)"
        ),
        "unknown layout 'foo'": lambda: ra.KVCache("Causal()", layers=1, ranks=2, layout="foo"),
        "cannot be a part of joined": lambda: ra.KVCache("Causal()", layers=1, ranks=2, layout="balanced"),
    }
    for words, call in calls.items():
        with pytest.raises(ra.InvalidInput, match=words):
            call()
    step(cache)


def test_calls_out_of_order_are_refused() -> None:
    new = torch.randn(3, 1, 2, 2, 8)
    cache = ra.KVCache("Causal()", layers=2, ranks=2)
    cache.step(1, *new)
    for call in (
        lambda: cache.step(1, *new),
        lambda: cache.step(0, *new[:, :, :, :1]),
        lambda: cache.prefill(0, *new),
        lambda: cache.crop(1),
        lambda: cache.fork([0]),
        lambda: cache.shard(3),
    ):
        with pytest.raises(ra.InvalidInput, match=r"layers \[0\] have not been called"):
            call()
    cache.step(0, *new)
    with pytest.raises(ra.InvalidInput, match="the cache holds"):
        cache.step(0, *torch.randn(3, 1, 2, 1, 4))
    with pytest.raises(ra.Unsupported, match="no gradients"):
        cache.step(0, *torch.randn(3, 1, 2, 1, 8, requires_grad=True))


@pytest.mark.parametrize("layout", ["zigzag", "striped(64)"])
@pytest.mark.parametrize(
    "pattern",
    ["Causal()", "Causal() & Window(100000)", "Causal() & (Sinks(4) | Window(4095))", "Causal() & Strided(8)"],
)
def test_a_step_after_many_chunks_is_few_kernel_calls(
    pattern: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million tokens in 32 chunks: what a rank holds is seen as a whole, and asked of the pattern a few times."""
    chunks, size = 32, 1 << 15
    cut, holdings = ra.make_layout(layout, tokens=size, ranks=8), Holdings(8, copies=False)
    for chunk in range(chunks):
        shards = [tuple(shift_range(r, chunk * size) for r in cut.shard(rank)) for rank in range(8)]
        holdings.begin(shards, None, 0, 64, prompt=True)
        holdings.settle()
    slots, asked, tiles = range(chunks * size, chunks * size + 1), [], And.tiles

    def count(self: And, *sides: range) -> Iterator[Tile]:
        asked.append(sides)
        return tiles(self, *sides)

    monkeypatch.setattr(And, "tiles", count)
    q, k = torch.zeros(1, 32, 1, 8), torch.zeros(1, 8, 1, 8)
    call = compile_call(q, k, k, pattern, "contiguous", {"kernel": "reference"})
    for rank in range(8):
        assert len(holdings.calls(rank, 0, call.pattern, slots, call)) <= 2
    assert len(asked) <= 8 * 40


@settings(max_examples=60)
@given(
    pattern=st.sampled_from(PATTERNS),
    layout=st.sampled_from(["zigzag", "striped(2)", "striped(3)", "striped"]),
    cuts=st.sets(st.integers(1, MOST - 5), max_size=6),
    ranks=st.integers(1, 4),
    new=st.integers(1, 5),
)
def test_works_are_the_pairs_of_a_mask(pattern: ra.Pattern, layout: str, cuts: set[int], ranks: int, new: int) -> None:
    bound, keys = pattern.bind(2, MOST), MOST - new
    slots: list[range] = []
    for first, last in itertools.pairwise(sorted({0, *cuts, keys})):
        for r in ra.make_layout(layout, tokens=last - first, ranks=ranks).shard(0):
            append_run(slots, shift_range(r, first))
    found = np.zeros((2, new, sum(map(len, slots))), dtype=np.int64)
    for work in lower(join_dense(find_tiles(bound, (range(keys, MOST),), slots, 2)), 1):
        for i, row in enumerate(work.q):
            for j, key in enumerate(key for run in work.k for key in run):
                seen = (work.lo is None or work.lo <= i - j) and (work.hi is None or i - j <= work.hi)
                found[np.ix_(list(work.heads), [row], [key])] += seen
    wanted = bound.mask(MOST, 2).astype(np.int64)[:, keys:, [slot for run in slots for slot in run]]
    assert (found == wanted).all()


def test_rows_of_documents_of_their_own() -> None:
    pattern = ra.Causal() & ra.Documents([[20, 40], [50, 10]])
    q, k, v = (torch.randn(2, heads, 60, 8, dtype=torch.float64) for heads in (4, 2, 2))
    cache = ra.KVCache(pattern, layers=1, ranks=3, max_tokens=60, page=4)
    outs = [cache.prefill(0, *(x[:, :, first:last] for x in (q, k, v))) for first, last in ((0, 17), (17, 40))]
    outs += [cache.step(0, *(x[:, :, token : token + 2] for x in (q, k, v))) for token in range(40, 60, 2)]
    assert torch.allclose(torch.cat(outs, 2), ra.attention(q, k, v, pattern), atol=1e-12)
    with pytest.raises(ra.Unsupported, match="differs between rows"):
        cache.fork([1, 0])


def test_padding_and_prompts_that_do_not_fit_are_refused() -> None:
    new = torch.randn(3, 2, 2, 6, 8)
    cache = ra.KVCache("Causal()", layers=1, ranks=2)
    with pytest.raises(ra.InvalidInput, match=r"padding must be a tensor, bool \[batch, 6\]"):
        cache.shard(6, torch.zeros(2, 5, dtype=torch.bool))
    cache.shard(6, torch.zeros(3, 6, dtype=torch.bool))
    with pytest.raises(ra.InvalidInput, match="padding has 3 rows, and q a batch of 2"):
        cache.prefill(0, *new)
    for rows in ([], [2]):
        cache = ra.KVCache("Causal()", layers=1, ranks=2)
        cache.step(0, *new)
        with pytest.raises(ra.InvalidInput, match="expected numbers of rows from 0 to 1"):
            cache.fork(rows)
    with pytest.raises(ra.InvalidInput, match=r"the rows hold \[6, 6\] tokens"):
        cache.crop([7, 3])


@pytest.mark.parametrize("call", ["step", "prefill"])
def test_a_layer_that_failed_is_not_computed_twice(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are kept already: a second call would keep them again."""
    new, cache = torch.randn(3, 1, 2, 4, 8), ra.KVCache("Causal()", layers=2, ranks=2)
    with monkeypatch.context() as patch:
        for name in ("attend", "virtual_attention"):
            patch.setattr(ringattn.inference.cache, name, lambda *args, **kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            getattr(cache, call)(0, *new)
    with pytest.raises(ra.InvalidInput, match=r"layers \[1\] have not been called yet; .* make a new cache"):
        getattr(cache, call)(0, *new)


def test_a_cache_of_no_token_takes_another_batch() -> None:
    cache = ra.KVCache("Causal()", layers=1, ranks=2, max_tokens=400)
    cache.step(0, *torch.randn(3, 0, 2, 4, 8))
    with pytest.raises(ra.InvalidInput, match="a batch of 0"):
        cache.step(0, *torch.randn(3, 2, 2, 4, 8))
    cache.crop(-4)
    fill(cache, 300, batch=2)
    cache.fork([0, 1, 1])
    cache.crop([0, 0, 0])
    assert (cache.length, cache.lengths, cache.nbytes) == (0, [], 0)
    q, k, v = torch.randn(3, 1, 4, 3, 16)
    assert torch.allclose(cache.step(0, q, k, v), ra.attention(q, k, v, ra.Causal()), atol=1e-6)


def test_a_chunk_is_forgotten_where_rows_of_the_batch_move() -> None:
    cache = ra.KVCache("Causal()", layers=1, ranks=2)
    fill(cache, 6, batch=2)
    cache.shard(3, torch.tensor([[True, True, False], [False] * 3]))
    cache.fork([1, 0])
    cache.prefill(0, *torch.randn(3, 2, 2, 3, 8))
    assert cache.lengths == [9, 9]
