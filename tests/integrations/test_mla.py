"""Models of transformers that attend through latents, and that choose their keys: ranks against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")
import hybrid_cases
import mla_cases
import sweep
from rank_pool import told_by

from ringattn.integrations import supported

Run = Callable[..., list[Any]]
LATENTS = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MiniCPM3ForCausalLM", "YoutuForCausalLM", "AXK1ForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "Mistral4ForTokenClassification", "LongcatFlashForCausalLM"),
    *("KimiLinearForCausalLM", "BailingHybridForCausalLM"),
)
CHOSEN = (
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "AXK2ForCausalLM", "HYV4ForCausalLM"),
    *("Dots3NoteTextModel", "MistralLarge4TextModel", "MiniMaxM3VLForCausalLM"),
)

GENERATING = (
    *("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM", "KimiLinearForCausalLM"),
    *("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "AXK2ForCausalLM", "HYV4ForCausalLM", "Dots3NoteForCausalLM"),
)


@pytest.mark.multi
@pytest.mark.parametrize("name", LATENTS + CHOSEN)
def test_packed_padded_and_checkpointed_rows_equal_sequences_alone(run_ranks: Run, name: str) -> None:
    assert sweep.verdict(run_ranks(mla_cases.exact, 3, name, timeout=120)) == "exact"


@pytest.mark.multi
@pytest.mark.parametrize("name", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "MiniCPM3ForCausalLM"])
def test_yarn_scales_once(run_ranks: Run, name: str) -> None:
    assert sweep.verdict(run_ranks(mla_cases.exact, 3, name, True, timeout=120)) == "exact"


@pytest.mark.multi
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_latents_are_what_travels(run_ranks: Run, name: str) -> None:
    sent, latents = run_ranks(mla_cases.sent, 2, name, timeout=120)[0]
    assert sent == latents


@pytest.mark.multi
def test_adapters_of_the_projection(run_ranks: Run) -> None:
    """In training, the layer itself expands one with dropout, which a visit could not repeat."""
    for found in run_ranks(mla_cases.adapted, 2, "DeepseekV3ForCausalLM", timeout=120):
        assert max(found.values()) < mla_cases.BOUND, found


@pytest.mark.multi
def test_graphs_and_autocast(run_ranks: Run) -> None:
    for found in run_ranks(mla_cases.in_graphs_and_autocast, 2, "YoutuForCausalLM", timeout=240):
        assert found.pop("compiled", 0.0) < 1e-6, found
        assert max(found.values()) < 2**-4, found


@pytest.mark.multi
@pytest.mark.parametrize("name", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_choices_matter_and_can_be_checked(run_ranks: Run, name: str) -> None:
    for found in run_ranks(mla_cases.choices, 2, name, timeout=120):
        assert found["check"] < 1e-5 and found["parts"] < 1e-5 and found["every"] > 1e-3, found


@pytest.mark.multi
@pytest.mark.parametrize("name", GENERATING)
def test_generation_is_that_of_one_process(run_ranks: Run, name: str) -> None:
    for differences in run_ranks(hybrid_cases.generations, 2, name, timeout=120):
        assert len(differences) == 4 and max(differences.values()) < 2e-5, differences


@pytest.mark.multi
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_a_cache_holds_latents(run_ranks: Run, name: str) -> None:
    for held, latents in run_ranks(mla_cases.held, 2, name, timeout=120):
        assert held == latents


def test_a_cache_of_latents_is_one_of_keys_and_values() -> None:
    found = mla_cases.latent_caches(0)
    assert len(found) == 9
    for name, far in found.items():
        assert far < (1e-5 if "dtype" in name else 1e-12), found


def test_the_example_has_one_loss_on_any_ranks(run_ranks: Run) -> None:
    one, two = (run_ranks(mla_cases.example, ranks, timeout=60)[0] for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-5) and one[-1] < one[0] - 1


@pytest.mark.multi
def test_generation_refuses_blocks(run_ranks: Run) -> None:
    for said in run_ranks(mla_cases.generate_by_blocks, 2, timeout=120):
        assert "generate: blocks of keys chosen by content" in said


def test_keys_chosen_in_pools_are_refused() -> None:
    both = {"layer_types": ["linear_attention", "indexed_attention"]}
    model = sweep.make_empty("Glm5NextTextModel", "glm5_next_text", **both, **sweep.HYBRIDS["glm5_next_text"])
    words = "has layers of type indexed_attention; its indexer scores keys in pools"
    assert words in told_by(lambda: supported.check_model(model))
