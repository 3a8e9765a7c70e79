"""Models of torch's tutorials in `context_parallel`, against one process and beside torch's context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import context_cases
import pytest
from graph_cases import in_graphs

EPS = 2.0**-23
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_first(run_ranks) -> Any:  # type: ignore[no-untyped-def]
    """run_first(ranks, case, ...): what a case finds on the first 2 or all 3 of the same ranks."""

    def run(ranks: int, *args: Any, timeout: float = 60.0) -> list[Any]:
        return run_ranks(context_cases.on_first, 3, ranks, *args, timeout=timeout)[:ranks]  # type: ignore[no-any-return]

    return run


@pytest.mark.multi
@pytest.mark.parametrize("tokens", [64, 61])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_lines_of_the_tutorial_compute_attention_of_whole_sequences(
    run_first: Any, ranks: int, tokens: int
) -> None:
    assert max(run_first(ranks, context_cases.ours, tokens)) <= 64 * EPS


@pytest.mark.multi
def test_torch_cuts_the_same_rows_and_has_no_attention_on_cpus(run_first: Any) -> None:
    for same, told in run_first(2, context_cases.beside_torch):
        assert same and "does not have a sharding strategy" in told


@pytest.mark.multi
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_and_gradient_norms_are_those_of_one_process(run_first: Any, ranks: int) -> None:
    kinds = ["causal, DDP", "recomputed", "documents, recomputed"] if ranks == 2 else ["documents"]
    for found in run_first(ranks, context_cases.all_losses, 61, kinds):
        for kind in kinds:
            assert found[kind][0] == pytest.approx(found[kind][1], rel=1e-6), kind


@pytest.mark.multi
def test_the_training_loops_of_the_page_train_as_one_process(run_first: Any) -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    samples = [x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "optimizer.step()" in x]
    assert len(samples) == 2 and all("with context_parallel(" in x for x in samples)
    for found in run_first(3, context_cases.follow, samples):
        assert max(found) < 1e-12, found


@pytest.mark.multi
@in_graphs
def test_compiled_models_and_compiled_attention(run_first: Any) -> None:
    kinds = ["documents, compiled attention", "documents, compiled"]
    for found in run_first(2, context_cases.all_losses, 61, kinds, timeout=120):
        for kind in kinds:
            assert found[kind][0] == pytest.approx(found[kind][1], rel=1e-6), kind


@pytest.mark.multi
def test_what_a_context_takes_and_refuses(run_first: Any) -> None:
    words = [
        "Unsupported: attn_mask torch.float32 (23, 23): only padding is read",
        "Unsupported: score_mod and max_scores of flex_attention",
        "Unsupported: score_mod and max_scores of flex_attention",
        "InvalidInput: a buffer has 22 rows along dim 1, but the sequence 23 tokens",
        "Unsupported: DTensors of {(Shard(dim=2),)}",
        "InvalidInput: Documents",
    ]
    for found, told in run_first(2, context_cases.doors):
        assert max(found.values()) <= 64 * EPS, found
        assert [text[: len(word)] for text, word in zip(told, words, strict=True)] == words


@pytest.mark.multi
def test_contexts_that_would_compute_something_else_are_refused(run_first: Any) -> None:
    words = [
        "Mismatch: the ranks got different inputs",
        "Mismatch: the ranks disagree about the shapes of the inputs: [(2, 23), (96,)] on rank 0; [(2, 24), (96,)]",
        "Mismatch: the ranks got different inputs",
        "InvalidInput: no attention ran over the ranks",
        "InvalidInput: no attention ran over the ranks",
        "InvalidInput: the layout zigzag was made for 2 tokens over 2 ranks, the call has 46 tokens",
        "InvalidInput: a buffer is cut already",
        "InvalidInput: 2 buffers have 1 buffer_seq_dims",
        "fine",
    ]
    for told in run_first(2, context_cases.mistakes):
        assert [text[: len(word)] for text, word in zip(told, words, strict=True)] == words
