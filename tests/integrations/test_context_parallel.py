"""Models of torch's tutorials in `context_parallel`, against one process and beside torch's context."""

from __future__ import annotations

import context_cases
import pytest
from graph_cases import in_graphs

EPS = 2.0**-23


@pytest.mark.multi
@pytest.mark.parametrize("tokens", [64, 61])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_lines_of_the_tutorial_compute_attention_of_whole_sequences(run_ranks, ranks: int, tokens: int) -> None:  # type: ignore[no-untyped-def]
    assert max(run_ranks(context_cases.ours, ranks, tokens)) <= 64 * EPS


@pytest.mark.multi
def test_torch_cuts_the_same_rows_and_has_no_attention_on_cpus(run_ranks) -> None:  # type: ignore[no-untyped-def]
    for same, told in run_ranks(context_cases.beside_torch, 2):
        assert same and "does not have a sharding strategy" in told


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_and_gradient_norms_are_those_of_one_process(run_ranks, ranks: int) -> None:  # type: ignore[no-untyped-def]
    kinds = ["causal, DDP", "recomputed", "documents, recomputed"] if ranks == 2 else ["documents"]
    for found in run_ranks(context_cases.all_losses, ranks, 61, kinds):
        for kind in kinds:
            assert found[kind][0] == pytest.approx(found[kind][1], rel=1e-6), kind


@pytest.mark.multi
@in_graphs
def test_compiled_models_and_compiled_attention(run_ranks) -> None:  # type: ignore[no-untyped-def]
    kinds = ["documents, compiled attention", "documents, compiled"]
    for found in run_ranks(context_cases.all_losses, 2, 61, kinds, timeout=120):
        for kind in kinds:
            assert found[kind][0] == pytest.approx(found[kind][1], rel=1e-6), kind


@pytest.mark.multi
def test_what_a_context_takes_and_refuses(run_ranks) -> None:  # type: ignore[no-untyped-def]
    words = [
        "Unsupported: attn_mask torch.float32 (23, 23): of masks only padding is read",
        "Unsupported: score_mod and max_scores of flex_attention",
        "Unsupported: score_mod and max_scores of flex_attention",
        "InvalidInput: a buffer has 22 rows along dim 1, the sequence 23 tokens",
        "Unsupported: DTensors of {(Shard(dim=2),)}",
        "InvalidInput: Documents",
    ]
    for found, told in run_ranks(context_cases.doors, 2):
        assert max(found.values()) <= 64 * EPS, found
        assert [text[: len(word)] for text, word in zip(told, words, strict=True)] == words
