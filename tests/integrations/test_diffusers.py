"""Transformers of diffusers on real ranks against themselves on one device.

Three ranks start once: imports take longer than the tests.
"""

from __future__ import annotations

import inspect
import pickle
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
import diffusers
import diffusion_cases
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch as dispatch
from packaging.specifiers import SpecifierSet

from ringattn import InvalidInput, RingAttentionError, Unsupported
from ringattn.integrations import diffusers as adapter

ROOT = Path(__file__).resolve().parents[2]
RING = ContextParallelConfig(ring_degree=2)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("ranks", "ulysses", "names"), [(2, 1, [*diffusion_cases.MODELS]), (2, 2, ["Flux", "Wan"]), (3, 1, ["Flux", "Wan"])]
)
def test_outputs_and_gradients_on_unequal_shards(run_ranks, ranks: int, ulysses: int, names: list[str]) -> None:  # type: ignore[no-untyped-def]
    results = run_ranks(diffusion_cases.agreements, 3, ranks, names, ulysses, 7, 11, timeout=120)
    for found in results[:ranks]:
        for name, (output, gradients) in zip(names, found, strict=True):
            assert output <= 1e-6 and gradients <= 1e-5, name


@pytest.mark.multi
def test_diffusers_own_calls_select_the_backend(run_ranks) -> None:  # type: ignore[no-untyped-def]
    assert max(map(max, run_ranks(diffusion_cases.selected, 3, timeout=120))) <= 1e-6


@pytest.mark.multi
def test_mistakes_are_told(run_ranks) -> None:  # type: ignore[no-untyped-def]
    expected = {
        "noise": "Mismatch: the ranks got different inputs; draw noise and batches with the same seed",
        "text": "Mismatch: the ranks disagree about the shapes of the inputs",
        "few": "InvalidInput: an input (2, 1, 32) has fewer tokens, in dim 1, than the 3 ranks",
        "alike": "fine",
        "compared before": "fine",
        "weights": "Mismatch: the ranks have different weights; load or seed them alike",
        "again": "InvalidInput: this FluxTransformer2DModel is parallelized already",
        "degrees": "InvalidInput: ring_degree 3 x ulysses_degree 2 must equal the number of ranks, which is 3",
    }
    for told in run_ranks(diffusion_cases.mistakes, 3, timeout=120):
        assert told.keys() == expected.keys()
        for name, words in expected.items():
            assert words in told[name]


@pytest.mark.multi
def test_the_sample_of_the_page_computes_the_same_on_all_ranks(run_ranks) -> None:  # type: ignore[no-untyped-def]
    one, *others = run_ranks(diffusion_cases.sample_of_the_page, 3, str(ROOT / "docs" / "models.md"), timeout=120)
    assert others == [one] * 2 and one["loss"] > 0 and one["norm"] > 0


x = torch.zeros(2, 5, 2, 8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attn_mask": torch.zeros(2, 1, 1, 5)}, r"a mask torch.float32 \(2, 1, 1, 5\)"),
        ({"attn_mask": torch.ones(1, 1, 2, 5, dtype=torch.bool)}, "only boolean masks of padded keys"),
        ({"is_causal": True}, "is_causal=True"),
        ({"dropout_p": 0.1}, "is_causal=False, dropout_p=0.1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(given: dict[str, Any], words: str) -> None:
    parallel = diffusers.ParallelConfig(context_parallel_config=RING)
    with pytest.raises(Unsupported, match=words):
        dispatch.dispatch_attention_fn(x, x, x, backend=adapter.BACKEND, parallel_config=parallel, **given)


def test_models_that_cannot_be_cut_are_refused() -> None:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(32,), down_block_types=("CrossAttnDownBlock2D",), norm_num_groups=8,
        up_block_types=("CrossAttnUpBlock2D",), layers_per_block=1, cross_attention_dim=8, attention_head_dim=8,
    )  # fmt: skip
    calls: dict[str, tuple[type[RingAttentionError], dict[str, Any]]] = {
        "UNet2DConditionModel has no plan of where to cut its tokens": (InvalidInput, {}),
        "AttnProcessor2_0 of UNet2DConditionModel computes attention by itself": (Unsupported, {"cp_plan": {}}),
        "unknown option 'schedule'": (InvalidInput, {"schedule": "ring"}),
    }
    for words, (kind, options) in calls.items():
        with pytest.raises(kind, match=words):
            adapter.parallelize(model, RING, **options)


def test_the_interface_of_diffusers_has_not_moved() -> None:
    """A new argument may change what attention means: diffusers drops those that `_attend` does not name."""
    passed = {*inspect.signature(dispatch.dispatch_attention_fn).parameters} - {"attention_kwargs", "backend"}
    assert passed - {"parallel_config"} | {"_parallel_config"} == {*inspect.signature(adapter._attend).parameters}
    assert dispatch.AttentionBackendName(adapter.NAME) is pickle.loads(pickle.dumps(adapter.BACKEND)) is adapter.BACKEND
    (tested,) = set(re.findall(r'"diffusers(>=[^"]+)"', (ROOT / "pyproject.toml").read_text()))
    assert SpecifierSet(tested).contains(version("diffusers")), f"{version('diffusers')} is not in {tested}"
