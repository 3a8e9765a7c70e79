"""FlexAttention's block masks become patterns, or an error that names the block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from ringattn import Causal, Documents, Full, InvalidInput, Unsupported, Window, from_block_mask, parse_pattern


def made(rule, tokens: int, block: int = 16, batch: int | None = None, heads: int | None = None):  # type: ignore[no-untyped-def]
    return create_block_mask(rule, batch, heads, tokens, tokens, device="cpu", BLOCK_SIZE=block)


def causal(b, h, q, k):  # type: ignore[no-untyped-def]
    return q >= k


def local(b, h, q, k):  # type: ignore[no-untyped-def]
    return (q // 16 - k // 16).abs() <= 1


def local_causal(b, h, q, k):  # type: ignore[no-untyped-def]
    return local(b, h, q, k) & (q >= k)


def per_head(b, h, q, k):  # type: ignore[no-untyped-def]
    return (q // 16 - k // 16).abs() <= h


def halves(b, h, q, k):  # type: ignore[no-untyped-def]
    document = torch.arange(256) // 128
    return (document[q] == document[k]) & (q >= k)


def packed(b, h, q, k):  # type: ignore[no-untyped-def]
    document = torch.bucketize(torch.arange(256), torch.tensor([3, 7, 90, 128, 200]), right=True)
    return (document[q] == document[k]) & (q - k <= 40)


@pytest.mark.parametrize("rule", [causal, local, local_causal, per_head, halves, packed])
@pytest.mark.parametrize("tokens", [16, 128, 250, 241, 5])
def test_equals_the_mask(rule, tokens: int) -> None:  # type: ignore[no-untyped-def]
    heads = 3 if rule is per_head else None
    truth = create_mask(rule, None, heads, tokens, tokens, device="cpu")[0].int().numpy()
    pattern = from_block_mask(made(rule, tokens, heads=heads))
    assert (pattern.mask(tokens, len(truth)) == truth).all()
    assert parse_pattern(repr(pattern)) == pattern


def borders(*starts: int):  # type: ignore[no-untyped-def]
    """A rule by which rows see their own document; documents begin at `starts`."""
    document = torch.bucketize(torch.arange(64), torch.tensor(starts), right=True)
    return lambda b, h, q, k: document[q] == document[k]


def windowed(rule, left: int, right: int):  # type: ignore[no-untyped-def]
    return lambda b, h, q, k: rule(b, h, q, k) & (q - k <= left) & (k - q <= right)


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        (causal, Causal()),
        (windowed(causal, 5, 0), Causal() & Window(5)),
        (borders(3, 21, 22, 50), Documents([3, 18, 1, 28, 14])),
        (windowed(borders(9, 40), 64, 0), Causal() & Documents([9, 31, 24])),
        (windowed(borders(9, 40), 12, 0), Causal() & Window(12) & Documents([9, 31, 24])),
        (windowed(borders(), 20, 20), Window(20, 20)),
        (windowed(borders(30), 7, 2), Window(7, 2) & Documents([30, 34])),
        (windowed(borders(30), 64, 2), Window(33, 2) & Documents([30, 34])),
        (windowed(borders(), 64, 3), Window(63, 3)),
        (borders(), Full()),
    ],
)
def test_causality_windows_and_documents_are_named(rule, pattern) -> None:  # type: ignore[no-untyped-def]
    assert from_block_mask(made(rule, 64)) == pattern
    assert from_block_mask(made(rule, 64, 64)) == pattern


def test_documents_may_differ_between_the_elements_of_a_batch() -> None:
    rules = [borders(9, 40), borders(33)]

    def rule(b, h, q, k):  # type: ignore[no-untyped-def]
        return torch.where(b == 0, rules[0](b, h, q, k), rules[1](b, h, q, k)) & (q >= k) & (q - k <= 24)

    expected = Causal() & Window(24) & Documents([[9, 31, 24], [33, 31]])
    assert from_block_mask(made(rule, 64, batch=2)) == expected


def test_a_table_has_one_head_where_heads_are_alike() -> None:
    assert from_block_mask(made(local, 64, heads=8)).table.shape[0] == 1  # type: ignore[attr-defined]


def test_partial_blocks_without_full_ones() -> None:
    """Masks made by hand may list every block as partial, empty ones, too."""
    mask = made(local, 64)
    table = {"kv_num_blocks": torch.full((1, 1, 4), 4), "kv_indices": torch.arange(4).expand(1, 1, 4, 4)}
    full = {"full_kv_num_blocks": None, "full_kv_indices": None}
    every = SimpleNamespace(**table, **full, BLOCK_SIZE=(16, 16), seq_lengths=(64, 64), mask_mod=local)
    assert from_block_mask(every) == from_block_mask(mask)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda b, h, q, k: ((q - k).abs() <= 20) | (k < 2), "block (0, 1) of head 0"),
        (lambda b, h, q, k: (q - k) % 2 == 0, "block (0, 0) of head 0"),
        (lambda b, h, q, k: (q >= k) | (k < 16), "block (0, 0) of head 0 is whole"),
    ],
)
def test_finer_masks_are_unsupported(rule, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Unsupported) as caught:
        from_block_mask(made(rule, 64))
    assert words in str(caught.value) and "flex masks finer than blocks cannot be imported" in str(caught.value)


def test_a_batch_of_equal_masks() -> None:
    assert from_block_mask(made(local, 64, batch=3), 2) == from_block_mask(made(local, 64))

    def differs(b, h, q, k):  # type: ignore[no-untyped-def]
        return (q // 16 - k // 16).abs() <= b

    with pytest.raises(InvalidInput, match="batch elements 1 and 0 differ"):
        from_block_mask(made(differs, 64, batch=2), 1)
    with pytest.raises(InvalidInput, match="batch=5 is not one of the 2"):
        from_block_mask(made(local, 64, batch=2), 5)


def test_other_errors() -> None:
    with pytest.raises(InvalidInput, match="Tensor has no kv_num_blocks"):
        from_block_mask(torch.ones(4, 4))
    with pytest.raises(InvalidInput, match="16 x 32 are not square"):
        from_block_mask(made(local, 64, (16, 32)))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="64 queries but 32 keys"):
        from_block_mask(create_block_mask(local, None, None, 64, 32, device="cpu", BLOCK_SIZE=16))
