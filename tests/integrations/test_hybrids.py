"""Models with recurrent and convolutional layers over ranks: each document alone, generation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hybrid_cases
import pytest
import sweep
import torch

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.multi
#: A class for each function: gated delta rule, KDA, Mamba-2 beside shared attention, Mamba, convolution, all in one.
CLASSES = ("Qwen3Next", "KimiLinear", "Zamba2", "Jamba", "Lfm2", "FalconH1")


@pytest.mark.parametrize(("half", "name"), [(i % 2, name) for i, name in enumerate(CLASSES)])
def test_packed_padded_and_checkpointed_rows_equal_documents_alone(run_ranks: Run, half: int, name: str) -> None:
    found = run_ranks(sweep.one, 3, f"{name}ForCausalLM", 1e-5, None, torch.float32, half, timeout=120)
    assert sweep.verdict(found) == "exact", found


@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1", "Zamba2", "Lfm2", "Zamba", "Mamba"])
def test_generation_is_that_of_one_process(run_ranks: Run, name: str) -> None:
    for differences in run_ranks(hybrid_cases.generations, 2, f"{name}ForCausalLM", timeout=120):
        assert len(differences) >= 3 and max(differences.values()) < 2e-5, differences


def test_what_does_not_compose_is_refused_on_all_ranks_by_name(run_ranks: Run) -> None:
    words = [
        "has layers of type linear_attention",
        "functions that ringattn does not know: lightning_rule",
        "reproducible=16: bits of recurrent layers follow the number of ranks; leave it out",
        "24 runs of consecutive tokens",
        "a padded prompt of length 3 is too short for 2 ranks",
        "Mamba's scan takes no earlier state",
        "recurrent states cannot be rolled back",
        "is recomputed by activation checkpointing without its document borders",
        "fine",
    ]
    for told in run_ranks(hybrid_cases.refusals, 2, timeout=120):
        for word, text in zip(words, told, strict=True):
            assert word in text, (word, text)


def test_a_check_compares_a_hybrid_with_its_eager_self(run_ranks: Run) -> None:
    for agreement in run_ranks(hybrid_cases.checks, 2, timeout=60):
        assert 0 < agreement.logits < 1e-5 and agreement.gradients < 1e-5


def test_the_example_has_one_loss_on_any_ranks(run_ranks: Run) -> None:
    runs = [
        run_ranks(hybrid_cases.example, *case, timeout=60)[0]
        for case in ((1, "zigzag"), (2, "zigzag"), (3, "contiguous"))
    ]
    for found in runs[1:]:
        assert found == [pytest.approx(numbers, rel=1e-5) for numbers in runs[0]]
